"""Sequences of several lengths in one (tokens, width) matrix: where each sequence begins, and selections of rows."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from dino_ds.basics.ranges import making_once

_T = TypeVar("_T")
Groups = Sequence[tuple[int, int]]  # sequences and tokens of each, by size
_KEPT = 64  # number of keys at which a `MadeOnce` is emptied: evaluations see images of many sizes


class MadeOnce:
    """Cache of tensors that no step changes, such as bounds of sequences: they are made once for each key."""

    def __init__(self) -> None:
        self._kept: dict[Hashable, Any] = {}

    def of(self, key: Hashable, make: Callable[[], _T]) -> _T:
        """The result of `make` for this key; the key must hold all that the result depends on, also the device."""
        if torch.compiler.is_compiling():
            return make()
        if key not in self._kept:
            if len(self._kept) >= _KEPT:
                self._kept.clear()
            with torch.inference_mode(False), torch.no_grad(), making_once():
                self._kept[key] = make()
        return self._kept[key]


@dataclass(frozen=True)
class Packing:
    """The division of the rows of a (tokens, width) matrix into sequences. groups: (sequences, tokens of each) per
    size, in order; bounds: (sequences + 1,) int32, the row where each sequence begins, and the end of the last."""

    groups: tuple[tuple[int, int], ...]
    bounds: Tensor

    @classmethod
    def of(cls, groups: Sequence[tuple[int, int]], device: torch.device) -> Packing:
        parts, start = [], 0
        for i, (sequences, tokens) in enumerate(groups):
            stop = start + sequences * tokens
            end = stop + 1 if i == len(groups) - 1 else stop
            parts.append(torch.arange(start, end, tokens, dtype=torch.int32, device=device))
            start = stop
        return cls(tuple(groups), torch.cat(parts))

    @property
    def cls(self) -> Tensor:
        """(sequences,) the row of every sequence's CLS token."""
        return self.bounds[:-1]

    def first_and_last(self, kept: Sequence[int]) -> Selection:
        """Select each sequence's first and last tokens. kept: their number, for each size; 1: the CLS token alone."""
        parts, first, device = [], 0, self.bounds.device
        if set(kept) == {1}:
            bounds = torch.arange(len(self.bounds), dtype=torch.int32, device=device)
            return Selection(self.cls, Packing(tuple((sequences, 1) for sequences, _ in self.groups), bounds))
        for (sequences, tokens), count in zip(self.groups, kept, strict=True):
            starts = self.bounds[first : first + sequences].unsqueeze(1)
            columns = torch.arange(tokens - count, tokens, dtype=torch.int32, device=device)
            columns[:1] = 0
            parts.append((starts + columns).flatten())
            first += sequences
        groups = [(sequences, count) for (sequences, _), count in zip(self.groups, kept, strict=True)]
        return Selection(torch.cat(parts), Packing.of(groups, device))

    def sequence_of_token(self) -> Tensor:
        """(tokens,) the sequence that each row belongs to."""
        tokens = sum(sequences * tokens for sequences, tokens in self.groups)
        rows = torch.arange(tokens, dtype=torch.int32, device=self.bounds.device)
        return torch.bucketize(rows, self.bounds[1:], right=True)


@dataclass(frozen=True)
class Selection:
    """The rows of a packed matrix for which a block is computed to its end; other rows serve only as keys and values.
    rows (r,) int32: indices in the matrix; packing: of these r rows."""

    rows: Tensor
    packing: Packing
