"""ResNet and ConvNeXt of timm's: stages, ranks, precisions, recomputation, resume and overflow change nothing."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from dino_ds.basics.seeds import sample_keys
from dino_ds.config.loading import load_recipe
from dino_ds.config.recipe import Recipe
from dino_ds.data.feed import Batch
from dino_ds.engine import distributed
from dino_ds.engine.engine import Progress
from dino_ds.method.build import build_network, build_step
from dino_ds.method.step import TrainingStep
from tests.engine.harness import crops, ds_config, fp32_student, max_difference, run_windows
from tests.engine.test_state import Memory
from tests.ranks import run_on_ranks
from tests.reference import copied, product
from tests.sample import sampled

BATCH, SIZES = 8, (64, 64, 32, 32)
CNNS = {
    "resnet": ("resnet18", '{"channels": [8, 16, 16, 24], "layers": [1, 1, 1, 1], "zero_init_last": false}'),
    "convnext": ("convnext_atto", '{"depths": [1, 1, 2, 1], "dims": [8, 16, 16, 24], "ls_init_value": 0.5}'),
}


def foreign_recipe(name: str, arguments: str = "{}", **changes: str) -> Recipe:
    """Stochastic depth and clipping take part; Adam's epsilon is so large that it does not magnify roundings."""
    values = {
        "model__backbone": name, "model__arguments": arguments, "model__drop_path": "0.2",
        "data__global_batch": str(BATCH), "crops__global_size": "64", "crops__local_size": "32",
        "crops__num_local": "2", "head__prototypes": "64", "head__hidden": "48", "head__bottleneck": "16",
        "length": "20 steps", "objective__freeze_prototypes": "1 steps", "optimizer__warmup": "2 steps",
        "optimizer__lr": "0.05", "optimizer__eps": "1e-2", "teacher__momentum": "0.9", **changes,
    }  # fmt: skip
    return load_recipe("vitti16", {key.replace("__", "."): value for key, value in values.items()})


def cnn_recipe(kind: str, **changes: str) -> Recipe:
    return foreign_recipe(*CNNS[kind], **changes)


def build(recipe: Recipe, stage: int, precision: str = "fp32", accumulation: int = 1, **sections: Any) -> TrainingStep:
    config = ds_config(stage, precision, BATCH, accumulation, gradient_clipping=1.0, **sections)
    return build_step(recipe, config, 10)


class Trained(NamedTuple):
    """Losses by window, and by name the tensors of teacher (as saved), student and its buffers."""

    losses: list[float]
    teacher: dict[str, Tensor]
    student: dict[str, Tensor]
    buffers: dict[str, Tensor]


def train(recipe: Recipe, step: TrainingStep, first: int, count: int) -> Trained:
    losses, done = run_windows(step, first, count, BATCH, SIZES), step.applied_steps
    assert done == first + count
    return taken(recipe, step, losses)


def taken(recipe: Recipe, step: TrainingStep, losses: list[float]) -> Trained:
    student = fp32_student(step.engine, build_network(recipe, step.engine.config.performance))
    return Trained(
        losses,
        copied(step.teachers["ema"].state()),
        {name: tensor for name, tensor in student.items() if name not in step.engine.buffers()},
        copied(step.engine.buffers()),
    )


WINDOWS = 3
MATRIX = [("resnet", 3, "fp32"), ("convnext", 2, "fp32"), ("resnet", 1, "bf16")]


def _train(kind, stage, precision="fp32", accumulation=1, sections=None, **changes):
    recipe = cnn_recipe(kind, **changes)
    return train(recipe, build(recipe, stage, precision, accumulation, **(sections or {})), 0, WINDOWS)


@functools.cache
def _reference(kind, precision="fp32"):
    return run_on_ranks(_train, kind, 0 if precision == "fp32" else 1, precision, world=1)[0]


@pytest.mark.parametrize(("kind", "stage", "precision"), sampled(MATRIX, lambda cell: cell[2:]))
def test_two_ranks_equal_one_process(kind, stage, precision):
    """Statistics of all ranks, stochastic depth and clipping included. fp32: 1e-5, sums in another order; bf16 rounds
    weights, activations and gradients to 2**-9, which a temperature of 0.1 magnifies: 3 % of the loss."""
    whole = _reference(kind, precision)
    rtol, atol = (1e-5, 1e-5) if precision == "fp32" else (3e-2, 2e-2)
    ranks = run_on_ranks(_train, kind, stage, precision)
    start = dict(build_network(cnn_recipe(kind), ds_config(0, "fp32", BATCH).performance).state_dict())
    moved = {name for name, tensor in whole.teacher.items() if not torch.equal(tensor, start[name])}
    assert len(moved) > 0.9 * len(start), "all but the smallest gradients have moved their weights"
    for found in ranks:
        assert found.losses == pytest.approx(whole.losses, rel=rtol)
        for ours, theirs in ((found.teacher, whole.teacher), (found.buffers, whole.buffers)):
            for name, tensor in ours.items():
                torch.testing.assert_close(
                    tensor, theirs[name], rtol=rtol, atol=atol, msg=lambda m, n=name: f"{n}: {m}"
                )
        assert all(t.dtype in (torch.float32, torch.int64) for t in (*found.buffers.values(), *found.teacher.values()))
    for one, other in ((ranks[0].teacher, ranks[1].teacher), (ranks[0].buffers, ranks[1].buffers)):
        assert all(torch.equal(one[name], other[name]) for name in one), "bit-identical on all ranks"


def test_recomputation_changes_nothing():
    """To the bit, running averages included: the same kernels on the same numbers."""
    plain, every = (run_on_ranks(_train, "resnet", 2, sections=s) for s in ({}, {"activation_checkpointing": {}}))
    for one, other in zip(plain, every, strict=True):
        _assert_same(one, other)


def _straight():
    recipe = cnn_recipe("resnet", teacher__batch_norm="ema")
    step = build(recipe, 2)
    train(recipe, step, 0, 2)
    state = step.engine.state()
    saved = state.layout, copied(state.tensors), copied(step.state())
    return saved, train(recipe, step, 2, 1)


def _resume(stage, saved):
    recipe = cnn_recipe("resnet", teacher__batch_norm="ema")
    step = build(recipe, stage)
    memory = Memory([layout for layout, _, _ in saved], [tensors for _, tensors, _ in saved], {})
    step.engine.load_state(memory)
    step.restore(saved[0][2], 2)
    return train(recipe, step, 2, 1)


def test_resume_goes_on_to_the_bit():
    """Every later loss, weight and average; on one rank, where ranks have joint statistics, to 1e-5."""
    saved, ended = zip(*run_on_ranks(_straight), strict=True)
    for expected, found in zip(ended, run_on_ranks(_resume, 2, list(saved)), strict=True):
        _assert_same(expected, found)
    (found,) = run_on_ranks(_resume, 0, list(saved), world=1)
    assert found.losses == pytest.approx(ended[0].losses, rel=1e-5)
    assert max_difference(found.teacher, ended[0].teacher) < 1e-5
    assert max_difference(found.buffers, ended[0].buffers) < 1e-5


def _assert_same(one: Trained, other: Trained):
    assert one.losses == other.losses
    for ours, theirs in zip(one[1:], other[1:], strict=True):
        assert ours.keys() == theirs.keys()
        assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []


def _skip():
    """A batch of infinities on one rank, then the state as before it."""
    recipe = cnn_recipe("resnet", model__sync_batch_norm="false")
    step = build(recipe, 2, "fp16", 2, fp16_settings={"initial_scale_power": 4})
    run_windows(step, 0, 1, BATCH, SIZES)
    before = copied(step.state()), taken(recipe, step, [])
    for _ in range(2):
        indices = torch.arange(2)
        views = crops(indices, SIZES)
        views["global"][0].fill_(torch.inf if distributed.rank() else 1.0)
        out = step.micro_batch(Batch(views, sample_keys(0, 0, indices)))
    assert out.progress is Progress.SKIPPED
    after = copied(step.state()), taken(recipe, step, [])
    assert all(torch.equal(before[0][name], after[0][name]) for name in before[0])
    _assert_same(before[1], after[1])
    return train(recipe, step, 1, 1).losses


def test_an_overflow_moves_nothing():
    """Running averages of student and teacher included."""
    for (loss,) in run_on_ranks(_skip):
        assert loss == loss


def _unsynced():
    """Student's and teacher's buffers after each step of micro-batches of its own, of both ranks."""
    recipe = cnn_recipe("resnet", model__sync_batch_norm="false")
    step, found = build(recipe, 2, accumulation=2), []
    for window in range(2):
        run_windows(step, window, 1, BATCH, SIZES)
        own = {**copied(step.engine.buffers()), **copied(step.teachers.moving_buffers())}
        found.append(distributed.gather_objects(own))
    return found


def test_statistics_that_are_not_synced_become_equal_with_every_step():
    for first, second in run_on_ranks(_unsynced)[0]:
        assert all(torch.equal(first[name], second[name]) for name in first)


def _rules():
    """The teacher's features of four and of two images, its buffers before and after, and a run; for each rule."""
    found = {}
    for rule in ("reference", "ema", "frozen"):
        recipe = cnn_recipe("resnet", teacher__batch_norm=rule)
        step = build(recipe, 1)
        teacher = step.teachers["ema"]
        buffers = dict(teacher.network.named_buffers())
        start = copied(buffers)
        trained = train(recipe, step, 0, 3)
        end = copied(buffers)
        rows = [teacher({"global": crops(torch.arange(n), SIZES)["global"][:1]}, {})["dino"] for n in (4, 2)]
        found[rule] = [product(logits) for logits in rows], start, end, trained
    return found


def test_rules_of_the_teacher_s_batch_norm():
    (rules,) = run_on_ranks(_rules, world=1)
    for rule, ((four, two), start, end, _) in rules.items():
        alone = torch.allclose(four[:2], two, rtol=0, atol=1e-6)
        assert alone is (rule != "reference"), "features depend on the batch with the reference's rule alone"
        moved = {name for name in start if not torch.equal(start[name], end[name])}
        assert moved == (set() if rule == "frozen" else set(start))
    theirs = rules["ema"][3].buffers
    _, start, own, _ = rules["ema"]
    for name, tensor in own.items():
        if tensor.is_floating_point():
            assert (tensor - theirs[name]).abs().max() < (start[name] - theirs[name]).abs().max(), "follows the student"
        else:
            assert torch.equal(tensor, theirs[name])
