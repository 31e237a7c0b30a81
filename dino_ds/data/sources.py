"""Opens a recipe's source of images: the user's files or class, or a dataset by name; holds a part of it out of
training.

Datasets by name are torchvision's, and patches of the 18 photographs inside the package (licenses: photos/NOTICE.md).
Each photograph is a class. Its left 60 % is for training, its right 30 % for testing, so that no pixel is in both."""

from __future__ import annotations

import fcntl
import hashlib
import inspect
import os
import pickle
import random
from collections.abc import Iterator, Sequence
from contextlib import suppress
from importlib import resources
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
from PIL import Image

from dino_ds.basics import own_code, seeds
from dino_ds.basics.names import did_you_mean
from dino_ds.config.fields import SOURCES
from dino_ds.config.recipe import Recipe
from dino_ds.config.sections import DataSection
from dino_ds.data import image_set, mixture
from dino_ds.data.images import Source, to_rgb
from dino_ds.data.images import UnreadableImage as UnreadableImage  # classes of users import it from here
from dino_ds.data.root import check_photos, open_files
from dino_ds.errors import ConfigError, DataError, UserError, one_line

_FORWARDED = ("read", "member", "listed_place", "file_bytes", "file_time")
"""Optional methods of a source that take an image's index."""


def training_images(data: DataSection, share: float) -> Source:
    """Open the training images of a recipe, without the `share` of them that is held out (eval.val_share). If images
    are not drawn equally often, the source has `draws`, and notes on these. Raises ConfigError, DataError."""
    if share and (data.mixture or data.balance != "none"):
        other = f"data.{'mixture' if data.mixture else 'balance'}: give eval.val_root, a folder of other images"
        raise ConfigError(f"eval.val_share is for one source whose images are drawn equally often, not for {other}")
    source: Any = recipe_images(data)
    if share:
        return split_off(source, data.root, share)[0]
    draws, notes = mixture.draws_of(source, data.balance)
    if draws is not None:
        source.draws, source.notes = draws, [*getattr(source, "notes", ()), *notes]
    return cast(Source, source)


def held_out_images(recipe: Recipe, train: Source) -> Source | None:
    """Open the images of the held-out loss; `train` are the recipe's `training_images`. None without that loss. Raises
    DataError."""
    if isinstance(train, Part) and recipe.eval.val_share:
        return train.others
    root, data = recipe.eval.val_root, recipe.data
    return None if root is None else build_source(data.source, root, "train", data.download, data.remote_cache_gib)


def labeled_test(train: Source) -> Part | None:
    """Labeled test images: held-out images of classes in `train`; None for fewer than two classes."""
    if not isinstance(train, Part) or train.labels is None or train.others.labels is None:
        return None
    labels = np.asarray(train.others.labels)
    known = (labels >= 0) & np.isin(labels, train.labels)
    return train.others.some(known) if len(np.unique(labels[known])) > 1 else None


def recipe_images(data: DataSection) -> Source:
    """Open the images of a recipe, one source or a mixture. Raises what `build_source` and `Mixture` do."""
    if not data.mixture:
        return build_source(data.source, data.root, "train", data.download, data.remote_cache_gib)
    if data.source != "folder":
        raise ConfigError(f"data.mixture takes files of yours, and data.source is {data.source}: set it to folder")
    return mixture.Mixture(data.parts, data.root, data.remote_cache_gib)


def build_source(
    source: str, root: str | None, split: Literal["train", "test"], download: bool, cache_gib: float = 0.0
) -> Source:
    """Open the images of one split; a user's files or class have no splits and are returned whole. cache_gib: disk
    space for remote images. Raises DataError if nothing can be read, ConfigError for an unknown source, a class that is
    not a source, or a root beside the photographs."""
    if ":" in source:
        return _build_own(source, root)
    check_photos(source, root)
    if source == "photos":
        return PhotoPatches(split)
    if source not in SOURCES:
        allowed = f"{', '.join(SOURCES)}, or a class as module:Class.{did_you_mean(source, SOURCES)}"
        raise ConfigError(f"data.source '{source}' is unknown; allowed are {allowed}")
    if root is None:
        content = "holds the images" if source == "folder" else f"keeps {source}"
        raise DataError(f"data.source {source} needs a folder: give --data.root DIR, the folder that {content}")
    if source == "folder":
        return open_files(root, cache_gib)
    return TorchvisionImages(source, root, split, download)


def _build_own(path: str, root: str | None) -> Any:
    """Build and check `Class(root)` for `module:Class`; `labels` and `classes` default to None. Raises ConfigError for
    a class that is not a source, DataError for one that can't be built, can't be pickled or has no images."""
    source_class: type = own_code.find_own("data.source", path, "class", inspect.isclass)
    # Checked before the class is called: a recipe must not be able to call just any class of a library.
    if lacks := [name for name in ("__len__", "load", "name") if not callable(getattr(source_class, name, None))]:
        raise ConfigError(f"data.source {path} is not a source of images: it lacks {', '.join(lacks)}")
    try:
        source = source_class(root)
        for name in ("labels", "classes"):
            if not hasattr(source, name):
                setattr(source, name, None)
        images = len(source)
        names = [source.name(index) for index in (0, images - 1)] if images > 0 else []
    except UserError:
        raise
    except Exception as error:
        reason = f"{type(error).__name__}: {one_line(error)}"
        raise DataError(f"{path} can't be built from data.root {root}: {reason}") from error
    if images < 1:
        raise DataError(f"{path} has no images with data.root {root}")
    if wrong := [name for name in names if not isinstance(name, str)]:
        remedy = "it must give a text, the image's name in messages"
        raise ConfigError(f"{path}.name gave {one_line(repr(wrong[0]))}; {remedy}")
    if source.labels is not None and (source.classes is None or len(source.labels) != images):
        raise ConfigError(f"{path} has {images} images and {len(source.labels)} labels: one a sample, with classes")
    labels, most = np.asarray([] if source.labels is None else source.labels), len(source.classes or ()) - 1
    if len(labels) and (labels.dtype.kind not in "iu" or labels.min() < -1 or labels.max() > most):
        wanted = f"the place of each image's class in {path}.classes (0 to {most}), or -1 for none"
        raise ConfigError(f"{path}.labels must be whole numbers, {wanted}")
    try:
        pickle.dumps(source)
    except Exception as error:
        problem = f"{path} can't be sent to loader processes ({type(error).__name__}: {one_line(error)})"
        raise DataError(f"{problem}: open files and connections in load, not in __init__") from error
    return source


def draws_of_its_own(source: Source) -> list[str]:
    """A line if a user's class gives other images when it reads the first 8 again with the same seeds: its random
    numbers can't be drawn again. Images that can't be read are left to training."""
    if not own_code.is_own(getattr(source, "whole", source)):
        return []
    read, readings = getattr(source, "read", source.load), list[list[bytes]]()
    with suppress(Exception):  # of any kind: the class is a user's
        for _ in range(2):
            seeds.seed_generators(0)
            readings.append([np.asarray(read(index)).tobytes() for index in range(min(8, len(source)))])
    if len(readings) < 2 or readings[0] == readings[1]:
        return []
    problem = "a resume can't be exact: data.source gives other images when it reads them again"
    remedy = "let it draw from random, numpy.random or torch, which are seeded for each image"
    return [f"{problem}: {remedy}, not from a generator of its own"]


def split_off(source: Source, root: str | None, share: float) -> tuple[Part, Part]:
    """Hold out about `share` of the images, by a hash of each name below `root`, so that an image keeps its side
    whatever is added or removed; returns training images and held-out images. All names of one file are on the side of
    its first name that is no link. Raises DataError if a side is empty."""
    names = (image_set.name_of(source, i, root) for i in range(len(source)))
    hashes = (hashlib.blake2b(name, digest_size=8, person=b"held out").digest() for name in names)
    values = np.fromiter((int.from_bytes(digest, "little") for digest in hashes), np.uint64, len(source))
    keys: np.ndarray = getattr(source, "file_keys", lambda: np.arange(len(source)))()
    of_file, counts = np.unique(keys, return_inverse=True, return_counts=True)[1:]
    is_link = np.zeros(len(keys), bool)
    for index in np.flatnonzero(counts[of_file] > 1).tolist():
        is_link[index] = os.path.realpath(source.name(index)) != source.name(index)
    order = np.lexsort((is_link, of_file))
    values = values[order[np.searchsorted(of_file[order], of_file)]]  # of the first name of each image's file
    held_out = values < np.uint64(int(share * 2**64))
    parts = Part(source, np.flatnonzero(~held_out)), Part(source, np.flatnonzero(held_out))
    if not all(map(len, parts)):
        held = f"eval.val_share {share:g} of {len(source)} images holds {len(parts[1])} out and leaves {len(parts[0])}"
        raise DataError(f"{held}: give another share, or images of their own with eval.val_root")
    parts[0].others = parts[1]
    held = f"eval.val_share {share:g}: {len(parts[1])} of {len(source)} images are held out, and not trained on"
    parts[0].notes = [*getattr(source, "notes", ()), held]
    return parts


class Part:
    """Some images of a source, with all attributes and methods of that source."""

    others: Part  # the rest of the images
    notes: list[str]

    def __init__(self, whole: Source, indices: np.ndarray) -> None:
        self.whole, self._indices, self.classes = whole, indices, whole.classes
        labels = whole.labels
        self.labels: Sequence[int] | None = None if labels is None else np.asarray(labels)[indices].tolist()

    def __len__(self) -> int:
        return len(self._indices)

    def some(self, chosen: np.ndarray) -> Part:
        return Part(self.whole, self._indices[chosen])

    def load(self, index: int) -> Any:
        return self.whole.load(int(self._indices[index]))

    def name(self, index: int) -> str:
        return self.whole.name(int(self._indices[index]))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name in ("whole", "others", "notes"):  # asked for while unpickling
            raise AttributeError(name)
        value = getattr(self.whole, name)
        if name == "file_keys":
            return lambda: value()[self._indices]
        if name == "prepare":
            return lambda indices, seconds=None: value(self._indices[indices].tolist(), seconds)
        return (lambda index: value(int(self._indices[index]))) if name in _FORWARDED else value


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
}  # torchvision's class, and the arguments of the datasets that are joined for training and for testing
PATCH_PIXELS = 40
_SIDES = (48, 72)  # smallest and largest side of a patch in a photograph that is 256 pixels high
_PER_PHOTO = {"train": 160, "test": 52}
_PART = {"train": (0.0, 0.6), "test": (0.7, 1.0)}


class TorchvisionImages:
    """One split of a torchvision dataset. Raises DataError if the dataset or torchvision is missing."""

    def __init__(self, dataset: str, root: str, split: str, download: bool) -> None:
        self._prefix = f"{dataset}/{split}"
        self._parts = _open_named(dataset, root, split, download)
        self._rows = [(part, row) for part, images in enumerate(self._parts) for row in range(len(images))]
        labels = [label for images in self._parts for label in _labels_of(images)]
        if dataset == "eurosat":  # has no splits: every tenth image is for testing
            keep = [i for i in range(len(self._rows)) if (i % 10 == 0) == (split == "test")]
            self._rows, labels = [self._rows[i] for i in keep], [labels[i] for i in keep]
        self.labels: list[int] | None = labels
        names = getattr(self._parts[0], "classes", None)
        names = map(str, range(max(labels) + 1)) if names is None else names
        self.classes: list[str] | None = [name if isinstance(name, str) else name[0] for name in names]

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
    try:
        import torchvision.datasets as datasets
    except (ImportError, RuntimeError) as error:
        remedy = "install the builds of torch and torchvision that belong together, or use --data.source folder"
        raise DataError(f"torchvision cannot be loaded: {one_line(error)}; {remedy}") from error
    folder = Path(os.path.expanduser(root))
    try:
        return _build(datasets, dataset, folder, split, download=False)
    except ImportError as error:  # flowers102 reads its labels with scipy
        raise DataError(f"{dataset} needs one more package: {one_line(error)}; pip install {error.name}") from None
    except (RuntimeError, OSError) as error:
        if not download:
            remedy = "give the --data.root that holds it, or add --data.download true; for image files of your own add "
            remedy += f"--data.source folder (torchvision: {one_line(error)})"
            raise DataError(f"{dataset} is not under {folder}: {remedy}") from None
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with open(folder / ".download.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # torchvision downloads nothing that another process has fetched meanwhile
            return _build(datasets, dataset, folder, split, download=True)
    except (RuntimeError, OSError) as error:
        problem = f"download of {dataset} into {folder} failed: {one_line(error)}"
        raise DataError(f"{problem}; fetch it elsewhere and give --data.root") from error


def _build(datasets: Any, dataset: str, folder: Path, split: str, download: bool) -> list[Any]:
    class_name, train, test = TORCHVISION_SETS[dataset]
    parts = train if split == "train" else test
    return [getattr(datasets, class_name)(str(folder), **part, download=download) for part in parts]


def _labels_of(images: Any) -> list[int]:
    """Labels of a torchvision dataset, under whichever name it has them; all -1 without labels."""
    for attribute in ("targets", "labels", "_labels"):
        if (values := getattr(images, attribute, None)) is not None:
            return [int(value) for value in values]
    samples = getattr(images, "_samples", None)
    return [int(label) for _, label in samples] if samples is not None else [-1] * len(images)


class PhotoPatches:
    """Patches of 40 x 40 pixels, in memory (uint8), sorted by photograph; positions and sizes never change."""

    def __init__(self, split: str) -> None:
        photos, count, patches = list(_load_photos()), _PER_PHOTO[split], list[np.ndarray]()
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
