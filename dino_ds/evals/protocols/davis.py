"""Video object segmentation: the masks of a clip's first frame are carried on by the likeness of patches (DAVIS 2017).

Sources: facebookresearch/dino `eval_video_segmentation.py` (Jabri et al. 2020, arXiv 2006.14613); nothing is trained.
The metrics, region (J) and boundary (F): `metrics.py` and `evaluation.py` of davisvideochallenge/davis2017-evaluation
(Perazzi et al. 2016, Pont-Tuset et al. 2017).
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from dino_ds.data.multicrop import to_tensor
from dino_ds.engine import distributed
from dino_ds.errors import DataError
from dino_ds.evals.context import EvalContext
from dino_ds.evals.protocols.work import Benchmark, read_image, read_label_map, share

_BENCHMARK = Benchmark(
    "DAVIS 2017",
    (".", "DAVIS"),
    ("ImageSets/2017/val.txt", "JPEGImages/480p", "Annotations/480p"),
    "JPEGImages/480p/CLIP/00000.jpg, Annotations/480p/CLIP/00000.png and ImageSets/2017/val.txt",
    "TrainVal 480p of https://davischallenge.org/davis2017/code.html",
)
_SIZE, _SIDE_STEP = 480, 64
_LAST_FRAMES, _NEIGHBOURHOOD, _NEAREST, _TEMPERATURE = 7, 12, 5, 0.1
_VOID = 255
_TOLERANCE = 0.008
"""Tolerance of a boundary's place, as a part of the image's diagonal."""
_MASKS = 16
"""Masks dilated at once."""


def davis(context: EvalContext) -> dict[str, float]:
    """DAVIS 2017: masks of a clip's first frame carried on by patches, J and F"""
    with distributed.raise_on_all_ranks():
        folder = _BENCHMARK.find(context.settings.benchmark_root)
        clips = [_read_clip(folder, name) for name in _BENCHMARK.names(folder / _BENCHMARK.marks[0])]
        _BENCHMARK.check(path for clip in clips for path in (*clip.frames, *clip.masks))
    context.begin()
    judged = share(context, clips, lambda clip: _judge(context, clip), "davis: clips")
    of_objects = np.array([row for rows in judged for row in rows])
    names = ("davis_j_mean", "davis_j_recall", "davis_f_mean", "davis_f_recall")
    means = dict(zip(names, (100 * of_objects.mean(axis=0)).tolist(), strict=True))
    return {"davis_jf_mean": (means["davis_j_mean"] + means["davis_f_mean"]) / 2, **means}


@dataclass(frozen=True)
class Clip:
    """Photos and the maps of their objects, in order; 0 is background."""

    frames: list[Path]
    masks: list[Path]


class LabelPropagation:
    """Soft labels (classes, rows, columns) of a clip's first frame, carried on frame by frame.

    A patch takes the mean of the 5 patches most like it, weighted by exp(cosine / 0.1), among those at most 12 rows and
    columns away in the first frame and the last 7. Patches: (rows, columns, d), of any length.
    """

    def __init__(self, patches: Tensor, labels: Tensor) -> None:
        self._first = F.normalize(patches, dim=-1), labels.movedim(0, -1)
        self._last: deque[tuple[Tensor, Tensor]] = deque(maxlen=_LAST_FRAMES)

    def __call__(self, patches: Tensor) -> Tensor:
        """The next frame's patches -> its labels (classes, rows, columns)."""
        targets = F.normalize(patches, dim=-1)
        known = [self._first, *self._last]
        features, labels = (torch.stack([pair[i] for pair in known]) for i in (0, 1))
        found = torch.empty_like(labels[0])
        reach = _NEIGHBOURHOOD
        # A tile of targets at a time sees the tiles around it: all that is near, and little else.
        for top in range(0, found.shape[0], reach):
            for left in range(0, found.shape[1], reach):
                tile = slice(top, top + reach), slice(left, left + reach)
                start = max(0, top - reach), max(0, left - reach)
                seen = slice(None), slice(start[0], top + 2 * reach), slice(start[1], left + 2 * reach)
                shift = top - start[0], left - start[1]
                found[tile] = _carried(targets[tile], features[seen], labels[seen], shift)
        self._last.append((targets, found))
        return found.movedim(-1, 0)


def _carried(targets: Tensor, features: Tensor, labels: Tensor, shift: tuple[int, int]) -> Tensor:
    """Targets (h, w, d) -> their labels (h, w, classes), of patches (frames, rows, columns, d) and their labels.

    `shift`: row and column of the first target among these patches.
    """
    row, column = (
        (torch.arange(target)[:, None] + first - torch.arange(source)).abs().to(targets.device) <= _NEIGHBOURHOOD
        for target, source, first in zip(targets.shape[:2], features.shape[1:3], shift, strict=True)
    )
    near = row[:, None, None, :, None] & column[None, :, None, None, :]
    likeness = torch.einsum("hwd,frcd->hwfrc", targets, features)
    likeness = likeness.masked_fill_(~near, -torch.inf).flatten(2)
    value, index = likeness.topk(min(_NEAREST, likeness.shape[2]), dim=2)
    weights = (value / _TEMPERATURE).softmax(dim=2)
    return (weights[..., None] * labels.flatten(0, 2)[index]).sum(dim=2)


def frame_sides(width: int, height: int, size: int, patch: int) -> tuple[int, int]:
    """(height, width) of what the model sees: the shorter side `size` pixels, the longer one a multiple of 64; both
    multiples of the patch size."""
    step = max(_SIDE_STEP // patch, 1) * patch
    short = max(size // patch, 1) * patch
    long = max(int(size * max(width, height) / min(width, height)) // step * step, short)
    return (long, short) if height > width else (short, long)


def hard_labels(soft: Tensor, patch: int, height: int, width: int) -> np.ndarray:
    """Soft labels of patches (classes, rows, columns) -> each pixel's class, uint8 (height, width).

    Like in the reference, each class is stretched to [0, 1] over the frame before the largest wins.
    """
    fine = F.interpolate(soft[None], scale_factor=patch, mode="bilinear", align_corners=False)[0]
    lowest = fine.amin(dim=(1, 2), keepdim=True)
    span = fine.amax(dim=(1, 2), keepdim=True) - lowest
    stretched = torch.where(span > 0, (fine - lowest) / span.clamp_min(1e-12), fine.sign())
    winner = stretched.argmax(dim=0).to(torch.uint8).cpu().numpy()
    return np.array(Image.fromarray(winner).resize((width, height), Image.Resampling.NEAREST))


def judge_masks(found: Tensor, wanted: Tensor, objects: int) -> list[tuple[float, float, float, float]]:
    """Labels uint8 (frames, h, w), 0 is background -> of each object means over frames: J, J > 1/2, F, F > 1/2."""
    rows = []
    for number in range(1, objects + 1):
        pair = found == number, wanted == number
        values = region_similarity(*pair), boundary_similarity(*pair)
        rows.append(tuple(float(x) for value in values for x in (value.mean(), (value > 0.5).double().mean())))
    return rows  # type: ignore[return-value]


def region_similarity(found: Tensor, wanted: Tensor) -> Tensor:
    """Intersection over union of boolean masks (n, h, w), FP64 (n,); 1 where both are empty."""
    inside = (found & wanted).sum(dim=(1, 2)).double()
    union = (found | wanted).sum(dim=(1, 2)).double()
    return torch.where(union > 0, inside / union.clamp_min(1), 1.0)


def boundary_similarity(found: Tensor, wanted: Tensor) -> Tensor:
    """F-measure of precision and recall of the boundaries' pixels, FP64; a pixel matches within the tolerance."""
    radius = math.ceil(_TOLERANCE * math.hypot(*found.shape[1:]))
    pairs = zip(found.split(_MASKS), wanted.split(_MASKS), strict=True)
    return torch.cat([_boundary_similarity(boundaries(a), boundaries(b), radius) for a, b in pairs])


def boundaries(masks: Tensor) -> Tensor:
    """Pixels that differ from a neighbour to the right, below, or right below: half a pixel off, 1 pixel wide."""
    padded = F.pad(masks.float(), (0, 1, 0, 1), mode="replicate") > 0
    right, below, both = padded[:, :-1, 1:], padded[:, 1:, :-1], padded[:, 1:, 1:]
    return (masks ^ right) | (masks ^ below) | (masks ^ both)


def dilate(masks: Tensor, radius: int) -> Tensor:
    """Masks of all pixels within `radius` pixels, Euclidean, of a pixel of the mask."""
    offsets = torch.arange(-radius, radius + 1, device=masks.device)
    disk = (offsets[:, None] ** 2 + offsets[None] ** 2 <= radius**2).float()
    near = F.conv2d(masks[:, None].float(), disk[None, None], padding=radius)
    return near[:, 0] > 0.5


def _boundary_similarity(found: Tensor, wanted: Tensor, radius: int) -> Tensor:
    hits = (found & dilate(wanted, radius)).sum(dim=(1, 2)).double()
    recalled = (wanted & dilate(found, radius)).sum(dim=(1, 2)).double()
    of_found, of_wanted = (boundary.sum(dim=(1, 2)).double() for boundary in (found, wanted))
    # Nothing found is precise, nothing wanted is recalled.
    precision = torch.where(of_found > 0, hits / of_found.clamp_min(1), 1.0)
    recall = torch.where(of_wanted > 0, recalled / of_wanted.clamp_min(1), 1.0)
    both = precision + recall
    return torch.where(both > 0, 2 * precision * recall / both.clamp_min(1e-12), 0.0)


def _judge(context: EvalContext, clip: Clip) -> list[tuple[float, float, float, float]]:
    """The figures of each object of a clip; neither its first frame nor its last one counts."""
    first = read_image(clip.frames[0])
    wanted = [_read_mask(path, first.size) for path in clip.masks]
    objects = int(wanted[0].max())
    if objects == 0:
        raise DataError(f"{clip.masks[0]} has no object: DAVIS's maps of objects hold their numbers; download it again")
    found = _carry(context, clip, first, wanted[0], objects)
    pair = [torch.from_numpy(np.stack(masks)).to(context.device) for masks in (found, wanted[1:-1])]
    return judge_masks(pair[0], pair[1], objects)


def _carry(context: EvalContext, clip: Clip, first: Image.Image, mask: np.ndarray, objects: int) -> list[np.ndarray]:
    """Found labels (height, width) of all frames but the first and the last."""
    model, device = context.backbone, context.device
    height, width = frame_sides(*first.size, context.settings.size or _SIZE, model.stride)

    def patches(image: Image.Image) -> Tensor:
        if image.size != first.size:
            raise DataError(f"{clip.frames[0].parent} has frames of {image.size} and {first.size} pixels")
        scaled = to_tensor(image.resize((width, height), Image.Resampling.BILINEAR), model.normalisation)
        return model.patch_tokens(scaled[None].to(device))[0].float()

    tokens = patches(first)
    rows, columns = tokens.shape[:2]
    small = np.array(Image.fromarray(mask).resize((columns, rows), Image.Resampling.NEAREST))
    labels = F.one_hot(torch.from_numpy(small).long(), objects + 1).permute(2, 0, 1).float().to(device)
    propagation = LabelPropagation(tokens, labels)
    found = []
    for path in clip.frames[1:-1]:
        soft = propagation(patches(read_image(path)))
        found.append(hard_labels(soft, model.stride, first.height, first.width))
    return found


def _read_clip(folder: Path, name: str) -> Clip:
    place = folder / "JPEGImages/480p" / name
    frames = sorted(place.glob("*.jpg"))
    if len(frames) < 3:
        raise DataError(f"DAVIS 2017: {place} has {len(frames)} frames, at least 3 are needed: download them again")
    return Clip(frames, [folder / "Annotations/480p" / name / f"{frame.stem}.png" for frame in frames])


def _read_mask(path: Path, size: tuple[int, int]) -> np.ndarray:
    mask = read_label_map(path, size)
    return np.where(mask == _VOID, 0, mask).astype(np.uint8)
