"""Factored logits, their comparison with a teacher's, and the size of the tiles in which they are multiplied out.

Logits are stored as unit rows (n, c) and prototypes (k, c). They are multiplied out tile by tile, as often as needed,
in FP32 whatever the engine's precision.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from dino_ds.basics.rehearsal import device_kind, rehearsing

# Bytes of the logits in one tile; "fused": on a GPU by functions that need no further scratch.
_TILE = {"cpu": 32 * 2**20, "cuda": 128 * 2**20, "fused": 256 * 2**20}
# Bytes of a tile that are processed at a time, by all passes: what a CPU's caches hold. A GPU processes whole tiles.
_PART = {"cpu": 2**20}
# Prototypes multiplied at a time on a CPU, whose caches hold them: 1.3 times as fast as all at once.
_CPU_BLOCK = 1024


class Logits(NamedTuple):
    """Logits (n, k) = (rows @ weight.T) * scale, not multiplied out.

    rows (n, c) of unit length; weight (k, c); scale (k,), all FP32; low: whether the engine computes in bf16 or fp16.
    """

    rows: Tensor
    weight: Tensor
    scale: Tensor
    low: bool = False

    def sum(self) -> Tensor:
        """(k,) the sum over rows: linear, so no tile is needed."""
        with torch.autocast(self.rows.device.type, enabled=False):
            return (self.weight @ self.rows.sum(dim=0)).mul_(self.scale)

    def multiply(self, rows: Tensor, scratch: Tensor) -> Tensor:
        """Compute `rows` (r, c) @ weight.T, without scale, in the first rows of `scratch`, and return these."""
        out = scratch[: len(rows)]
        with torch.autocast(rows.device.type, enabled=False), tf32(self.low):
            # A rehearsal counts the same whole: with a million prototypes it would take minutes in blocks.
            block = _CPU_BLOCK if rows.device.type == "cpu" and not rehearsing() else len(self.weight)
            for start in range(0, len(self.weight), block):
                torch.mm(rows, self.weight[start : start + block].t(), out=out[:, start : start + block])
        return out


class Comparison(NamedTuple):
    """The targets that a head compares its rows with, and how.

    teacher: logits of g * n rows; the targets are softmax(logits / temperature + shift), shift (k,). The student's rows
    are v * n: crop s of an image is compared with every one of the g crops, but not with crop s itself if
    `exclude_own`. weights (n,) of the images, or None for 1. others: with `exclude_own`, the weight of pairs with
    student crops that the teacher does not see. The sum is divided by `divisor`, or by the number of pairs if None.
    """

    teacher: Logits
    shift: Tensor
    temperature: float
    student_temp: float
    crops: int = 1
    exclude_own: bool = False
    weights: Tensor | None = None
    divisor: float | None = None
    others: float = 1.0

    def pairs(self, rows: int) -> tuple[int, int]:
        """Numbers of pairs of an image, with `rows` rows of the student: of all, and of those with weight `others`."""
        images = max(len(self.teacher.rows) // self.crops, 1)
        crops = rows // images if len(self.teacher.rows) else 1
        others = self.crops * (crops - self.crops) if self.exclude_own else 0
        return self.crops * crops - (self.crops if self.exclude_own else 0), others

    def share(self, rows: int) -> float:
        """Mean weight of a pair, with `rows` rows of the student."""
        pairs, others = self.pairs(rows)
        return 1.0 if self.others == 1 else 1 + (self.others - 1) * others / pairs


class Compared(NamedTuple):
    """loss: scalar with gradient, the weighted sum of cross-entropies / divisor; entropy: of the targets, their
    weighted mean, without gradient; share: the mean weight of a pair, 1 if `Comparison.others` is 1."""

    loss: Tensor
    entropy: Tensor
    share: float = 1.0


def tile_rows(weight: Tensor, fused: bool) -> int:
    """Rows of logits that are multiplied out at a time; fused: by functions that need no further scratch."""
    kind = "fused" if fused else device_kind(weight.device.type)
    return max(1, _TILE.get(kind, _TILE["cuda"]) // (4 * len(weight)))


def part_rows(weight: Tensor) -> int:
    """Rows of a tile that are processed at a time."""
    return max(1, _PART.get(device_kind(weight.device.type), _TILE["cuda"]) // (4 * len(weight)))


@contextmanager
def tf32(wanted: bool) -> Iterator[None]:
    """Context in which a GPU computes FP32 products in TF32, which rounds less than bf16 and no more than fp16 does.

    Not set elsewhere: the switch is the whole process's, evaluations need FP32, and compilers of some versions of torch
    read it by its older name, which raises an error while the new name has set it (pytorch issue 166387).
    """
    if not wanted:
        yield
        return
    matmul = torch.backends.cuda.matmul
    before, matmul.fp32_precision = matmul.fp32_precision, "tf32"
    try:
        yield
    finally:
        matmul.fp32_precision = before
