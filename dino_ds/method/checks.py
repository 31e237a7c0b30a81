"""Refuses options that do nothing for the backbone, and loss terms whose names clash or whose inputs are missing."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping

from dino_ds.config.crops import CropGroup, crop_sizes
from dino_ds.config.ds_values import PerformanceOptions
from dino_ds.config.recipe import Recipe
from dino_ds.errors import ConfigError
from dino_ds.method.objective import Needs, Objective, Term
from dino_ds.method.specs.base import OF_EVERY_RUN, TermSpec
from dino_ds.method.specs.of_recipe import teachers_of, terms_of
from dino_ds.models.batch_norm import batch_norms
from dino_ds.models.network import Network
from dino_ds.models.specs.trained import ALL

_VITS, _OTHERS = "ViTs that dino_ds builds itself", "networks that dino_ds does not build itself"
_LEVERS = {
    **dict.fromkeys(("attention", "packed", "cls_only_last_block"), _VITS),
    "channels_last": _OTHERS,
}
"""Performance options that not every backbone obeys, and the networks that they are for."""


def check_backbone(recipe: Recipe, network: Network) -> None:
    """Raise ConfigError for a network that can't be trained at all or on the recipe's crops, and for settings of
    BatchNorm that have no effect on it."""
    network.backbone.check_trainable()
    keys = "crops.resolutions" if recipe.crops.resolutions else "crops.global_size or crops.local_size"
    for side in {side: None for resolution in recipe.resolutions for side in crop_sizes(recipe.groups_of(resolution))}:
        try:
            network.backbone.check_image(side, side)
        except ConfigError as error:
            raise ConfigError(f"{error}; change {keys}") from None
    for term in terms_of(recipe):
        if term.reads_patches:
            _check_patches(term, recipe, network)
    _check_batch_norm(recipe, network)


def check_levers(recipe: Recipe, performance: PerformanceOptions) -> None:
    """Raises ConfigError for performance options, other than the defaults, that do nothing for a recipe's backbone."""
    fitting = fitting_levers(recipe, performance)
    for name, kind in _LEVERS.items():
        value = getattr(performance, name)
        if value != getattr(fitting, name):
            shown = str(value).lower()
            raise ConfigError(
                f"dino_ds.{name} {shown} is for {kind}: {recipe.model.backbone} has no use for it; leave it out"
            )


def fitting_levers(recipe: Recipe, performance: PerformanceOptions) -> PerformanceOptions:
    """`performance` with defaults for the options that do nothing for a recipe's backbone."""
    defaults, idle = PerformanceOptions(), _LEVERS.keys() - recipe.model.spec().obeys
    return dataclasses.replace(performance, **{name: getattr(defaults, name) for name in idle})


def check_start(recipe: Recipe) -> None:
    """Raise ConfigError if a new run would keep random statistics or weights as they are; a resumed run has its own,
    and does not read the weights that it began with."""
    train = recipe.model.train
    if recipe.model.init_from is not None or recipe.stage_start is not None:
        return
    if recipe.teacher.batch_norm == "frozen":
        raise ConfigError(
            "teacher.batch_norm frozen keeps the statistics of the weights that a run starts from: give "
            "model.init_from, or take reference or ema"
        )
    if train != ALL:
        raise ConfigError(
            f"model.train {train} leaves the other weights as they are, and these would be random: give "
            "model.init_from, or set model.train all"
        )


def _check_patches(term: TermSpec, recipe: Recipe, network: Network) -> None:
    """Raises ConfigError for a backbone that has no patches for a term."""
    side = recipe.crops.global_size
    try:
        network.backbone.patch_grid(side, side)
    except ConfigError as error:
        raise ConfigError(f"{term.name}.weight is for patches: {error}; set it 0, or take a ViT") from None


def _check_batch_norm(recipe: Recipe, network: Network) -> None:
    """Raise ConfigError for settings of BatchNorm that have no effect."""
    teacher, model = recipe.teacher.batch_norm, recipe.model
    if teacher == "reference" and not teachers_of(recipe)[0].sees and batch_norms(network):
        raise ConfigError(
            "teacher.batch_norm reference: in a distillation the EMA teacher sees no images, and its averages would "
            "never move: set it ema"
        )
    if not batch_norms(network):
        if teacher not in ("auto", "reference"):
            raise ConfigError(f"teacher.batch_norm {teacher}: {model.backbone} has no BatchNorm; leave it out")
        if not model.sync_batch_norm:
            raise ConfigError(f"model.sync_batch_norm false: {model.backbone} has no BatchNorm; leave it out")


def check_names(terms: Mapping[str, Term]) -> None:
    """Raise ConfigError if there is no term, or if the name of a term's scalar or statistic is taken already."""
    if not terms:
        raise ConfigError("objective: all weights are 0, those of objective.terms too: give one above 0")
    owners = dict.fromkeys(OF_EVERY_RUN, "every run's metrics") | {f"{name}_loss": f"term {name}'s" for name in terms}
    statistics: dict[str, str] = {}
    for name, term in terms.items():
        if not isinstance(term, Term) or not isinstance(getattr(term, "needs", None), Needs):
            raise ConfigError(f"loss term {name}: build() gave a {type(term).__name__}: return a Term that has `needs`")
        for kind, names, taken in (("scalar", term.scalars, owners), ("statistic", term.statistics, statistics)):
            for key in names:
                if key in taken:
                    raise ConfigError(
                        f"loss term {name}: its {kind} {key} is {taken[key]} too, and one would be lost: give it "
                        f"another name, such as {name}_{key}, which may be made of its spec's name"
                    )
                taken[key] = f"term {name}'s"


def check_needs(objective: Objective, groups: Iterable[CropGroup], teachers: Iterable[str]) -> None:
    """Raise ConfigError if a term reads a teacher that the run lacks, or a feature that the student or that teacher
    does not have with these crops."""
    groups, teachers = list(groups), list(teachers)
    for name, term in objective.terms.items():
        if unknown := sorted(term.needs.teachers.keys() - set(teachers)):
            raise ConfigError(
                f"loss term {name} reads teacher {unknown[0]}: teachers here are {', '.join(teachers)}; teacher.others "
                "adds EMA teachers"
            )
        readers = {"the student": term.needs.student} | {f"teacher {t}": n for t, n in term.needs.teachers.items()}
        for reader, outputs in readers.items():
            seen = [g for g in groups if (g.student if reader == "the student" else reader[8:] in g.teachers)]
            for output in outputs:
                feature = objective.queries[output].feature if output in objective.queries else output
                _check_feature(f"loss term {name} reads {output} of {reader}", feature, seen)


def _check_feature(reads: str, feature: str, seen: list[CropGroup]) -> None:
    kind, _, group = feature.partition("/")
    names = [crops.name for crops in seen]
    if feature != "cls" and (kind not in ("cls", "patches", "masked") or not group):
        raise ConfigError(
            f"{reads}: a feature is cls, cls/GROUP, patches/GROUP or masked/GROUP, or a query of the term"
        )
    if group and group not in names:
        raise ConfigError(f"{reads}, which sees {', '.join(names) or 'no'} crops and none of {group}")
    if not names:
        raise ConfigError(f"{reads}, which sees no crops: teachers of teacher.others see those of `sees`")
    if kind == "masked" and not next(crops for crops in seen if crops.name == group).masked:
        raise ConfigError(f"{reads}, and no patches of {group} crops are hidden: set crops.mask")
