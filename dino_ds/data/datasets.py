"""Datasets by name: torchvision's, and patches of the photographs inside the package.

The 18 photographs (licenses: photos/NOTICE.md) are cut into patches; a patch's class is its photograph. The left 60 %
of each is for training, the right 30 % for testing, so that no pixel is in both.
"""

from __future__ import annotations

import fcntl
import os
import random
from collections.abc import Iterator
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from dino_ds.data.images import UnreadableImage, to_rgb
from dino_ds.errors import DataError, one_line

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
