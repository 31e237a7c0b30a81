"""Fine-tune a teacher to classify images, by timm and plain PyTorch; a folder of images for each class.

python -m dino_ds.examples.finetune_classification runs/vits16 --train images/train --test images/test --out classifier
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import timm
import torch
from PIL import Image, ImageOps
from safetensors.torch import load_file, save_file
from timm.optim import param_groups_layer_decay
from timm.scheduler import CosineLRScheduler
from torch import nn
from torch.utils.data import DataLoader
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2
from tqdm import tqdm

from dino_ds.errors import CheckpointError
from dino_ds.weights.sidecar import read_sidecar

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
MODEL, DATA = 3, 2
"""Exit codes for a model and for options or images that can't be used, as in dino-ds."""
Score = Callable[[], tuple[float, dict[str, float]]]


def fail(message: str, code: int = DATA) -> NoReturn:
    print(message, file=sys.stderr)
    sys.exit(code)


def open_upright(path: str | Path) -> Image.Image:
    """Open an image as RGB, rotated by its EXIF, as the teacher saw images. Raises ValueError for more than 8 bits."""
    with Image.open(path) as image:
        if image.mode[0] in "IF":
            raise ValueError(f"{path} has more than 8 bits, which Pillow would cut off at 255: save it in 8 bits")
        return ImageOps.exif_transpose(image).convert("RGB")


def create(name: str, arguments: dict[str, Any], pretrained: bool = False) -> tuple[Any, dict[str, Any]]:
    """timm's network, a ViT also for images of any size, and the arguments that made it."""
    flexible = {**arguments, "dynamic_img_size": True}
    try:
        return timm.create_model(name, pretrained=pretrained, **flexible), flexible
    except TypeError:  # not a ViT
        return timm.create_model(name, pretrained=pretrained, **arguments), arguments


def load_teacher(model: str, classes: int, random: bool = False) -> tuple[Any, dict[str, Any]]:
    """timm's network for images of any size with a new head, and its facts: timm_name, timm_arguments, mean, std.

    model: a run folder, a .safetensors file with the .json of its name next to it, or timm's name of released weights.
    random: the same network, randomly initialized. Ends the program if the model can't be loaded.
    """
    path = Path(model) / "teacher.safetensors" if Path(model).is_dir() else Path(model)
    if path.suffix != ".safetensors":
        if not timm.is_model(model.partition(".")[0]):
            fail(f"{model} is neither a run folder, a .safetensors file nor a name of timm's", MODEL)
        network, arguments = create(model, {"num_classes": classes}, not random)
        config = network.pretrained_cfg
        return network, {"timm_name": model, "timm_arguments": arguments, "mean": config["mean"], "std": config["std"]}
    if not (path.exists() and path.with_suffix(".json").exists()):
        fail(f"{path} or the .json of its name is missing: give a run folder, or dino-ds export its teacher", MODEL)
    try:
        about = read_sidecar(path)
    except CheckpointError as error:
        fail(str(error), MODEL)
    wanted = {**about["timm_arguments"], "num_classes": classes}
    if about.get("value_range"):
        fail(f"{model} takes images of more than 8 bits: change how this program reads images")
    if wanted.get("in_chans", 3) != 3:
        fail(f"{model} takes {wanted['in_chans']} channels: change how this program reads images")
    network, about["timm_arguments"] = create(about["timm_name"], wanted)
    if not random:
        head = {name: tensor for name, tensor in network.state_dict().items() if name.startswith(("head.", "fc."))}
        try:
            network.load_state_dict(load_file(path) | head)
        except RuntimeError as error:
            fail(f"{path} does not fit {about['timm_name']}: {str(error).splitlines()[1].strip()}", MODEL)
    return network, about


def parser(description: str | None) -> argparse.ArgumentParser:
    """The options that kinds of fine-tuning have in common."""
    options = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("model", help="a run folder, teacher.safetensors or timm's name")
    options.add_argument("--out", type=Path, required=True, help="folder for the best weights")
    options.add_argument("--size", type=int, help="side of the images in pixels (default: the teacher's)")
    options.add_argument("--frozen", action="store_true", help="train the head alone")
    options.add_argument("--random", action="store_true", help="start without the weights, to compare")
    for name, default in {"epochs": 20, "batch": 64, "lr": 1e-3, "layer_decay": 0.75, "workers": 4, "seed": 0}.items():
        options.add_argument(f"--{name}", type=type(default), default=default, help=f"(default: {default})")
    return options


def fit(network: Any, data: Any, groups: Any, score: Score, about: dict[str, Any], args: Any) -> float:
    """Train the parameters of `groups`, and save the network of the best epoch in args.out. score: returns the
    percentage that decides and that of each class. Labels of 255 are ignored. Returns the best percentage."""
    loader = DataLoader(data, min(args.batch, len(data)), True, drop_last=True, num_workers=args.workers)
    optimizer = torch.optim.AdamW(groups, args.lr, weight_decay=0.05)
    steps, best, known = args.epochs * len(loader), -1.0, dict[str, float]()
    # timm's schedule: torch's ignore layer decay, the groups' lr_scale.
    schedule = CosineLRScheduler(optimizer, steps, warmup_t=max(1, steps // 10), t_in_epochs=False)
    args.out.mkdir(parents=True, exist_ok=True)
    for epoch in range(args.epochs):
        network.train()
        if args.frozen:
            getattr(network, "backbone", network).eval()  # so that BatchNorm is frozen too
        for number, (images, labels) in enumerate(tqdm(loader, disable=None, leave=False), epoch * len(loader) + 1):
            schedule.step_update(number)
            with torch.autocast(DEVICE.type, torch.bfloat16, enabled=DEVICE.type == "cuda"):
                outputs = network(images.to(DEVICE))
            loss = nn.functional.cross_entropy(outputs.float(), labels.to(DEVICE), ignore_index=255)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        reached, each = score()
        print(f"epoch {epoch + 1}: loss {loss.item():.3f}, {reached:.2f} %", flush=True)
        if reached > best:
            best, known = reached, {name: round(percent, 2) for name, percent in each.items()}
            save_file(network.state_dict(), args.out / "best.safetensors")
            (args.out / "best.json").write_text(json.dumps({**about, "best": best, "classes": known}, indent=1))
    print(f"best {best:.2f} %:", ", ".join(f"{name} {percent:.1f}" for name, percent in known.items()))
    return best


@torch.no_grad()
def accuracy(network: Any, loader: DataLoader[Any], classes: list[str]) -> tuple[float, dict[str, float]]:
    """Accuracies in percent: of all images, and of each class."""
    counts = torch.zeros(2, len(classes))
    for images, labels in loader:
        right = network.eval()(images.to(DEVICE)).argmax(1).cpu() == labels
        counts += torch.stack([some.bincount(minlength=len(classes)) for some in (labels[right], labels)])
    percent = (100 * counts[0] / counts[1]).tolist()
    return float(100 * counts[0].sum() / counts[1].sum()), dict(zip(classes, percent, strict=True))


def main(argv: list[str] | None = None) -> float:
    """Returns the best accuracy on the test images, in percent."""
    options = parser(__doc__)
    for name in ("--train", "--test"):
        options.add_argument(name, type=Path, required=True, help="a folder of images for each class")
    args = options.parse_args(argv)
    torch.manual_seed(args.seed)
    classes, others = (
        [folder.name for folder in sorted(path.glob("*")) if folder.is_dir()] for path in (args.train, args.test)
    )
    if len(classes) < 2 or classes != others:
        fail(f"{args.train} has the class folders {classes}, {args.test} {others}: they must be the same, 2 or more")
    network, about = load_teacher(args.model, len(classes), args.random)
    size = args.size or about["timm_arguments"].get("img_size", 224)
    patch = getattr(getattr(network, "patch_embed", None), "patch_size", (1,))[0]
    if size % patch:
        fail(f"--size {size} is not a multiple of the patch size: give {max(1, round(size / patch)) * patch}")
    last = [v2.ToImage(), v2.ToDtype(torch.float32, scale=True), v2.Normalize(about["mean"], about["std"])]
    crop = v2.Compose([v2.RandomResizedCrop(size, scale=(0.3, 1)), v2.RandomHorizontalFlip(), *last])
    middle = v2.Compose([v2.Resize(size), v2.CenterCrop(size), *last])
    tests = DataLoader(ImageFolder(args.test, middle, loader=open_upright), args.batch, num_workers=args.workers)
    if args.frozen:
        network.requires_grad_(False).get_classifier().requires_grad_(True)
    groups = param_groups_layer_decay(network.to(DEVICE), weight_decay=0.05, layer_decay=args.layer_decay)
    training = ImageFolder(args.train, crop, loader=open_upright)
    return fit(network, training, groups, partial(accuracy, network, tests, classes), about, args)


if __name__ == "__main__":
    main()
