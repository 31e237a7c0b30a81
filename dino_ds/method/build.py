"""Builds the parts of a training step from a recipe: components take plain values, which this module reads from it.
Refuses options that do nothing for the backbone, and loss terms whose names clash or whose inputs are missing."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch

from dino_ds.basics.seeds import crop_seed, seed_generators
from dino_ds.config.crops import EMA, CropGroup, crop_sizes
from dino_ds.config.ds_schema import DsConfig, PerformanceOptions
from dino_ds.config.fields import Ramp
from dino_ds.config.recipe import Recipe
from dino_ds.data import batches, feed, image_cache, images, multicrop
from dino_ds.data.loader import DevicePrefetcher, Loader
from dino_ds.engine import distributed, masters
from dino_ds.engine.engine import Engine
from dino_ds.engine.process import device, use_deterministic_kernels
from dino_ds.engine.schedules import Schedules, WeightSchedule
from dino_ds.errors import ConfigError
from dino_ds.method import dino, ema, fast_paths, frozen, gram, spread, step
from dino_ds.method.networks import TeacherParts, TermParts, build_meta, optimizer_options
from dino_ds.method.objective import Needs, Objective, Term
from dino_ds.method.specs import ours
from dino_ds.method.specs.base import OF_EVERY_RUN, TeacherSpec, TermSpec
from dino_ds.method.specs.own import own_terms, teachers_of, terms_of
from dino_ds.method.teacher import Teacher, Teachers
from dino_ds.models import batch_norm, trained
from dino_ds.models.base import Placer, init_weights_in_pieces, take_drawn_weights
from dino_ds.models.network import Network
from dino_ds.models.specs.backbones import ALL
from dino_ds.weights.frozen import FrozenSource
from dino_ds.weights.layouts import Weights
from dino_ds.weights.start import InitialWeights, find_start

_LEVERS = {  # performance options that not every backbone obeys, and the networks that they are for
    **dict.fromkeys(("attention", "packed", "cls_only_last_block"), "ViTs that dino_ds builds itself"),
    "channels_last": "networks that dino_ds does not build itself",
}


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
    side = recipe.crops.global_size
    for term in (term for term in terms_of(recipe) if term.reads_patches):
        try:
            network.backbone.patch_grid(side, side)
        except ConfigError as error:
            raise ConfigError(f"{term.name}.weight is for patches: {error}; set it 0, or take a ViT") from None
    teacher, model = recipe.teacher.batch_norm, recipe.model
    if teacher == "reference" and not teachers_of(recipe)[0].sees and batch_norm.batch_norms(network):
        why = "teacher.batch_norm reference: in a distillation the EMA teacher sees no images"
        raise ConfigError(f"{why}, and its averages would never move: set it ema")
    if not batch_norm.batch_norms(network):
        if teacher not in ("auto", "reference"):
            raise ConfigError(f"teacher.batch_norm {teacher}: {model.backbone} has no BatchNorm; leave it out")
        if not model.sync_batch_norm:
            raise ConfigError(f"model.sync_batch_norm false: {model.backbone} has no BatchNorm; leave it out")


def check_levers(recipe: Recipe, performance: PerformanceOptions) -> None:
    """Raises ConfigError for performance options, other than the defaults, that do nothing for a recipe's backbone."""
    fitting = fitting_levers(recipe, performance)
    for name, kind in _LEVERS.items():
        value = getattr(performance, name)
        if value != getattr(fitting, name):
            shown = f"dino_ds.{name} {str(value).lower()}"
            raise ConfigError(f"{shown} is for {kind}: {recipe.model.backbone} has no use for it; leave it out")


def fitting_levers(recipe: Recipe, performance: PerformanceOptions) -> PerformanceOptions:
    """`performance` with defaults for the options that do nothing for a recipe's backbone."""
    defaults, idle = PerformanceOptions(), _LEVERS.keys() - recipe.model.spec().obeys
    return replace(performance, **{name: getattr(defaults, name) for name in idle})


def check_start(recipe: Recipe) -> None:
    """Raise ConfigError if a recipe would keep random statistics or weights as they are. It must name initial weights
    for a resumed run too, which does not read them."""
    if recipe.model.init_from is not None or recipe.stage_start is not None:
        return
    if recipe.teacher.batch_norm == "frozen":
        why = "teacher.batch_norm frozen keeps the statistics of the weights that a run starts from"
        raise ConfigError(f"{why}: give model.init_from, or take reference or ema")
    if recipe.model.train != ALL:
        why = f"model.train {recipe.model.train} leaves the other weights as they are, and these would be random"
        raise ConfigError(f"{why}: give model.init_from, or set model.train all")


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
                    why = f"loss term {name}: its {kind} {key} is {taken[key]} too, and one would be lost"
                    other = f"{name}_{key} (the name of the term's spec, and {key})"
                    raise ConfigError(f"{why}: give it another name, such as {other}")
                taken[key] = f"term {name}'s"


def check_needs(objective: Objective, groups: Iterable[CropGroup], teachers: Iterable[str]) -> None:
    """Raise ConfigError if a term reads a teacher that the run lacks, or a feature that its network lacks with these
    crops."""
    groups, teachers = list(groups), list(teachers)
    for name, term in objective.terms.items():
        if unknown := sorted(term.needs.teachers.keys() - set(teachers)):
            known = f"teachers here are {', '.join(teachers)}; teacher.others adds EMA teachers"
            raise ConfigError(f"loss term {name} reads teacher {unknown[0]}: {known}")
        readers = {"the student": term.needs.student} | {f"teacher {t}": n for t, n in term.needs.teachers.items()}
        for reader, output in ((reader, output) for reader, outputs in readers.items() for output in outputs):
            seen = [g for g in groups if (g.student if reader == "the student" else reader[8:] in g.teachers)]
            feature = objective.queries[output].feature if output in objective.queries else output
            reads, names = f"loss term {name} reads {output} of {reader}", [crops.name for crops in seen]
            kind, _, group = feature.partition("/")
            if feature != "cls" and (kind not in ("cls", "patches", "masked") or not group):
                kinds = "cls, cls/GROUP, patches/GROUP or masked/GROUP, or a query of the term"
                raise ConfigError(f"{reads}: a feature is {kinds}")
            if group and group not in names:
                raise ConfigError(f"{reads}, which sees {', '.join(names) or 'no'} crops and none of {group}")
            if not names:
                raise ConfigError(f"{reads}, which sees no crops: teachers of teacher.others see those of `sees`")
            if kind == "masked" and not next(crops for crops in seen if crops.name == group).masked:
                raise ConfigError(f"{reads}, and no patches of {group} crops are hidden: set crops.mask")


_BUILDERS: dict[type, Callable[[Any, Any], Any]] = {
    ours.DinoSpec: dino.build_prototype_term,
    ours.IbotSpec: dino.build_prototype_term,
    ours.FeatureSpec: frozen.build_features,
    ours.CodingRateSpec: lambda spec, parts: spread.CodingRateTerm(spec, parts.taught_crops),
    ours.KoLeoSpec: lambda spec, parts: spread.KoLeoTerm(parts.taught_crops, spec.ranks == "all"),
    ours.GramSpec: gram.build_gram,
    ours.PreserveSpec: lambda _, parts: frozen.PreserveTerm(parts.recipe.model.spec().patch_width > 0),
    ours.EmaSpec: ema.build_teacher,
    ours.FrozenSpec: frozen.build_teacher,
    ours.GramTeacherSpec: gram.build_teacher,
    ours.StartSpec: frozen.build_start_teacher,
}


def build_by_spec(spec: TermSpec | TeacherSpec, parts: TermParts | TeacherParts) -> Any:
    """Build the loss term of a spec, or its teacher on this process's device, by the nearest class of its spec that has
    a build method (users' classes) or a builder (dino_ds's classes). Every rank calls it. Raises ConfigError."""
    method = "build" if isinstance(spec, TermSpec) else "build_teacher"
    for kind in type(spec).__mro__:
        if method in vars(kind) and kind not in (TermSpec, TeacherSpec):
            return getattr(spec, method)(parts)
        if kind in _BUILDERS:
            return _BUILDERS[kind](spec, parts)
    raise ConfigError(f"{type(spec).__name__} has no build: give it one, which returns the term or teacher")


def build_step(
    recipe: Recipe, config: DsConfig, epoch_steps: int, start: tuple[str, Weights] | None = None
) -> step.TrainingStep:
    """Build student, teachers and objective of a recipe; every rank must call it. `start`: as in `build_network`."""
    check_levers(recipe, config.performance)
    # Torch prefers cuDNN's attention on Hopper. With one query, as in the last block, its gradients may be NaN on an
    # H200 (NVIDIA/cudnn-frontend#1072).
    torch.backends.cuda.enable_cudnn_sdp(False)
    if config.performance.deterministic:
        use_deterministic_kernels()
    if "channels_last" in recipe.model.spec().obeys:  # it has convolutions, and crops have few sizes
        torch.backends.cudnn.benchmark = not config.performance.deterministic  # times kernels, takes the fastest
        torch.backends.cudnn.allow_tf32 = config.precision != "fp32"  # of convolutions; torch's default is True
    source = frozen.find_teacher(recipe)
    objective = build_objective(recipe, device(), source)
    config = fast_paths.settle(
        fast_paths.Case(recipe, config, device(), functools.partial(build_network, objective=objective))
    )
    network = build_network(recipe, config.performance, masters.Placement(config), objective, start)
    if config.performance.compile != "off":
        # By segments, so that the engine finds plain modules; before the engine, so that its hooks are not compiled.
        network.backbone.compile_segments(config.performance.compile)
    engine = Engine(network, config, optimizer_options(recipe.optimizer))
    engine.set_masters(network.began_with)
    network.began_with = {}
    teachers = build_teachers(recipe, config, engine, objective, source)
    schedules = build_schedules(recipe, epoch_steps)
    return step.TrainingStep(engine, teachers, objective, schedules, recipe.groups, recipe.seed)


def build_network(
    recipe: Recipe,
    performance: PerformanceOptions,
    placer: Placer = lambda module: None,
    objective: Objective | None = None,
    start: tuple[str, Weights] | None = None,
) -> Network:
    """The student of a recipe, FP32, on the CPU; the same weights on every rank and whatever the performance options.

    Args:
        placer: called with each module once its weights are initialized; if it moves modules elsewhere, the whole
            network is never in memory.
        objective: loss terms, whose inputs the network must output; None: the recipe's terms.
        start: name and tensors of weights to begin with, instead of those of model.init_from.

    Raises ConfigError for options that don't go with the backbone, CheckpointError for model.init_from that does not
    fit.
    """
    model, objective = recipe.model, objective or build_objective(recipe, torch.device("cpu"))
    network = build_meta(recipe, performance, objective.queries, objective.student_features())
    check_backbone(recipe, network)
    if model.train != ALL:
        placer = trained.TrainedPlacer(network, recipe.seed, placer)
    if start is None and model.init_from is not None:
        start = model.init_from, find_start(model, recipe.data.known_range)
    if start is not None:
        source, weights = start
        placer = initial = InitialWeights(network, weights, source, placer, model.pos_embed_interpolation)
        network.started_from, network.began_with = str(initial), initial.tensors
    torch.manual_seed(recipe.seed)
    if (drawn := network.backbone.drawn()) is not None:
        take_drawn_weights(network.backbone, drawn, placer)
    else:
        init_weights_in_pieces(network.backbone, placer)
    for head in network.heads().values():
        init_weights_in_pieces(head, placer)
    return network


def build_objective(recipe: Recipe, device: torch.device, source: FrozenSource | None = None) -> Objective:
    """The recipe's loss terms, with new running statistics, or those that the training of the frozen teacher `source`
    saved (None: the one that the recipe names, if any)."""
    source = source or frozen.find_teacher(recipe)
    parts = TermParts(recipe, device, source)
    for spec in own_terms(recipe.objective.terms):  # dino_ds's terms are checked with the recipe
        if problems := spec.problems(recipe):
            raise ConfigError("\n".join(f"loss term {spec.name}: {problem}" for problem in problems))
    seed_generators(crop_seed(recipe.seed, 0, -1))  # a user's term may draw while it is built
    terms: dict[str, Term] = {spec.name: build_by_spec(spec, parts) for spec in terms_of(recipe)}
    check_names(terms)
    objective = Objective(terms)
    check_needs(objective, recipe.groups, [teacher.name for teacher in teachers_of(recipe)])
    centers = source.centers if source else {}
    for name, statistic in objective.statistics.items():
        if name in centers and centers[name].shape == statistic.value.shape:
            statistic.load(centers[name])
    return objective


def build_teachers(
    recipe: Recipe, config: DsConfig, engine: Engine, objective: Objective, source: FrozenSource | None = None
) -> Teachers:
    """The teachers of a recipe, first the EMA teacher, equal to the student. source: the frozen teacher to distill."""
    parts = TeacherParts(recipe, config, engine, objective, source)
    teachers: dict[str, Teacher] = {}
    for spec in teachers_of(recipe):
        parts = replace(parts, ema=teachers[EMA].network if teachers else None)
        teachers[spec.name] = build_by_spec(spec, parts)
    return Teachers(teachers, recipe.groups)


def build_schedules(recipe: Recipe, epoch_steps: int) -> Schedules:
    """The recipe's schedules in optimizer steps; an epoch has `epoch_steps` steps."""
    batch, objective, optimizer = recipe.data.global_batch, recipe.objective, recipe.optimizer
    steps, warmup = recipe.length.in_steps(batch, epoch_steps), objective.teacher_temp_warmup
    weights: dict[str, WeightSchedule] = {}
    for term in terms_of(recipe):
        start = term.start.in_steps(batch, epoch_steps)
        weights[term.name] = _weight_schedule(term.weight, batch, epoch_steps, start)
        weights |= {name: _weight_schedule(ramp, batch, epoch_steps) for name, ramp in term.scheduled.items()}
    teachers = teachers_of(recipe)
    replaced = {spec.name: spec.replaced_after(recipe, epoch_steps) for spec in teachers}
    followers = [spec for spec in teachers if spec.name != EMA and spec.follows]
    by_epoch = warmup.unit == "epochs" and warmup.value == int(warmup.value)
    return Schedules(
        steps=steps,
        lr=recipe.peak_lr,
        min_lr=optimizer.min_lr,
        warmup_steps=optimizer.warmup.in_steps(batch, epoch_steps),
        warmup_shape=optimizer.warmup_shape,
        constant=optimizer.schedule == "constant",
        weight_decay=optimizer.weight_decay,
        weight_decay_end=optimizer.weight_decay_end,
        momentum=recipe.teacher.momentum,
        momentum_end=recipe.teacher.momentum_end,
        teacher_temp=objective.teacher_temp,
        warmup_teacher_temp=objective.warmup_teacher_temp,
        teacher_temp_treads=int(warmup.value) if by_epoch else warmup.in_steps(batch, epoch_steps),
        teacher_temp_tread_steps=epoch_steps if by_epoch else 1,
        freeze_steps=objective.freeze_prototypes.in_steps(batch, epoch_steps),
        freeze_backbone_steps=recipe.model.freeze_backbone.in_steps(batch, epoch_steps),
        frozen_prototypes=objective.frozen_prototypes,
        weights=weights,
        momenta={spec.name: functools.partial(spec.momentum_at, steps=steps) for spec in followers},
        replacements={name: when for name, when in replaced.items() if when is not None},
    )


def _weight_schedule(ramp: Ramp, batch: int, epoch_steps: int, start: int = 0) -> WeightSchedule:
    if ramp.length is None or ramp.end is None:
        return WeightSchedule(ramp.start, ramp.start, 1, start, start)
    steps = ramp.length.in_steps(batch, epoch_steps) - ramp.length.begin
    return WeightSchedule(ramp.start, ramp.end, steps, max(ramp.length.begin, start), start)


def build_prefetcher(
    recipe: Recipe, source: images.Source, micro_batch: int, where: torch.device, start: feed.Position
) -> DevicePrefetcher:
    """This rank's micro-batches on the device `where`, from `start` on; every rank calls it. Raises DataError where
    shared memory is too small, and ConfigError where a machine's ranks can't share a cache."""
    with distributed.raise_on_all_ranks():
        batches.check_shared_memory(recipe.batch_bytes(micro_batch), recipe.data.workers)
    cache = image_cache.open_cache(recipe.data.cache_gib, len(source))
    rank, ranks = distributed.rank(), distributed.world_size()
    options = batches.LoaderOptions.of(
        recipe, micro_batch=micro_batch, rank=rank, world_size=ranks, device=where, cache=cache
    )
    loader = Loader(source, multicrop.MultiCrop.of(recipe), options, start)
    return DevicePrefetcher(loader, where)
