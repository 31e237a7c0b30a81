"""Fine-tune a teacher to classify images, by timm and plain PyTorch; a folder of images for each class.

dino-ds export runs/vits16 --format timm --out for-timm
python -m dino_ds.examples.finetune_classification for-timm --train images/train --test images/test --out classifier
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import timm
import torch
from PIL import Image, ImageOps
from safetensors.torch import save_file
from timm.optim import param_groups_layer_decay
from timm.scheduler import CosineLRScheduler
from torch import nn
from torch.utils.data import DataLoader
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
NUMBERS = {"epochs": 20, "batch": 64, "lr": 1e-3, "layer_decay": 0.75, "workers": 4, "seed": 0}
"""Default values of options."""


def parse(argv: list[str] | None, *names: str, **numbers: int) -> argparse.Namespace:
    """Read the command line and seed torch's random numbers. names: more options; numbers: more with default values."""
    options = argparse.ArgumentParser()
    options.add_argument("model", type=Path, help="a folder of dino-ds export --format timm")
    for name in ("train", "test", "out", *names):
        options.add_argument(f"--{name}", required=True)
    for name, default in {**NUMBERS, **numbers}.items():
        options.add_argument(f"--{name}", type=type(default), default=default, help=f"(default: {default})")
    options.add_argument("--frozen", action="store_true", help="train the head alone")
    options.add_argument("--random", action="store_true", help="start without the weights, to compare")
    args = options.parse_args(argv)
    if not (args.model / "config.json").is_file():
        options.error(f"{args.model} has no config.json: give a folder of dino-ds export --format timm")
    channels = json.loads((args.model / "config.json").read_text())["pretrained_cfg"]["input_size"][0]
    if channels != 3:
        options.error(f"{args.model} is for images of {channels} channels, and open_upright reads RGB: change it")
    torch.manual_seed(args.seed)
    return args


def open_upright(path: str | Path) -> Image.Image:
    """Open an image as RGB, rotated by its EXIF, as the teacher saw images."""
    with Image.open(path) as image:
        if image.mode[0] in "IF":
            raise ValueError(f"{path} has more than 8 bits, which Pillow would cut off at 255: save it in 8 bits")
        return ImageOps.exif_transpose(image).convert("RGB")


def fit(network: Any, data: Any, groups: Any, score: Callable[[Any], float], args: Any) -> float:
    """Train the parameters of `groups`, save the network of the epoch with the best score, and return that."""
    loader = DataLoader(data, min(args.batch, len(data)), True, drop_last=True, num_workers=args.workers)
    optimizer = torch.optim.AdamW(groups, args.lr, weight_decay=0.05)
    steps, best = args.epochs * len(loader), -1.0
    # timm's schedule: torch's ignore layer decay, the groups' lr_scale.
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
        print(f"epoch {epoch + 1}: loss {loss.item():.3f}, {reached:.2f} %", flush=True)
        if reached > best:
            best = reached
            save_file(network.state_dict(), Path(args.out, "model.safetensors"))
    print(f"best {best:.2f} %")
    return best


def main(argv: list[str] | None = None) -> float:
    """Returns the best accuracy on the test images, in percent."""
    args = parse(argv)
    training, test = (ImageFolder(folder, loader=open_upright) for folder in (args.train, args.test))
    if training.classes != test.classes:
        sys.exit(f"{args.train} has the class folders {training.classes}, {args.test} has {test.classes}")
    count = len(training.classes)
    network: Any = timm.create_model(f"local-dir:{args.model}", pretrained=not args.random, num_classes=count)
    images, size = network.pretrained_cfg, network.pretrained_cfg["input_size"][-1]
    last = [v2.ToImage(), v2.ToDtype(torch.float32, scale=True), v2.Normalize(images["mean"], images["std"])]
    training.transform = v2.Compose([v2.RandomResizedCrop(size, scale=(0.3, 1)), v2.RandomHorizontalFlip(), *last])
    test.transform = v2.Compose([v2.Resize(size), v2.CenterCrop(size), *last])
    tests = DataLoader(test, args.batch, num_workers=args.workers)
    if args.frozen:
        network.requires_grad_(False).get_classifier().requires_grad_(True)
    groups = param_groups_layer_decay(network.to(DEVICE), weight_decay=0.05, layer_decay=args.layer_decay)
    # With this file the new folder is a timm model too.
    config = json.loads((args.model / "config.json").read_text())
    config |= {"num_classes": count, "label_names": training.classes}
    Path(args.out).mkdir(parents=True, exist_ok=True)
    Path(args.out, "config.json").write_text(json.dumps(config, indent=1))

    def accuracy(network: Any) -> float:
        right = sum((network(images.to(DEVICE)).argmax(1).cpu() == labels).sum() for images, labels in tests)
        return 100 * float(right) / len(test)

    return fit(network, training, groups, accuracy, args)


if __name__ == "__main__":
    main()
