"""Every ZeRO stage and precision on two ranks against one process on the joint batch, through real DeepSpeed."""

from __future__ import annotations

import copy
import functools
import itertools

import pytest
import torch

from dino_ds.basics.seeds import sample_keys
from dino_ds.data.feed import Batch
from dino_ds.engine.engine import Progress
from dino_ds.engine.optim import OptimizerOptions
from tests.engine import harness
from tests.engine.harness import build_step, crops, ds_config, fp32_student, run_windows, tiny_network
from tests.ranks import run_on_ranks
from tests.reference import copied
from tests.sample import sampled

WINDOWS, BATCH = 6, 8
MATRIX = [(stage, "fp32", "adamw") for stage in (0, 1, 2, 3)] + [(stage, "bf16", "adamw") for stage in (1, 2, 3)]
MATRIX += [(2, "fp32", "sgd"), (1, "fp32", "lars"), (3, "fp32", "lars")]  # LARS sums norms of layers cut among ranks
MATRIX += [(1, "fp32", "muon"), (3, "fp32", "muon"), (2, "bf16", "muon")]
# So large an epsilon that Adam doesn't magnify roundings.
OPTIONS = harness.OPTIMIZERS | {"adamw": OptimizerOptions(eps=1e-2)}


def _train(stage, precision, accumulation=1, kind="adamw", **sections):
    """Losses of six windows, teacher, its difference from a hand-made EMA of the masters, gradient norms, center."""
    config = ds_config(stage, precision, BATCH, accumulation, **sections)
    lr = 2e-3 if kind in ("adamw", "muon") else 0.02
    step = build_step(config, schedules=harness.tiny_schedules(2, lr=lr), options=OPTIONS[kind])
    ema = fp32_student(step.engine, tiny_network())
    assert harness.max_difference(ema, copied(step.teachers["ema"].state())) == 0.0
    losses, norms = [], []
    for window in range(WINDOWS):
        momentum = step.schedule.teacher_momentum
        losses += run_windows(step, window, 1, BATCH)
        norms.append(step.engine.grad_norm)
        masters = fp32_student(step.engine, tiny_network())
        ema = {name: ema[name].lerp(masters[name], 1 - momentum) for name in ema}
    teacher = copied(step.teachers["ema"].state())
    return losses, teacher, harness.max_difference(ema, teacher), norms, step.objective.statistics["center"].value


@functools.cache
def reference(precision, kind="adamw"):
    # Muon gives weak directions the length of strong ones, and with them the roundings of sums over ranks in bf16.
    world = 2 if (precision, kind) == ("bf16", "muon") else 1
    return run_on_ranks(_train, 0 if precision == "fp32" else 1, precision, 1, kind, world=world)[0]


@pytest.mark.parametrize(("stage", "precision", "kind"), sampled(MATRIX, lambda cell: (cell[:2], cell[2])))
def test_two_ranks_equal_one_process(stage, precision, kind):
    """fp32: 1e-5, sums in another order. bf16: gradients are summed over ranks in bf16 (2**-8 relative), weights and
    cosines are rounded by 2**-9, and the temperatures multiply that by up to 25: 5 % of a logit, the mean over crops to
    1 % of the loss; the teacher to 4e-4, a fifth of its movement."""
    results = run_on_ranks(_train, stage, precision, 1, kind)
    losses, teacher, _, _, center = reference(precision, kind)
    rtol, atol = (1e-5, 1e-5) if precision == "fp32" else (1e-2, 4e-4)
    assert _difference_without_key_bias(teacher, tiny_network().state_dict()) > 4 * atol, "the teacher has moved"
    for rank_losses, rank_teacher, ema_error, _, rank_center in results:
        assert rank_losses == pytest.approx(losses, rel=rtol)
        assert _difference_without_key_bias(rank_teacher, teacher) < atol
        torch.testing.assert_close(rank_center, center, rtol=0, atol=1e-5 if precision == "fp32" else 1e-2)
        assert ema_error < 1e-7, "the teacher is the FP32 EMA of the masters, to the last rounding of an FP32 lerp"
    first, second = results
    assert all(torch.equal(first[1][name], second[1][name]) for name in first[1]), "bit-identical on all ranks"
    assert torch.equal(first[4], second[4])


OFFLOAD = {"offload_optimizer": {"device": "cpu", "pin_memory": False}}
LAYOUTS = {
    "offload": {"zero": OFFLOAD},
    "fp32-accumulation": {"data_types": {"grad_accum_dtype": "fp32"}},
    "round-robin": {"zero": {"round_robin_gradients": True}},
    "offload-all": {"zero": OFFLOAD | {"offload_param": {"device": "cpu"}}},
    "sub-groups": {"zero": {"sub_group_size": 500, "stage3_param_persistence_threshold": 10}},
}


@pytest.mark.parametrize(
    ("layout", "stage"), [*sampled(itertools.product(list(LAYOUTS)[:3], (1, 2))), ("offload-all", 3), ("sub-groups", 3)]
)
def test_teacher_follows_the_masters_of_every_layout(stage, layout):
    for losses, teacher, ema_error, _, _ in run_on_ranks(_train, stage, "bf16", 1, **copy.deepcopy(LAYOUTS[layout])):
        assert ema_error < 1e-7
        assert losses == pytest.approx(reference("bf16")[0], rel=1e-2)
        assert _difference_without_key_bias(teacher, reference("bf16")[1]) < 4e-4


PARTS = [(0, 4, 1, "adamw"), (1, 4, 1, "adamw"), (3, 4, 1, "adamw"), (2, 2, 2, "adamw"), (1, 4, 1, "muon")]


@pytest.mark.parametrize(("stage", "accumulation", "world", "kind"), PARTS)
def test_micro_batches_equal_one_batch(stage, accumulation, world, kind):
    """Accumulation is an implementation detail: 4 micro-batches of 2 give the loss, gradient norm, center and
    teacher of one batch of 8. FP32 sums in another order: 1e-6; losses after Adam's first steps, which divide
    rounding by small moments, 1e-5, and the teacher on several ranks too."""
    whole_losses, whole_teacher, _, whole_norms, whole_center = reference("fp32", kind)
    for losses, teacher, _, norms, center in run_on_ranks(_train, stage, "fp32", accumulation, kind, world=world):
        assert losses[:2] == pytest.approx(whole_losses[:2], rel=1e-6)
        assert losses == pytest.approx(whole_losses, rel=1e-5)
        assert norms == pytest.approx(whole_norms, rel=1e-5)
        torch.testing.assert_close(center, whole_center, rtol=0, atol=1e-6)
        assert _difference_without_key_bias(teacher, whole_teacher) < (1e-6 if world == 1 else 1e-5)


def _checkpointed(stage, section):
    sections = {} if section is None else {"activation_checkpointing": section}
    step = build_step(ds_config(stage, "fp32", BATCH, **sections), network=tiny_network(drop_path=0.3))
    elements: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: elements.append(t.numel()) or t, lambda t: t):
        indices = torch.arange(BATCH)
        out = step.micro_batch(Batch(crops(indices), sample_keys(0, 0, indices)))
    assert out.progress is Progress.STEPPED
    losses = [out.loss.item(), *run_windows(step, 1, 3, BATCH)]
    return losses, sum(elements)


@pytest.mark.parametrize("stage", [3, pytest.param(0, marks=pytest.mark.full)])
def test_activation_checkpointing_saves_less_and_changes_nothing(stage):
    plain, plain_elements = run_on_ranks(_checkpointed, stage, None, world=1)[0]
    every, every_elements = run_on_ranks(_checkpointed, stage, {}, world=1)[0]
    one, one_elements = run_on_ranks(_checkpointed, stage, {"number_checkpoints": 1}, world=1)[0]
    assert every_elements < one_elements < plain_elements
    for losses in (every, one):
        assert losses == pytest.approx(plain, rel=1e-6)


def _difference_without_key_bias(a, b):
    """The keys' bias has a true gradient of 0: Adam follows its rounding (see test_golden)."""
    worst = 0.0
    for name in a:
        left, right = a[name], b[name]
        if name.endswith("attn.qkv.bias"):
            left, right = (torch.cat((t.chunk(3)[0], t.chunk(3)[2])) for t in (left, right))
        worst = max(worst, float((left - right).abs().max()))
    return worst
