"""Retrieval of landmarks: revisited Oxford and Paris (ROxford5k, RParis6k).

Sources: Radenović et al. 2018 (arXiv 1803.11285), `python/` of filipradenovic/revisitop for the ground truth and its
metrics; facebookresearch/dino `eval_image_retrieval.py` for sizes and features.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch.nn.functional as F
from PIL import Image
from pydantic import BaseModel, Field, model_validator
from torch import Tensor

from dino_ds.basics.text_file import read_object
from dino_ds.data.base import Source
from dino_ds.data.decode import load_image
from dino_ds.data.encoded import NamedFiles
from dino_ds.data.multicrop import to_tensor
from dino_ds.data.normalization import Normalization
from dino_ds.engine import distributed
from dino_ds.errors import ConfigError, DataError, one_line
from dino_ds.evals.context import EvalContext
from dino_ds.evals.knn import average_precision, rank_database

_SCALES = (1.0, 2**-0.5, 0.5)
_SETUPS = {
    "easy": (("easy",), ("junk", "hard")),
    "medium": (("easy", "hard"), ("junk",)),
    "hard": (("hard",), ("junk", "easy")),
}
"""For each setup: kinds of images that count as positives, and kinds that are skipped."""
Name = Annotated[str, Field(pattern=r"^[^./\\\x00][^/\\\x00]*$")]
Index = Annotated[int, Field(ge=0, strict=True)]
Pixel = Annotated[float, Field(gt=-10_000, lt=10_000)]


def oxford(context: EvalContext) -> dict[str, float]:
    """Revisited Oxford: landmarks by cosine, mAP of easy, medium and hard"""
    return _evaluate(context, "oxford", "roxford5k", size=224, scales=(1.0,))


def paris(context: EvalContext) -> dict[str, float]:
    """Revisited Paris: landmarks by cosine, mAP of easy, medium and hard"""
    return _evaluate(context, "paris", "rparis6k", size=512, scales=_SCALES)


class QueryAnswers(BaseModel):
    """One query's box in pixels (left, top, right, bottom), and the indices of its images in the database by kind."""

    bbx: tuple[Pixel, Pixel, Pixel, Pixel]
    easy: list[Index]
    hard: list[Index]
    junk: list[Index]


class GroundTruth(BaseModel):
    """Names of the database's images and of the queries, and the queries' answers; keys are revisitop's."""

    imlist: Annotated[list[Name], Field(min_length=1)]
    qimlist: Annotated[list[Name], Field(min_length=1)]
    gnd: list[QueryAnswers]

    @model_validator(mode="after")
    def _check(self) -> GroundTruth:
        if len(self.gnd) != len(self.qimlist):
            raise ValueError(f"{len(self.qimlist)} queries can't have {len(self.gnd)} answers")
        for answer in self.gnd:
            left, top, right, bottom = answer.bbx
            if max((*answer.easy, *answer.hard, *answer.junk), default=0) >= len(self.imlist):
                raise ValueError(f"an index is not below {len(self.imlist)}")
            if not (abs(left) < right and abs(top) < bottom):
                raise ValueError(f"{answer.bbx} is not a box in an image")
        return self


def read_ground_truth(path: Path) -> GroundTruth:
    """Read gnd_roxford5k.json or gnd_rparis6k.json. Raises DataError for any other content."""
    try:
        return GroundTruth.model_validate(read_object(path))
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


def describe_at_scales(context: EvalContext, scales: Sequence[float]) -> Callable[[Tensor], Tensor]:
    """A function from one image (1, 3, h, w) of any size to (1, d), the normalized sum of its features at `scales`."""
    patch = context.backbone.side_multiple

    def describe(images: Tensor) -> Tensor:
        total = Tensor([0.0]).to(images.device)
        for scale in scales:
            is_shrunken = scale != 1 and min(images.shape[-2:]) * scale >= 1
            scaled = F.interpolate(images, scale_factor=scale, mode="bilinear") if is_shrunken else images
            total = total + context.backbone.features(_whole_patches(scaled, patch))
        return F.normalize(total, dim=-1)

    return describe


def _whole_patches(images: Tensor, patch: int) -> Tensor:
    """Crop images to whole patches at the right and bottom, as patch embeddings do; enlarge small ones to a patch."""
    height, width = images.shape[-2:]
    if min(height, width) < patch:
        height, width = max(height, patch), max(width, patch)
        images = F.interpolate(images, size=(height, width), mode="bilinear")
    return images[..., : height // patch * patch, : width // patch * patch]


def _evaluate(context: EvalContext, name: str, dataset: str, size: int, scales: Sequence[float]) -> dict[str, float]:
    file = f"gnd_{dataset}.json"
    layout = f"a folder {dataset} with jpg/NAME.jpg and {file}, made of gnd_{dataset}.pkl as docs/benchmarks.md says"
    benchmark = Benchmark(dataset, dataset, (file, "jpg"), layout, "https://github.com/filipradenovic/revisitop")
    with distributed.raise_on_all_ranks():
        folder = benchmark.find(context.settings.benchmark_root)
        truth = read_ground_truth(folder / file)
        images, queries = ([folder / f"jpg/{stem}.jpg" for stem in some] for some in (truth.imlist, truth.qimlist))
        benchmark.check([*images, *queries])
    context.begin()
    prepare = partial(_thumbnail, size=context.settings.size or size, normalization=context.backbone.normalization)
    describe = describe_at_scales(context, scales)

    def features(files: Any, label: str) -> Tensor:
        return describe_files(context, files, prepare, describe, 1, f"{name}: {label}")

    database = features(NamedFiles(list(map(str, images))), "database")
    cut = _CutOut(NamedFiles(list(map(str, queries))), [answer.bbx for answer in truth.gnd])
    ranking = rank_database(features(cut, "queries"), database).tolist()
    return {f"{name}_{setup}_map": landmark_map(ranking, truth.gnd, setup) for setup in _SETUPS}


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


@dataclass(frozen=True)
class Benchmark:
    """A benchmark's files in a root folder, or in its subfolder `folder`.

    Args:
        name: for messages.
        folder: usual name of the downloaded folder.
        marks: files by which the benchmark is recognized.
        layout, origin: for messages, the expected files and where they come from.
    """

    name: str
    folder: str
    marks: tuple[str, ...]
    layout: str
    origin: str

    def find(self, root: Path | None) -> Path:
        """The folder that has all marks. Raises ConfigError without a root, DataError if none is found."""
        if root is None:
            raise ConfigError(f"{self.name} needs its images: --benchmark_root DIR, {self._wanted}")
        candidates = root, root / self.folder
        for candidate in candidates:
            if all((candidate / mark).exists() for mark in self.marks):
                return candidate
        marks = " or ".join(self.marks)
        raise DataError(f"no {self.name} in {candidates[0]} or {candidates[1]}: {marks} is not there; {self._wanted}")

    def check(self, paths: Iterable[Path]) -> None:
        """Raise DataError if one of these files is missing."""
        missing = [path for path in paths if not path.is_file()]
        if missing:
            raise DataError(
                f"{self.name} is not complete: {len(missing)} files are not there, such as {str(missing[0])!r}; "
                f"{self._wanted}"
            )

    @property
    def _wanted(self) -> str:
        return f"wanted is {self.layout} ({self.origin})"


def describe_files(
    context: EvalContext,
    files: Source,
    transform: Callable[..., Tensor],
    describe: Callable[[Tensor], Tensor],
    batch: int,
    label: str,
) -> Tensor:
    """Features (n, d) of all files in their order, on all ranks; each rank computes its share.

    Args:
        transform: image -> (3, h, w), of one size unless `batch` is 1.
        describe: (b, 3, h, w) -> (b, d).
        label: name of the progress bar.

    Raises:
        DataError: an image can't be read: results without it would not be comparable.
    """
    features, _, unreadable = context.gather(describe, files, range(len(files)), transform, label, batch)
    if unreadable:
        raise DataError(f"{len(unreadable)} images can't be read, such as {unreadable[0]}: download it again")
    return features
