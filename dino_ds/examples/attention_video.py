"""Paint the frames of a clip with what a teacher looks at.

ffmpeg -i walk.mp4 frames/%06d.png
python -m dino_ds.examples.attention_video runs/vits16 frames painted
ffmpeg -framerate 25 -i painted/%06d.png -pix_fmt yuv420p walk_attention.mp4
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

import dino_ds
from dino_ds.data.multicrop import to_tensor
from dino_ds.errors import UserError
from dino_ds.report.draw import heat
from dino_ds.weights.load import Backbone

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SAMPLE = 16
"""Frames of all parts of the clip whose attention says what is lightest, so that nothing flickers."""
LIGHTEST = 0.995
"""Share of the sample's patches that are darker than the lightest color."""


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="whatever dino_ds.load reads")
    parser.add_argument("frames", type=Path, help="folder of images, in the order of their names")
    parser.add_argument("out", type=Path, help="folder for the painted frames")
    parser.add_argument("--size", type=int, default=480, help="pixels of a frame's shorter side")
    options = parser.parse_args(arguments)
    try:
        paint_clip(options.model, options.frames, options.out, options.size)
    except (UserError, OSError) as error:
        sys.exit(f"attention_video: {error}")


def paint_clip(model: str, frames: Path, out: Path, size: int) -> None:
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
    attention = torch.stack([_attention(backbone, _resized(path, height, width)) for path in sample])
    top = float(attention.quantile(LIGHTEST))
    out.mkdir(parents=True, exist_ok=True)
    for number, path in enumerate(paths):
        frame = _resized(path, height, width)
        painted = heat(torch.from_numpy(np.asarray(frame) / np.float32(255)), _attention(backbone, frame), top)
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


def _attention(backbone: Backbone, frame: Image.Image) -> Tensor:
    """The CLS token's attention (rows, columns), the mean of all heads."""
    pixels = to_tensor(frame, backbone.normalisation)[None]
    return backbone.attention(pixels.to(DEVICE))[0].float().mean(dim=0).cpu()


if __name__ == "__main__":
    main()
