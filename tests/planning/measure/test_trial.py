"""A trial is the step that training makes; it stands where the weights move, and leaves nothing behind."""

from __future__ import annotations

import gc
import math
import sys
import time

import pytest
import torch

from dino_ds.config.crops import all_crops
from dino_ds.engine import distributed
from dino_ds.engine.process import init_distributed, memory_gib, resident_mib
from dino_ds.planning.measure import ChildFailed, ChildLimits, ChildOutOfMemory, build_trial, resolve, run_in_child
from tests.planning.measure.tiny import tiny_ds, tiny_recipe
from tests.reference import copied


@pytest.fixture(autouse=True)
def _process_group():
    init_distributed()


@pytest.mark.slow
def test_a_trial_has_the_recipe_s_crops_and_moves_the_weights():
    trial = build_trial(*resolve(tiny_recipe(), tiny_ds(0), "test.json", 4))
    assert [tuple(view.shape) for view in all_crops(trial.batch.crops)] == [(4, 3, 32, 32)] * 2 + [(4, 3, 16, 16)] * 2
    schedule = trial.step.schedule
    assert not schedule.prototypes_frozen and not schedule.unfreeze_prototypes
    assert schedule.lr == pytest.approx(5e-4 * 4 / 256, rel=1e-3)
    before = copied(trial.step.teachers["ema"].state())
    first = trial.run()
    assert math.isfinite(float(first))
    assert trial.step.applied_steps == 10001
    assert any(
        not torch.equal(before[name], value) for name, value in copied(trial.step.teachers["ema"].state()).items()
    )


def take_memory(mib):
    block = torch.ones(mib * 2**18)
    return float(block.sum()), memory_gib() * 1024


@pytest.mark.slow
def test_a_child_tells_its_own_peak_memory():
    """However large this process is: 150 MiB of work to 20 MiB of allocator and threads; by its metrics too."""
    ballast = torch.ones(2**27)
    result = run_in_child(take_memory, threads=1, mib=150)
    assert result.value == [150 * 2**18, pytest.approx(result.peak_mib, abs=1)]
    assert result.peak_mib - result.imports_mib == pytest.approx(150, abs=20)
    assert ballast.sum() == ballast.numel() and result.peak_mib < resident_mib()
    gc.collect()


def take_long():
    return distributed.world_size() if distributed.world_size() > 1 else time.sleep(60)


@pytest.mark.slow
def test_children_end_at_their_limits_and_several_are_ranks():
    with pytest.raises(ChildOutOfMemory, match=r"took 0\.\d\d GiB, more than 0\.05"):
        run_in_child(take_memory, 1, ChildLimits(gib=0.05), mib=150)
    with pytest.raises(ChildFailed, match="had not ended after 1 s"):
        run_in_child(take_long, 1, ChildLimits(seconds=1.0))
    assert run_in_child(take_long, 1, ChildLimits(ranks=2)).value == 2


@pytest.mark.parametrize(
    ("code", "says"),
    [("echo on purpose >&2; exit 1", "without a result: on purpose"), ("kill -9 $$", "take a smaller batch")],
)
def test_a_child_that_fails_says_why(code, says, tmp_path, monkeypatch):
    (tmp_path / "python").write_text(f"#!/bin/sh\n{code}\n")
    (tmp_path / "python").chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    with pytest.raises(ChildFailed, match=says):
        run_in_child(take_memory, threads=1, mib=1)
