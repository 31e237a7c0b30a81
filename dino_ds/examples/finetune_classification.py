"""Fine-tune a teacher to classify images, with timm and plain PyTorch. Each class has a folder of images.

dino-ds export runs/vits16 --format timm --out for-timm
python -m dino_ds.examples.finetune_classification for-timm --train images/train --test images/test --out classifier
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import timm
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from timm.optim import param_groups_layer_decay
from timm.scheduler import CosineLRScheduler
from torch import nn
from torch.utils.data import DataLoader, Subset
from torchvision.datasets import ImageFolder
from torchvision.datasets.folder import IMG_EXTENSIONS
from torchvision.transforms import v2

from dino_ds.data.decode import load_image
from dino_ds.data.encoded import NamedFiles
from dino_ds.data.images import UnreadableImage, ValueRange

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
WORKERS = min(4, os.cpu_count() or 1)
NUMBERS = {"epochs": 20, "batch": 64, "lr": 1e-3, "layer_decay": 0.75, "workers": WORKERS, "seed": 0}


def parse(argv: list[str] | None, *names: str, **numbers: int) -> argparse.Namespace:
    """Read the command line, seed torch. names: further required options; numbers: further options with defaults."""
    options = argparse.ArgumentParser()
    options.add_argument("model", type=Path, help="a folder of dino-ds export RUN --format timm")
    for name in ("train", "test", "out", *names):
        options.add_argument(f"--{name}", required=True)
    for name, default in {**NUMBERS, **numbers}.items():
        options.add_argument(f"--{name}", type=type(default), default=default, help=f"(default: {default})")
    options.add_argument("--frozen", action="store_true", help="train the head alone")
    options.add_argument("--random", action="store_true", help="start without the weights, to compare")
    args = options.parse_args(argv)
    if not (args.model / "config.json").is_file():
        options.error(f"{args.model} has no config.json: give a folder of dino-ds export RUN --format timm")
    if Path(args.out, "model.safetensors").exists():
        options.error(f"{args.out}/model.safetensors is there already: remove it, or name another folder with --out")
    torch.manual_seed(args.seed)
    return args


def open_upright(path: str | Path, value_range: ValueRange | None = None, channels: int = 3) -> Any:
    """Open an image as the teacher saw images: RGB of 8 bits as a PIL image, else as a tensor (channels, h, w),
    deeper values scaled by `value_range`. Raises UnreadableImage."""
    image = load_image(NamedFiles([str(path)]), 0, value_range, channels)
    return image if isinstance(image, Image.Image) else v2.functional.to_image(image)


def is_readable(path: str | Path, read: Callable[[str | Path], Any] = open_upright) -> bool:
    """Whether a file is an image that can be read; prints a line about an unreadable image, which is left out."""
    try:
        return str(path).lower().endswith(IMG_EXTENSIONS) and read(path) is not None
    except UnreadableImage as error:
        print(f"left out: {error}", file=sys.stderr, flush=True)
        return False


def split(count: int, seed: int) -> tuple[list[int], list[int]]:
    """Indices of the images to train on, and of a random fifth of all `count` images, by which the epoch is chosen."""
    if count < 2:
        sys.exit(f"--train has {count} images: one to train on and one to choose the epoch by are the fewest")
    order, held = torch.randperm(count, generator=torch.Generator().manual_seed(seed)).tolist(), -(-count // 5)
    return order[held:], order[:held]


def fit(network: Any, data: Any, groups: Any, score: Callable[[Any], float], args: Any) -> None:
    """Train the parameters of `groups`; save the network of the epoch with the best score, and load it at the end."""
    loader = DataLoader(data, min(args.batch, len(data)), True, drop_last=True, num_workers=args.workers)
    optimizer = torch.optim.AdamW(groups, args.lr, weight_decay=0.05)
    steps, best, chosen = args.epochs * len(loader), -1.0, 0
    # timm's schedule obeys the groups' lr_scale, by which layers decay; torch's schedules ignore it.
    schedule = CosineLRScheduler(optimizer, steps, warmup_t=max(1, steps // 10), t_in_epochs=False)
    for epoch in range(args.epochs):
        network.train()
        if args.frozen:
            getattr(network, "backbone", network).eval()  # so that BatchNorm is frozen too
        for number, (images, labels) in enumerate(loader, epoch * len(loader) + 1):
            schedule.step_update(number)
            with torch.autocast(DEVICE.type, torch.bfloat16, enabled=DEVICE.type == "cuda"):
                outputs = network(images.to(DEVICE)).float()
            loss = nn.functional.cross_entropy(outputs, labels.to(DEVICE), ignore_index=255)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        with torch.no_grad():
            reached = score(network.eval())
        print(f"epoch {epoch + 1}: loss {loss.item():.3f}, {reached:.2f} % of training images held out", flush=True)
        if reached >= best:
            best, chosen = reached, epoch + 1
            save_file(network.state_dict(), Path(args.out, "model.safetensors"))
    network.load_state_dict(load_file(Path(args.out, "model.safetensors")))
    print(f"epoch {chosen} is chosen, by {best:.2f} % of training images held out", flush=True)


def main(argv: list[str] | None = None) -> float:
    """Returns the accuracy of the chosen epoch on the test images, in percent."""
    args = parse(argv)
    config = json.loads((args.model / "config.json").read_text())
    deep = config.get("value_range")
    read = partial(open_upright, value_range=deep and tuple(deep), channels=config["pretrained_cfg"]["input_size"][0])
    is_image = partial(is_readable, read=read)
    training, test = (ImageFolder(path, None, None, read, is_image) for path in (args.train, args.test))
    if training.classes != test.classes:
        sys.exit(f"{args.train} has the class folders {training.classes}, {args.test} has {test.classes}")
    count = len(training.classes)
    network: Any = timm.create_model(f"local-dir:{args.model}", pretrained=not args.random, num_classes=count)
    images, size = network.pretrained_cfg, network.pretrained_cfg["input_size"][-1]
    last = [v2.ToImage(), v2.ToDtype(torch.float32, scale=True), v2.Normalize(images["mean"], images["std"])]
    training.transform = v2.Compose([v2.RandomResizedCrop(size, scale=(0.3, 1)), v2.RandomHorizontalFlip(), *last])
    test.transform = v2.Compose([v2.Resize(size), v2.CenterCrop(size), *last])
    learned, held = split(len(training), args.seed)
    held_out = copy.copy(training)
    held_out.transform = test.transform
    if args.frozen:
        network.requires_grad_(False).get_classifier().requires_grad_(True)
    groups = param_groups_layer_decay(network.to(DEVICE), weight_decay=0.05, layer_decay=args.layer_decay)
    # With this file the new folder is a timm model too.
    config |= {"num_classes": count, "label_names": training.classes}
    Path(args.out).mkdir(parents=True, exist_ok=True)
    Path(args.out, "config.json").write_text(json.dumps(config, indent=1))

    def accuracy(data: Any) -> float:
        batches = DataLoader(data, args.batch, num_workers=args.workers)
        right = sum((network(images.to(DEVICE)).argmax(1).cpu() == labels).sum() for images, labels in batches)
        return 100 * float(right) / len(data)

    fit(network, Subset(training, learned), groups, lambda _: accuracy(Subset(held_out, held)), args)
    with torch.no_grad():
        reached = accuracy(test)
    print(f"test images: {reached:.2f} %")
    return reached


if __name__ == "__main__":
    main()
