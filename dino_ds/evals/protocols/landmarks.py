"""Retrieval of landmarks: revisited Oxford and Paris (ROxford5k, RParis6k).

Sources: Radenović et al. 2018 (arXiv 1803.11285), `python/` of filipradenovic/revisitop for the ground truth and its
metrics; facebookresearch/dino `eval_image_retrieval.py` for sizes and features.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from dino_ds.data.multicrop import to_tensor
from dino_ds.data.normalisation import Normalisation
from dino_ds.engine import distributed
from dino_ds.errors import DataError
from dino_ds.evals.context import EvalContext
from dino_ds.evals.knn import average_precision, rank_database
from dino_ds.evals.protocols.plain_pickle import read_plain_pickle
from dino_ds.evals.protocols.work import Benchmark, Files, describe_files, plain_name

_KS = (1, 5, 10)
_SCALES = (1.0, 2**-0.5, 0.5)
_MOST_PIXELS = 10_000
"""Most pixels of a side of a query's box."""
_SETUPS = {
    "easy": (("easy",), ("junk", "hard")),
    "medium": (("easy", "hard"), ("junk",)),
    "hard": (("hard",), ("junk", "easy")),
}
"""Kinds of images that count as found, and kinds that are passed over."""


def oxford(context: EvalContext) -> dict[str, float]:
    """Revisited Oxford: landmarks by cosine, mAP and mP@k of easy, medium and hard"""
    return _evaluate(context, "oxford", "roxford5k", size=224, scales=(1.0,))


def paris(context: EvalContext) -> dict[str, float]:
    """Revisited Paris: landmarks by cosine, mAP and mP@k of easy, medium and hard"""
    return _evaluate(context, "paris", "rparis6k", size=512, scales=_SCALES)


@dataclass(frozen=True)
class GroundTruth:
    """Names of the database's images and of the queries; of each query its box in pixels (left, top, right, bottom)
    and, by "easy", "hard" and "junk", indices into the database."""

    images: list[str]
    queries: list[str]
    boxes: list[tuple[float, float, float, float]]
    answers: list[dict[str, list[int]]]


def read_ground_truth(path: Path) -> GroundTruth:
    """Read gnd_roxford5k.pkl or gnd_rparis6k.pkl. Raises DataError for any other content."""
    content = read_plain_pickle(path)
    try:
        images, queries = ([plain_name(name, path) for name in content[key]] for key in ("imlist", "qimlist"))
        entries: list[dict[str, Any]] = list(content["gnd"])
        boxes = [_box(entry["bbx"]) for entry in entries]
        answers = [{key: _indices(entry[key], len(images)) for key in ("easy", "hard", "junk")} for entry in entries]
    except (KeyError, TypeError, ValueError, OverflowError, AttributeError) as error:
        raise DataError(f"{path} is not a ground truth of revisitop: {type(error).__name__}: {error}") from None
    if not images or not queries or len(entries) != len(queries):
        raise DataError(f"{path}: {len(queries)} queries, {len(entries)} answers and {len(images)} images can't be")
    return GroundTruth(images, queries, boxes, answers)


def landmark_scores(
    ranking: Sequence[Sequence[int]], answers: Sequence[dict[str, list[int]]], setup: str
) -> dict[str, float]:
    """{"map": ..., "mp1": ...} in percent of each query's `ranking` of the whole database by likeness.

    Queries that have nothing to find are left out; NaN if none is left. The same as `compute_map` of revisitop.
    """
    found, passed = _SETUPS[setup]
    precisions, positions = [], []
    for row, answer in zip(ranking, answers, strict=True):
        wanted = {index for key in found for index in answer[key]}
        junk = {index for key in passed for index in answer[key]} - wanted
        if wanted:
            precisions.append(average_precision(row, wanted, junk))
            kept = [index for index in row if index not in junk]
            positions.append([i + 1 for i, index in enumerate(kept) if index in wanted])
    scores = {"map": _percent(precisions)}
    for k in _KS:
        # Where all is found before the k-th place, places behind the last are not counted.
        depths = [min(places[-1], k) for places in positions]
        within = [sum(p <= depth for p in places) / depth for places, depth in zip(positions, depths, strict=True)]
        scores[f"mp{k}"] = _percent(within)
    return scores


def thumbnail(image: Image.Image, size: int, normalisation: Normalisation) -> Tensor:
    """Image -> (3, h, w), normalised: shrunken so that its longer side is at most `size` pixels."""
    small = image.copy()
    small.thumbnail((size, size), Image.Resampling.LANCZOS)
    return to_tensor(small, normalisation)


def describe_at_scales(context: EvalContext, scales: Sequence[float]) -> Callable[[Tensor], Tensor]:
    """One image (1, 3, h, w) of any size -> (1, d): the sum of its features at these scales, unit length."""
    patch = context.backbone.side_multiple

    def describe(images: Tensor) -> Tensor:
        total = Tensor([0.0]).to(images.device)
        for scale in scales:
            scaled = images if scale == 1 else _scaled(images, scale)
            total = total + context.backbone.features(_whole_patches(scaled, patch))
        return F.normalize(total, dim=-1)

    return describe


def _scaled(images: Tensor, scale: float) -> Tensor:
    """Images scaled as `scale_factor` of the reference does it, but at least one pixel remains."""
    if min(images.shape[-2:]) * scale < 1:
        return images
    return F.interpolate(images, scale_factor=scale, mode="bilinear")


def _whole_patches(images: Tensor, patch: int) -> Tensor:
    """Images without the rest at the right and at the bottom, which a patch embedding drops; at least one patch."""
    height, width = images.shape[-2:]
    if min(height, width) < patch:
        height, width = max(height, patch), max(width, patch)
        images = F.interpolate(images, size=(height, width), mode="bilinear")
    return images[..., : height // patch * patch, : width // patch * patch]


def _evaluate(context: EvalContext, name: str, dataset: str, size: int, scales: Sequence[float]) -> dict[str, float]:
    benchmark = _benchmark(dataset)
    with distributed.raise_on_all_ranks():
        folder = benchmark.find(context.settings.benchmark_root)
        truth = read_ground_truth(folder / f"gnd_{dataset}.pkl")
        images = [folder / "jpg" / f"{name}.jpg" for name in truth.images]
        queries = [folder / "jpg" / f"{name}.jpg" for name in truth.queries]
        benchmark.check([*images, *queries])
    context.begin()
    prepare = partial(thumbnail, size=context.settings.size or size, normalisation=context.backbone.normalisation)
    describe = describe_at_scales(context, scales)

    def features(files: Files, what: str) -> Tensor:
        return describe_files(context, files, prepare, describe, 1, what)

    database = features(Files(images), f"{name}: database")
    results = dict[str, float]()
    # The benchmark asks with the landmark cut out, DINO's script with the whole photo.
    for boxes, kind in ((truth.boxes, ""), (None, "whole_")):
        asked = features(Files(queries, boxes), f"{name}: {kind}queries")
        ranking = rank_database(asked, database).tolist()
        for setup in _SETUPS:
            scores = landmark_scores(ranking, truth.answers, setup)
            kept = scores if boxes else {"map": scores["map"]}
            results |= {f"{name}_{kind}{setup}_{key}": value for key, value in kept.items()}
    return results


def _benchmark(dataset: str) -> Benchmark:
    truth = f"gnd_{dataset}.pkl"
    return Benchmark(
        dataset,
        (".", dataset),
        (truth, "jpg"),
        f"a folder {dataset} with {truth} and jpg/NAME.jpg",
        "https://github.com/filipradenovic/revisitop",
    )


def _box(values: Any) -> tuple[float, float, float, float]:
    left, top, right, bottom = np.asarray(values, dtype=float).reshape(4).tolist()
    if not (abs(left) < right < _MOST_PIXELS and abs(top) < bottom < _MOST_PIXELS):
        raise ValueError(f"{left, top, right, bottom} is not a box in an image")
    return left, top, right, bottom


def _indices(values: Any, images: int) -> list[int]:
    found = np.asarray(values)
    if found.size == 0:
        return []
    if found.ndim != 1 or found.dtype.kind not in "iu" or len(found) > images:
        raise ValueError("indices are not a list of integers")
    if int(found.min()) < 0 or int(found.max()) >= images:
        raise ValueError(f"an index is not below {images}")
    return [int(index) for index in found]


def _percent(values: Sequence[float]) -> float:
    return 100.0 * sum(values) / len(values) if values else float("nan")
