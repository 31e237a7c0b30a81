"""The center: the running mean of the teacher's logits that keeps one prototype from winning everywhere."""

from __future__ import annotations

import torch
from torch import Tensor


class Center:
    """gather() per micro-batch, commit() once per applied optimizer step, drop() after a skipped one. FP32.

    Source: DINO, equation 4 (arXiv 2104.14294): c <- m c + (1 - m) mean of the teacher's logits over all ranks.
    Sums and counts are kept, so micro-batches and ranks of unequal size weigh as they should.
    """

    def __init__(self, prototypes: int, momentum: float, device: torch.device | str = "cpu") -> None:
        self.value = torch.zeros(prototypes, device=device)
        self.momentum = momentum
        self._pending = torch.zeros(prototypes + 1, device=device)

    @torch.no_grad()
    def gather(self, teacher_logits: Tensor) -> None:
        """Teacher logits (rows, k) of one micro-batch join the window."""
        logits = teacher_logits.float()
        self._pending[:-1] += logits.sum(dim=0)
        self._pending[-1] += logits.shape[0]

    def pending(self) -> Tensor:
        """This rank's window, (k + 1,): the sum of the logits and the number of rows; to be summed over ranks."""
        return self._pending

    @torch.no_grad()
    def commit(self, total: Tensor) -> None:
        """Move the center by the window's total (k + 1,) over all ranks, and begin a new window."""
        self.value.lerp_(total[:-1] / total[-1], 1 - self.momentum)
        self.drop()

    def drop(self) -> None:
        """Forget the window: its optimizer step was not applied."""
        self._pending = torch.zeros_like(self._pending)

    def load(self, value: Tensor) -> None:
        """Set the center (k,), as a checkpoint has it, and begin a new window."""
        self.value.copy_(value)
        self.drop()
