"""Steps that were skipped because a number was not finite: reports their images, and ends a run with too many."""

from __future__ import annotations

import json

import torch

from dino_ds.engine import distributed
from dino_ds.errors import NumericError
from dino_ds.health.files import Event, append_line
from dino_ds.method.step import MicroStep
from dino_ds.run.run import Run

_FILE = "bad_batches.jsonl"
_MOST = 3  # steps in a row whose loss or gradient is not finite stop the run


class BadSteps:
    """Counts bad steps in a row. A mere fp16 overflow does not count: it is how the loss scale is found."""

    def __init__(self, run: Run) -> None:
        self._run, self._log = run, run.log
        self._in_a_row = 0

    def reset(self) -> None:
        """Begin the count anew, after a step that was applied."""
        self._in_a_row = 0

    def report(self, window: list[tuple[MicroStep, list[str]]]) -> None:
        """Report a skipped step; `window` is what this rank has trained on. Every rank calls it.

        Raises NumericError, on all ranks, at the last bad step that is allowed, or if the scale can't fall.
        """
        run, step = self._run, self._run.step
        run.state.skipped_steps += 1
        mine = [name for out, names in window if not torch.isfinite(out.loss) for name in names]
        all_mine = [name for _, names in window for name in names]
        found = distributed.gather_objects((mine, all_mine))
        ranks = [rank for rank, (names, _) in enumerate(found) if names]
        if not ranks and step.engine.config.dynamic_loss_scale:
            if step.engine.scale_is_exhausted:
                raise NumericError(
                    f"fp16 gradients still overflow at the smallest loss scale ({step.engine.loss_scale:g}): "
                    "lower optimizer.lr, or use a bf16 ds config"
                )
            line = f"fp16 overflow after step {step.applied_steps}: the loss scale is {step.engine.loss_scale:g}"
            self._log.info(Event(line, "overflow"))
            return
        self._in_a_row += 1
        names = {rank: found[rank][0] or found[rank][1] for rank in ranks or range(len(found))}
        self._record(names, "loss" if ranks else "gradient")
        culprits = [name for names, _ in found for name in names]
        what = f"the loss is NaN or infinite on {_shorten(culprits)}" if culprits else "the gradient is NaN or infinite"
        if culprits and len(found) > 1:
            what += f" (rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))})"
        what = f"{what}, after step {step.applied_steps}"
        self._log.info(Event(f"{what}: nothing moved ({self._in_a_row} in a row; {_MOST} stop the run)", "not finite"))
        if self._in_a_row >= _MOST:
            raise NumericError(
                f"{what}, {_MOST} times in a row; checkpoints in {run.path} are from before. Look at the images "
                f"in {run.path / _FILE}, lower optimizer.lr, or use a bf16 or fp32 ds config"
            )

    def _record(self, names: dict[int, list[str]], what: str) -> None:
        """A line for each rank in `names`: those whose loss was not finite, or all where only the gradient was not."""
        if distributed.rank() == 0:
            common = {"step": self._run.step.applied_steps, "in_a_row": self._in_a_row}
            for rank, images in names.items():
                record = {**common, "rank": rank, "what": what, "images": images}
                append_line(self._run.path / _FILE, json.dumps(record))


def _shorten(names: list[str], most: int = 4) -> str:
    shown = ", ".join(names[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"
