"""One run as its loop sees it: the parts that `dino_ds.train` has built, and where the run stands."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from dino_ds import distributed
from dino_ds.config.ds_config import DsConfig
from dino_ds.config.recipe import Recipe
from dino_ds.data.loader import Position
from dino_ds.data.multicrop import MultiCrop
from dino_ds.training.at_step import AtStep
from dino_ds.training.metrics import RunLog
from dino_ds.training.step import TrainingStep


@dataclass
class RunState:
    """Where a run stands, apart from its tensors and its step; a checkpoint keeps it."""

    position: Position = field(default_factory=Position)
    skipped_steps: int = 0
    bad_images: set[str] = field(default_factory=set)

    def state_dict(self) -> dict[str, Any]:
        return {
            "position": asdict(self.position),
            "skipped_steps": self.skipped_steps,
            "bad_images": sorted(self.bad_images),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Raises LookupError, TypeError or ValueError for what `state_dict` has not made."""
        self.position = Position(int(state["position"]["epoch"]), int(state["position"]["samples"]))
        self.skipped_steps = int(state["skipped_steps"])
        self.bad_images = {str(name) for name in state["bad_images"]}


@dataclass(frozen=True)
class Run:
    """The parts of a run; `images` and `epoch_steps` are the number of images and the optimizer steps of one pass."""

    recipe: Recipe
    config: DsConfig
    path: Path
    images: int
    crops: MultiCrop
    epoch_steps: int
    last_step: int
    predicted_gib: float | None
    step: TrainingStep
    state: RunState
    evaluations: AtStep | None
    pictures: AtStep
    log: RunLog

    def advance(self) -> None:
        """One micro-batch of every rank has been used."""
        consumed = self.config.micro_batch * distributed.world_size()
        per_epoch = self.epoch_steps * self.recipe.data.global_batch
        self.state.position = self.state.position.advance(consumed, per_epoch)

    @property
    def images_drawn(self) -> int:
        """Different images used so far, by all ranks; the few that an epoch leaves out are taken as drawn after it."""
        return self.images if self.state.position.epoch else self.state.position.samples
