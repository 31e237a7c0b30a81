"""Semantic segmentation by a linear layer on patch tokens (Pascal VOC 2012).

Sources: Everingham et al. 2010 for the images and the metric; DINOv2 (arXiv 2304.07193, section 7.4, "linear") for the
head: batch norm and a 1 x 1 convolution as facebookresearch/dinov2 `linear_head.py`. The batch norm comes to the mean
and deviation of the training set, which are taken at once here; what is left is convex, so L-BFGS replaces 40,000 steps
of AdamW and has no learning rate.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor
from tqdm import tqdm

from dino_ds.data.multicrop import to_tensor
from dino_ds.engine import distributed
from dino_ds.errors import DataError
from dino_ds.evals.context import EvalContext
from dino_ds.evals.linear import LinearProbe, minimise
from dino_ds.evals.protocols.work import Benchmark, read_image, read_label_map, share

_BENCHMARK = Benchmark(
    "Pascal VOC 2012",
    (".", "VOC2012", "VOCdevkit/VOC2012"),
    ("JPEGImages", "SegmentationClass", "ImageSets/Segmentation/train.txt", "ImageSets/Segmentation/val.txt"),
    "JPEGImages/NAME.jpg, SegmentationClass/NAME.png and ImageSets/Segmentation/{train,val}.txt",
    "VOCtrainval_11-May-2012.tar of http://host.robots.ox.ac.uk/pascal/VOC/voc2012",
)
_CLASSES, _IGNORED = 21, 255
_SIZE = 512
_DECAY = 1e-4
"""Weight of |W|^2 / 2, next to the mean cross-entropy."""
_STEPS = 100


def voc(context: EvalContext) -> dict[str, float]:
    """Pascal VOC 2012: linear layer on patch tokens, mean IoU of 21 classes"""
    with distributed.raise_on_all_ranks():
        folder = _BENCHMARK.find(context.settings.benchmark_root)
        train, val = (_read_split(folder, split) for split in ("train", "val"))
        _BENCHMARK.check(path for pair in (*train, *val) for path in (pair.photo, pair.labels))
    context.begin()
    tokens, pixels = list[Tensor](), list[Tensor]()

    def learn(pair: Pair) -> None:
        image, labels = _read(pair)
        patches = _patches(context, image)
        tokens.append(patches.flatten(0, 1).half())  # a layer norm's output: far from FP16's ends
        pixels.append(pixels_of_patches(labels, *patches.shape[:2]).to(context.device))

    share(context, train, learn, "voc: training images")
    if not tokens:  # fewer images than ranks
        tokens.append(torch.zeros(0, context.backbone.width, device=context.device))
        pixels.append(torch.zeros(0, _CLASSES, device=context.device))
    probe = fit_patch_probe(tokens, pixels, context.progress, context.give_up)
    confusion = torch.zeros(_CLASSES, _CLASSES, dtype=torch.long, device=context.device)

    def judge(pair: Pair) -> None:
        image, labels = _read(pair)
        found = segment(probe, _patches(context, image), *labels.shape)
        confusion.add_(confusion_of(found, torch.from_numpy(labels).to(context.device)))

    share(context, val, judge, "voc: test images")
    return segmentation_scores(distributed.sum_across_ranks(confusion))


@dataclass(frozen=True)
class Pair:
    """A photo and the map of its classes."""

    photo: Path
    labels: Path


def fit_patch_probe(
    tokens: Sequence[Tensor],
    pixels: Sequence[Tensor],
    progress: bool = False,
    give_up: Callable[[], bool] = lambda: False,
) -> LinearProbe:
    """Logistic regression, every pixel a sample. All ranks call it and get the same.

    tokens (n, d) of this rank's patches, in parts, and how many pixels of each class lie in each patch, (n, classes)
    FP32; all on one device. `progress`: a bar on rank 0. Raises GaveUp (`minimise`).
    """
    width, classes, device = tokens[0].shape[1], pixels[0].shape[1], tokens[0].device
    mean, scale = _moments(tokens)
    pixel_count = sum((part.double().sum() for part in pixels), torch.zeros((), device=device).double())
    total = float(distributed.sum_across_ranks(pixel_count))
    hidden = distributed.hidden_bar(progress)
    bar = tqdm(desc="fitting", total=_STEPS * 5 // 4, unit=" passes", leave=False, disable=hidden)

    def loss_and_gradient(values: Tensor) -> Tensor:
        """Of the mean cross-entropy over the pixels of all ranks."""
        bar.update()
        found = torch.zeros(1 + values.numel(), device=device)
        for part, counts in zip(tokens, pixels, strict=True):
            x = (part.float() - mean) / scale
            likely = (x @ values[:, :-1].T + values[:, -1]).log_softmax(dim=1)
            error = counts.sum(dim=1, keepdim=True) * likely.exp() - counts
            found[0] -= (counts * likely).sum()
            found[1:] += torch.cat((error.T @ x, error.sum(dim=0)[:, None]), dim=1).flatten()
        return distributed.sum_across_ranks(found) / total

    with torch.no_grad(), bar:
        start = torch.zeros(classes, width + 1, device=device)
        best = minimise(loss_and_gradient, start, _DECAY, _STEPS, give_up)
    return LinearProbe(mean, scale, best[:, :-1].contiguous(), best[:, -1].contiguous(), _DECAY)


def _moments(tokens: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Mean and deviation (d,) of the tokens of all ranks; one may have none."""
    sums = torch.zeros(3, tokens[0].shape[1], dtype=torch.float64, device=tokens[0].device)
    for part in tokens:
        values = part.double()
        sums[0] += values.sum(dim=0)
        sums[1] += values.square().sum(dim=0)
        sums[2] += len(values)
    first, second, count = distributed.sum_across_ranks(sums)
    mean = first / count
    return mean.float(), (second / count - mean.square()).clamp_min(1e-12).sqrt().float()


def pixels_of_patches(labels: np.ndarray, rows: int, columns: int) -> Tensor:
    """uint8 (h, w) -> how many pixels of each class lie in each patch of the grid, (rows * columns, 21) FP32.

    A pixel belongs to the patch that its center lies in; ignored ones (255) to none.
    """
    height, width = labels.shape
    row = ((np.arange(height) + 0.5) * rows / height).astype(np.int64)
    column = ((np.arange(width) + 0.5) * columns / width).astype(np.int64)
    place = (row[:, None] * columns + column)[labels != _IGNORED]
    flat = place * _CLASSES + labels[labels != _IGNORED]
    counts = np.bincount(flat, minlength=rows * columns * _CLASSES)
    return torch.from_numpy(counts.reshape(rows * columns, _CLASSES)).float()


def segment(probe: LinearProbe, patches: Tensor, height: int, width: int) -> Tensor:
    """Patches (rows, columns, d) -> classes of pixels (height, width): of the largest logit, bilinearly."""
    logits = probe(patches).permute(2, 0, 1)[None]
    return F.interpolate(logits, size=(height, width), mode="bilinear", align_corners=False)[0].argmax(dim=0)


def confusion_of(found: Tensor, wanted: Tensor) -> Tensor:
    """Classes of pixels (h, w) -> how many of each true class (row) were found to be each class (column)."""
    known = wanted != _IGNORED
    flat = wanted[known].long() * _CLASSES + found[known].long()
    return torch.bincount(flat, minlength=_CLASSES**2).view(_CLASSES, _CLASSES)


def segmentation_scores(confusion: Tensor) -> dict[str, float]:
    """In percent, over all pixels of all images; a class that is neither there nor found is left out of the mean."""
    counts = confusion.double()
    right = counts.diag()
    union = counts.sum(dim=0) + counts.sum(dim=1) - right
    present = union > 0
    return {
        "voc_miou": 100 * float((right[present] / union[present]).mean()),
        "voc_pixel_accuracy": 100 * float(right.sum() / counts.sum()),
    }


def _read_split(folder: Path, split: str) -> list[Pair]:
    names = _BENCHMARK.names(folder / f"ImageSets/Segmentation/{split}.txt")
    return [Pair(folder / "JPEGImages" / f"{n}.jpg", folder / "SegmentationClass" / f"{n}.png") for n in names]


def _read(pair: Pair) -> tuple[Image.Image, np.ndarray]:
    """The photo and its labels, below 21 or ignored."""
    image = read_image(pair.photo)
    labels = read_label_map(pair.labels, image.size)
    strange = labels[(labels >= _CLASSES) & (labels != _IGNORED)]
    if len(strange):
        raise DataError(f"{pair.labels} has class {strange[0]}: Pascal VOC has {_CLASSES}, and {_IGNORED} is ignored")
    return image, labels


def _patches(context: EvalContext, image: Image.Image) -> Tensor:
    """(rows, columns, d) of the photo, its shorter side resized to 512 pixels, both to multiples of the patch size."""
    patch = context.backbone.stride
    scale = (context.settings.size or _SIZE) / min(image.size)
    width, height = (max(round(side * scale / patch), 1) * patch for side in image.size)
    scaled = to_tensor(image.resize((width, height), Image.Resampling.BILINEAR), context.backbone.normalisation)
    return context.backbone.patch_tokens(scaled[None].to(context.device))[0].float()
