"""Several sources of images as one, each with a share of every epoch; groups of images that are drawn equally often."""

from __future__ import annotations

import csv
import hashlib
import itertools
import os
from collections.abc import Iterator, Sequence
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import numpy as np

from dino_ds.basics.files import is_url
from dino_ds.basics.seeds import crop_seed, mix
from dino_ds.config.sections import DataSection, MixturePart
from dino_ds.data.encoded import EncodedImages, ListedFiles
from dino_ds.data.images import Joined, Source, is_remote, prepare_images
from dino_ds.data.listing import Labels, join_classes, note_unnamed, printable
from dino_ds.data.root import open_files
from dino_ds.errors import ConfigError, DataError

if TYPE_CHECKING:
    from torch import Tensor

_MOST_FIELD = 1 << 16  # characters of the longest name or cluster in a file
_PASSES, _SHUFFLE = -3, -1  # reserved negative image indices that seed the order of a pass and of an epoch


class Mixture(EncodedImages, Joined):
    """Images of all parts, part after part; classes of the same name are one class. Raises DataError for a part without
    images; ConfigError for a part that is named twice or has no path, and for parts with images in common."""

    def __init__(self, parts: Sequence[MixturePart], root: str | None, cache_gib: float = 0.0) -> None:
        self.parts, self.sources = tuple(parts), list[EncodedImages]()
        for part in parts:
            try:
                self.sources.append(open_files(place_of(part, root), cache_gib))
            except DataError as error:
                raise DataError(f"data.mixture: {part.place}: {error}") from None
        self.elsewhere = any(map(is_remote, self.sources))
        self.ends = list(itertools.accumulate(map(len, self.sources)))
        self._check_overlap()
        self.labels: Labels | None = None
        self.classes: list[str] | None = None
        if any(source.labels is not None for source in self.sources):
            self.classes, numbers = join_classes(source.classes or () for source in self.sources)
            labels = [
                np.full(len(source), -1, np.int32) if source.labels is None else joined[np.asarray(source.labels)]
                for source, joined in zip(self.sources, numbers, strict=True)
            ]
            self.labels = Labels(np.concatenate(labels))
        unnamed = (all(map(str.isdigit, source.classes or "-")) for source in self.sources)
        self.notes = note_unnamed(part.place for part in itertools.compress(parts, unnamed))
        self.notes += [f"{place}: {note}" for place, source in self.joined for note in getattr(source, "notes", ())]

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

    def _check_overlap(self) -> None:
        keys, part_of = self.file_keys(), np.repeat(np.arange(len(self.parts)), np.diff([0, *self.ends]))
        order = np.argsort(keys, kind="stable")
        both = np.flatnonzero((np.diff(keys[order]) == 0) & (np.diff(part_of[order]) != 0))
        for pair in zip(order[both].tolist(), order[both + 1].tolist(), strict=True):
            if self._is_one_file(*pair):
                small, large = sorted(part_of[list(pair)].tolist(), key=lambda part: len(self.sources[part]))
                inner, outer = self.parts[small].place, self.parts[large].place
                if set(keys[part_of == small].tolist()) == set(keys[part_of == large].tolist()):
                    why = f"data.mixture: {inner} and {outer} are the same place or images"
                    raise ConfigError(f"{why}: give it once, with the sum of its shares")
                why = f"data.mixture: images of {inner} lie in {outer} too, such as {self.name(pair[0])}"
                raise ConfigError(f"{why}, and would have the shares of both: give places without images in common")

    def _is_one_file(self, first: int, second: int) -> bool:
        """Whether images with equal keys are one file: keys in folders are as old as the folder's listing."""
        pair = [self._find(index) for index in (first, second)]
        paths = [source.path(index) for source, index in pair if isinstance(source, ListedFiles)]
        try:
            return len(paths) < 2 or paths[0] == paths[1] or os.path.samefile(*paths)
        except OSError:
            return False


def place_of(part: MixturePart, root: str | None) -> str:
    """The path or pattern of a part's images. Raises ConfigError for a relative one without data.root."""
    path = os.path.expanduser(part.place)
    if is_url(path):
        return path
    if root is None and not os.path.isabs(path):
        why = f"data.mixture: {part.place} is relative: give --data.root, the folder that it is in, or its whole path"
        raise ConfigError(why)
    return os.path.join(os.path.expanduser(root or ""), path)


def roots_of(data: DataSection) -> list[str]:
    """Paths or patterns of a recipe's images, "" where none are named; [] for a named data set. Raises
    ConfigError as `place_of` does."""
    if data.source != "folder":
        return []
    return [place_of(part, data.root) for part in data.parts] or [data.root or ""]


class Draws:
    """Order of images from several parts, each with a share of every epoch; groups of a part are drawn equally often.

    A part draws from its groups in turn, and a group draws all of its images, in a random order, before it repeats one.
    So the counts of a part and of its groups are exact to one image an epoch, and after any epoch the times that two
    images of a group have been drawn differ by at most one.

    Args:
        shares: share of each part.
        parts: (n,) int64, part of each image.
        groups: (n,) int64, group of each image, numbered part after part; -1 = never drawn.
    """

    def __init__(self, shares: Sequence[Fraction], parts: np.ndarray, groups: np.ndarray) -> None:
        self._shares, self._groups = tuple(shares), groups
        drawn = np.flatnonzero(groups >= 0)
        self._sizes = np.bincount(groups[drawn])
        part_of_group = np.zeros(len(self._sizes), np.int64)
        part_of_group[groups[drawn]] = parts[drawn]
        self._counts = np.bincount(part_of_group, minlength=len(shares))
        self._part_of_group = part_of_group
        self._place = np.arange(len(self._sizes)) - np.searchsorted(part_of_group, part_of_group)
        self._drawn = drawn

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()  # loader processes receive the indices of their images

    @property
    def digest(self) -> str:
        return hashlib.blake2b(np.ascontiguousarray(self._groups).tobytes(), digest_size=16).hexdigest()

    def counts(self, length: int) -> np.ndarray:
        """Images of each part, (parts,) int64, in an epoch of `length`, by largest remainders."""
        exact = [share * length for share in self._shares]
        whole = [int(count) for count in exact]
        rest = sorted(range(len(exact)), key=lambda part: (whole[part] - exact[part], part))
        for part in rest[: length - sum(whole)]:
            whole[part] += 1
        return np.array(whole, np.int64)

    def epoch(self, seed: int, epoch: int, length: int) -> Tensor:
        """Images of an epoch in order, (length,) int64; repeat r of image i has the index i + r * images."""
        import torch

        counts = self.counts(length)
        times = self._drawn_until(seed, (epoch + 1) * counts) - self._drawn_until(seed, epoch * counts)
        first = np.repeat(np.cumsum(times) - times, times)
        repeats = np.arange(len(first)) - first
        images = torch.from_numpy(np.repeat(self._drawn, times) + repeats * len(self._groups))
        generator = torch.Generator().manual_seed(crop_seed(seed, epoch, _SHUFFLE) >> 1)
        return images[torch.randperm(len(images), generator=generator)]

    def _drawn_until(self, seed: int, counts: np.ndarray) -> np.ndarray:
        """How often each image of a group has been drawn when the parts have drawn `counts` (parts,) images."""
        import torch

        begun = self._counts[self._part_of_group]
        of_group = (counts[self._part_of_group] + begun - 1 - self._place) // begun  # group after group
        passes, rest = np.divmod(of_group, self._sizes)
        group = self._groups[self._drawn]
        start = crop_seed(seed, 0, _PASSES) - (1 << 63)
        keys = mix(mix(torch.from_numpy(passes[group]) ^ start) ^ torch.from_numpy(self._drawn)).numpy()
        order = np.lexsort((keys, group))
        places = np.empty(len(order), np.int64)  # position of each image in its group's order of this pass
        places[order] = np.arange(len(order)) - (np.cumsum(self._sizes) - self._sizes)[group[order]]
        return passes[group] + (places < rest[group])


def draws_in(source: object) -> Draws | None:
    """The `Draws` of a source, or None where all images are drawn equally often."""
    draws = getattr(source, "draws", None)
    return draws if isinstance(draws, Draws) else None


def draws_of(source: Source, balance: str) -> tuple[Draws | None, list[str]]:
    """`Draws` of a source, None where all images are drawn equally often; and notes on them. Raises ConfigError or
    DataError if the images have no such classes or clusters."""
    parts = source.parts if isinstance(source, Mixture) else (MixturePart("data.root", Fraction(1)),)
    if balance == "none" and len(parts) == 1:
        return None, []
    ends = source.ends if isinstance(source, Mixture) else [len(source)]
    part_of = np.repeat(np.arange(len(parts)), np.diff([0, *ends]))
    kind, _, file = balance.partition(":")
    if kind == "none":
        labels = np.zeros(len(source), np.int64)
    elif kind == "clusters":
        labels = _read_clusters(file, source)
    elif source.labels is not None:
        labels = np.array(source.labels, np.int64)
    else:
        why = "data.balance classes: the images have no classes (docs/data.md says where they come from)"
        raise ConfigError(f"{why}; for clusters of their features: data.balance clusters:FILE")
    # Groups (part, label) are numbered without gaps, part after part; -1 where the label is -1.
    has, groups = labels >= 0, np.full(len(labels), -1, np.int64)
    keys = part_of[has] * (labels.max(initial=0) + 1) + labels[has]
    groups[has] = np.unique(keys, return_inverse=True)[1]
    for number, part in enumerate(parts):
        if not (groups[part_of == number] >= 0).any():
            raise ConfigError(f"data.balance {kind}: no image of {part.place} has one: leave data.balance out")
    draws = Draws([part.share for part in parts], part_of, groups)
    for part, count in zip(parts, draws.counts(len(source)), strict=True):
        if not count:
            raise ConfigError(
                f"data.mixture: {part.place} with a share of {float(part.share):.3g} gives none of the {len(source)} "
                "images of an epoch: raise its share, or leave it out"
            )
    without = int((labels < 0).sum())
    return draws, [f"data.balance {kind}: {without} images have none, and are never drawn"] if without else []


def _read_clusters(file: str, source: Source) -> np.ndarray:
    """Clusters (images,) from a .csv whose row i has the name of image i and its cluster; an empty cluster is -1."""
    numbers, clusters = dict[str, int](), np.full(len(source), -1, np.int64)
    member, count = getattr(source, "member", None), 0
    for name, cluster in _rows(file):
        if count < len(source):
            if name != source.name(count) and not (  # the root may have moved since
                member is not None and name.endswith("/" + printable(member(count)))
            ):
                why = f"data.balance: row {count + 1} of {file} is of {printable(name)}"
                more = f"and image {count + 1} of the data is {source.name(count)}"
                raise DataError(f"{why}, {more}: make it again for these images, in the order of dino-ds embed")
            if cluster and cluster != "-1":
                clusters[count] = numbers.setdefault(cluster, len(numbers))
        count += 1
    if count != len(source):
        why = f"data.balance: {file} has {count} rows, and there are {len(source)} images: make it again for these"
        raise DataError(why)
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
