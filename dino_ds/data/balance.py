"""Groups of images that data.balance draws equally often: the classes of a source, or clusters that a file names."""

from __future__ import annotations

import csv
import os
from collections.abc import Iterator
from fractions import Fraction

import numpy as np

from dino_ds.config.mixture import Part
from dino_ds.data.base import Source
from dino_ds.data.draws import Draws
from dino_ds.data.listing import printable
from dino_ds.data.mixture import Mixture
from dino_ds.errors import ConfigError, DataError

_MOST_FIELD = 1 << 16
"""The longest name or cluster in a file."""
_OFTEN = 10
"""Repeats an epoch beyond which a note says so."""


def draws_of(source: Source, balance: str) -> tuple[Draws | None, list[str]]:
    """How often each image of a source is drawn, or None where all are equally often; and notes on it.

    Raises ConfigError or DataError where its images have no such classes or clusters.
    """
    parts = source.parts if isinstance(source, Mixture) else (Part("data.root", Fraction(1)),)
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
    draws = Draws([part.share for part in parts], part_of, groups)
    return draws, [*_left_out(labels, kind), *_repeats(draws, parts, kind, len(source))]


def _labels(source: Source, kind: str, file: str) -> np.ndarray:
    """(images,) the class or cluster of each, -1 for an image that has none."""
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
    """Numbers of the groups (part, label) without gaps, part after part; -1 where the label is."""
    has = labels >= 0
    keys = parts[has] * (labels.max(initial=0) + 1) + labels[has]
    groups = np.full(len(labels), -1, np.int64)
    groups[has] = np.unique(keys, return_inverse=True)[1]
    return groups


def _left_out(labels: np.ndarray, kind: str) -> list[str]:
    without = int((labels < 0).sum())
    return [f"data.balance {kind}: {without} images have none, and are never drawn"] if without else []


def _repeats(draws: Draws, parts: tuple[Part, ...], kind: str, images: int) -> list[str]:
    """Notes on images that come more than once in an epoch. Raises ConfigError for a part of which none comes."""
    notes = []
    for number, part in enumerate(parts):
        if not draws.counts(images)[number]:
            raise ConfigError(
                f"data.mixture: {part.place} with a share of {float(part.share):.3g} gives none of the {images} images "
                "of an epoch: raise its share, or leave it out"
            )
        most = draws.most_repeats(number, images)
        if kind == "none" and most > 1:
            notes.append(f"data.mixture: each image of {part.place} comes {most:.3g} times in an epoch")
        elif most > _OFTEN:
            what = "class" if kind == "classes" else "cluster"
            where = "" if len(parts) == 1 else f" of {part.place}"
            notes.append(f"data.balance: each image of the rarest {what}{where} comes {most:.3g} times in an epoch")
    return notes


def _read_clusters(file: str, source: Source) -> np.ndarray:
    """Clusters (images,) of a .csv whose row i has the name of image i and its cluster, -1 where that is empty."""
    numbers, found = dict[str, int](), np.full(len(source), -1, np.int64)
    count = 0
    for name, cluster in _rows(file):
        if count < len(source):
            if not _is_name(name, source, count):
                raise DataError(
                    f"data.balance: row {count + 1} of {file} is of {printable(name)}, and image {count + 1} of the "
                    f"data is {source.name(count)}: make it again for these images, in the order of dino-ds embed"
                )
            if cluster and cluster != "-1":
                found[count] = numbers.setdefault(cluster, len(numbers))
        count += 1
    if count != len(source):
        raise DataError(
            f"data.balance: {file} has {count} rows, and there are {len(source)} images: make it again for these"
        )
    return found


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
    """Whether it is an image's name, below a root that may have moved."""
    member = getattr(source, "member", None)
    return name == source.name(index) or (member is not None and name.endswith("/" + printable(member(index))))
