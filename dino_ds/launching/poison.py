"""The images of one optimizer step, by name: computed from recipe, seed and position, as the loader does it."""

from __future__ import annotations

import json
from pathlib import Path

from dino_ds.config import load_recipe
from dino_ds.health.records import last_checkpoint


def write_step_images(run_dir: Path, done: int) -> Path:
    """RUN/poison-STEP.txt: the global batch of the step after `done`. Raises UserError if the data can't be found."""
    from dino_ds.data.loader import ResumableSampler, steps_per_epoch
    from dino_ds.data.sources import build_source

    recipe = load_recipe(str(run_dir / "config.yaml"), {})
    data = recipe.data
    source = build_source(data.source, data.root, "train", download=False)
    per_epoch = steps_per_epoch(len(source), data.global_batch) * data.global_batch
    position, step, skipped = _saved_position(run_dir)
    for _ in range(done - step + _skipped_steps(run_dir, done) - skipped):
        position = position.advance(data.global_batch, per_epoch)
    sampler = ResumableSampler(len(source), recipe.seed, data.global_batch, data.global_batch, 0, 1, position)
    images = next(iter(sampler))
    path = run_dir / f"poison-{done + 1}.txt"
    head = f"# step {done + 1}, epoch {images[0][0]}: the {len(images)} images of its global batch, in order"
    more = "# loader processes (data.workers) were reading images of later steps at the same time"
    path.write_text("\n".join([head, more, *(source.name(index) for _, index in images)]) + "\n")
    return path
