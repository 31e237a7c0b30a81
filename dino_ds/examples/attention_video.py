"""Paint the frames of a clip with what a teacher looks at, or with the colors of its patches.

ffmpeg -i walk.mp4 frames/%06d.png
python -m dino_ds.examples.attention_video runs/vits16 frames painted      # --show pca: components of the patches
ffmpeg -framerate 25 -i painted/%06d.png -pix_fmt yuv420p walk_attention.mp4
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

import dino_ds
from dino_ds.data.multicrop import to_tensor
from dino_ds.errors import UserError
from dino_ds.report.draw import coat, heat
from dino_ds.report.maps import PatchColors
from dino_ds.weights.load import Backbone

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SAMPLE = 16
"""Frames of all parts of the clip that decide on its colors once, so that nothing flickers."""
LIGHTEST = 0.995
"""Share of the sample's patches that are darker than the lightest color."""


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="whatever dino_ds.load reads")
    parser.add_argument("frames", type=Path, help="folder of images, in the order of their names")
    parser.add_argument("out", type=Path, help="folder for the painted frames")
    parser.add_argument("--show", choices=("attention", "pca"), default="attention")
    parser.add_argument("--size", type=int, default=480, help="pixels of a frame's shorter side")
    options = parser.parse_args(arguments)
    try:
        paint_clip(options.model, options.frames, options.out, options.show, options.size)
    except (UserError, OSError) as error:
        sys.exit(f"attention_video: {error}")


def paint_clip(model: str, frames: Path, out: Path, show: str, size: int) -> None:
    """Paint every image of `frames` into a PNG file of `out`.

    Raises:
        UserError: the model can't be loaded, or has no attention.
        OSError: a frame can't be read or written.
    """
    paths = sorted(path for path in frames.iterdir() if path.suffix.lower() in (".png", ".jpg", ".jpeg", ".webp"))
    if not paths:
        raise FileNotFoundError(f"{frames} holds no PNG, JPEG or WebP files: ffmpeg -i CLIP {frames}/%06d.png")
    backbone = dino_ds.load(model, DEVICE)
    height, width = _network_size(paths[0], size, backbone.stride)
    sample = paths[:: max(1, len(paths) // SAMPLE)]
    paint = _painter(backbone, [_pixels(path, height, width, backbone) for path in sample], show)
    out.mkdir(parents=True, exist_ok=True)
    for number, path in enumerate(paths):
        picture = torch.from_numpy(np.asarray(_resized(path, height, width)) / np.float32(255))
        painted = paint(picture, _pixels(path, height, width, backbone))
        Image.fromarray((255 * painted).round().astype(np.uint8)).save(out / f"{number:06d}.png")
    print(f"{out}: {len(paths)} frames of {width} x {height}")


def _network_size(path: Path, short: int, patch: int) -> tuple[int, int]:
    """Height and width in whole patches, an even number of them: encoders of videos want even sides."""
    with Image.open(path) as image:
        scale = short / min(image.size)
        width, height = (max(2, round(side * scale / patch / 2) * 2) * patch for side in image.size)
    return height, width


def _resized(path: Path, height: int, width: int) -> Image.Image:
    with Image.open(path) as image:
        return image.convert("RGB").resize((width, height), Image.Resampling.BICUBIC)


def _pixels(path: Path, height: int, width: int, backbone: Backbone) -> Tensor:
    return to_tensor(_resized(path, height, width), backbone.normalisation)[None]


def _painter(backbone: Backbone, sample: list[Tensor], show: str) -> Callable[[Tensor, Tensor], np.ndarray]:
    """A function of a frame (h, w, 3) in [0, 1] and the network's input (1, 3, h, w) that gives the painted frame."""
    if show == "pca":
        colors = PatchColors(torch.cat([_tokens(backbone, frame).flatten(0, 1) for frame in sample]))
        return lambda picture, pixels: coat(picture, colors(_tokens(backbone, pixels)))
    top = float(torch.stack([_attention(backbone, frame) for frame in sample]).quantile(LIGHTEST))
    return lambda picture, pixels: heat(picture, _attention(backbone, pixels), top)


def _tokens(backbone: Backbone, pixels: Tensor) -> Tensor:
    """Patch tokens (rows, columns, d)."""
    return backbone.patch_tokens(pixels.to(DEVICE))[0].float().cpu()


def _attention(backbone: Backbone, pixels: Tensor) -> Tensor:
    """The CLS token's attention (rows, columns), the mean of all heads."""
    return backbone.attention(pixels.to(DEVICE))[0].float().mean(dim=0).cpu()


if __name__ == "__main__":
    main()
