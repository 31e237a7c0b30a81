"""`dino-ds attention-video`: a clip with what the teacher looks at laid over it.

Like facebookresearch/dino `video_generation.py`, but with colors that mean the same in all frames.
"""

from __future__ import annotations

import itertools
import json
import os
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from tqdm import tqdm

from dino_ds.basics.durable import why_not_writable
from dino_ds.data.multicrop import to_tensor
from dino_ds.errors import ConfigError
from dino_ds.options.model import AttentionVideoOptions
from dino_ds.report.clip import FORMS, clip_writer, has_av, import_av, open_clip, survey
from dino_ds.report.model_options import MAPS_AT_ONCE, in_parts, load_for_pictures, side_of
from dino_ds.report.pictures.draw import MASS, coat, head_colors, heat, overlay
from dino_ds.report.pictures.maps import PatchColors, mass_mask
from dino_ds.weights.load import Backbone

_SAMPLE = 16
_SLOWEST, _FASTEST = 0.01, 1000.0
"""Frames a second. A GIF knows 655 seconds a frame at most."""
_LIGHTEST = 0.995
"""Share of the sample's patches that are darker than the lightest color."""
_MOST_PATCHES = 65536
_SHORT = 240
"""Pixels that a frame's shorter side should have at least where patches are small."""


Paint = Callable[[Tensor, Tensor], list[np.ndarray]]
"""Frames as the network gets them (b, 3, h, w), and as they are shown (b, H, W, 3) in [0, 1] -> painted (H, W, 3)."""


def run(options: AttentionVideoOptions) -> None:
    """Paint every frame of `clip` into `out`. Raises ConfigError, DataError, CheckpointError."""
    if options.head is not None and options.show != "attention":
        raise ConfigError(f"--head {options.head} is for --show attention; --show {options.show} has all heads")
    path, form = _destination(options.clip, options.out, options.format)
    if options.fps is not None and form == "png":
        raise ConfigError(f"--fps {options.fps:g} is for videos and animations, images have no rate: leave it out")
    clip = open_clip(options.clip)
    rate = options.fps or clip.fps
    if form != "png" and not _SLOWEST <= rate <= _FASTEST:
        raise ConfigError(f"{rate:g} frames a second can't be written: give --fps, {_SLOWEST:g} to {_FASTEST:g}")
    backbone = load_for_pictures(options.model)
    if (channels := len(backbone.normalisation.mean)) != 3:
        raise ConfigError(
            f"{options.model} takes images of {channels} channels, and a clip's frames have 3: dino-ds pictures shows "
            "its images"
        )
    if options.show != "pca":
        _ = backbone.vit  # raises where there is no attention
    count, sample = survey(clip, _SAMPLE)
    height, width = _network_size(sample[0], side_of(backbone, options.size), backbone.stride)

    def cut(frames: list[np.ndarray]) -> Tensor:
        return torch.stack([to_tensor(_resized(frame, height, width), backbone.normalisation) for frame in frames])

    paint = _painter(backbone, cut(sample), options.show, options.head)
    zoom = max(1, -(-_SHORT // min(height, width)))
    began = time.monotonic()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with clip_writer(path, form, rate) as add_frame, tqdm(total=count, unit=" frames", disable=None) as bar:
            stream = clip.frames()
            while batch := list(itertools.islice(stream, MAPS_AT_ONCE)):
                shown = torch.stack([_shown(frame, height * zoom, width * zoom) for frame in batch])
                for picture in paint(cut(batch), shown):
                    add_frame((255 * picture).round().astype(np.uint8))
                bar.update(len(batch))
    except OSError as error:
        raise ConfigError(f"{path} can't be written: {error.strerror or error}; fix --out") from None
    about = {"video": str(path), "frames": count, "height": height * zoom, "width": width * zoom, "fps": rate}
    seconds = time.monotonic() - began
    words = f"{count} frames of {width * zoom} x {height * zoom}, {rate:g} a second; made in {seconds:.1f} s"
    print(json.dumps({**about, "seconds": round(seconds, 2)}) if options.json else f"{path}: {words}")


def _destination(clip: str, out: str | None, form: str | None) -> tuple[Path, str]:
    """The path to write and its format. Raises ConfigError, also if the path exists already."""
    ending = Path(out).suffix.lower().removeprefix(".") if out else ""
    form = form or (ending if ending in FORMS else "mp4" if has_av() else "gif")
    if out and form != "png" and ending != form:
        raise ConfigError(f"--out {out} does not end in .{form}: name it so, or choose {', '.join(FORMS)} by --format")
    if form == "mp4":
        import_av()
    name = Path(clip.rstrip("/")).stem.strip("*?[]") or "clip"
    path = Path(os.path.expanduser(out)) if out else Path(f"{name}_attention" + ("" if form == "png" else f".{form}"))
    if path.exists():
        raise ConfigError(f"{path} exists already: remove it, or name another with --out")
    if reason := why_not_writable(path):
        raise ConfigError(f"{path} can't be written: {reason}; fix --out")
    return path, form


def _network_size(frame: np.ndarray, short: int, patch: int) -> tuple[int, int]:
    """Height and width for the network, multiples of the patch size: the shorter side `short`, the shape kept.

    Raises ConfigError for more patches than attention can pay for.
    """
    scale = short / min(frame.shape[:2])
    height, width = (max(1, round(side * scale / patch)) for side in frame.shape[:2])
    if height * width > _MOST_PATCHES:
        raise ConfigError(
            f"frames of {frame.shape[1]} x {frame.shape[0]} pixels are {width} x {height} patches at a shorter side of "
            f"{short}; at most {_MOST_PATCHES} are painted: give a smaller --size, or cut the clip"
        )
    return height * patch, width * patch


def _resized(frame: np.ndarray, height: int, width: int) -> Image.Image:
    return Image.fromarray(frame).resize((width, height), Image.Resampling.BICUBIC)


def _shown(frame: np.ndarray, height: int, width: int) -> Tensor:
    return torch.from_numpy(np.asarray(_resized(frame, height, width)) / np.float32(255))


def _painter(backbone: Backbone, sample: Tensor, show: str, head: int | None) -> Paint:
    """`sample` (n, 3, h, w), frames of all parts of the clip, decides once on the colors: nothing flickers.

    Raises ConfigError where there is no such head.
    """
    colors = PatchColors(in_parts(backbone.patch_tokens, sample).flatten(0, 2)) if show == "pca" else None

    def look(images: Tensor) -> Tensor:
        """(b, heads, h, w) for all heads, (b, h, w) for one or for their mean, (b, h, w, 3) for colors."""
        if colors is not None:
            return colors(in_parts(backbone.patch_tokens, images))
        maps = in_parts(backbone.attention, images)
        if head is not None and head >= maps.shape[1]:
            raise ConfigError(f"--head {head}: the model has {maps.shape[1]} heads, 0 to {maps.shape[1] - 1}")
        return maps if show == "heads" else maps.mean(dim=1) if head is None else maps[:, head]

    top = float(look(sample).quantile(_LIGHTEST)) if show == "attention" else 1.0

    def over(picture: Tensor, found: Tensor) -> np.ndarray:
        if show == "heads":
            return overlay(picture, found * mass_mask(found, MASS), head_colors(len(found)))
        return coat(picture, found) if show == "pca" else heat(picture, found, top)

    return lambda images, shown: [over(picture, found) for picture, found in zip(shown, look(images), strict=True)]
