"""The first lines of a run's log: its images, length, engine and memory, and what is not as usual."""

from __future__ import annotations

from collections.abc import Iterable

from dino_ds import distributed
from dino_ds.config.flat import flat_values, lengths_without_unit
from dino_ds.config.recipe import Recipe
from dino_ds.costs.memory import Memory
from dino_ds.training.run import attention_kernels
from dino_ds.training.state import Run


def announce(run: Run, memory: Memory, notes: Iterable[str], resumed: bool) -> None:
    """Write them; `notes` are what was found while the run was built."""
    recipe, config, steps = run.recipe, run.config, run.step.schedules.steps
    data, device = recipe.data, run.step.engine.device
    compiled = ", compiled blocks" if config.performance.compile != "off" else ""
    stopping = f", stopping after step {run.last_step}" if run.last_step < steps else ""
    run.log.info(
        f"images   {run.images} in {data.root or data.source}; global batch {data.global_batch} = micro-batch "
        f"{config.micro_batch} x accumulation {config.accumulation} x ranks {distributed.world_size()}; "
        f"{run.epoch_steps} steps an epoch",
        f"length   {steps} steps = {steps * data.global_batch} images = {steps / run.epoch_steps:.1f} epochs{stopping}",
        f"engine   ZeRO {config.stage}, {config.precision}, {device}; run folder {run.path}",
        f"kernels  {attention_kernels(recipe, config, device)}{compiled}",
        f"memory   predicted peak {memory}",
        *_changed_values(recipe),
        *(
            f"note     {name} was given without a unit: steps; other units are written '100 epochs', '1e6 images'"
            for name in lengths_without_unit(recipe)
        ),
        *(f"note     {text}" for text in notes),
    )
    if resumed:
        position, done = run.state.position, run.step.applied_steps
        where = f"at step {done}, epoch {position.epoch}, image {position.samples}"
        run.log.info(f"resumed  {where if done else 'from the start: there is no checkpoint yet'}")


def _changed_values(recipe: Recipe) -> list[str]:
    """The recipe's values that are not the defaults, a line a section."""
    changed: dict[str, list[str]] = {}
    defaults = flat_values(Recipe())
    for name, value in flat_values(recipe).items():
        if value != defaults[name]:
            section, _, key = name.rpartition(".")
            changed.setdefault(section or "recipe", []).append(f"{key} {value}")
    return [f"{section:<10}{', '.join(values)}" for section, values in changed.items()]
