"""Several sources of images as one, each with a share of every epoch; groups of images that data.balance draws equally
often; and datasets by name: torchvision's and the package's photographs.

The 18 photographs (licenses: photos/NOTICE.md) are cut into patches; a patch's class is its photograph. The left 60 %
of each is for training, the right 30 % for testing, so that no pixel is in both.
"""

from __future__ import annotations

import csv
import fcntl
import itertools
import os
import random
from collections.abc import Iterator, Sequence
from fractions import Fraction
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image

from dino_ds.basics.files import is_url
from dino_ds.config.sections import MixturePart
from dino_ds.data.classes import join_classes, note_unnamed
from dino_ds.data.encoded import EncodedImages, ListedFiles
from dino_ds.data.images import Joined, Source, UnreadableImage, is_remote, prepare_images, to_rgb
from dino_ds.data.listing import Labels, printable
from dino_ds.data.root import open_files
from dino_ds.errors import ConfigError, DataError, one_line

if TYPE_CHECKING:
    from dino_ds.data.masks import Draws


TORCHVISION_SETS: dict[str, tuple[str, list[dict[str, Any]], list[dict[str, Any]]]] = {
    "cifar10": ("CIFAR10", [{"train": True}], [{"train": False}]),
    "cifar100": ("CIFAR100", [{"train": True}], [{"train": False}]),
    # The labeled images come first, so that a bank made of the first ones has labels.
    "stl10": ("STL10", [{"split": "train"}, {"split": "unlabeled"}], [{"split": "test"}]),
    "imagenette": ("Imagenette", [{"split": "train"}], [{"split": "val"}]),
    "food101": ("Food101", [{"split": "train"}], [{"split": "test"}]),
    "flowers102": ("Flowers102", [{"split": "train"}, {"split": "val"}], [{"split": "test"}]),
    "pets": ("OxfordIIITPet", [{"split": "trainval"}], [{"split": "test"}]),
    "eurosat": ("EuroSAT", [{}], [{}]),
}
"""torchvision's class, and the arguments of the datasets that are joined for training and for testing."""
_EUROSAT_TEST = 10
"""EuroSAT has no splits: every tenth image is for testing."""
PATCH_PIXELS = 40
_SIDES = (48, 72)
"""Smallest and largest side of a patch in a photograph that is 256 pixels high."""
_PER_PHOTO = {"train": 160, "test": 52}
_PART = {"train": (0.0, 0.6), "test": (0.7, 1.0)}
_MOST_FIELD = 1 << 16
"""Characters of the longest name or cluster in a file."""


class TorchvisionImages:
    """One split of a torchvision dataset. Raises DataError if the dataset or torchvision is missing."""

    def __init__(self, dataset: str, root: str, split: str, download: bool) -> None:
        self._prefix = f"{dataset}/{split}"
        self._parts = _open_named(dataset, root, split, download)
        self._rows = [(part, row) for part, images in enumerate(self._parts) for row in range(len(images))]
        labels = [label for images in self._parts for label in _labels_of(images)]
        if dataset == "eurosat":
            keep = [i for i in range(len(self._rows)) if (i % _EUROSAT_TEST == 0) == (split == "test")]
            self._rows, labels = [self._rows[i] for i in keep], [labels[i] for i in keep]
        self.labels: list[int] | None = labels
        self.classes: list[str] | None = _class_names(self._parts[0], labels)

    def __len__(self) -> int:
        return len(self._rows)

    def load(self, index: int) -> Image.Image:
        part, row = self._rows[index]
        try:
            image = self._parts[part][row][0]
            image.load()
            return to_rgb(image)
        except Exception as error:  # a file of the set may be broken in as many ways as a user's
            raise UnreadableImage(self.name(index), str(error) or type(error).__name__) from error

    def name(self, index: int) -> str:
        return f"{self._prefix}/{index}"


def _open_named(dataset: str, root: str, split: str, download: bool) -> list[Any]:
    datasets, folder = _import_datasets(), Path(os.path.expanduser(root))
    try:
        return _build(datasets, dataset, folder, split, download=False)
    except ImportError as error:  # flowers102 reads its labels with scipy
        raise DataError(f"{dataset} needs one more package: {one_line(error)}; pip install {error.name}") from None
    except (RuntimeError, OSError) as error:
        if not download:
            raise DataError(
                f"{dataset} is not under {folder}: give the --data.root that holds it, or add --data.download true; "
                f"for image files of your own add --data.source folder (torchvision: {one_line(error)})"
            ) from None
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with open(folder / ".download.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # torchvision downloads nothing that another process has fetched meanwhile
            return _build(datasets, dataset, folder, split, download=True)
    except (RuntimeError, OSError) as error:
        raise DataError(
            f"download of {dataset} into {folder} failed: {one_line(error)}; fetch it elsewhere and give --data.root"
        ) from error


def _build(datasets: Any, dataset: str, folder: Path, split: str, download: bool) -> list[Any]:
    class_name, train, test = TORCHVISION_SETS[dataset]
    parts = train if split == "train" else test
    return [getattr(datasets, class_name)(str(folder), **part, download=download) for part in parts]


def _import_datasets() -> Any:
    try:
        import torchvision.datasets
    except (ImportError, RuntimeError) as error:
        raise DataError(
            f"torchvision cannot be loaded: {one_line(error)}; install the builds of torch and torchvision that "
            "belong together, or use --data.source folder"
        ) from error
    return torchvision.datasets


def _labels_of(images: Any) -> list[int]:
    """Labels of a torchvision dataset, under whichever name it has them; all -1 without labels."""
    for attribute in ("targets", "labels", "_labels"):
        values = getattr(images, attribute, None)
        if values is not None:
            return [int(value) for value in values]
    samples = getattr(images, "_samples", None)
    return [int(label) for _, label in samples] if samples is not None else [-1] * len(images)


def _class_names(images: Any, labels: list[int]) -> list[str]:
    names = getattr(images, "classes", None)
    if names is None:
        return [str(number) for number in range(max(labels) + 1)]
    return [name if isinstance(name, str) else name[0] for name in names]


class PhotoPatches:
    """Patches of 40 x 40 pixels, in memory (uint8), sorted by photograph; positions and sizes never change."""

    def __init__(self, split: str) -> None:
        photos, count = list(_load_photos()), _PER_PHOTO[split]
        patches: list[np.ndarray] = []
        for name, photo in photos:
            rng = random.Random(f"{name}/{split}")
            patches += [_cut(photo, _PART[split], number, count, rng) for number in range(count)]
        self._patches, self._split, self._count = np.stack(patches), split, count
        self.labels: list[int] | None = [label for label in range(len(photos)) for _ in range(count)]
        self.classes: list[str] | None = [name for name, _ in photos]

    def __len__(self) -> int:
        return len(self._patches)

    def load(self, index: int) -> Image.Image:
        return Image.fromarray(self._patches[index])

    def name(self, index: int) -> str:
        assert self.classes is not None
        photo, number = divmod(range(len(self))[index], self._count)
        return f"photos/{self._split}/{self.classes[photo]}/{number}"


def _load_photos() -> Iterator[tuple[str, Image.Image]]:
    folder = resources.files("dino_ds.data").joinpath("photos")
    for file in sorted(folder.iterdir(), key=lambda entry: entry.name):
        if file.name.endswith(".jpg"):
            with file.open("rb") as stream, Image.open(stream) as photo:
                yield file.name[: -len(".jpg")], photo.convert("RGB")


def _cut(photo: Image.Image, part: tuple[float, float], number: int, count: int, rng: random.Random) -> np.ndarray:
    """Cut patch `number` of `count`: sizes spread evenly over the range, positions random in `part` of the width."""
    left, right = (round(edge * photo.width) for edge in part)
    side = round(_SIDES[0] + (_SIDES[1] - _SIDES[0]) * number / max(count - 1, 1))
    x, y = rng.randint(left, right - side), rng.randint(0, photo.height - side)
    patch = photo.crop((x, y, x + side, y + side))
    return np.asarray(patch.resize((PATCH_PIXELS, PATCH_PIXELS), Image.Resampling.BICUBIC))


class Mixture(EncodedImages, Joined):
    """Images of all parts, part after part; classes of the same name are one class.

    Raises DataError for a part without images; ConfigError for a part that is named twice or has no path, and for parts
    with images in common.
    """

    def __init__(self, parts: Sequence[MixturePart], root: str | None, cache_gib: float = 0.0) -> None:
        self.parts = tuple(parts)
        self.sources = [_open(part, root, cache_gib) for part in parts]
        self.elsewhere = any(map(is_remote, self.sources))
        self.ends = list(itertools.accumulate(map(len, self.sources)))
        if overlap := self._overlap():
            raise ConfigError(f"data.mixture: {overlap}")
        self.labels, self.classes = self._join_labels()
        unnamed = (all(map(str.isdigit, source.classes or "-")) for source in self.sources)
        self.notes = note_unnamed(part.place for part in itertools.compress(parts, unnamed))
        self.notes += [
            f"{part.place}: {note}"
            for part, source in zip(parts, self.sources, strict=True)
            for note in getattr(source, "notes", ())
        ]

    def __len__(self) -> int:
        return self.ends[-1]

    @property
    def joined(self) -> list[tuple[str, Source]]:
        return [(part.place, source) for part, source in zip(self.parts, self.sources, strict=True)]

    def part_of(self, index: int) -> tuple[int, int]:
        """Number of the part that an image is from, and its index there."""
        part = int(np.searchsorted(self.ends, index, side="right"))
        return part, index - self.first_of(part)

    def first_of(self, part: int) -> int:
        return self.ends[part - 1] if part else 0

    def another(self, index: int, number: int) -> int:
        part, _ = self.part_of(index)
        return self.first_of(part) + number % len(self.sources[part])

    def prepare(self, indices: Sequence[int], seconds: float | None = None) -> None:
        of_part = np.searchsorted(self.ends, indices, side="right")
        for part, source in enumerate(self.sources):
            inner = np.asarray(indices)[of_part == part] - self.first_of(part)
            prepare_images(source, inner.tolist(), seconds)

    def read(self, index: int) -> bytes:
        source, inner = self._find(index)
        return source.read(inner)

    def name(self, index: int) -> str:
        source, inner = self._find(index)
        return source.name(inner)

    def member(self, index: int) -> str:
        part, inner = self.part_of(index)
        return f"{part}/{self.sources[part].member(inner)}"

    def file_bytes(self, index: int) -> int:
        """Bytes of the image's file. Raises OSError, also where its part does not provide sizes."""
        return self._asked("file_bytes", index)

    def file_time(self, index: int) -> int:
        """Time of the file's last change in nanoseconds. Raises OSError."""
        return self._asked("file_time", index)

    def _find(self, index: int) -> tuple[EncodedImages, int]:
        part, inner = self.part_of(range(len(self))[index])
        return self.sources[part], inner

    def _asked(self, method: str, index: int) -> int:
        source, inner = self._find(index)
        ask = getattr(source, method, None)
        if ask is None:
            raise OSError(f"{type(source).__name__} has no {method}")
        return int(ask(inner))

    def file_keys(self) -> np.ndarray:
        return np.concatenate([source.file_keys() for source in self.sources])

    def _overlap(self) -> str:
        """A sentence on two parts with images in common, which would get more than their share; "" for none."""
        keys, part_of = self.file_keys(), np.repeat(np.arange(len(self.parts)), np.diff([0, *self.ends]))
        order = np.argsort(keys, kind="stable")
        both = np.flatnonzero((np.diff(keys[order]) == 0) & (np.diff(part_of[order]) != 0))
        for pair in zip(order[both].tolist(), order[both + 1].tolist(), strict=True):
            if self._is_one_file(*pair):
                small, large = sorted(part_of[list(pair)].tolist(), key=lambda part: len(self.sources[part]))
                inner, outer = self.parts[small].place, self.parts[large].place
                if set(keys[part_of == small].tolist()) == set(keys[part_of == large].tolist()):
                    return f"{inner} and {outer} are the same place or images: give it once, with the sum of its shares"
                both_have = f"images of {inner} lie in {outer} too, such as {self.name(pair[0])}"
                return f"{both_have}, and would have the shares of both: give places without images in common"
        return ""

    def _is_one_file(self, first: int, second: int) -> bool:
        """Whether images with equal keys are one file: keys of folders are from when these were listed."""
        pair = [self._find(index) for index in (first, second)]
        paths = [source.path(index) for source, index in pair if isinstance(source, ListedFiles)]
        try:
            return len(paths) < 2 or paths[0] == paths[1] or os.path.samefile(*paths)
        except OSError:
            return False

    def _join_labels(self) -> tuple[Any, list[str] | None]:
        """Labels of all images (-1 in a part without labels), and the names of all classes."""
        if all(source.labels is None for source in self.sources):
            return None, None
        classes, numbers = join_classes(source.classes or () for source in self.sources)
        labels = np.full(len(self), -1, np.int32)
        for part, source in enumerate(self.sources):
            if source.labels is not None:
                labels[self.first_of(part) : self.ends[part]] = numbers[part][np.asarray(source.labels)]
        return Labels(labels), classes


def place_of(part: MixturePart, root: str | None) -> str:
    """The path or pattern of a part's images. Raises ConfigError for a relative one without data.root."""
    path = os.path.expanduser(part.place)
    if is_url(path):
        return path
    if root is None and not os.path.isabs(path):
        raise ConfigError(
            f"data.mixture: {part.place} is relative: give --data.root, the folder that it is in, or its whole path"
        )
    return os.path.join(os.path.expanduser(root or ""), path)


def _open(part: MixturePart, root: str | None, cache_gib: float) -> EncodedImages:
    try:
        return open_files(place_of(part, root), cache_gib)
    except DataError as error:
        raise DataError(f"data.mixture: {part.place}: {error}") from None


def draws_of(source: Source, balance: str) -> tuple[Draws | None, list[str]]:
    """`Draws` of a source, None where all images are drawn equally often; and notes on them.

    Raises ConfigError or DataError if the images have no such classes or clusters.
    """
    parts = source.parts if isinstance(source, Mixture) else (MixturePart("data.root", Fraction(1)),)
    if balance == "none" and len(parts) == 1:
        return None, []
    ends = source.ends if isinstance(source, Mixture) else [len(source)]
    part_of = np.repeat(np.arange(len(parts)), np.diff([0, *ends]))
    kind, _, file = balance.partition(":")
    labels = _labels(source, kind, file)
    groups = _numbered(part_of, labels)
    for number, part in enumerate(parts):
        if not (groups[part_of == number] >= 0).any():
            raise ConfigError(f"data.balance {kind}: no image of {part.place} has one: leave data.balance out")
    from dino_ds.data.masks import Draws  # imports torch, which takes long: a mistyped path is reported before

    draws = Draws([part.share for part in parts], part_of, groups)
    for part, count in zip(parts, draws.counts(len(source)), strict=True):
        if not count:
            raise ConfigError(
                f"data.mixture: {part.place} with a share of {float(part.share):.3g} gives none of the {len(source)} "
                "images of an epoch: raise its share, or leave it out"
            )
    without = int((labels < 0).sum())
    return draws, [f"data.balance {kind}: {without} images have none, and are never drawn"] if without else []


def _labels(source: Source, kind: str, file: str) -> np.ndarray:
    """Class or cluster of each image, (images,), -1 for none."""
    if kind == "none":
        return np.zeros(len(source), np.int64)
    if kind == "clusters":
        return _read_clusters(file, source)
    if source.labels is None:
        raise ConfigError(
            "data.balance classes: the images have no classes (docs/data.md says where they come from); for clusters "
            "of their features: data.balance clusters:FILE"
        )
    return np.array(source.labels, np.int64)


def _numbered(parts: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Number of each image's group (part, label), without gaps, part after part; -1 where the label is -1."""
    has = labels >= 0
    keys = parts[has] * (labels.max(initial=0) + 1) + labels[has]
    groups = np.full(len(labels), -1, np.int64)
    groups[has] = np.unique(keys, return_inverse=True)[1]
    return groups


def _read_clusters(file: str, source: Source) -> np.ndarray:
    """Clusters (images,) from a .csv whose row i has the name of image i and its cluster; an empty cluster is -1."""
    numbers, clusters = dict[str, int](), np.full(len(source), -1, np.int64)
    count = 0
    for name, cluster in _rows(file):
        if count < len(source):
            if not _is_name(name, source, count):
                raise DataError(
                    f"data.balance: row {count + 1} of {file} is of {printable(name)}, and image {count + 1} of the "
                    f"data is {source.name(count)}: make it again for these images, in the order of dino-ds embed"
                )
            if cluster and cluster != "-1":
                clusters[count] = numbers.setdefault(cluster, len(numbers))
        count += 1
    if count != len(source):
        raise DataError(
            f"data.balance: {file} has {count} rows, and there are {len(source)} images: make it again for these"
        )
    return clusters


def _rows(file: str) -> Iterator[tuple[str, str]]:
    try:
        csv.field_size_limit(_MOST_FIELD)
        with open(os.path.expanduser(file), newline="", encoding="utf-8-sig") as lines:
            rows = csv.DictReader(lines)
            if not {"name", "cluster"} <= set(rows.fieldnames or ()):
                raise DataError(f"data.balance: the first line of {file} does not name the columns name and cluster")
            for row in rows:
                yield row["name"] or "", row["cluster"] or ""
    except OSError as error:
        raise DataError(f"data.balance: {file} cannot be read: {error.strerror or error}") from None
    except (ValueError, csv.Error) as error:
        raise DataError(f"data.balance: {file} is no .csv in UTF-8: {error}") from None


def _is_name(name: str, source: Source, index: int) -> bool:
    """Whether `name` is an image's name, below a root that may have moved."""
    member = getattr(source, "member", None)
    return name == source.name(index) or (member is not None and name.endswith("/" + printable(member(index))))
