"""Sequences of several lengths in one (tokens, width) matrix: where each begins, and which of them to take."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Packing:
    """How the rows of a (tokens, width) matrix divide into sequences.

    groups: (sequences, tokens of each) per size, in order; cls: index (sequences,) of every sequence's CLS token;
    sequence_of_token: (tokens,) the sequence each row belongs to.
    """

    groups: tuple[tuple[int, int], ...]
    cls: Tensor
    sequence_of_token: Tensor

    @classmethod
    def of(cls, groups: list[tuple[int, int]], device: torch.device) -> Packing:
        starts, offset = [], 0
        for sequences, tokens in groups:
            starts.append(torch.arange(sequences, device=device) * tokens + offset)
            offset += sequences * tokens
        first = torch.cat(starts)
        owner = torch.zeros(offset, dtype=torch.long, device=device)
        owner[first] = 1
        return cls(tuple(groups), first, owner.cumsum(0) - 1)

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence."""
        return max(tokens for _, tokens in self.groups)

    def bounds(self) -> Tensor:
        """(sequences + 1,) int32: the row where each sequence begins, and the end of the last."""
        total = sum(sequences * tokens for sequences, tokens in self.groups)
        return torch.nn.functional.pad(self.cls, (0, 1), value=total).int()

    def rows_of(self, chosen: list[Tensor]) -> Tensor:
        """Per group the sequences (k,) counted within it -> the rows of all their tokens, in that order."""
        rows, offset = [], 0
        for (sequences, tokens), kept in zip(self.groups, chosen, strict=True):
            within = torch.arange(tokens, device=kept.device)
            rows.append((offset + kept.unsqueeze(1) * tokens + within).flatten())
            offset += sequences * tokens
        return torch.cat(rows)
