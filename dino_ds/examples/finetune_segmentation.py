"""Segment images by a teacher's patch features and a head of BatchNorm and one linear layer, as DINOv2's evaluation.

Images lie in DIR/images, masks in DIR/masks: PNG files of the same names and sizes whose values are class indices,
255 where the class is unknown.

dino-ds export runs/vits16 --format timm --out for-timm
python -m dino_ds.examples.finetune_segmentation for-timm --frozen --train TRAIN --test TEST --out segmenter \\
    --classes background,crack,rust
"""

from __future__ import annotations

import copy
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import timm
import torch
from PIL import Image, ImageDraw, ImageOps
from timm.optim import param_groups_layer_decay
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset, Subset
from torchvision import tv_tensors
from torchvision.transforms import v2

from dino_ds.examples.finetune_classification import DEVICE, fit, is_readable, open_upright, parse, split

UNKNOWN = 255
COLORS = np.random.default_rng(3).integers(40, 256, (256, 3), dtype=np.uint8)
COLORS[0], COLORS[UNKNOWN] = 0, 255


class Segmenter(nn.Module):
    """Images (b, 3, h, w) -> logits (b, classes, h, w)."""

    def __init__(self, backbone: Any, classes: int, frozen: bool) -> None:
        super().__init__()
        self.backbone: Any = backbone.requires_grad_(not frozen)
        self.stride: int = backbone.feature_info[-1]["reduction"]
        self.head = nn.Sequential(nn.BatchNorm2d(backbone.num_features), nn.Conv2d(backbone.num_features, classes, 1))

    def forward(self, images: Tensor) -> Tensor:
        height, width = images.shape[-2:]
        padded = functional.pad(images, (0, -width % self.stride, 0, -height % self.stride))
        features = self.backbone.forward_intermediates(padded, indices=1, norm=True, intermediates_only=True)[-1]
        logits = functional.interpolate(self.head(features).float(), padded.shape[-2:], mode="bilinear")
        return logits[..., :height, :width]


class Masked(Dataset[tuple[Tensor, Tensor]]):
    def __init__(self, folder: str, classes: int, transform: Any) -> None:
        images = sorted(path for path in Path(folder, "images").glob("[!.]*") if is_readable(path))
        self.pairs = [(path, Path(folder, "masks", f"{path.stem}.png")) for path in images]
        self.transform = transform
        if not images:
            sys.exit(f"no images in {folder}/images")
        for image, mask in self.pairs:
            numbers = np.array(Image.open(mask)) if mask.exists() else np.zeros(0)
            known = (numbers < classes) | (numbers == UNKNOWN)
            if numbers.shape != open_upright(image).size[::-1] or not known.all():
                sys.exit(f"{image} wants a mask {mask} of its size, one channel of classes 0 to {classes - 1} or 255")

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        image, mask = self.pairs[index]
        pair = tv_tensors.Image(open_upright(image)), tv_tensors.Mask(np.array(Image.open(mask), dtype=np.int64))
        pixels, labels = self.transform(*pair)
        return pixels.as_subclass(Tensor), labels.squeeze(0).as_subclass(Tensor)


@torch.no_grad()
def predict(network: Segmenter, data: Masked, index: int) -> tuple[np.ndarray, np.ndarray]:
    """The predicted classes and the mask of a whole image, each (h, w) in the mask's size."""
    mask = np.array(Image.open(data.pairs[index][1]))
    logits = network.eval()(data[index][0][None].to(DEVICE))
    return functional.interpolate(logits, mask.shape, mode="bilinear").argmax(1)[0].cpu().numpy(), mask


def iou(network: Segmenter, data: Masked, classes: list[str]) -> float:
    """The mean over classes of intersection over union, of all images in percent; prints that of each class."""
    n = len(classes)
    counts = np.zeros((n, n))
    for index in range(len(data)):
        predicted, mask = predict(network, data, index)
        known = mask != UNKNOWN
        counts += np.bincount(n * mask[known].astype(int) + predicted[known], minlength=n * n).reshape(n, n)
    right, union = counts.diagonal(), counts.sum(0) + counts.sum(1) - counts.diagonal()
    each = {name: float(100 * a / b) for name, a, b in zip(classes, right, union, strict=True) if b}
    print(", ".join(f"{name} {percent:.1f}" for name, percent in each.items()), end="; ")
    return float(np.mean([*each.values()]))


def overlay(network: Segmenter, data: Masked, path: Path) -> None:
    """Draw the first four images, each beside its mask and the predicted classes, laid over it half transparent."""
    rows = []
    for index in range(min(4, len(data))):
        image = open_upright(data.pairs[index][0])
        tinted = [Image.blend(image, Image.fromarray(COLORS[each]), 0.5) for each in predict(network, data, index)]
        rows.append(np.hstack([np.array(ImageOps.pad(each, (320, 240))) for each in (image, *tinted[::-1])]))
    sheet = Image.fromarray(np.vstack(rows))
    pen = ImageDraw.Draw(sheet)
    for column, word in enumerate((f"{len(rows)} of {len(data)} images", "mask", "predicted")):
        pen.text((320 * column + 8, 6), word, "white", stroke_width=2, stroke_fill="black", font_size=20)
    sheet.save(path)


def main(argv: list[str] | None = None) -> float:
    """Returns the mean IoU of the chosen epoch on the test images, in percent."""
    args = parse(argv, "classes", size=0)  # of images in pixels, 0 for the teacher's
    names = args.classes.split(",")
    arguments = json.loads((args.model / "config.json").read_text())["model_args"]
    any_size: dict[str, Any] = {"dynamic_img_size": True} if "img_size" in arguments else {}
    backbone: Any = timm.create_model(f"local-dir:{args.model}", pretrained=not args.random, num_classes=0, **any_size)
    images = backbone.pretrained_cfg
    if (channels := images["input_size"][0]) != 3:
        sys.exit(f"{args.model} is for images of {channels} channels, and this program reads RGB: change it")
    size = args.size or images["input_size"][-1]
    last = [v2.ToDtype({tv_tensors.Image: torch.float32, "others": None}, scale=True)]
    last.append(v2.Normalize(images["mean"], images["std"]))
    crop = [v2.RandomResizedCrop(size, scale=(0.25, 1)), v2.RandomHorizontalFlip(), v2.ColorJitter(0.4, 0.4, 0.4)]
    training = Masked(args.train, len(names), v2.Compose([*crop, *last]))
    tests = Masked(args.test, len(names), v2.Compose([v2.Resize(size), *last]))
    held_out, (learned, held) = copy.copy(training), split(len(training), args.seed)
    held_out.pairs, held_out.transform = [training.pairs[index] for index in held], tests.transform
    network = Segmenter(backbone, len(names), args.frozen).to(DEVICE)
    groups = [{"params": [*network.head.parameters()]}]
    if not args.frozen:
        groups += param_groups_layer_decay(backbone, weight_decay=0.05, layer_decay=args.layer_decay)
    Path(args.out).mkdir(parents=True, exist_ok=True)
    fit(network, Subset(training, learned), groups, lambda network: iou(network, held_out, names), args)
    overlay(network, tests, Path(args.out, "overlay.png"))
    reached = iou(network, tests, names)
    print(f"test images: {reached:.2f} %")
    return reached


if __name__ == "__main__":
    main()
