"""A run without a network: tensors that follow from step and rank, saved and loaded as those of a real one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dino_ds.checkpoint.folder import Checkpoints, Choice, Saving
from dino_ds.checkpoint.manifest import SavedCheckpoint
from dino_ds.engine import distributed
from dino_ds.engine.distributed import RankFlags

RUN_ID = "0123456789abcdef"
SETTINGS: dict[str, Any] = {
    "run_id": RUN_ID, "stage": 1, "precision": "fp32", "offload": False, "micro_batch": 4, "accumulation": 1,
    "gradient_clipping": 3.0, "recipe": {"seed": 0}, "images": {}, "versions": {},
}  # fmt: skip


def part_of(step: int, rank: int, numel: int = 5000) -> dict[str, Tensor]:
    values = torch.arange(numel, dtype=torch.float32)
    return {f"0.{kind}": values * (step + 1) + 1000 * rank + i for i, kind in enumerate(("master", "exp_avg"))}


def whole_of(step: int) -> dict[str, Tensor]:
    return {
        "teacher.a": torch.full((30, 40), step / 7),
        "teacher.b": torch.full((9,), -1.0 * step),
        "center": part_of(step, 9, 48)["0.master"],
    }


class SmallRun:
    """`train` takes steps, `save` saves, lines are collected in `said`; `finish`: see Saving."""

    def __init__(
        self,
        run_dir: Path,
        keep: int = 3,
        keep_every: int = 0,
        background: bool = True,
        numel: int = 5000,
        finish: Callable[[Path], None] = lambda folder: None,
    ) -> None:
        run_dir.mkdir(exist_ok=True)
        self.checkpoints = Checkpoints(run_dir, keep, keep_every)
        self.flags = RankFlags(("stop", "saved", "save_failed"), torch.device("cpu"))
        self.saving = Saving(self.checkpoints, self.flags, background, finish)
        self.step, self.numel, self.said = 0, numel, list[str]()
        self._part, self._whole = part_of(0, distributed.rank(), numel), whole_of(0)

    def train(self, steps: int = 1) -> SmallRun:
        for _ in range(steps):
            self.flags.push(distributed.sum_across_ranks(self.flags.tensor_to_sum().clone()))
            self.step += 1
            for name, tensor in part_of(self.step, distributed.rank(), self.numel).items():
                self._part[name].copy_(tensor)  # in place, as training does
            for name, tensor in whole_of(self.step).items():
                self._whole[name].copy_(tensor)
            self.said += self.saving.poll()
        return self

    def save(self, wait: bool = False) -> SmallRun:
        manifest = {
            **SETTINGS,
            "world_size": distributed.world_size(),
            "step": self.step,
            "state": {"position": {"epoch": 0, "samples": 8 * self.step}},
        }
        layout = {"rank": distributed.rank()}
        self.said += self.saving.save(self._part, layout, self._whole, manifest, wait)
        return self

    def choose(self, wanted: int | None = None, run_id: str | None = RUN_ID) -> Choice:
        return self.checkpoints.choose(wanted, run_id, lambda manifest: None)


def is_that_of(saved: SavedCheckpoint, step: int, numel: int = 5000) -> bool:
    """Whether every element of every tensor is that of `step`."""
    whole = saved.whole()
    parts = [
        torch.equal(saved.read(rank, name, 0, numel), tensor)
        for rank in range(saved.manifest.world_size)
        for name, tensor in part_of(step, rank, numel).items()
    ]
    return (
        saved.manifest.step == step
        and all(parts)
        and whole.keys() == whole_of(step).keys()
        and all(torch.equal(whole[name], tensor) for name, tensor in whole_of(step).items())
    )


def folders(run_dir: Path) -> list[str]:
    return sorted(path.name for path in (run_dir / "checkpoints").iterdir())
