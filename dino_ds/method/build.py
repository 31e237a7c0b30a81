"""From a recipe to what a training step is made of: components take plain numbers, this page knows which."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import nn

from dino_ds.config.crops import EMA, FROZEN, GRAM, teacher_sizes
from dino_ds.config.ds_config import DsConfig, PerformanceOptions
from dino_ds.config.fields import Ramp
from dino_ds.config.recipe import Recipe
from dino_ds.config.sections import HeadSection
from dino_ds.data.base import Source
from dino_ds.data.batches import LoaderOptions
from dino_ds.data.feed import Position
from dino_ds.data.image_cache import open_cache
from dino_ds.data.loader import Loader
from dino_ds.data.multicrop import MultiCrop
from dino_ds.data.normalisation import Normalisation
from dino_ds.data.prefetcher import DevicePrefetcher
from dino_ds.data.workers import check_shared_memory
from dino_ds.engine import distributed
from dino_ds.engine.device import DTYPES, device, set_convolutions, use_deterministic_kernels
from dino_ds.engine.engine import Engine
from dino_ds.engine.optim import OptimizerOptions
from dino_ds.engine.placement import Placement
from dino_ds.engine.schedules import Schedules, WeightSchedule
from dino_ds.errors import ConfigError
from dino_ds.method.backbone_checks import check_backbone, check_levers
from dino_ds.method.build_frozen import begin_centers, build_frozen, feature_terms, find_teacher
from dino_ds.method.build_gram import build_gram_teacher, build_gram_term, gram_schedule
from dino_ds.method.centering import Centering, RunningCenter, SinkhornKnopp
from dino_ds.method.dino import DINO, HEAD, DinoTerm
from dino_ds.method.ema import EmaTeacher, TeacherOptions
from dino_ds.method.gram import GRAM_TERM
from dino_ds.method.ibot import IBOT, IBOT_HEAD, IbotTerm
from dino_ds.method.koleo import KoLeoTerm
from dino_ds.method.objective import Objective, Term
from dino_ds.method.step import TrainingStep
from dino_ds.method.teacher import Teacher, Teachers
from dino_ds.models.attention import leave_out_cudnn_attention
from dino_ds.models.build import build_backbone
from dino_ds.models.head import DinoHead, RegressionHead
from dino_ds.models.network import Network, Query
from dino_ds.models.specs.backbones import BackboneOptions, ViTSpec
from dino_ds.models.weights import Placer, init_weights_in_pieces, take_drawn_weights
from dino_ds.weights.frozen import FrozenSource
from dino_ds.weights.start import InitialWeights, find_start
from dino_ds.weights.tensors import Weights


def build_step(
    recipe: Recipe, config: DsConfig, epoch_steps: int, start: tuple[str, Weights] | None = None
) -> TrainingStep:
    """Student, teachers and objective of a recipe, new, on this process group; every rank must call it.

    `start` as of `build_network`.
    """
    check_levers(recipe, config.performance)
    leave_out_cudnn_attention()
    if config.performance.deterministic:
        use_deterministic_kernels()
    if not isinstance(recipe.model.spec(), ViTSpec):  # crops have few sizes
        set_convolutions(fastest=not config.performance.deterministic, tf32=config.precision != "fp32")
    frozen = find_teacher(recipe)
    objective = build_objective(recipe, device(), frozen)
    network = build_network(recipe, config.performance, Placement(config), objective, start)
    if config.performance.compile != "off":
        # Segments, so that the engine finds plain modules; before it, so that its hooks stay outside.
        network.backbone.compile_segments(config.performance.compile)
    engine = Engine(network, config, OptimizerOptions.of(recipe.optimizer))
    teachers = build_teachers(recipe, config, engine, objective, frozen)
    schedules = build_schedules(recipe, epoch_steps)
    return TrainingStep(engine, teachers, objective, schedules, recipe.groups, recipe.seed)


def build_network(
    recipe: Recipe,
    performance: PerformanceOptions,
    place: Placer = lambda module: None,
    objective: Objective | None = None,
    start: tuple[str, Weights] | None = None,
) -> Network:
    """The student of a recipe, FP32, on the CPU; the same weights on every rank and whatever the performance options.

    `place` gets each module as soon as its weights are drawn: what it moves elsewhere is never in memory as a whole.
    It gives what the terms of `objective` need, None: the recipe's. start: the name of weights, and these, in the place
    of model.init_from's.
    Raises ConfigError for options that don't go with the backbone, CheckpointError for model.init_from that does not
    fit.
    """
    objective = objective or build_objective(recipe, torch.device("cpu"))
    network = build_meta(recipe, performance, objective.queries, objective.student_features())
    model = recipe.model
    check_backbone(recipe, network)
    if start is None and model.init_from is not None:
        start = model.init_from, find_start(model, recipe.data.known_range, Normalisation.of(recipe))
    if start is not None:
        source, weights = start
        place = InitialWeights(network, weights, source, place, model.pos_embed_interpolation)
        network.started_from = str(place)
    torch.manual_seed(recipe.seed)
    drawn = network.backbone.drawn()
    if drawn is not None:
        take_drawn_weights(network.backbone, drawn, place)
    for part in (*([] if drawn is not None else [network.backbone]), *network.heads().values()):
        init_weights_in_pieces(part, place)
    return network


def build_objective(recipe: Recipe, device: torch.device, frozen: FrozenSource | None = None) -> Objective:
    """The recipe's loss terms, with new running statistics, or those of the `frozen` teacher, None: found here."""
    how, teacher = recipe.objective, recipe.taught_by
    crops = len(teacher_sizes(recipe.groups, teacher))
    frozen = frozen or find_teacher(recipe)
    own = how.ibot_head == "own"
    terms: dict[str, Term] = {}

    def centering(name: str, prototypes: int) -> Centering:
        if how.centering == "sinkhorn":
            return SinkhornKnopp()
        return RunningCenter(name, prototypes, how.center_momentum, device)

    if frozen and recipe.regresses_features:
        terms |= feature_terms(recipe, frozen)
        how = how.model_copy(update={"dino_weight": 0, "ibot_weight": 0})
    if how.dino_weight:
        prototypes = recipe.head.prototypes
        weighs_local = how.dino_local_weight != Ramp(1.0)
        center = centering("center", prototypes)
        terms[DINO] = DinoTerm(prototypes, how.student_temp, center, crops, teacher, weighs_local)
    if how.ibot_weight:
        head, prototypes = (IBOT_HEAD, recipe.ibot_head.prototypes) if own else (HEAD, recipe.head.prototypes)
        terms[IBOT] = IbotTerm(prototypes, how.student_temp, centering("ibot_center", prototypes), head, teacher)
    if how.koleo_weight:
        terms["koleo"] = KoLeoTerm(crops, how.koleo_ranks == "all")
    if recipe.gram.weight:
        terms[GRAM_TERM] = build_gram_term(recipe)
    objective = Objective(terms)
    if frozen:
        begin_centers(objective, frozen)
    return objective


def build_teachers(
    recipe: Recipe, config: DsConfig, engine: Engine, objective: Objective, frozen: FrozenSource | None = None
) -> Teachers:
    """The EMA teacher of the engine's student, equal to it; the `frozen` one; Gram anchoring's, if it has its own."""
    network = build_meta(recipe, config.performance, objective.queries, objective.teacher_features(EMA))
    network = network.to_empty(device=device())
    with torch.no_grad():
        for tensor in (*network.parameters(), *network.buffers()):
            tensor.zero_()  # the student's values take their place
    weights = sum(p.numel() for p in network.parameters())
    options = TeacherOptions(
        DTYPES[config.precision],
        keep_copy=config.keeps_teacher_copy(device().type == "cuda", weights) and bool(teacher_sizes(recipe.groups)),
        compiled=config.performance.compile,
        batch_norm=recipe.teacher.batch_norm,
    )
    ema = EmaTeacher(network, engine.masters(), options, engine.buffers)
    teachers: dict[str, Teacher] = {EMA: ema}
    if frozen:
        teachers[FROZEN] = build_frozen(frozen, recipe, config, objective, build_head)
    if recipe.gram.weight and recipe.gram.teacher != EMA:
        like = build_meta(recipe, config.performance, {}, objective.teacher_features(GRAM))
        teachers[GRAM] = build_gram_teacher(recipe, config, like, ema.network)
    return Teachers(teachers, recipe.groups, exported=EMA)


def build_meta(
    recipe: Recipe, performance: PerformanceOptions, queries: Mapping[str, Query], outputs: Sequence[str]
) -> Network:
    """The network of a recipe that gives those of `queries` and of features that are `outputs`, weights without memory.

    Raises ConfigError for batched stochastic depth that grows by block, in compiled blocks.
    """
    model = recipe.model
    grows = model.stochastic_depth == "batched" and model.drop_path_growth == "linear" and model.drop_path
    if performance.compile != "off" and grows:
        raise ConfigError(
            "dino_ds.compile does not go with model.stochastic_depth batched that grows: each block keeps another "
            "number of crops and would be compiled anew; take model.drop_path_growth uniform, or remove one of the two"
        )
    sizes = {HEAD: recipe.head, IBOT_HEAD: recipe.ibot_head}
    options = BackboneOptions(
        model.drop_path,
        model.drop_path_growth,
        model.stochastic_depth,
        model.pos_embed_interpolation,
        performance.attention,
        performance.attention_backend,
        performance.packed,
        performance.cls_only_last_block,
        mask_token=recipe.hides_patches,
        sync_batch_norm=model.sync_batch_norm,
        rope_shift=model.rope_shift,
        rope_jitter=model.rope_jitter,
        rope_rescale=model.rope_rescale,
        channels_last=performance.channels_last,
    )
    with torch.device("meta"):
        backbone = build_backbone(model.spec(), recipe.crops.global_size, options)
        width, synced = backbone.spec.width, model.sync_batch_norm
        heads: dict[str, nn.Module] = {
            query.head: RegressionHead(width, query.width)
            if query.width
            else build_head(width, sizes[query.head], synced)
            for query in {query.head: query for query in queries.values()}.values()
        }
    asked = {name: query for name, query in queries.items() if name in outputs}
    features = [name for name in outputs if name not in queries]
    return Network(backbone, heads, asked, features, freezes_backbone=model.freeze_backbone.value > 0)


def build_head(width: int, head: HeadSection, sync_batch_norm: bool = True) -> DinoHead:
    """A recipe's head for features of `width`."""
    found = DinoHead(width, head.hidden, head.bottleneck, head.prototypes, head.layers, head.learned_lengths)
    found = found.free_prototypes() if head.free_prototypes else found
    return found.add_batch_norm(sync_batch_norm) if head.batch_norm else found


def build_schedules(recipe: Recipe, epoch_steps: int) -> Schedules:
    """The recipe's lengths in optimizer steps; an epoch is `epoch_steps` of them."""
    batch = recipe.data.global_batch
    objective, optimizer = recipe.objective, recipe.optimizer
    warmup = objective.teacher_temp_warmup
    weights = {"dino": objective.dino_weight, "ibot": objective.ibot_weight, "koleo": objective.koleo_weight}
    weights |= {"dino_local": objective.dino_local_weight}
    gram, gram_weight = gram_schedule(recipe, epoch_steps), _weight_schedule(recipe.gram.weight, batch, epoch_steps)
    of_gram = {GRAM_TERM: replace(gram_weight, begin=max(gram_weight.begin, gram.start))}
    by_epoch = warmup.unit == "epochs" and warmup.value == int(warmup.value)
    return Schedules(
        steps=recipe.length.in_steps(batch, epoch_steps),
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
        weights={name: _weight_schedule(ramp, batch, epoch_steps) for name, ramp in weights.items()} | of_gram,
        gram=gram,
    )


def _weight_schedule(ramp: Ramp, batch: int, epoch_steps: int) -> WeightSchedule:
    if ramp.length is None or ramp.end is None:
        return WeightSchedule(ramp.start, ramp.start, 1)
    begin = ramp.length.begin
    return WeightSchedule(ramp.start, ramp.end, ramp.length.in_steps(batch, epoch_steps) - begin, begin)


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
