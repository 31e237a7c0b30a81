"""Keys of a recipe that have no effect beside others, and are not refused: shipped recipes set some of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from dino_ds.config.flat import named_values
from dino_ds.config.recipe import Recipe
from dino_ds.config.schema import show_value


def idle_keys(recipe: Recipe, given: Iterable[str]) -> list[str]:
    """A line for each of the keys `given` that has no effect in this recipe, and why."""
    values = dict(named_values(recipe))
    found = {key: reason for key in given if key in _REASONS and (reason := _REASONS[key](recipe))}
    return [f"{key} {show_value(values[key])} has no effect: {reason}" for key, reason in found.items()]


def _no_warmup(recipe: Recipe) -> str:
    return "" if recipe.optimizer.warmup.value else "optimizer.warmup is 0"


def _constant(recipe: Recipe) -> str:
    return "optimizer.schedule is constant" if recipe.optimizer.schedule == "constant" else ""


def _no_mask(recipe: Recipe) -> str:
    return "crops.mask is none" if recipe.crops.mask == "none" else ""


def _no_local(recipe: Recipe) -> str:
    return "" if recipe.crops.num_local else "crops.num_local is 0"


def _local_size(recipe: Recipe) -> str:
    return _no_local(recipe) or ("crops.resolutions gives the sizes" if recipe.crops.resolutions else "")


def _no_temperature_warmup(recipe: Recipe) -> str:
    return "" if recipe.objective.teacher_temp_warmup.value else "objective.teacher_temp_warmup is 0"


def _no_prototypes(recipe: Recipe) -> str:
    """Terms of a user's own may have them."""
    how = recipe.objective
    has = how.dino_weight or how.ibot_weight or how.terms != "{}" or recipe.teacher.distill is not None
    return "" if has else "no loss has prototypes (objective.dino_weight and ibot_weight are 0)"


def _not_frozen(recipe: Recipe) -> str:
    never = not recipe.objective.freeze_prototypes.value
    return _no_prototypes(recipe) or ("objective.freeze_prototypes is 0" if never else "")


def _no_koleo(recipe: Recipe) -> str:
    return "" if recipe.objective.koleo_weight else "objective.koleo_weight is 0"


def _no_ibot(recipe: Recipe) -> str:
    return "" if recipe.objective.ibot_weight else "objective.ibot_weight is 0"


def _no_drop_path(recipe: Recipe) -> str:
    return "" if recipe.model.drop_path else "model.drop_path is 0"


_REASONS: dict[str, Callable[[Recipe], str]] = {
    "optimizer.warmup_shape": _no_warmup,
    "optimizer.min_lr": _constant,
    "crops.local_size": _local_size,
    "crops.local_scale": _no_local,
    "crops.mask_share": _no_mask,
    "crops.mask_ratio": _no_mask,
    "objective.warmup_teacher_temp": _no_temperature_warmup,
    "objective.frozen_prototypes": _not_frozen,
    "objective.koleo_ranks": _no_koleo,
    "objective.ibot_head": _no_ibot,
    "model.drop_path_growth": _no_drop_path,
    "model.stochastic_depth": _no_drop_path,
}
_REASONS |= dict.fromkeys(
    ("objective.teacher_temp", "objective.student_temp", "objective.centering", "objective.freeze_prototypes"),
    _no_prototypes,
)
_REASONS["head.prototypes"] = _no_prototypes
