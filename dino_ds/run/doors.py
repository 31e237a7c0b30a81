"""The two functions by which training calls packages of higher layers, which are imported only when a run needs them.

They choose the ds config of a start, and build the evaluations and pictures of a run. `tests/test_layers.py` lists the
modules of the training layers that may name a higher package.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from dino_ds.basics.own_code import by_name
from dino_ds.config.ds_values import DsConfig
from dino_ds.config.recipe import Recipe
from dino_ds.data.base import Source
from dino_ds.health.files import Event
from dino_ds.run.run import AtStep
from dino_ds.run.train_options import TrainOptions


@dataclass(frozen=True)
class Chosen:
    """The ds config of a start, with its predicted memory.

    said: how the config was chosen, "" if the user named it; memory: the log's event about the prediction; trained: the
    part of the weights that is trained, in words, "" for all; predicted_gib: of a rank, None if it is not estimated;
    check_fits: raises ConfigError, with a config that fits, if the prediction exceeds the machine's memory.
    """

    config: DsConfig
    said: str
    memory: Event
    trained: str
    predicted_gib: float | None
    check_fits: Callable[[], None]


def choose_ds_config(
    recipe: Recipe, options: TrainOptions, ds: Mapping[str, Any], path: str, overrides: Mapping[str, Any] | None
) -> Chosen:
    """The ds config of a start, the same on all ranks; `overrides` as in `train`. Raises ConfigError."""
    chosen: Chosen = by_name("planning.start:choose_ds_config")(recipe, options, ds, path, overrides)
    return chosen


def build_periodic_tasks(recipe: Recipe, source: Source, epoch_steps: int) -> tuple[AtStep | None, AtStep | None]:
    """Evaluations and pictures of a run, each None where the recipe asks for none. Every rank must call it."""
    evaluations = pictures = None
    if recipe.eval.every.value:
        evaluations = by_name("evals.runner:EvalRunner").build(recipe, source, epoch_steps)
    if recipe.eval.pictures_every == "auto" or recipe.eval.pictures_every.value:
        pictures = by_name("report.pictures:PeriodicPictures").build(recipe, source, epoch_steps)
    return evaluations, pictures
