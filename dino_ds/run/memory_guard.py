"""Explains running out of memory in one line: in which part, the prediction, free memory, and what to change."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from dino_ds.config.ds_values import DsConfig
from dino_ds.config.recipe import Recipe
from dino_ds.engine.device import free_memory
from dino_ds.errors import OutOfMemory, UserError, is_out_of_memory
from dino_ds.health.beat import Beat

_PARTS = {
    **dict.fromkeys(("teacher", "targets", "student", "loss", "step"), "the forward pass"),
    "backward": "the backward pass",
    **dict.fromkeys(("optimizer", "center", "ema"), "the optimizer"),
    "evaluate": "evaluation",
    "save": "saving",
    "data": "loading",
    "start": "building the model",
    "end": "the end",
}
"""`Beat.where` in words."""


class MemoryGuard:
    """Turns an allocator's errors on this rank into OutOfMemory; `expect` tells it of the run that is being built."""

    def __init__(self, beat: Beat) -> None:
        self._beat = beat
        self._run: tuple[Recipe, DsConfig, float | None] | None = None

    def expect(self, recipe: Recipe, config: DsConfig, predicted_gib: float | None) -> None:
        self._run = recipe, config, predicted_gib

    @contextmanager
    def explain(self) -> Iterator[None]:
        """Raise OutOfMemory in the place of an allocator's error."""
        try:
            yield
        except UserError:
            raise
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            raise OutOfMemory(self._text(error)) from error

    def _text(self, error: Exception) -> str:
        part = _PARTS.get(self._beat.where, self._beat.where)
        predicted, cure = "", "take a smaller model, or one more GPU"
        if self._run is not None:
            recipe, config, gib = self._run
            predicted = f"{gib:.2f} GiB were predicted, " if gib is not None else ""
            cure = _cure(part, recipe, config, on_gpu=type(error).__name__ == "OutOfMemoryError")
        found = re.search(r"tried to allocate ([\d.]+ \w+)", str(error), re.IGNORECASE)
        asked = f" ({found[1]} more)" if found else ""
        where = f"out of memory in {part} after step {self._beat.step}{asked}"
        return f"{where}: {predicted}{free_memory()}. To continue with --resume: {cure}"


def _cure(part: str, recipe: Recipe, config: DsConfig, on_gpu: bool) -> str:
    """The setting to change, for running out of memory in `part`."""
    if part == "saving" and recipe.save_in_background:
        return "--save_in_background false, which needs no second copy of a checkpoint in host memory"
    if part == "evaluation":
        return f'--eval.bank_images {max(1, recipe.eval.bank_images // 2)}, or --eval.every "0 steps" for none'
    if part == "loading" and not on_gpu:
        return "fewer --data.workers, or a smaller micro-batch"
    if part in ("the optimizer", "building the model", "saving", "the end"):
        return "shard or offload more, such as --ds_config ds_configs/zero2_bf16_offload.json, or take a smaller model"
    images = config.micro_batch * config.accumulation
    size = next((size for size in range(config.micro_batch // 2, 0, -1) if images % size == 0), 0)
    if size:
        low = config.stage == 1 and config.precision != "fp32"  # stage 1 would accumulate in low precision
        return (
            f"--ds.train_micro_batch_size_per_gpu {size} --ds.gradient_accumulation_steps {images // size}"
            f"{' --ds.zero_optimization.stage 2' if low else ''}, the same global batch in smaller parts"
        )
    return "--ds.activation_checkpointing.number_checkpoints auto, or a smaller model"
