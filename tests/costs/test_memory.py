"""The predicted memory is that of the real network, engine and step."""

from __future__ import annotations

import gc
import itertools

import pytest
import torch

from dino_ds.backbones import BACKBONES, BackboneOptions, ViTSpec
from dino_ds.config.ds_config import PerformanceOptions
from dino_ds.costs.flops import HeadSizes, tokens_of
from dino_ds.costs.memory import (
    GIB,
    Memory,
    block_bytes,
    bucket_bytes,
    count_parameters,
    estimate_memory,
    gradient_bytes,
    state_bytes,
)
from dino_ds.costs.parameters import parameter_sizes
from dino_ds.engine.process import init_distributed
from dino_ds.measure.trial import build_trial, resolve
from dino_ds.models.head import DinoHead
from dino_ds.models.vit import VisionTransformer
from tests.engine import harness
from tests.measure.tiny import tiny_ds, tiny_recipe
from tests.ranks import run_on_ranks
from tests.reference import by_group, dino_network
from tests.sample import sampled

HEAD = HeadSizes(prototypes=harness.PROTOTYPES, hidden=48, bottleneck=16, layers=3)


@pytest.mark.parametrize("name", BACKBONES)
def test_parameters_are_counted_one_by_one(name):
    arch, head = BACKBONES[name], HeadSizes(500, 64, 32, 3)
    with torch.device("meta"):
        network = dino_network(VisionTransformer(arch, 224), DinoHead(arch.width, 64, 32, 500, 3))
    assert parameter_sizes(arch, 224, head) == {name: p.numel() for name, p in network.named_parameters()}


def _saved_bytes(network, views) -> int:
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
        network(by_group(views))
    return sum(found.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", [{}, {"swiglu": True, "mlp_ratio": 5.0}, {"layer_scale": 1e-5, "registers": 4}])
@pytest.mark.parametrize("attention", ["sdpa", "naive"])
def test_activations_are_those_that_autograd_saves(dtype, kind, attention):
    """Exact in FP32; in bf16 a CPU keeps the norms' statistics in bf16 too, a GPU in FP32."""
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
    assert saved(2, False) - saved(1, False) == pytest.approx(whole, abs=tolerance)
    last = block_bytes(arch, groups, dtype.itemsize, performance, cls_only=True)
    # With CLS only the final norm's input is the block's output itself, and indices of the CLS tokens are kept.
    assert saved(2, False) - saved(2, True) == pytest.approx(whole - last, abs=tolerance + 20 * 5 * images)


def _storages():
    gc.collect()
    tensors = [o for o in gc.get_objects() if type(o) in (torch.Tensor, torch.nn.Parameter)]
    return {t.untyped_storage().data_ptr(): t.untyped_storage() for t in tensors}


def _held_by_an_engine(stage: int, precision: str, accumulation: int) -> tuple[int, int]:
    """(bytes between two steps, bytes of the prediction) of this rank."""
    before = _storages()  # kept, so that no address is used twice
    config = harness.ds_config(stage, precision, 8, accumulation)
    step = harness.build_step(config)
    harness.run_windows(step, 0, 2)
    held = sum(storage.nbytes() for pointer, storage in _storages().items() if pointer not in before)
    arch = step.teachers["ema"].network.backbone.arch
    sizes, ranks = parameter_sizes(arch, 32, HEAD), torch.distributed.get_world_size()
    predicted = sum(state_bytes(sizes, config, ranks, on_gpu=False).values())
    if stage == 3:
        predicted += gradient_bytes(sizes, config, ranks, on_gpu=False) + bucket_bytes(config)
    return held, predicted


ENGINES = [(0, "fp32", 1), (1, "fp32", 2), (1, "bf16", 1), (2, "bf16", 2), (3, "fp32", 1), (3, "bf16", 2)]


@pytest.mark.parametrize(
    ("ranks", "stage", "precision", "accumulation"),
    sampled([(ranks, *engine) for engine in ENGINES for ranks in (2, 1)], lambda cell: (cell[0], cell[1:3])),
)
def test_state_is_what_the_engine_holds(stage, precision, accumulation, ranks):
    """Within 2 %: DeepSpeed pads its shards, and there are the center and some counters."""
    if ranks == 1:
        init_distributed()
        found = [_held_by_an_engine(stage, precision, accumulation)]
    else:
        found = run_on_ranks(_held_by_an_engine, stage, precision, accumulation, world=ranks)
    for held, predicted in found:
        assert predicted == pytest.approx(held, rel=0.02)


def _peak_bytes(run) -> int:
    """The largest sum of all tensors while `run()` runs."""
    gc.collect()  # what earlier tests left must not be freed meanwhile
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        run()
    records = profiler.profiler.kineto_results.events()  # type: ignore[union-attr]
    sizes = [event.nbytes() for event in sorted(records, key=lambda e: e.start_ns()) if event.name() == "[memory]"]
    return max(itertools.accumulate(sizes))


@pytest.mark.parametrize(
    ("sections", "prototypes"),
    [
        ({}, 64),
        ({}, 16384),
        ({"zero_optimization": {"stage": 1}, "bf16": {"enabled": True}}, 2048),
        ({"zero_optimization": {"stage": 2}, "bf16": {"enabled": True}, "activation_checkpointing": {}}, 2048),
        ({"zero_optimization": {"stage": 0}, "activation_checkpointing": {"number_checkpoints": 2}}, 64),
        ({"zero_optimization": {"stage": 0}, "dino_ds": {"attention": "naive"}}, 64),
    ],
)
@pytest.mark.slow
def test_the_peak_of_a_step_is_predicted(sections, prototypes):
    """Within 5 %, whatever moment it is at."""
    init_distributed()
    ds = tiny_ds(0, **sections)
    changes = {"model.width": "96", "model.depth": "3", "crops.global_size": "64", "head.prototypes": str(prototypes)}
    recipe, config = resolve(tiny_recipe(**changes), ds, "test.json", 16)
    trials = []

    def run():
        trials.append(build_trial(recipe, config))
        for _ in range(2):
            trials[0].run()

    predicted = estimate_memory(recipe, config, 1, on_gpu=False)
    assert predicted.gib * 2**30 == pytest.approx(_peak_bytes(run), rel=0.05), predicted


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
