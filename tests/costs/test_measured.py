"""What is measured on the meta device is what real networks, engines and steps hold and compute."""

from __future__ import annotations

import gc
import itertools
from functools import partial

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from dino_ds.config.ds_config import PerformanceOptions
from dino_ds.costs.activations import MicroBatch
from dino_ds.costs.flops import recipe_step_flops
from dino_ds.costs.measured import FORMULAS, measure, measure_student, parameters_of
from dino_ds.costs.memory import estimate_memory
from dino_ds.costs.parameters import copied_names, group_sizes, recipe_sizes
from dino_ds.engine.optim import parameter_groups
from dino_ds.engine.process import init_distributed
from dino_ds.engine.recipe_optimizer import optimizer_options
from dino_ds.errors import NotEstimated
from dino_ds.method.build import build_network
from dino_ds.planning.measure.trial import build_trial, resolve, synthetic_inputs
from dino_ds.planning.work import Work
from tests.costs.cnn import CONVNEXT, NETWORKS, RESNET, cnn_recipe
from tests.costs.test_memory import _saved_by, peak_bytes
from tests.planning.measure.tiny import tiny_ds
from tests.sample import sampled

BF16 = {"zero_optimization": {"stage": 1}, "bf16": {"enabled": True}}


@pytest.mark.parametrize("changes", [{}, {"head.batch_norm": "true", "optimizer.layer_decay": "0.9"}])
@pytest.mark.parametrize("network", NETWORKS.values(), ids=NETWORKS)
def test_parameters_and_groups_are_those_of_the_network(network, changes):
    recipe = cnn_recipe(network, **changes)
    built = build_network(recipe, PerformanceOptions())
    assert recipe_sizes(recipe) == {name: p.numel() for name, p in built.named_parameters()}
    groups = parameter_groups(built, optimizer_options(recipe.optimizer))
    assert sorted(group_sizes(recipe)) == sorted(sum(p.numel() for p in group["params"]) for group in groups)


@pytest.mark.slow
@pytest.mark.parametrize("network", NETWORKS.values(), ids=NETWORKS)
def test_the_low_precision_copy_is_of_the_same_tensors(network):
    recipe = cnn_recipe(network)
    _, config = resolve(recipe, tiny_ds(1, bf16={"enabled": True}, dino_ds={"teacher_copy": True}), "x", 4)
    init_distributed()
    teacher = build_trial(recipe, config).step.teachers["ema"]
    copied = {name for name, p in teacher._running.named_parameters() if p.dtype == torch.bfloat16}
    assert copied == copied_names(recipe)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("network", "sections"),
    sampled(itertools.product(NETWORKS.values(), ({}, {"bf16": {"enabled": True}}, {"activation_checkpointing": {}}))),
)
def test_the_backbone_keeps_what_autograd_saves(network, sections):
    """Within 2 %: BatchNorm's averages are kept too, of a step whose maps are small."""
    recipe = cnn_recipe(network)
    _, config = resolve(recipe, tiny_ds(1 if "bf16" in sections else 0, **sections), "test.json", 6)
    backbone = build_network(recipe, config.performance).backbone.train()
    if "bf16" in sections:
        for parameter in backbone.parameters():
            parameter.data = parameter.data.bfloat16()
    backbone.checkpoint_segments(None if "activation_checkpointing" in sections else 0)
    inputs = synthetic_inputs(recipe, 6, torch.device("cpu"))
    saved = _saved_by(partial(backbone, inputs.crops), backbone)
    assert MicroBatch(recipe, config).in_backbone == pytest.approx(saved, rel=0.02)


class _Flops(TorchDispatchMode):
    """FLOPs of real operators."""

    def __init__(self) -> None:
        super().__init__()
        self.found = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func._overloadpacket in FORMULAS:
            self.found += FORMULAS[func._overloadpacket](*args, **(kwargs or {}), out_val=result)
        elif func._overloadpacket == torch.ops.aten.addmm_:
            self.found += 2 * args[1].shape[0] * args[1].shape[1] * args[2].shape[1]
        return result


@pytest.mark.slow
@pytest.mark.parametrize("network", NETWORKS.values(), ids=NETWORKS)
def test_a_training_step_computes_what_is_counted(network):
    """Exactly: engine, loss, optimizer and teacher add no matrix product."""
    init_distributed()
    recipe, config = resolve(cnn_recipe(network, head__layers="2"), tiny_ds(0), "test.json", 4)
    trial = build_trial(recipe, config)
    with _Flops() as counted:
        trial.run()
    assert counted.found == 4 * sum(recipe_step_flops(recipe, False).values())


def test_grouped_convolutions_cost_twice_their_forward_pass():
    """torch's own formula takes their gradient for that of dense ones. The first convolution's images need none."""
    found = measure_student(cnn_recipe(CONVNEXT))
    assert 2.8 * found.forward_flops < found.flops < 3 * found.forward_flops


@pytest.mark.slow
@pytest.mark.parametrize(
    ("network", "sections", "prototypes"),
    [
        pytest.param(RESNET, {}, "64", marks=pytest.mark.full),
        pytest.param(CONVNEXT, {}, "64", marks=pytest.mark.full),
        (RESNET, {"activation_checkpointing": {}}, "64"),
        (RESNET, BF16, "2048"),
        (CONVNEXT, {}, "32768"),
    ],
)
def test_the_peak_of_a_step_is_predicted(network, sections, prototypes):
    """Within 6 %, as of ViTs, or 3.2 MB: oneDNN takes 2.9 MB beside its tensors for a depthwise convolution."""
    init_distributed()
    recipe, config = resolve(cnn_recipe(network, head__prototypes=prototypes), tiny_ds(0, **sections), "test.json", 16)
    predicted = estimate_memory(recipe, config, 1, on_gpu=False)
    assert predicted.gib * 2**30 == pytest.approx(peak_bytes(recipe, config), rel=0.06, abs=3.2e6), predicted


def test_memory_grows_with_the_images_and_shrinks_with_recomputation():
    recipe = cnn_recipe(RESNET)
    few, many, again = (
        MicroBatch(recipe, resolve(recipe, tiny_ds(0, **more), "x", images)[1])
        for images, more in ((8, {}), (16, {}), (16, {"activation_checkpointing": {}}))
    )
    assert many.in_backbone == pytest.approx(2 * few.in_backbone, rel=0.01)
    assert max(one.activations for one in again.backward) < max(one.activations for one in many.backward)
    config = resolve(recipe, tiny_ds(0, activation_checkpointing={}), "x", 16)[1]
    assert 0 < Work.of(recipe, config).again.flops < Work.of(recipe, config).flops["student_backbone"] / 2


def test_what_others_leave_to_the_collector_is_not_counted():
    """As a dropped engine of DeepSpeed's: it computes when it is found, and leaves another to be found then."""

    class Dropped:
        def __init__(self, *held):
            self.held = [self, *held]

        def __del__(self):
            self.result = torch.ones(2) + 1

    recipe = cnn_recipe(RESNET)
    alone = measure_student(recipe)
    measure.cache_clear()
    gc.disable()
    try:
        Dropped(Dropped())
        assert measure_student(recipe) == alone
    finally:
        gc.enable()


def test_what_cannot_be_measured_is_said(tmp_path, monkeypatch):
    """A network that looks at values while it trains."""
    (tmp_path / "looking.py").write_text(
        "import torch\n"
        "class Net(torch.nn.Module):\n"
        "    def __init__(self, in_chans):\n"
        "        super().__init__()\n"
        "        self.conv = torch.nn.Conv2d(in_chans, 8, 4, 4)\n"
        "    def forward(self, x):\n"
        "        x = self.conv(x)\n"
        "        return x * x.sum().item() if self.training else x\n"
    )
    monkeypatch.chdir(tmp_path)
    recipe = cnn_recipe({"model.backbone": "looking:Net"})
    assert parameters_of(recipe.model.spec(), 64).shapes
    with pytest.raises(NotEstimated, match="not estimated"):
        measure_student(recipe)
