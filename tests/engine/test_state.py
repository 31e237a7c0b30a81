"""An engine's state goes into an engine of any stage, ranks, precision and offload, and training goes on from there."""

from __future__ import annotations

import functools
import gc
import math
import weakref
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch

from dino_ds.engine.optim import OptimizerOptions
from dino_ds.engine.state import MASTER, MOMENTS, SavedParameters
from dino_ds.errors import CheckpointError
from tests.engine import harness
from tests.engine.harness import build_step, ds_config, fp32_student, run_windows, tiny_network, tiny_schedules
from tests.ranks import run_on_ranks
from tests.reference import copied
from tests.sample import sampled

BATCH, SAVED_AT, RELEASED_AT = 8, 3, 2
# The scale doubles after every second good step: it moves within a test, and overflows.
FP16 = {"initial_scale_power": 7, "loss_scale_window": 2}
ROUND_ROBIN, ALIGNED = {"round_robin_gradients": True}, {"parameter_alignment": True}
SUB_GROUPS = {"sub_group_size": 3000, "stage3_param_persistence_threshold": 10}
HPZ = {"zero_hpz_partition_size": 2}
OFFLOAD = {"offload_optimizer": {"device": "cpu", "pin_memory": False}}
OFFLOAD_ALL = OFFLOAD | {"offload_param": {"device": "cpu"}}
LAYERS = OptimizerOptions(layer_decay=0.8, patch_embed_lr=0.2)
OPTIONS = harness.OPTIMIZERS | {"by layer": LAYERS, "by layer and part": replace(LAYERS, clip_by="part")}


@dataclass(frozen=True)
class Setup:
    """kind: a key of OPTIONS."""

    stage: int
    precision: str = "fp32"
    world: int = 2
    accumulation: int = 1
    zero: dict[str, Any] = field(default_factory=dict)
    sections: dict[str, Any] = field(default_factory=dict)
    kind: str = "adamw"

    def __str__(self):
        extra = [*self.zero, *self.sections] + ([self.kind] if self.kind != "adamw" else [])
        extra += [f"accumulate{self.accumulation}"] if self.accumulation > 1 else []
        return "-".join([f"zero{self.stage}", self.precision, f"{self.world}ranks", *extra])

    def __hash__(self):
        return hash(str(self))

    def features(self) -> tuple[Any, ...]:
        """The values that a sample of setups must show."""
        return self.stage, self.precision, self.world, self.accumulation, [*self.zero, *self.sections], self.kind


BF16_OPTIMIZER = Setup(1, "bf16", sections={"data_types": {"grad_accum_dtype": "fp32"}})


@dataclass
class Memory:
    """A SavedState in memory."""

    layouts: list[dict[str, Any]]
    tensors: list[dict[str, torch.Tensor]]
    whole: dict[str, Any]
    read_elements: int = 0

    def read(self, rank, name, start, stop):
        tensor = self.tensors[rank][name]
        assert 0 <= start < stop <= len(tensor)
        self.read_elements += stop - start
        return tensor[start:stop]


def _build(setup):
    sections = {"fp16_settings": FP16} if setup.precision == "fp16" else {}
    config = ds_config(
        setup.stage, setup.precision, BATCH, setup.accumulation, zero=dict(setup.zero), **sections, **setup.sections
    )
    return build_step(config, schedules=tiny_schedules(RELEASED_AT, steps=40), options=OPTIONS[setup.kind])


def _take(step):
    """This rank's part, and what a run saves in addition."""
    state = step.engine.state()
    tensors = {name: tensor.cpu().clone() for name, tensor in state.tensors.items()}
    assert all(tensor.ndim == 1 and tensor.dtype == torch.float32 for tensor in tensors.values())
    whole = {
        "teacher": copied(step.teachers["ema"].state()),
        "state": copied(step.state()),
        "applied_steps": step.applied_steps,
        "loss_scale": step.engine.loss_scale,
    }
    return state.layout, tensors, whole


def _gathered(parts):
    layouts, tensors, whole = zip(*parts, strict=True)
    return Memory(list(layouts), list(tensors), whole[0])


def _straight(setup, windows, more):
    step = _build(setup)
    run_windows(step, 0, windows, BATCH)
    taken = _take(step)
    return taken, run_windows(step, windows, more, BATCH), _take(step)


def _resume(setup, saved, more):
    """Load into a new engine: the state right after it, the masters by the teacher's way, and the later training."""
    step = _build(setup)
    saved.read_elements = 0
    step.engine.load_state(saved)
    read = saved.read_elements
    step.restore(saved.whole["state"], saved.whole["applied_steps"])
    loaded, masters = _take(step), fp32_student(step.engine, tiny_network())
    windows = saved.layouts[0]["counters"]["global_steps"]
    return loaded, run_windows(step, windows, more, BATCH), _take(step), masters, read


@functools.cache
def straight(setup, more=2, windows=SAVED_AT):
    """The state of a run after `windows` windows, its losses in `more` further ones, and its state after them."""
    taken, losses, ended = zip(*run_on_ranks(_straight, setup, windows, more, world=setup.world), strict=True)
    return _gathered(taken), losses[0], _gathered(ended)


def resume(setup, saved, more=2):
    """(state right after loading, losses, state at the end); whatever was saved, it must be there."""
    results = run_on_ranks(_resume, setup, saved, more, world=setup.world)
    loaded, losses, ended, masters, read = zip(*results, strict=True)
    loaded = _gathered(loaded)
    assert_same(saved, loaded)
    values, _ = by_parameter(saved)
    for name, master in masters[0].items():
        assert torch.equal(master.view(-1), values[MASTER, name])
        assert torch.equal(loaded.whole["teacher"][name], saved.whole["teacher"][name])
    assert sum(read) <= (setup.world if setup.stage == 0 else 1) * sum(len(value) for value in values.values())
    return loaded, losses[0], _gathered(ended)


def by_parameter(saved):
    """(kind, name) -> flat FP32 tensor, and the step counts."""
    parameters = SavedParameters(saved)
    numel = {name: math.prod(shape) for name, shape in parameters.shapes.items()}
    values = {
        (kind, name): torch.cat([part for _, part in parameters.read(kind, name, 0, numel[name])])
        for name in numel
        for kind in (MASTER, *(MOMENTS[parameters.kinds[name]] if parameters.step_of([name]) else ()))
    }
    return values, {name: parameters.step_of([name]) for name in numel}


def assert_same(one, other):
    (values, steps), (others, other_steps) = by_parameter(one), by_parameter(other)
    assert steps == other_steps
    assert values.keys() == others.keys()
    assert [key for key in values if not torch.equal(values[key], others[key])] == []


UNCHANGED = [Setup(0), *(Setup(stage, precision) for stage in (1, 2, 3) for precision in ("fp32", "bf16", "fp16"))]
UNCHANGED += [Setup(2, "bf16", zero=OFFLOAD), Setup(3, zero=OFFLOAD), Setup(3, zero=SUB_GROUPS | HPZ), BF16_OPTIMIZER]
UNCHANGED += [Setup(0, kind="sgd"), Setup(2, "fp16", kind="lars"), Setup(3, "bf16", zero=SUB_GROUPS, kind="lars")]
UNCHANGED += [Setup(2, "bf16", zero=OFFLOAD, kind="sgd"), replace(BF16_OPTIMIZER, kind="lars")]
UNCHANGED += [Setup(0, kind="muon"), Setup(2, "bf16", kind="muon"), Setup(3, "fp16", zero=SUB_GROUPS, kind="muon")]


@pytest.mark.parametrize("setup", sampled(UNCHANGED, Setup.features), ids=str)
def test_unchanged_settings_go_on_to_the_bit(setup):
    saved, losses, ended = straight(setup)
    loaded, resumed_losses, resumed_end = resume(setup, saved)
    assert loaded.layouts == saved.layouts
    assert resumed_losses == losses
    assert_same(resumed_end, ended)
    assert resumed_end.layouts == ended.layouts
    assert all(torch.equal(resumed_end.whole["teacher"][n], t) for n, t in ended.whole["teacher"].items())
    assert resumed_end.whole["loss_scale"] == ended.whole["loss_scale"]


def _features_of_both(pair):
    return *pair[0].features(), *pair[1].features()


EXACT = [
    (Setup(0, world=1), Setup(3, zero=SUB_GROUPS)),
    (Setup(3, zero=SUB_GROUPS), Setup(0, world=1, accumulation=4)),
    (Setup(1, zero=OFFLOAD), Setup(3, zero=OFFLOAD)),
    (Setup(2, zero=ROUND_ROBIN), Setup(0, world=1)),
    (Setup(0, world=1), Setup(1, zero=ROUND_ROBIN | ALIGNED)),
    (Setup(1, zero=ROUND_ROBIN | ALIGNED, kind="lars"), Setup(1, world=4, kind="lars")),
    (Setup(3, world=1, kind="sgd"), Setup(2, kind="sgd")),
    (Setup(3, kind="muon"), Setup(1, world=4, zero=ROUND_ROBIN | ALIGNED, kind="muon")),
]


@pytest.mark.parametrize(("old", "new"), sampled(EXACT, _features_of_both), ids=str)
def test_other_stages_ranks_batches_and_layouts(old, new):
    saved, losses, _ = straight(old)
    assert resume(new, saved)[1] == pytest.approx(losses, rel=1e-5)


GROUPS = [
    (Setup(2, kind="by layer"), Setup(3, kind="by layer and part", sections={"gradient_clipping": 1.0})),
    (Setup(2), Setup(0, kind="by layer")),
    (Setup(2, kind="by layer"), Setup(2)),
]


@pytest.mark.parametrize(("old", "new"), GROUPS, ids=str)
def test_other_groups_of_the_optimizer(old, new):
    """A state is by parameter: what saved it had one learning rate, or had them by layer."""
    resume(new, straight(old)[0], more=0)


PRECISIONS = [
    (Setup(0), Setup(3, "bf16", world=1)),
    (Setup(3, "bf16", world=1), BF16_OPTIMIZER),
    (Setup(3, "fp16", zero=SUB_GROUPS | OFFLOAD), Setup(1, "bf16", world=1, accumulation=4)),
    (Setup(1, "bf16", world=1), Setup(3, "fp16", world=2, accumulation=2, zero=OFFLOAD_ALL)),
]


@pytest.mark.parametrize(("old", "new"), sampled(PRECISIONS, _features_of_both), ids=str)
def test_another_precision(old, new):
    """Masters and moments are exact; the next loss to bf16's 8 bits, which a temperature of 0.1 multiplies: 3 %."""
    saved, losses, _ = straight(old)
    loaded, new_losses, _ = resume(new, saved, more=1)
    assert new_losses == pytest.approx(losses[:1], rel=3e-2)
    scale = 1.0 if new.precision != "fp16" else 2.0 ** FP16["initial_scale_power"]
    assert loaded.whole["loss_scale"] == (saved.whole["loss_scale"] if old.precision == new.precision else scale)


ACROSS = [(0, Setup(0), Setup(3, world=1)), (1, Setup(3, world=1), Setup(2)), (RELEASED_AT, Setup(0), Setup(2))]


@pytest.mark.parametrize(("windows", "old", "new"), ACROSS, ids=str)
def test_from_before_the_first_step_and_across_the_release_of_the_prototypes(windows, old, new):
    """Their Adam state starts at the release, whether that lies before the save, after it, or just there."""
    saved, losses, ended = straight(old, 3, windows)
    counts = by_parameter(saved)[1]
    assert set(counts.values()) == ({windows} if windows < RELEASED_AT else {0, windows})
    _, new_losses, new_end = resume(new, saved, more=3)
    assert new_losses == pytest.approx(losses, rel=1e-5)
    after = by_parameter(new_end)[1]
    assert after == by_parameter(ended)[1]
    assert after["head.prototypes.weight"] == windows + 3 - RELEASED_AT


def _left_when_dropped(setup):
    step = _build(setup)
    run_windows(step, 0, 3, BATCH)  # ZeRO 3 traces the first ones
    engine = step.engine._engine
    things = [weakref.ref(thing) for thing in (engine, engine.module, engine.optimizer, *engine.module.parameters())]
    del step, engine
    gc.collect()
    return sum(thing() is not None for thing in things)


@pytest.mark.parametrize("setup", [BF16_OPTIMIZER, Setup(3)], ids=str)
def test_nothing_of_an_engine_is_left_when_it_is_dropped(setup):
    assert run_on_ranks(_left_when_dropped, setup) == [0, 0]


def _refused(setup, saved, network):
    step = build_step(ds_config(setup.stage, "fp32", BATCH), network=network, options=OPTIONS[setup.kind])
    before = fp32_student(step.engine, tiny_network(prototypes=network.head.prototypes.weight.shape[0]))
    try:
        step.engine.load_state(saved)
    except CheckpointError as error:
        after = fp32_student(step.engine, tiny_network(prototypes=network.head.prototypes.weight.shape[0]))
        return str(error), all(torch.equal(before[name], after[name]) for name in before)
    return "loaded", False


@pytest.mark.parametrize(
    ("setup", "prototypes", "message"),
    [
        (
            Setup(3),
            48,
            "model differs from the checkpoint in 1 tensors, first head.prototypes.weight [40, 16] vs [48, 16]",
        ),
        (Setup(3, kind="muon"), 40, "the checkpoint has the moments of adamw, optimizer.kind is muon"),
    ],
    ids=str,
)
def test_a_state_of_another_network_or_optimizer_is_refused(setup, prototypes, message):
    saved, _, _ = straight(Setup(2))
    found = run_on_ranks(_refused, setup, saved, tiny_network(prototypes=prototypes))
    assert found == [(message, True)] * 2
