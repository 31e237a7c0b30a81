"""Names the images of one optimizer step: computed from recipe, seed and position, as the loader does it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from dino_ds.basics.names import step_name
from dino_ds.checkpoint.manifest import read_manifest
from dino_ds.config.loading import load_recipe
from dino_ds.data.batches import LoaderOptions
from dino_ds.data.draws import draws_in
from dino_ds.data.feed import Position
from dino_ds.data.held_out import training_images
from dino_ds.data.loader import ResumableSampler, steps_per_epoch
from dino_ds.health.records import last_checkpoint_step


def write_step_images(run_dir: Path, done: int) -> Path:
    """Write the global batch of the step after `done` to RUN/suspect_images-STEP.txt. Raises UserError if unknown."""
    recipe = load_recipe(str(run_dir / "config.yaml"), {})
    data = recipe.data
    source = training_images(data.model_copy(update={"download": False}), recipe.eval.val_share)
    per_epoch = steps_per_epoch(len(source), data.global_batch) * data.global_batch
    step, state = _saved_state(run_dir)
    position = Position(**state["position"])
    # A skipped step uses its images up as well.
    for _ in range(done - step + _skipped_steps(run_dir, done) - state["skipped_steps"]):
        position = position.advance(data.global_batch, per_epoch)
    options, draws = LoaderOptions.of(recipe, micro_batch=data.global_batch), draws_in(source)
    images = next(iter(ResumableSampler(len(source), options, position, draws)))
    path = run_dir / f"suspect_images-{done + 1}.txt"
    head = f"# step {done + 1}, epoch {images[0][0]}: the {len(images)} images of its global batch, in order"
    note = "# loader processes (data.workers) may have been reading images of the steps after it"
    path.write_text("\n".join([head, note, *(source.name(index % len(source)) for _, index in images)]) + "\n")
    return path


def _saved_state(run_dir: Path) -> tuple[int, dict[str, Any]]:
    """The last checkpoint's step, position and counters."""
    step = last_checkpoint_step(run_dir)
    if not step:
        return 0, {"position": {}, "skipped_steps": 0}
    return step, read_manifest(run_dir / "checkpoints" / step_name(step)).state


def _skipped_steps(run_dir: Path, done: int) -> int:
    """The number of skipped steps, by the last line of metrics that is not after step `done`."""
    skipped = 0
    path = run_dir / "metrics.jsonl"
    for text in path.read_text(errors="replace").splitlines() if path.is_file() else []:
        try:
            line = json.loads(text)
            if line["step"] <= done:
                skipped = line.get("skipped_steps", skipped)
        except (ValueError, KeyError, TypeError, RecursionError):
            continue  # it was being written
    return skipped
