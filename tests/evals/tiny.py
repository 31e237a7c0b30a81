"""Tiny benchmarks in their true layouts, and a model that sees nothing but colors."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from dino_ds.data.normalization import IMAGENET, MEAN, STD
from dino_ds.evals.context import EvalContext, Settings

COLORS = [(230, 20, 20), (20, 230, 20), (20, 20, 230), (220, 220, 10), (10, 220, 220), (220, 10, 220)]


class Colors:
    """A patch's token is its mean color and its likeness to each of COLORS; the feature is the tokens' mean."""

    image_size, stride, side_multiple, width, is_vit = 32, 8, 8, 3 + len(COLORS), True
    normalization = IMAGENET

    def patch_tokens(self, images: Tensor) -> Tensor:
        mean = F.avg_pool2d(images, self.stride).permute(0, 2, 3, 1)
        shades = (torch.tensor(COLORS) / 255 - torch.tensor(MEAN)) / torch.tensor(STD)
        distance = (mean[..., None, :] - shades).square().sum(dim=-1)
        return torch.cat((0.1 * mean, (-distance).exp()), dim=-1)

    def features(self, images: Tensor) -> Tensor:
        return self.patch_tokens(images).mean(dim=(1, 2))


def context_of(root: Path | None, **settings: object) -> EvalContext:
    return EvalContext(
        Colors(), Settings(benchmark_root=root, workers=0, **settings), torch.device("cpu"), progress=False
    )


def photo(path: Path, blocks: list[list[int]], side: int = 40) -> None:
    """A photo of plain blocks of COLORS by number, with a little noise."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.array(COLORS)[np.array(blocks)].repeat(side, 0).repeat(side, 1)
    noise = np.random.default_rng(len(path.name)).integers(-8, 9, pixels.shape)
    Image.fromarray((pixels + noise).clip(0, 255).astype(np.uint8)).save(path, quality=95)


def label_map(path: Path, labels: np.ndarray) -> None:
    """As DAVIS and VOC keep them: a PNG with a palette."""
    path.parent.mkdir(parents=True, exist_ok=True)
    image = Image.fromarray(labels.astype(np.uint8), "P")
    image.putpalette(list(range(256)) * 3)
    image.save(path)


def landmarks(root: Path, dataset: str = "roxford5k") -> Path:
    """Four landmarks, a color each, with three images; two queries. Beside a query's landmark is another one."""
    folder = root / dataset
    names = [f"place_{i // 3}_{i % 3:06d}" for i in range(12)]
    for i, name in enumerate(names):
        photo(folder / "jpg" / f"{name}.jpg", [[i // 3] * (1 + i % 3)])
    truth = []
    for query, landmark in enumerate((0, 2)):
        photo(folder / "jpg" / f"query_{query}.jpg", [[landmark, landmark + 1, landmark + 1]])
        first = 3 * landmark
        truth.append({"bbx": [0.0, 0.0, 39.6, 39.6], "easy": [first], "hard": [first + 1], "junk": [first + 2]})
    content = {"gnd": truth, "imlist": names, "qimlist": ["query_0", "query_1"]}
    (folder / f"gnd_{dataset}.json").write_text(json.dumps(content))
    return folder


def clips(root: Path, names: tuple[str, ...] = ("walk", "run", "sit"), frames: int = 6) -> Path:
    """Two squares of their own colors that move over a ground, a pixel block a frame."""
    for clip, name in enumerate(names):
        for t in range(frames):
            labels = np.zeros((96, 160), dtype=np.uint8)
            left = 8 * (t + clip)
            labels[16:48, left : left + 32] = 1
            labels[56:88, 120 - left : 152 - left] = 2
            pixels = np.array(COLORS)[labels + clip]
            path = root / "JPEGImages/480p" / name / f"{t:05d}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(pixels.astype(np.uint8)).save(path, quality=100, subsampling=0)
            label_map(root / "Annotations/480p" / name / f"{t:05d}.png", labels)
    (root / "ImageSets/2017").mkdir(parents=True, exist_ok=True)
    (root / "ImageSets/2017/val.txt").write_text("\n".join(names) + "\n")
    return root
