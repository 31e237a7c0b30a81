"""A trial is the step that training makes; it stands where the weights move, and leaves nothing behind."""

from __future__ import annotations

import gc
import math
import signal
import subprocess
import sys
import time

import pytest
import torch

from dino_ds.config.crops import all_crops
from dino_ds.engine.device import memory_gib, resident_mib
from dino_ds.engine.process import init_distributed
from dino_ds.planning.measure.memory import ChildFailed, _wait_for_all, run_in_child
from dino_ds.planning.measure.trial import build_trial, resolve
from tests.planning.measure.tiny import tiny_ds, tiny_recipe
from tests.reference import copied


@pytest.fixture(autouse=True)
def _process_group():
    init_distributed()


def _trial(stage=0, batch=4, **sections):
    return build_trial(*resolve(tiny_recipe(), tiny_ds(stage, **sections), "test.json", batch))


@pytest.mark.slow
def test_a_trial_has_the_recipe_s_crops_and_moves_the_weights():
    trial = _trial()
    assert [tuple(view.shape) for view in all_crops(trial.inputs.crops)] == [(4, 3, 32, 32)] * 2 + [(4, 3, 16, 16)] * 2
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
    """However large this process is: 150 MiB of work are seen as that, to 20 MiB of allocator and threads; by what a
    run writes into its metrics too."""
    ballast = torch.ones(2**27)
    result = run_in_child("tests.planning.measure.test_trial:take_memory", threads=1, mib=150)
    assert result.value == [150 * 2**18, pytest.approx(result.peak_mib, abs=1)]
    assert result.peak_mib - result.imports_mib == pytest.approx(150, abs=20)
    assert ballast.sum() == ballast.numel() and result.peak_mib < resident_mib()
    gc.collect()


@pytest.mark.parametrize(
    ("code", "says", "returncode"),
    [
        ("raise SystemExit('rank on purpose')", "rank on purpose", 1),
        (f"import os; os.kill(os.getpid(), {signal.SIGKILL.value})", "smaller --batch", -signal.SIGKILL),
    ],
    ids=["fails", "is killed"],
)
def test_when_a_child_ends_the_others_do_and_its_reason_is_told(code, says, returncode, tmp_path):
    codes, begin = ("import time; time.sleep(60)", code), time.monotonic()
    children = []
    for rank, one in enumerate(codes):
        with (tmp_path / f"{rank}.log").open("w") as log:
            children.append(subprocess.Popen([sys.executable, "-S", "-c", one], stdout=log, stderr=log))
    with pytest.raises(ChildFailed, match=says) as caught:
        _wait_for_all(children, tmp_path, None)
    assert time.monotonic() - begin < 30 and all(child.returncode for child in children)
    assert caught.value.returncode == returncode
