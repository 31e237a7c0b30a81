"""Sequences of several lengths in one (tokens, width) matrix: where each begins, and which of them to take."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Packing:
    """How the rows of a (tokens, width) matrix divide into sequences.

    groups: (sequences, tokens of each) per size, in order; bounds: (sequences + 1,) int32, the row where each sequence
    begins, and the end of the last.
    """

    groups: tuple[tuple[int, int], ...]
    bounds: Tensor

    @classmethod
    def of(cls, groups: list[tuple[int, int]], device: torch.device) -> Packing:
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

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence."""
        return max(tokens for _, tokens in self.groups)

    def sequence_of_token(self) -> Tensor:
        """(tokens,) the sequence that each row belongs to."""
        parts, first = [], 0
        for sequences, tokens in self.groups:
            own = torch.arange(first, first + sequences, device=self.bounds.device)
            parts.append(own.unsqueeze(1).expand(-1, tokens).flatten())
            first += sequences
        return torch.cat(parts)
