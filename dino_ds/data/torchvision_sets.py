"""Data sets by name through torchvision, which is imported only when one is asked for."""

from __future__ import annotations

import fcntl
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from PIL import Image

from dino_ds.data.images import UnreadableImage, to_rgb
from dino_ds.errors import DataError

_Build = Callable[[Any, str, str, bool], list[Any]]
"""(torchvision.datasets, root, split, download) -> data sets to be read one after the other."""


def _by_split(class_name: str, train: tuple[str, ...], test: str) -> _Build:
    def build(datasets: Any, root: str, split: str, download: bool) -> list[Any]:
        parts = train if split == "train" else (test,)
        return [getattr(datasets, class_name)(root, split=part, download=download) for part in parts]

    return build


def _by_flag(class_name: str) -> _Build:
    def build(datasets: Any, root: str, split: str, download: bool) -> list[Any]:
        return [getattr(datasets, class_name)(root, train=split == "train", download=download)]

    return build


def _eurosat(datasets: Any, root: str, split: str, download: bool) -> list[Any]:
    return [datasets.EuroSAT(root, download=download)]


TORCHVISION_SETS: dict[str, _Build] = {
    "cifar10": _by_flag("CIFAR10"),
    "cifar100": _by_flag("CIFAR100"),
    # The labelled images come first, so that a bank made of the first ones has labels.
    "stl10": _by_split("STL10", ("train", "unlabeled"), "test"),
    "imagenette": _by_split("Imagenette", ("train",), "val"),
    "food101": _by_split("Food101", ("train",), "test"),
    "flowers102": _by_split("Flowers102", ("train", "val"), "test"),
    "pets": _by_split("OxfordIIITPet", ("trainval",), "test"),
    "eurosat": _eurosat,
}
_EUROSAT_TEST = 10
"""EuroSAT has no split of its own: every tenth image is for testing."""


class TorchvisionImages:
    """One split of a torchvision data set. Raises DataError if it isn't there, or torchvision isn't."""

    def __init__(self, dataset: str, root: str, split: str, download: bool) -> None:
        self._prefix = f"{dataset}/{split}"
        self._parts = _open(dataset, root, split, download)
        self._rows = [(part, row) for part, images in enumerate(self._parts) for row in range(len(images))]
        labels = [label for images in self._parts for label in _labels(images)]
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


def _open(dataset: str, root: str, split: str, download: bool) -> list[Any]:
    datasets = _import_datasets()
    folder = Path(root).expanduser()
    build = TORCHVISION_SETS[dataset]
    try:
        return build(datasets, str(folder), split, False)
    except ImportError as error:  # flowers102 reads its labels with scipy
        raise DataError(f"{dataset} needs one more package: {_one_line(error)}; pip install {error.name}") from None
    except (RuntimeError, OSError) as error:
        if not download:
            raise DataError(
                f"{dataset} is not under {folder}: give the --data.root that holds it, or add --data.download true; "
                f"for image files of your own add --data.source folder (torchvision: {_one_line(error)})"
            ) from None
    try:
        with _one_process_at_a_time(folder):
            try:  # another process of this node may have fetched it while this one waited
                return build(datasets, str(folder), split, False)
            except (RuntimeError, OSError):
                return build(datasets, str(folder), split, True)
    except (RuntimeError, OSError) as error:
        raise DataError(
            f"download of {dataset} into {folder} failed: {_one_line(error)}; fetch it elsewhere and give --data.root"
        ) from error


def _import_datasets() -> Any:
    try:
        import torchvision.datasets
    except (ImportError, RuntimeError) as error:
        raise DataError(
            f"torchvision cannot be loaded: {_one_line(error)}; install the builds of torch and torchvision that "
            "belong together, or use --data.source folder"
        ) from error
    return torchvision.datasets


@contextmanager
def _one_process_at_a_time(folder: Path) -> Iterator[None]:
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / ".download.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _labels(images: Any) -> list[int]:
    """torchvision has no common name for them; -1 where there are none."""
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


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__
