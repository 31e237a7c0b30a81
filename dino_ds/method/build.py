"""Builds the parts of a training step from a recipe: components take plain values, which this module reads from it."""

from __future__ import annotations

import functools
from dataclasses import replace

import torch

from dino_ds.basics.hashing import crop_seed, seed_generators
from dino_ds.config.crops import EMA
from dino_ds.config.ds_values import DsConfig, PerformanceOptions
from dino_ds.config.fields import Ramp
from dino_ds.config.recipe import Recipe
from dino_ds.data.base import Source
from dino_ds.data.batches import LoaderOptions
from dino_ds.data.feed import Position
from dino_ds.data.image_cache import open_cache
from dino_ds.data.loader import Loader
from dino_ds.data.multicrop import MultiCrop
from dino_ds.data.prefetcher import DevicePrefetcher
from dino_ds.data.workers import check_shared_memory
from dino_ds.engine import distributed
from dino_ds.engine.device import device, set_convolutions, use_deterministic_kernels
from dino_ds.engine.engine import Engine
from dino_ds.engine.placement import Placement
from dino_ds.engine.schedules import Schedules, WeightSchedule
from dino_ds.errors import ConfigError
from dino_ds.method.build_frozen import begin_centers, find_teacher
from dino_ds.method.builders import build_teacher, build_term
from dino_ds.method.checks import check_backbone, check_levers, check_names, check_needs
from dino_ds.method.networks import build_meta, optimizer_options
from dino_ds.method.objective import Objective
from dino_ds.method.parts import TeacherParts, TermParts
from dino_ds.method.specs.of_recipe import teachers_of, terms_of
from dino_ds.method.specs.own import own_terms
from dino_ds.method.step import TrainingStep
from dino_ds.method.teacher import Teacher, Teachers
from dino_ds.models.attention import leave_out_cudnn_attention
from dino_ds.models.initialization import Placer, init_weights_in_pieces, take_drawn_weights
from dino_ds.models.network import Network
from dino_ds.models.specs.trained import ALL
from dino_ds.models.trained import TrainedPlacer
from dino_ds.weights.frozen import FrozenSource
from dino_ds.weights.start import InitialWeights, find_start
from dino_ds.weights.tensors import Weights


def build_step(
    recipe: Recipe, config: DsConfig, epoch_steps: int, start: tuple[str, Weights] | None = None
) -> TrainingStep:
    """Build student, teachers and objective of a recipe on this process group; every rank must call it.

    For `start` see `build_network`.
    """
    check_levers(recipe, config.performance)
    leave_out_cudnn_attention()
    if config.performance.deterministic:
        use_deterministic_kernels()
    if "channels_last" in recipe.model.spec().obeys:  # it has convolutions, and crops have few sizes
        set_convolutions(fastest=not config.performance.deterministic, tf32=config.precision != "fp32")
    frozen = find_teacher(recipe)
    objective = build_objective(recipe, device(), frozen)
    network = build_network(recipe, config.performance, Placement(config), objective, start)
    if config.performance.compile != "off":
        # By segments, so that the engine finds plain modules; before the engine, so that its hooks are not compiled.
        network.backbone.compile_segments(config.performance.compile)
    engine = Engine(network, config, optimizer_options(recipe.optimizer))
    engine.set_masters(network.began_with)
    network.began_with = {}
    teachers = build_teachers(recipe, config, engine, objective, frozen)
    schedules = build_schedules(recipe, epoch_steps)
    return TrainingStep(engine, teachers, objective, schedules, recipe.groups, recipe.seed)


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
    objective = objective or build_objective(recipe, torch.device("cpu"))
    network = build_meta(recipe, performance, objective.queries, objective.student_features())
    model = recipe.model
    check_backbone(recipe, network)
    if model.train != ALL:
        placer = TrainedPlacer(network, recipe.seed, placer)
    if start is None and model.init_from is not None:
        start = model.init_from, find_start(model, recipe.data.known_range)
    if start is not None:
        source, weights = start
        initial = InitialWeights(network, weights, source, placer, model.pos_embed_interpolation)
        network.started_from, network.began_with, placer = str(initial), initial.tensors, initial
    torch.manual_seed(recipe.seed)
    drawn = network.backbone.drawn()
    if drawn is not None:
        take_drawn_weights(network.backbone, drawn, placer)
    for part in (*([] if drawn is not None else [network.backbone]), *network.heads().values()):
        init_weights_in_pieces(part, placer)
    return network


def build_objective(recipe: Recipe, device: torch.device, frozen: FrozenSource | None = None) -> Objective:
    """The recipe's loss terms, with new running statistics, or those of the `frozen` teacher (None: the one that the
    recipe names, if any)."""
    source = frozen or find_teacher(recipe)
    parts = TermParts(recipe, device, source)
    for spec in own_terms(recipe.objective.terms):  # dino_ds's terms are checked with the recipe
        if problems := spec.problems(recipe):
            raise ConfigError("\n".join(f"loss term {spec.name}: {problem}" for problem in problems))
    seed_generators(crop_seed(recipe.seed, 0, -1))  # a user's term may draw while it is built
    terms = {spec.name: build_term(spec, parts) for spec in terms_of(recipe)}
    check_names(terms)
    objective = Objective(terms)
    check_needs(objective, recipe.groups, [teacher.name for teacher in teachers_of(recipe)])
    if source:
        begin_centers(objective, source)
    return objective


def build_teachers(
    recipe: Recipe, config: DsConfig, engine: Engine, objective: Objective, frozen: FrozenSource | None = None
) -> Teachers:
    """The teachers of a recipe, first the EMA teacher, equal to the engine's student; frozen: the one to distill."""
    parts = TeacherParts(recipe, config, engine, objective, frozen)
    teachers: dict[str, Teacher] = {}
    for spec in teachers_of(recipe):
        parts = replace(parts, ema=teachers[EMA].network if teachers else None)
        teachers[spec.name] = build_teacher(spec, parts)
    return Teachers(teachers, recipe.groups, exported=EMA)


def build_schedules(recipe: Recipe, epoch_steps: int) -> Schedules:
    """The recipe's schedules in optimizer steps; an epoch has `epoch_steps` steps."""
    batch = recipe.data.global_batch
    objective, optimizer = recipe.objective, recipe.optimizer
    warmup = objective.teacher_temp_warmup
    steps = recipe.length.in_steps(batch, epoch_steps)
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
    """A ramp in optimizer steps, 0 before the step `start`."""
    if ramp.length is None or ramp.end is None:
        return WeightSchedule(ramp.start, ramp.start, 1, start, start)
    begin = ramp.length.begin
    steps = ramp.length.in_steps(batch, epoch_steps) - begin
    return WeightSchedule(ramp.start, ramp.end, steps, max(begin, start), start)


def build_prefetcher(
    recipe: Recipe, source: Source, micro_batch: int, where: torch.device, start: Position
) -> DevicePrefetcher:
    """This rank's micro-batches on the device `where`, from `start` on; every rank calls it.

    Raises DataError where shared memory is too small, and ConfigError where a machine's ranks can't share a cache.
    """
    with distributed.raise_on_all_ranks():
        check_shared_memory(recipe.batch_bytes(micro_batch), recipe.data.workers)
    cache = open_cache(recipe.data.cache_gib, len(source))
    rank, ranks = distributed.rank(), distributed.world_size()
    options = LoaderOptions.of(recipe, micro_batch=micro_batch, rank=rank, world_size=ranks, device=where, cache=cache)
    loader = Loader(source, MultiCrop.of(recipe), options, start)
    return DevicePrefetcher(loader, where)
