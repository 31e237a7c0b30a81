"""Messages about evaluations for the user: which recipe key is meant, and which test images are trained on."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from dino_ds.data.base import Source
from dino_ds.data.images import evenly_spaced_indices
from dino_ds.engine import distributed
from dino_ds.errors import ConfigError, DataError

OF_ONE_SET = ("statistics",)
_LOOKED_AT = 64
_OF_ONE_NAME = 2
"""Most training images of a test image's file name that are compared with it; as many again with its folder too."""


def with_recipe_keys(name: str, error: ConfigError | DataError) -> ConfigError | DataError:
    """Replace the flags of `dino-ds eval` in the error message of an evaluation by recipe keys."""
    words = {
        "(--images)": "(eval.bank_images, eval.test_images)",
        "--images": "--eval.bank_images",
        "with --test_root DIR": "with --eval.root DIR (--eval.val_share 0.1 holds some out of training), or leave "
        "this out with --eval.evals auto",
        "--test_root": "--eval.root",
        "--benchmark_root": "--eval.benchmark_root",
        "--k": "--eval.k",
    }
    text = re.sub("|".join(map(re.escape, words)), lambda flag: words[flag[0]], str(error))
    return type(error)(f"eval.evals {name}: {text}")


def note_on_shared(
    evaluations: Collection[str], train: Source | None, test: Source | None, option: str, which: str = "test"
) -> tuple[float, list[str]]:
    """The share of the test images that are training images too, and notes for the user: those of the same file, or, of
    64 that are looked at, of the same name and content. Looks only if an evaluation needs both; all ranks must call it,
    and get rank 0's answer.

    option: names other test images. which: what the test images are called.
    """
    share, notes = 0.0, list[str]()
    needed = set(evaluations) - set(OF_ONE_SET)
    if needed and train is not None and test is not None and distributed.rank() == 0:
        looked_at: Sequence[int] = range(len(test))
        shared = _same_files(train, test)
        if not shared:
            looked_at = evenly_spaced_indices(len(test), _LOOKED_AT)
            shared = _shared(train, test, looked_at)
        if shared:
            share = len(shared) / len(looked_at)
            notes.append(
                f"{len(shared)} of {len(looked_at)} {which} images looked at are training images too, such as "
                f"{test.name(shared[0])}: a score on them says nothing about new images; name others with {option}"
            )
    return distributed.gather_objects((share, notes))[0]


def _same_files(train: Any, test: Any) -> list[int]:
    """Indices of the test images whose files are those of training images, by whatever links or spelling."""
    if not all(hasattr(source, "file_keys") for source in (train, test)):
        return []
    keys, test_keys = train.file_keys(), test.file_keys()
    shared: list[int] = np.flatnonzero(np.isin(test_keys, keys)).tolist()
    # Keys are from when a folder was listed: one pair is compared.
    is_true = shared and _is_same(train, int(np.argmax(keys == test_keys[shared[0]])), test, shared[0])
    return shared if is_true else []


def _shared(train: Source, test: Source, looked_at: Sequence[int]) -> list[int]:
    """Indices of the test images that have the same content as a training image of the same name."""
    if not all(hasattr(source, "read") for source in (train, test)):
        return []
    names = {index: _name(test, index) for index in looked_at}
    wanted = {part for name in names.values() for part in (name, name[-1:])}
    alike: dict[tuple[str, ...], list[int]] = defaultdict(list)
    for index in range(len(train)):
        whole_name = _name(train, index)
        for name in (whole_name, whole_name[-1:]):
            if name in wanted and len(alike[name]) < _OF_ONE_NAME:
                alike[name].append(index)
    return [
        index
        for index, name in names.items()
        if any(_is_same(train, other, test, index) for other in {*alike[name], *alike[name[-1:]]})
    ]


def _name(source: Source, index: int) -> tuple[str, ...]:
    """The folder and the name of an image's file."""
    name: str = getattr(source, "member", source.name)(index)
    return tuple(name.split("/")[-2:])


def _is_same(train: Any, train_index: int, test: Any, test_index: int) -> bool:
    """Whether two files have the same content; False where one can't be read, which the evaluation reports."""
    with suppress(Exception):  # a source of the user's may raise anything
        pair = ((train, train_index), (test, test_index))
        sizes = {source.file_bytes(index) for source, index in pair if hasattr(source, "file_bytes")}
        return len(sizes) < 2 and bool(train.read(train_index) == test.read(test_index))
    return False
