"""The teacher's files in a run folder: the newest teacher, teacher.*, and the best one by a metric, best_teacher.*."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from dino_ds.basics.durable import discard
from dino_ds.basics.names import BEST_TEACHER, sidecar_of, step_name
from dino_ds.checkpoint.files import write_tensors
from dino_ds.checkpoint.manifest import MANIFEST, WHOLE
from dino_ds.checkpoint.opening import open_checkpoint
from dino_ds.config.recipe import Recipe
from dino_ds.errors import CheckpointError
from dino_ds.models.trained import merged
from dino_ds.run.environment import versions
from dino_ds.weights.sidecar import about_teacher, read_sidecar, write_with_sidecar


@dataclass(frozen=True)
class TeacherFiles:
    """Writes the teacher's files into the run folder `path`; distilled: the frozen teacher's facts, or None."""

    path: Path
    recipe: Recipe
    distilled: dict[str, Any] | None

    def write(self, backbone: Mapping[str, Tensor], step: int, best: Mapping[str, Any] | None = None) -> None:
        """Write teacher.safetensors and teacher.json. Raises OSError.

        teacher.safetensors has the backbone after `step` steps, in FP32, under timm's names, with adapters merged.
        teacher.json says how the teacher was made and from what it was distilled.
        best: facts of the best teacher; if they are given, the files are best_teacher.* instead.
        """
        facts, name = about_teacher(self.recipe, self.distilled, step, versions()), "teacher.safetensors"
        if best is not None:
            facts["best"], name = {key: best[key] for key in ("metric", "value", "start")}, BEST_TEACHER
            if "load" in facts:
                facts["load"] = facts["load"].replace("teacher.safetensors", BEST_TEACHER)
        whole = merged(backbone, self.recipe.model.lora_alpha)
        write_with_sidecar(self.path / name, lambda file: write_tensors(file, whole, {"format": "pt"}), facts)

    def settle(
        self, best: Mapping[str, Any], start: int, exported: Callable[[Mapping[str, Tensor]], dict[str, Tensor]]
    ) -> list[str]:
        """Make the best teacher's file agree with a run that continues at step `start`; returns lines for the log.

        If the file is not of the step of `best`, as after a crash or a full disk, `exported` takes the teacher from the
        checkpoint of that step. Without this checkpoint, a file of a step after `start` is removed. Raises OSError.
        """
        there, step = best_step(self.path), best["step"]
        folder = self.path / "checkpoints" / step_name(step or 0)
        if there == step:
            return []
        if step and (folder / MANIFEST).is_file():
            try:
                saved = open_checkpoint(folder, WHOLE)
            except CheckpointError as error:
                return [f"the best teacher is lost: {error}"]
            self.write(exported(saved.whole()), step, best)
            return [f"{BEST_TEACHER} is written again, of step {step}"]
        if there is None or there <= start:
            return []
        discard(self.path / BEST_TEACHER)
        discard(sidecar_of(self.path / BEST_TEACHER))
        return [f"{BEST_TEACHER}, of step {there}, is removed: training continues from step {start}"]


def best_step(run: Path) -> int | None:
    """The step of the best teacher in a run folder, or None if there is none or it is damaged."""
    try:
        step = read_sidecar(run / BEST_TEACHER).get("step") if (run / BEST_TEACHER).is_file() else None
    except CheckpointError:
        return None
    return step if isinstance(step, int) else None
