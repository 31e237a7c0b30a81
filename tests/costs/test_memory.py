"""The predicted memory is that of the real network, engine and step."""

from __future__ import annotations

import gc
import itertools
from functools import partial

import pytest
import torch

from dino_ds.config.ds_config import PerformanceOptions
from dino_ds.costs.activations import MicroBatch, block_bytes
from dino_ds.costs.flops import tokens_of
from dino_ds.costs.memory import (
    GIB,
    Memory,
    bucket_bytes,
    count_parameters,
    estimate_memory,
    gradient_bytes,
    state_bytes,
)
from dino_ds.costs.objective import HeadSizes
from dino_ds.costs.parameters import group_sizes, parameter_sizes, recipe_sizes
from dino_ds.engine.optim import parameter_groups
from dino_ds.engine.process import init_distributed
from dino_ds.engine.recipe_optimizer import optimizer_options
from dino_ds.method.build import build_network
from dino_ds.models.drop_path import step_key
from dino_ds.models.head import DinoHead
from dino_ds.models.specs.backbones import BACKBONES, BackboneOptions, ViTSpec
from dino_ds.models.vit import VisionTransformer
from dino_ds.planning.measure.trial import build_trial, resolve, synthetic_inputs
from tests.engine import harness
from tests.planning.measure.tiny import tiny_ds, tiny_recipe
from tests.ranks import run_on_ranks
from tests.reference import by_group, dino_network
from tests.sample import sampled

# As many patches are hidden as is expected.
MASKS = {"crops.mask": "dinov3", "crops.mask_share": "1", "crops.mask_ratio": "0.3,0.3", "objective.ibot_weight": "1"}
IBOT = MASKS | {"ibot_head.hidden": "48", "ibot_head.bottleneck": "16"}
SHARED = MASKS | {"objective.ibot_head": "shared"}
ROTARY = {
    "model.backbone": "vit_small_plus_patch16_dinov3_qkvb", "model.local_cls_norm": "true", "model.rope_rescale": "2",
}  # fmt: skip
GRAM = {"gram.weight": "1", "gram.teacher": "snapshot", "head.free_prototypes": "true"}
PLAIN_ROPE = {"model.backbone": "vit_small_patch16_dinov3"}
ROPE = {"rope": "separate", "layer_scale": 1e-5, "registers": 4, "swiglu": True, "mlp_ratio": 6.0}
HEAD = HeadSizes(prototypes=harness.PROTOTYPES, hidden=48, bottleneck=16, layers=3)


@pytest.mark.parametrize("name", BACKBONES)
def test_parameters_are_counted_one_by_one(name):
    arch, head = BACKBONES[name], HeadSizes(500, 64, 32, 3)
    with torch.device("meta"):
        network = dino_network(VisionTransformer(arch, 224), DinoHead(arch.width, 64, 32, 500, 3))
    assert parameter_sizes(arch, 224, head) == {name: p.numel() for name, p in network.named_parameters()}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        IBOT | {"ibot_head.learned_lengths": "true", "model.registers": "2"},
        SHARED | {"head.learned_lengths": "true", "optimizer.layer_decay": "0.9", "optimizer.patch_embed_lr": "0.2"},
        IBOT | {"objective.dino_weight": "0", "objective.koleo_weight": "0.1", "model.freeze_backbone": "3 steps"},
        IBOT | {"optimizer.clip_by": "part", "optimizer.layer_decay": "0.9", "model.layer_scale": "1e-5"},
        ROTARY | IBOT | {"optimizer.layer_decay": "0.9", "optimizer.patch_embed_lr": "0.2"},
        {"objective.dino_weight": "0", "objective.koleo_weight": "0.1"},
    ],
    ids=lambda changes: ",".join(changes.values()),
)
def test_a_recipes_parameters_and_groups_are_those_of_its_network(changes):
    recipe = tiny_recipe(**changes)
    network = build_network(recipe, PerformanceOptions())
    assert recipe_sizes(recipe) == {name: p.numel() for name, p in network.named_parameters()}
    optimizer = recipe.optimizer
    options = optimizer_options(optimizer)
    groups = parameter_groups(network, options)
    assert sorted(group_sizes(recipe)) == sorted(sum(p.numel() for p in group["params"]) for group in groups)


def _saved_bytes(network, views) -> int:
    return _saved_by(partial(network, by_group(views)), network)


def _saved_by(run, network) -> int:
    """Of the storages that autograd keeps, but for the weights."""
    weights = {p.untyped_storage().data_ptr() for p in network.parameters()}
    found, kept = {}, []

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            found[storage.data_ptr()] = storage.nbytes()
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        kept.append(run())
    return sum(found.values())


KINDS = [{}, {"swiglu": True, "mlp_ratio": 5.0}, {"layer_scale": 1e-5, "registers": 4}, ROPE]


@pytest.mark.parametrize(
    ("dtype", "kind", "attention"),
    sampled(itertools.product((torch.float32, torch.bfloat16), KINDS, ("sdpa", "naive"))),
)
def test_activations_are_those_that_autograd_saves(dtype, kind, attention):
    """Exact in FP32; in bf16 a CPU keeps the norms' statistics in bf16 too, a GPU in FP32.

    DeepSpeed's linear function, which ZeRO 3 leaves in a process, keeps biases too: RoPE's are joined, no weight.
    """
    images, performance = 3, PerformanceOptions(attention=attention)
    views = [torch.randn(images, 3, 64, 64)] * 2 + [torch.randn(images, 3, 32, 32)] * 3

    def saved(depth: int, cls_only: bool) -> int:
        arch = ViTSpec(8, 64, depth, 4, **kind)
        network = VisionTransformer(arch, 64, BackboneOptions(attention=attention, cls_only_last_block=cls_only))
        return _saved_bytes(network.to(dtype), views)

    arch = ViTSpec(8, 64, 2, 4, **kind)
    groups = [(2 * images, tokens_of(arch, 64)), (3 * images, tokens_of(arch, 32))]
    whole = block_bytes(arch, groups, dtype.itemsize, performance)
    tokens = sum(s * n for s, n in groups)
    tolerance = 16 * tokens if dtype == torch.bfloat16 else 0
    tolerance += 3 * arch.width * dtype.itemsize if arch.rope else 0
    assert saved(2, False) - saved(1, False) == pytest.approx(whole, abs=tolerance)
    last = block_bytes(arch, groups, dtype.itemsize, performance, [1, 1])
    # With CLS only the final norm's input is the block's output itself, and indices of the CLS tokens are kept.
    assert saved(2, False) - saved(2, True) == pytest.approx(whole - last, abs=tolerance + 20 * 5 * images)


def _storages():
    gc.collect()
    tensors = [o for o in gc.get_objects() if type(o) in (torch.Tensor, torch.nn.Parameter)]
    return {t.untyped_storage().data_ptr(): t.untyped_storage() for t in tensors}


def _held_by_an_engine(stage: int, precision: str, accumulation: int, kind: str) -> tuple[int, int]:
    """(bytes between two steps, bytes of the prediction) of this rank."""
    before = _storages()  # kept, so that no address is used twice
    config = harness.ds_config(stage, precision, 8, accumulation)
    step = harness.build_step(config, options=harness.OPTIMIZERS[kind])
    harness.run_windows(step, 0, 2)
    held = sum(storage.nbytes() for pointer, storage in _storages().items() if pointer not in before)
    arch = step.teachers["ema"].network.backbone.arch
    sizes, ranks = parameter_sizes(arch, 32, HEAD), torch.distributed.get_world_size()
    predicted = sum(state_bytes(sizes, config, ranks, False, kind).values())
    if stage == 3:
        predicted += gradient_bytes(sizes, config, ranks, on_gpu=False) + bucket_bytes(config)
    return held, predicted


ENGINES = [(0, "fp32", 1), (1, "fp32", 2), (1, "bf16", 1), (2, "bf16", 2), (3, "fp32", 1), (3, "bf16", 2)]
ENGINES = [*((*engine, "adamw") for engine in ENGINES), (0, "fp32", 1, "sgd"), (2, "bf16", 1, "lars")]


@pytest.mark.parametrize(
    ("ranks", "stage", "precision", "accumulation", "kind"),
    sampled([(ranks, *engine) for engine in ENGINES for ranks in (2, 1)], lambda cell: (cell[0], cell[1:3], cell[-1])),
)
def test_state_is_what_the_engine_holds(stage, precision, accumulation, kind, ranks):
    """Within 2 %: DeepSpeed pads its shards, and there are the center and some counters."""
    if ranks == 1:
        init_distributed()
        found = [_held_by_an_engine(stage, precision, accumulation, kind)]
    else:
        found = run_on_ranks(_held_by_an_engine, stage, precision, accumulation, kind, world=ranks)
    for held, predicted in found:
        assert predicted == pytest.approx(held, rel=0.02)


def peak_bytes(recipe, config) -> int:
    """The largest sum of all tensors while a trial is built and takes two steps."""
    gc.collect()  # what earlier tests left must not be freed meanwhile
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        trial = build_trial(recipe, config)
        for _ in range(2):
            trial.run()
    records = profiler.profiler.kineto_results.events()  # type: ignore[union-attr]
    sizes = [event.nbytes() for event in sorted(records, key=lambda e: e.start_ns()) if event.name() == "[memory]"]
    return max(itertools.accumulate(sizes))


BF16 = {"bf16": {"enabled": True}}
PEAKS = [
    ({}, 131072, {}),
    ({"zero_optimization": {"stage": 2}, **BF16, "activation_checkpointing": {}}, 2048, {}),
    ({}, 32768, IBOT | {"ibot_head.prototypes": "16384", "objective.centering": "sinkhorn"}),
    ({"zero_optimization": {"stage": 1}, **BF16}, 16384, IBOT | {"optimizer.clip_by": "part"}),
    ({}, 64, ROTARY | IBOT),
    ({"zero_optimization": {"stage": 2}, **BF16}, 64, GRAM | PLAIN_ROPE | {"gram.crop_size": "128"}),
]
MORE_PEAKS = [
    ({"zero_optimization": {"stage": 0}, "dino_ds": {"attention": "naive"}}, 64, {}),
    ({}, 32768, SHARED | {"model.registers": "4"}),
    ({}, 64, {}),
    ({}, 16384, {}),
    ({"zero_optimization": {"stage": 1}, **BF16}, 2048, {}),
    ({"zero_optimization": {"stage": 0}, "activation_checkpointing": {"number_checkpoints": 2}}, 64, {}),
    ({}, 64, IBOT),
    ({}, 131072, SHARED | {"head.bottleneck": "256"}),
    ({"zero_optimization": {"stage": 2}, **BF16}, 16384, IBOT),
    ({"zero_optimization": {"stage": 2}, **BF16, "activation_checkpointing": {}}, 2048, ROTARY),
    ({}, 64, GRAM),
    ({}, 64, GRAM | {"gram.crop_size": "128", "gram.whole_batch": "true"}),
]


@pytest.mark.parametrize(
    ("sections", "prototypes", "terms"), [*PEAKS, *(pytest.param(*cell, marks=pytest.mark.full) for cell in MORE_PEAKS)]
)
@pytest.mark.slow
def test_the_peak_of_a_step_is_predicted(sections, prototypes, terms):
    """Within 6 %, whatever moment it is at: of a toy's 25 MB at the least, some 1.5 MB are short-lived copies."""
    init_distributed()
    ds = tiny_ds(0, **sections)
    changes = {"model.width": "96", "model.depth": "3", "crops.global_size": "64", "head.prototypes": str(prototypes)}
    recipe, config = resolve(tiny_recipe(**changes | terms), ds, "test.json", 16)
    predicted = estimate_memory(recipe, config, 1, on_gpu=False)
    assert predicted.gib * 2**30 == pytest.approx(peak_bytes(recipe, config), rel=0.06), predicted


@pytest.mark.parametrize(
    ("changes", "cls_only"),
    sampled(itertools.product((IBOT, SHARED | {"model.registers": "4"}, ROTARY | IBOT), (True, False))),
)
def test_with_patches_the_blocks_keep_what_autograd_saves(changes, cls_only):
    """Within 1 %: masks, indices of rows and the local crops' own norm are kept too. Heads and prototypes left out."""
    recipe = tiny_recipe(**changes, **{"model.depth": "2", "model.drop_path": "0"})
    _, config = resolve(recipe, tiny_ds(0, dino_ds={"cls_only_last_block": cls_only}), "test.json", 8)
    backbone = build_network(recipe, config.performance).backbone
    inputs = synthetic_inputs(recipe, 8, torch.device("cpu"))
    masks = {name: mask["mask"] for name, mask in inputs.masks.items()}
    run = partial(backbone, inputs.crops, None, ["global"], masks, step_key(0, 0))
    assert MicroBatch(recipe, config).in_backbone == pytest.approx(_saved_by(run, backbone), rel=0.01)


def test_sinkhorn_keeps_the_crops_and_the_teachers_rows_of_a_whole_step():
    recipe = tiny_recipe(**IBOT | {"objective.centering": "sinkhorn"})
    ds = tiny_ds(0, gradient_accumulation_steps=4)
    one, four = (MicroBatch(recipe, resolve(recipe, d, "x", n)[1]) for d, n in ((tiny_ds(0), 4), (ds, 16)))
    assert (four.crops, four.targets) == (4 * one.crops, 4 * one.targets)
    other = MicroBatch(tiny_recipe(**IBOT), resolve(recipe, ds, "x", 16)[1])
    assert (other.crops, other.targets) == (one.crops, one.targets)
    # 2 crops and 0.3 of their 32 patches, 16 wide.
    assert one.targets == pytest.approx(4 * 4 * 16 * (2 + 0.3 * 32), rel=1e-3)


def test_what_is_offloaded_is_not_on_the_gpu():
    recipe = tiny_recipe()
    zero = {"stage": 2, "offload_optimizer": {"device": "cpu"}}
    _, config = resolve(recipe, tiny_ds(0, zero_optimization=zero), "test.json", 8)
    here, host = (estimate_memory(recipe, config, 1, on_gpu=on_gpu) for on_gpu in (True, False))
    assert "masters and moments" not in here.parts
    assert host.parts["masters and moments"] == 12 * count_parameters(recipe)


def test_the_prediction_reads_as_one_line():
    memory = Memory("the loss", {"student": 3 * GIB, "teacher": GIB, "crops": GIB // 100})
    assert str(memory) == "4.01 GiB at the loss: student 3.00, teacher 1.00"
