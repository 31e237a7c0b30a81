"""Input of evaluations: a frozen model, settings, images and their features, after training and during it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from dino_ds.config.fields import IMAGE_FORMS
from dino_ds.data import listing, multicrop
from dino_ds.data.images import Source, ValueRange, evenly_spaced_indices
from dino_ds.data.normalization import Normalization
from dino_ds.engine import distributed
from dino_ds.errors import DataError
from dino_ds.evals.features import BATCH, ImageMemory, Reading, extract_features
from dino_ds.method.teacher import Teacher
from dino_ds.weights.load import Backbone

NamedSources = Callable[[], tuple[Source | None, Source | None]]


@dataclass(frozen=True)
class Settings:
    """Settings of evaluations.

    Args:
        ks: numbers of neighbors.
        temperature: of the neighbors' votes.
        size: pixels of a side, None for the model's.
        images: largest number of training images, and of test images unless `test_images` is set; None for all.
        workers: loader processes per rank, None for a number that fits the cores.
        benchmark_root: folder of DAVIS and other benchmarks.
        value_range: range of images deeper than 8 bits, which are unreadable without one.
    """

    ks: tuple[int, ...] = (10, 20, 100, 200)
    temperature: float = 0.07
    size: int | None = None
    images: int | None = None
    test_images: int | None = None
    workers: int | None = None
    benchmark_root: Path | None = None
    value_range: ValueRange | None = None


@dataclass(frozen=True)
class Labeled:
    """Features (n, d), FP32, and labels (n,) int64 below `classes`, on one device; -1 is an unknown label."""

    features: Tensor
    labels: Tensor
    classes: int


class EvalContext:
    """A model, settings and images. Features are computed once, at first use; each rank computes a share.
    `sources` returns training and test images, or None for unnamed ones; it is called when they are first needed.
    `give_up` is called after each batch. `notes` collects what could not be read or was left out.
    All ranks must use everything here together, and get the same results."""

    def __init__(
        self,
        backbone: Backbone,
        settings: Settings,
        device: torch.device,
        sources: NamedSources = lambda: (None, None),
        give_up: Callable[[], bool] = lambda: False,
        progress: bool = True,
    ) -> None:
        self.backbone, self.settings, self.device = backbone, settings, device
        self._named, self.give_up, self.progress = sources, give_up, progress
        self.notes: list[str] = []
        self.memory: ImageMemory | None = None  # of transformed images, which contexts of a run then read only once

    @cached_property
    def sources(self) -> tuple[Source | None, Source | None]:
        """Training and test images, labeled or not. Raises what opening them raises."""
        with distributed.raise_on_all_ranks():
            return self._named()

    def begin(self) -> None:
        """Called on all ranks right before an evaluation uses the model: `preflight_eval` runs it up to this call."""

    @property
    def any_source(self) -> Source:
        """The test images, or without these the training images, labeled or not. Raises DataError if there are none."""
        for source in reversed(self.sources):
            if source is not None:
                return source
        raise DataError(f"there are no images: name some with --root PLACE ({IMAGE_FORMS})")

    @cached_property
    def train_indices(self) -> list[int]:
        """The training images in use: labeled, at most `settings.images`, evenly spread."""
        return images_in_use(self.labeled_sources[0], self.settings.images)

    @cached_property
    def test_indices(self) -> list[int]:
        """`any_indices`, checked: raises DataError without labels, or for classes that no training image in use has."""
        train, test = self.labeled_sources
        indices, classes = self.any_indices, train.classes or []
        wanted = _class_numbers(train, test)[np.asarray(test.labels)[indices]]
        known = np.asarray(train.labels)[self.train_indices]
        if unseen := sorted(classes[number] for number in set(wanted.tolist()) - set(known.tolist())):
            missing = f"{len(unseen)} classes of the test images: {', '.join(unseen[:5])}"
            remedy = "raise --images, or leave these classes out"
            raise DataError(f"none of {len(self.train_indices)} training images is of {missing}; {remedy}")
        return indices

    @cached_property
    def any_indices(self) -> list[int]:
        """The images of `any_source` in use, evenly spread; only labeled ones where it has labels."""
        return images_in_use(self.any_source, self.settings.test_images or self.settings.images)

    @cached_property
    def train(self) -> Labeled:
        return self._describe(self.labeled_sources[0], self.train_indices)

    @cached_property
    def test(self) -> Labeled:
        """`any_images` as test images: labels are numbers of the training images' classes."""
        _ = self.test_indices  # raises an error if they don't fit
        images, (train, test) = self.any_images, self.labeled_sources
        numbers = torch.from_numpy(_class_numbers(train, test).astype(np.int64)).to(self.device)
        return Labeled(images.features, numbers[images.labels], len(train.classes or []))

    @cached_property
    def any_images(self) -> Labeled:
        """Features of `any_source`, with its own labels."""
        return self._describe(self.any_source, self.any_indices)

    @property
    def image_counts(self) -> tuple[int | None, int | None]:
        """Numbers of training and of other images used so far, or None if none were."""
        train, others = self.__dict__.get("train_indices"), self.__dict__.get("any_indices")
        return None if train is None else len(train), None if others is None else len(others)

    def _describe(self, source: Source, indices: Sequence[int]) -> Labeled:
        """Features and labels of images; unreadable ones are left out and noted. Raises GaveUp, DataError."""
        crop = multicrop.EvalCrop(self.settings.size or self.backbone.image_size, self.backbone.normalization)
        features, labels, unreadable = self.gather(self.backbone.features, source, indices, crop)
        self.note(f"left out, unreadable: {text}" for text in unreadable)
        return Labeled(features, labels, len(source.classes or []))

    def gather(
        self,
        describe: Callable[[Tensor], Tensor],
        source: Source,
        indices: Sequence[int],
        transform: Callable[[Image.Image], Tensor],
        label: str = "images",
        batch: int = BATCH,
    ) -> tuple[Tensor, Tensor, list[str]]:
        """Apply `describe` to transformed images (b, ...), of one size unless `batch` is 1. Every rank does its share.
        Returns FP32 results in the order of `indices`, labels, and texts that name unreadable images. Raises GaveUp,
        DataError."""
        self.begin()
        workers, value_range = self.settings.workers, self.settings.value_range
        progress, channels = label if self.progress else None, len(self.backbone.normalization.mean)
        how = Reading(transform, workers, value_range, batch, progress, self.give_up, channels, self.memory)
        features, labels, unreadable = extract_features(describe, source, indices, self.device, how)
        return features.float(), labels, unreadable

    def note(self, lines: Iterable[str]) -> None:
        """Add lines to `notes`, each once; the same on all ranks."""
        self.notes = list(dict.fromkeys([*self.notes, *lines]))

    @cached_property
    def labeled_sources(self) -> tuple[Source, Source]:
        """Training and test images, both labeled; test images have no class that training lacks. Raises DataError."""
        train, test = self.sources
        if train is None:
            raise DataError("there are no training images: name labeled ones with --root DIR")
        if test is None:
            raise DataError("there are no test images: name labeled ones with --test_root DIR")
        for which, images in (("training", train), ("test", test)):
            if not _is_labeled(images):
                remedy = "sort them into two or more class folders, or give labels"
                raise DataError(f"the {which} images have no classes: {remedy}")
        if missing := listing.join_classes((train.classes or [], test.classes or []))[0][len(train.classes or []) :]:
            raise DataError(f"{len(missing)} classes of the test images are not in training: {', '.join(missing[:5])}")
        return train, test


@contextmanager
def live_teacher(teacher: Teacher, image_size: int, normalization: Normalization) -> Iterator[Backbone]:
    """The current teacher itself, not a copy: in FP32, and not compiled; `image_size` is the native side in pixels."""
    model = Backbone(teacher.backbone, image_size, "the teacher", dataclasses.asdict(normalization))
    with teacher.evaluating():
        yield model


def images_in_use(source: Source, limit: int | None) -> list[int]:
    """Indices of at most `limit` images, evenly spread; only labeled ones where the source has labels."""
    if not _is_labeled(source):
        return evenly_spaced_indices(len(source), limit or len(source))
    labeled = np.flatnonzero(np.asarray(source.labels) >= 0)
    return [int(labeled[i]) for i in evenly_spaced_indices(len(labeled), limit or len(labeled))]


def _is_labeled(source: Source) -> bool:
    return source.labels is not None and bool(source.classes)


def _class_numbers(train: Source, test: Source) -> np.ndarray:
    """The number of each test class among the training classes; the last entry, -1, is for the unknown label -1."""
    return listing.join_classes((train.classes or [], test.classes or []))[1][1]
