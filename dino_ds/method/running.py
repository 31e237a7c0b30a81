"""Running statistics of loss terms, such as the mean of the teacher's logits that centers them."""

from __future__ import annotations

import torch
from torch import Tensor


class RunningMean:
    """gather() per micro-batch, commit() once per applied optimizer step, drop() after a skipped one. FP32.

    Source: DINO, equation 4 (arXiv 2104.14294): c <- m c + (1 - m) mean of the teacher's logits over all ranks.
    Sums and counts are kept, so micro-batches and ranks of unequal size weigh as they should.
    """

    def __init__(self, width: int, momentum: float, device: torch.device | str = "cpu") -> None:
        self.value = torch.zeros(width, device=device)
        self.momentum = momentum
        self._pending = torch.zeros(width + 1, device=device)

    @torch.no_grad()
    def gather(self, rows: Tensor) -> None:
        """Rows (n, k) of one micro-batch join the window."""
        self.gather_sum(rows.float().sum(dim=0), len(rows))

    @torch.no_grad()
    def gather_sum(self, total: Tensor, count: int) -> None:
        """The sum (k,) of `count` rows of one micro-batch joins the window."""
        self._pending[:-1] += total
        self._pending[-1] += count

    def pending(self) -> Tensor:
        """This rank's window, (k + 1,): the sum of the rows and their number; to be summed over ranks."""
        return self._pending

    @torch.no_grad()
    def commit(self, total: Tensor) -> None:
        """Move the mean by the window's total (k + 1,) over all ranks, and begin a new window.

        Without rows it stays as it is.
        """
        moves = total[-1].clamp_max(1 - self.momentum)  # or 0: rows are whole numbers
        self.value.lerp_(total[:-1] / total[-1].clamp_min(1), moves)
        self.drop()

    def drop(self) -> None:
        """Forget the window: its optimizer step was not applied."""
        self._pending = torch.zeros_like(self._pending)

    def load(self, value: Tensor) -> None:
        """Set the mean (k,), as a checkpoint has it, and begin a new window."""
        self.value.copy_(value)
        self.drop()
