"""Opens a recipe's source of images: the user's files or class, torchvision's datasets, the package's photographs;
holds a part of it out of training, by a hash of names; and describes it in a few kilobytes, from which a resumed run or
command tells what has changed.
"""

from __future__ import annotations

import base64
import hashlib
import heapq
import inspect
import os
import pickle
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from dino_ds.basics.files import FORMAT, seed_generators
from dino_ds.basics.names import did_you_mean
from dino_ds.basics.own_code import find_own, is_own
from dino_ds.config.fields import SOURCES
from dino_ds.config.recipe import Recipe
from dino_ds.config.sections import DataSection
from dino_ds.data.images import Joined, Source, evenly_spaced_indices, prepare_images
from dino_ds.data.images import UnreadableImage as UnreadableImage  # classes of users import it from here
from dino_ds.data.masks import draws_in
from dino_ds.data.mixture import Mixture, PhotoPatches, TorchvisionImages, draws_of
from dino_ds.data.root import check_photos, open_files
from dino_ds.errors import ConfigError, DataError, UserError, one_line

_SAMPLE = 1024
_READ = 64
"""Images whose content is hashed: a small batch, and enough to notice if one in twenty has changed."""
_NO_SIZE = -1
_THREADS, _CHUNK = 16, 1024


@dataclass(frozen=True)
class ImageSet:
    """Description of a set of images.

    Samples take the smallest hashes, 1,024 for sizes and 64 for contents, so that two sets sample the same names: sets
    of up to 1,024 images are compared whole, larger ones by the same part every time.
    """

    count: int
    names: str
    """Hash of all names in their order."""
    sample: dict[int, int]
    """File size by hash of the name."""
    contents: dict[int, int] = field(default_factory=dict)
    """Hash of the file by hash of the name; empty for a source without `read`."""
    parts: dict[str, ImageSet] = field(default_factory=dict)
    """Descriptions of the sources of a mixture, by path."""
    groups: str = ""
    """Hash of the class or cluster of each image, if these are balanced."""

    @staticmethod
    def of(source: Source, root: str | None) -> ImageSet:
        """Describe a source by names relative to `root`, so that the folder may move."""
        order = hashlib.blake2b(digest_size=16)

        def hashes() -> Iterator[tuple[int, int]]:
            for index in range(len(source)):
                digest = hashlib.blake2b(name_of(source, index, root), digest_size=8).digest()
                order.update(digest)
                yield int.from_bytes(digest, "little"), index

        chosen = heapq.nsmallest(_SAMPLE, hashes())
        sizes = {value: _size(source, index) for value, index in chosen}
        joined = source.joined if isinstance(source, Joined) else ()
        parts = {path: ImageSet.of(part, None) for path, part in joined}
        draws = draws_in(source)
        groups = "" if draws is None else draws.digest
        contents = _contents(source, chosen[:_READ])
        return ImageSet(len(source), order.hexdigest(), sizes, contents, parts, groups)

    def to_json(self) -> dict[str, Any]:
        sample, contents = _packed("<Qq", self.sample), _packed("<QQ", self.contents)
        plain = {"count": self.count, "names": self.names, "sample": sample, "contents": contents}
        parts = {path: part.to_json() for path, part in self.parts.items()}
        return plain | ({"parts": parts} if parts else {}) | ({"groups": self.groups} if self.groups else {})

    @staticmethod
    def from_json(saved: Mapping[str, Any]) -> ImageSet:
        """Description from the values of `to_json`. Raises DataError for anything else."""
        try:
            sample, contents = _unpacked("<Qq", saved["sample"]), _unpacked("<QQ", saved["contents"])
            parts = {str(path): ImageSet.from_json(part) for path, part in saved.get("parts", {}).items()}
            count, groups = int(saved["count"]), str(saved.get("groups", ""))
            return ImageSet(count, str(saved["names"]), sample, contents, parts, groups)
        except (AttributeError, KeyError, TypeError, ValueError, struct.error) as error:
            raise DataError(
                f"a description of images can't be used ({error!r}): make what it describes again"
            ) from None

    def changes(self, now: ImageSet) -> str:
        """Differences of `now`, such as "64 -> 96 images: 40 added, 8 removed, 0 of another size"; "" for none.

        Differences of a mixture are named by source if its paths are unchanged.
        """
        if self.parts and self.parts.keys() == now.parts.keys():
            changed = ((path, part.changes(now.parts[path])) for path, part in self.parts.items())
            words = "; ".join(f"{path}: {change}" for path, change in changed if change)
        else:
            words = self._changes(now)
        if not words and self.groups and now.groups and self.groups != now.groups:
            return f"{now.count} images as before: some are of another class or cluster"
        return words

    def _changes(self, now: ImageSet) -> str:
        counts = f"{self.count} -> {now.count} images" if self.count != now.count else f"{now.count} images as before"
        # Nothing is known of a set beyond the largest hash of its full sample.
        last = min(max(s.sample, default=0) if s.count > _SAMPLE else 2**64 for s in (self, now))
        before, after = ({value: size for value, size in s.sample.items() if value <= last} for s in (self, now))
        both = before.keys() & after.keys()
        added, removed = len(after) - len(both), len(before) - len(both)
        same_size = {value for value in both if before[value] == after[value]}
        read = same_size & self.contents.keys() & now.contents.keys()
        rewritten = sum(self.contents[value] != now.contents[value] for value in read)
        compared = len(before.keys() | after.keys())
        whole = len(self.sample) == self.count and len(now.sample) == now.count
        if not added + removed + len(both - same_size) + rewritten:
            if self.names == now.names:
                return ""
            if whole:
                return f"{counts}: the same names in another order"
        part = "" if whole else f"of {compared} that were compared "
        other = f", {rewritten} of {len(read)} that were read of other content" if rewritten else ""
        return f"{counts}: {part}{added} added, {removed} removed, {len(both - same_size)} of another size{other}"


def digest_of(source: Source, indices: Sequence[int]) -> str:
    """Digest of some images of a source: all names and classes, and 1,024 sizes and 64 contents, evenly spread."""
    digest, labels, classes = hashlib.blake2b(digest_size=16), source.labels, source.classes or []
    for index in indices:
        label = -1 if labels is None else int(labels[index])
        digest.update(b"%s\0%s\0" % (name_of(source, index, None), classes[label].encode() if label >= 0 else b""))
    for index in (indices[i] for i in evenly_spaced_indices(len(indices), _SAMPLE)):
        digest.update(b"%d " % _size(source, index))
    read = [indices[i] for i in evenly_spaced_indices(len(indices), _READ)]
    digest.update(repr(_contents(source, list(enumerate(read)))).encode())
    return digest.hexdigest()


def facts_of_images(source: Source) -> dict[str, Any]:
    """Facts of a source as JSON, which `changed_images` compares between the starts of a command."""
    return {"format": FORMAT, "images": ImageSet.of(source, None).to_json(), "times": times_of_files(source)}


def changed_images(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Differences between the `facts_of_images` of two starts, in words; "" for none. Raises DataError."""
    old, new = (ImageSet.from_json(facts.get("images", {})) for facts in (before, now))
    changes = old.changes(new)
    if not changes and before.get("times") != now["times"]:
        return f"{new.count} images of the same names, whose files have other sizes or times"
    return changes


def times_of_files(source: Source) -> str | None:
    """Hash of the sizes and times of all files, or None for a source without them."""
    file_time = getattr(source, "file_time", None)
    if file_time is None:
        return None

    def described(first: int) -> bytes:
        indices = range(first, min(first + _CHUNK, len(source)))
        return b"".join(struct.pack("<qq", _size(source, i), _known(file_time, i)) for i in indices)

    digest = hashlib.blake2b(digest_size=16)
    with ThreadPoolExecutor(_THREADS) as pool:  # a network file system answers many at once
        for part in pool.map(described, range(0, len(source), _CHUNK)):
            digest.update(part)
    return digest.hexdigest()


def _packed(form: str, values: Mapping[int, int]) -> str:
    return base64.b64encode(b"".join(struct.pack(form, *pair) for pair in values.items())).decode()


def _unpacked(form: str, text: str) -> dict[int, int]:
    return dict(struct.iter_unpack(form, base64.b64decode(text, validate=True)))


def _contents(source: Source, chosen: list[tuple[int, int]]) -> dict[int, int]:
    """Hash of the file by hash of the name, for those (hash, index) pairs that can be read."""
    read, contents = getattr(source, "read", None), dict[int, int]()
    if read is None:
        return contents
    prepare_images(source, [index for _, index in chosen])
    for value, index in sorted(chosen, key=lambda pair: pair[1]):  # neighbors lie in one row group of a Parquet file
        try:
            contents[value] = int.from_bytes(hashlib.blake2b(read(index), digest_size=8).digest(), "little")
        except Exception:  # a user's source may raise anything: training reports it with the image's name
            continue
    return dict(sorted(contents.items()))


def name_of(source: Source, index: int, root: str | None) -> bytes:
    """Name below `root` that identifies an image of a source; from a list its canonical path."""
    if listed_path := getattr(source, "listed_place", None):
        name: str = listed_path(index)
    elif member := getattr(source, "member", None):
        name = member(index)
    else:
        name = source.name(index).removeprefix(str(Path(root)) if root else "")
    return name.encode(errors="surrogatepass")


def _size(source: Source, index: int) -> int:
    return _known(getattr(source, "file_bytes", None), index)


def _known(ask: Callable[[int], int] | None, index: int) -> int:
    try:
        return int(ask(index)) if ask else _NO_SIZE
    except (OSError, ValueError):  # ValueError: a NUL in the path
        return _NO_SIZE


_METHODS = ("__len__", "load", "name")


def training_source(data: DataSection) -> Source:
    """Open the images of a recipe, with `draws` and notes on them if they are not drawn equally often.

    Raises what `recipe_images` does, and ConfigError or DataError for data.balance.
    """
    source: Any = recipe_images(data)
    draws, notes = draws_of(source, data.balance)
    if draws is not None:
        source.draws, source.notes = draws, [*getattr(source, "notes", ()), *notes]
    return source


def recipe_images(data: DataSection) -> Source:
    """Open the images of a recipe, one source or a mixture. Raises what `build_source` and `Mixture` do."""
    if not data.mixture:
        return build_source(data.source, data.root, "train", data.download, data.remote_cache_gib)
    if data.source != "folder":
        raise ConfigError(f"data.mixture takes files of yours, and data.source is {data.source}: set it to folder")
    return Mixture(data.parts, data.root, data.remote_cache_gib)


def build_source(
    source: str, root: str | None, split: Literal["train", "test"], download: bool, cache_gib: float = 0.0
) -> Source:
    """Open the images of one split; a user's files or class have no splits and are returned whole.

    cache_gib: disk space for remote images. Raises DataError if nothing can be read, ConfigError for an unknown source,
    a class that is not a source, or a root beside the photographs.
    """
    if ":" in source:
        return _build_own(source, root)
    check_photos(source, root)
    if source == "photos":
        return PhotoPatches(split)
    if source not in SOURCES:
        near = did_you_mean(source, SOURCES)
        raise ConfigError(
            f"data.source '{source}' is unknown; allowed are {', '.join(SOURCES)}, or a class as module:Class.{near}"
        )
    if root is None:
        content = "holds the images" if source == "folder" else f"keeps {source}"
        raise DataError(f"data.source {source} needs a folder: give --data.root DIR, the folder that {content}")
    if source == "folder":
        return open_files(root, cache_gib)
    return TorchvisionImages(source, root, split, download)


def _build_own(path: str, root: str | None) -> Any:
    """Build and check `Class(root)` for `module:Class`, a module on Python's path or in the current folder.

    `labels` and `classes` default to None. Raises ConfigError for a class that can't be found or is not a source,
    DataError for one that can't be built from `root`, can't be pickled or has no images.
    """
    source_class: type = find_own("data.source", path, "class", inspect.isclass)
    missing_methods = [method for method in _METHODS if not callable(getattr(source_class, method, None))]
    if missing_methods:
        # Checked before the class is called: a recipe must not be able to call just any class of a library.
        raise ConfigError(f"data.source {path} is not a source of images: it lacks {', '.join(missing_methods)}")
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
        raise DataError(
            f"{path} can't be built from data.root {root}: {type(error).__name__}: {one_line(error)}"
        ) from error
    if images < 1:
        raise DataError(f"{path} has no images with data.root {root}")
    if wrong := [name for name in names if not isinstance(name, str)]:
        raise ConfigError(
            f"{path}.name gave {one_line(repr(wrong[0]))}; it must give a text, the image's name in messages"
        )
    if source.labels is not None and (source.classes is None or len(source.labels) != images):
        raise ConfigError(f"{path} has {images} images and {len(source.labels)} labels: one a sample, with classes")
    labels, most = np.asarray([] if source.labels is None else source.labels), len(source.classes or ()) - 1
    if len(labels) and (labels.dtype.kind not in "iu" or labels.min() < -1 or labels.max() > most):
        raise ConfigError(
            f"{path}.labels must be whole numbers, the place of each image's class in {path}.classes (0 to {most}), or "
            "-1 for none"
        )
    try:
        pickle.dumps(source)
    except Exception as error:
        raise DataError(
            f"{path} can't be sent to loader processes ({type(error).__name__}: {one_line(error)}): open files and "
            "connections in load, not in __init__"
        ) from error
    return source


_READ_TWICE = 8


def draws_of_its_own(source: Source) -> list[str]:
    """A line if a user's class gives other images when it reads the first ones again with the same seeds: its random
    numbers can't be drawn again. Images that can't be read are left to training."""
    if not is_own(getattr(source, "whole", source)):
        return []
    read, readings = getattr(source, "read", source.load), list[list[bytes]]()
    with suppress(Exception):  # of any kind: the class is a user's
        for _ in range(2):
            seed_generators(0)
            readings.append([np.asarray(read(index)).tobytes() for index in range(min(_READ_TWICE, len(source)))])
    if len(readings) < 2 or readings[0] == readings[1]:
        return []
    return [
        "a resume can't be exact: data.source gives other images when it reads them again: let it draw from "
        "random, numpy.random or torch, which are seeded for each image, not from a generator of its own"
    ]


_FORWARDED = ("read", "member", "listed_place", "file_bytes", "file_time")
"""Optional methods of a source that take an image's index."""


class Part:
    """Some images of a source, with all attributes and methods of that source."""

    others: Part
    """The rest of the images."""
    notes: list[str]

    def __init__(self, whole: Source, indices: np.ndarray) -> None:
        self.whole, self._indices = whole, indices
        self.classes = whole.classes
        labels = whole.labels
        self.labels: Sequence[int] | None = None if labels is None else np.asarray(labels)[indices].tolist()

    def __len__(self) -> int:
        return len(self._indices)

    def some(self, chosen: np.ndarray) -> Part:
        """Return the part of these images for which the mask `chosen` is true."""
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


def training_images(data: DataSection, share: float) -> Source:
    """Open the training images of a recipe, without those held out by eval.val_share. Raises ConfigError, DataError."""
    if not share:
        return training_source(data)
    if data.mixture or data.balance != "none":
        raise ConfigError(
            "eval.val_share is for one source whose images are drawn equally often, not for data."
            f"{'mixture' if data.mixture else 'balance'}: give eval.val_root, a folder of other images"
        )
    return split_off(recipe_images(data), data.root, share)[0]


def held_out_images(recipe: Recipe, train: Source) -> Source | None:
    """Open the images of the held-out loss; `train` are the recipe's `training_images`. None without that loss. Raises
    DataError."""
    root, data = recipe.eval.val_root, recipe.data
    if isinstance(train, Part) and recipe.eval.val_share:
        return train.others
    return None if root is None else build_source(data.source, root, "train", data.download, data.remote_cache_gib)


def labeled_test(train: Source) -> Part | None:
    """Labeled test images: held-out images of classes in `train`; None for fewer than two classes."""
    if not isinstance(train, Part) or train.labels is None or train.others.labels is None:
        return None
    labels = np.asarray(train.others.labels)
    known = (labels >= 0) & np.isin(labels, train.labels)
    return train.others.some(known) if len(np.unique(labels[known])) > 1 else None


def split_off(source: Source, root: str | None, share: float) -> tuple[Part, Part]:
    """Hold out about `share` of the images, by a hash of each name below `root`, so that an image keeps its side
    whatever is added or removed; returns training images and held-out images. Several names of a file are on the side
    of the first that is no link. Raises DataError if a side is empty.
    """
    hashes = (
        hashlib.blake2b(name_of(source, i, root), digest_size=8, person=b"held out").digest()
        for i in range(len(source))
    )
    values = np.fromiter((int.from_bytes(digest, "little") for digest in hashes), np.uint64, len(source))
    values = values[_first_names(source)]
    held_out = values < np.uint64(int(share * 2**64))
    parts = Part(source, np.flatnonzero(~held_out)), Part(source, np.flatnonzero(held_out))
    if not all(map(len, parts)):
        raise DataError(
            f"eval.val_share {share:g} of {len(source)} images holds {len(parts[1])} out and leaves {len(parts[0])}: "
            "give another share, or images of their own with eval.val_root"
        )
    parts[0].others = parts[1]
    held = f"eval.val_share {share:g}: {len(parts[1])} of {len(source)} images are held out, and not trained on"
    parts[0].notes = [*getattr(source, "notes", ()), held]
    return parts


def _first_names(source: Source) -> np.ndarray:
    """For each image the index of the first name of its file, (n,): the first that is no link, or else the first."""
    keys: np.ndarray = getattr(source, "file_keys", lambda: np.arange(len(source)))()
    of_file, counts = np.unique(keys, return_inverse=True, return_counts=True)[1:]
    if len(counts) == len(keys):
        return np.arange(len(keys))
    is_link = np.zeros(len(keys), bool)
    for index in np.flatnonzero(counts[of_file] > 1).tolist():
        is_link[index] = os.path.realpath(source.name(index)) != source.name(index)
    order = np.lexsort((is_link, of_file))
    return order[np.searchsorted(of_file[order], of_file)]
