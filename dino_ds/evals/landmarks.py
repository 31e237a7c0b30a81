"""Retrieval of landmarks: revisited Oxford and Paris (ROxford5k, RParis6k).

Sources: Radenović et al. 2018 (arXiv 1803.11285), `python/` of filipradenovic/revisitop for the ground truth and its
metrics; facebookresearch/dino `eval_image_retrieval.py` for sizes and features.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch.nn.functional as F
from PIL import Image
from pydantic import BaseModel
from torch import Tensor

from dino_ds.basics.files import read_object
from dino_ds.data.decode import load_image
from dino_ds.data.encoded import NamedFiles
from dino_ds.data.multicrop import to_tensor
from dino_ds.data.normalization import Normalization
from dino_ds.engine import distributed
from dino_ds.errors import ConfigError, DataError, one_line
from dino_ds.evals.context import EvalContext
from dino_ds.evals.knn import average_precision, rank_database
from dino_ds.weights.load import Backbone

_SCALES = (1.0, 2**-0.5, 0.5)
_SETUPS = {
    "easy": (("easy",), ("junk", "hard")),
    "medium": (("easy", "hard"), ("junk",)),
    "hard": (("hard",), ("junk", "easy")),
}
"""For each setup: kinds of images that count as positives, and kinds that are skipped."""


def oxford(context: EvalContext) -> dict[str, float]:
    """Revisited Oxford: landmarks by cosine, mAP of easy, medium and hard"""
    return _evaluate(context, "oxford", "roxford5k", size=224, scales=(1.0,))


def paris(context: EvalContext) -> dict[str, float]:
    """Revisited Paris: landmarks by cosine, mAP of easy, medium and hard"""
    return _evaluate(context, "paris", "rparis6k", size=512, scales=_SCALES)


def _evaluate(context: EvalContext, name: str, dataset: str, size: int, scales: Sequence[float]) -> dict[str, float]:
    file = f"gnd_{dataset}.json"
    layout = f"a folder {dataset} with jpg/NAME.jpg and {file}, made of gnd_{dataset}.pkl as docs/benchmarks.md says"
    with distributed.raise_on_all_ranks():
        folder = find_benchmark(context.settings.benchmark_root, dataset, (file, "jpg"), layout)
        truth = read_ground_truth(folder / file)
    context.begin()
    side = context.settings.size or size
    transform = partial(_thumbnail, size=side, normalization=context.backbone.normalization)
    files = [NamedFiles([str(folder / f"jpg/{stem}.jpg") for stem in some]) for some in (truth.imlist, truth.qimlist)]

    def features(images: Any, label: str) -> Tensor:
        """One row for each image; results without one that can't be read would not be comparable."""
        describe = partial(describe_at_scales, context.backbone, scales)
        rows, _, bad = context.gather(describe, images, range(len(images)), transform, f"{name}: {label}", batch=1)
        if bad:
            raise DataError(f"{len(bad)} images can't be read, such as {bad[0]}: download it again")
        return rows

    database = features(files[0], "database")
    queries = features(_CutOut(files[1], [answer.bbx for answer in truth.gnd]), "queries")
    ranking = rank_database(queries, database).tolist()
    return {f"{name}_{setup}_map": landmark_map(ranking, truth.gnd, setup) for setup in _SETUPS}


def find_benchmark(root: Path | None, name: str, marks: Sequence[str], layout: str) -> Path:
    """The folder of a benchmark, which has all `marks`: `root` or its subfolder `name`. Raises ConfigError, DataError.

    layout: the files that the benchmark consists of, for messages.
    """
    if root is None:
        raise ConfigError(f"{name} needs its images: --benchmark_root DIR, wanted is {layout}")
    for folder in (root, root / name):
        if all((folder / mark).exists() for mark in marks):
            return folder
    raise DataError(f"no {name} in {root} or {root / name}: {' or '.join(marks)} is not there; wanted is {layout}")


class QueryAnswers(BaseModel):
    """One query's box in pixels (left, top, right, bottom), and the indices of its images in the database by kind."""

    bbx: tuple[float, float, float, float]
    easy: list[int]
    hard: list[int]
    junk: list[int]


class GroundTruth(BaseModel):
    """Names of the database's images and of the queries, and the queries' answers; keys are revisitop's."""

    imlist: list[str]
    qimlist: list[str]
    gnd: list[QueryAnswers]


def read_ground_truth(path: Path) -> GroundTruth:
    """Read gnd_roxford5k.json or gnd_rparis6k.json. Raises DataError for any other content."""
    try:
        truth = GroundTruth.model_validate(read_object(path))
        named = {i for answer in truth.gnd for i in (*answer.easy, *answer.hard, *answer.junk)}
        if len(truth.gnd) != len(truth.qimlist) or not named <= set(range(len(truth.imlist))):
            raise ValueError("gnd, qimlist and imlist do not fit together")
        return truth
    except (OSError, ValueError) as error:
        raise DataError(f"{path} is not a ground truth of revisitop: {one_line(error)}") from None


def landmark_map(ranking: Sequence[Sequence[int]], answers: Sequence[QueryAnswers], setup: str) -> float:
    """Mean average precision in percent; ranking: the whole database for each query, most similar first.

    Queries without positives are left out; NaN if none is left. Equal to `compute_map` of revisitop.
    """
    precisions = []
    for row, answer in zip(ranking, answers, strict=True):
        positive, positive_or_junk = ({i for kind in kinds for i in getattr(answer, kind)} for kinds in _SETUPS[setup])
        if positive:
            precisions.append(average_precision(row, positive, positive_or_junk - positive))
    return 100.0 * sum(precisions) / len(precisions) if precisions else float("nan")


def describe_at_scales(backbone: Backbone, scales: Sequence[float], images: Tensor) -> Tensor:
    """One image (1, 3, h, w) of any size -> (1, d), the normalized sum of its features at `scales`."""
    total = Tensor([0.0]).to(images.device)
    for scale in scales:
        is_shrunken = scale != 1 and min(images.shape[-2:]) * scale >= 1
        scaled = F.interpolate(images, scale_factor=scale, mode="bilinear") if is_shrunken else images
        total = total + backbone.features(_whole_patches(scaled, backbone.side_multiple))
    return F.normalize(total, dim=-1)


def _whole_patches(images: Tensor, patch: int) -> Tensor:
    """Crop images to whole patches at the right and bottom, as patch embeddings do; enlarge small ones to a patch."""
    height, width = images.shape[-2:]
    if min(height, width) < patch:
        height, width = max(height, patch), max(width, patch)
        images = F.interpolate(images, size=(height, width), mode="bilinear")
    return images[..., : height // patch * patch, : width // patch * patch]


class _CutOut:
    """Images of files, each cropped to its box. Has no `read`, which would return the uncropped file."""

    labels = classes = None

    def __init__(self, files: NamedFiles, boxes: Sequence[tuple[float, float, float, float]]) -> None:
        self._files, self._boxes, self.name = files, boxes, files.name

    def __len__(self) -> int:
        return len(self._files)

    def load(self, index: int) -> Image.Image:
        image = load_image(self._files, index, None)
        assert isinstance(image, Image.Image)  # without a range nothing deeper is read
        return image.crop(self._boxes[index])


def _thumbnail(image: Image.Image, size: int, normalization: Normalization) -> Tensor:
    """Image -> (3, h, w), normalized: shrunken so that its longer side is at most `size` pixels."""
    small = image.copy()
    small.thumbnail((size, size), Image.Resampling.LANCZOS)
    return to_tensor(small, normalization)
