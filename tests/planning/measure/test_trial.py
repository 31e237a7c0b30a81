"""A trial is the step that training makes; it stands where the weights move, and leaves nothing behind."""

from __future__ import annotations

import gc
import math
import signal
import subprocess
import sys
import time
import weakref

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from dino_ds.basics.ranges import PARTS, listen
from dino_ds.config.crops import all_crops
from dino_ds.engine.device import memory_gib, release_memory, resident_mib
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


class _Precisions(TorchDispatchMode):
    """What FP32 products of a GPU are computed in, at each product."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if "mm" in str(function):
            self.seen.append((args[0].dtype, torch.backends.cuda.matmul.fp32_precision))
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize(("stage", "low"), [(0, {}), (3, {"bf16": {"enabled": True}})])
@pytest.mark.slow
def test_tf32_is_for_the_prototypes_of_a_low_precision_alone(stage, low):
    """Teacher and student forward, and two products of the backward pass."""
    before = torch.backends.cuda.matmul.fp32_precision
    trial = _trial(stage, **low)
    with _Precisions() as precisions:
        trial.run()
    switched = [dtype for dtype, precision in precisions.seen if precision == "tf32"]
    assert switched == [torch.float32] * (4 if low else 0) and len(precisions.seen) > 20
    assert torch.backends.cuda.matmul.fp32_precision == before


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.slow
def test_a_dropped_trial_leaves_no_weights(stage):
    trial = _trial(stage)
    trial.run()
    kept = [weakref.ref(p) for p in (*trial.step.teachers["ema"].network.parameters(), trial.inputs.crops["global"][0])]
    del trial
    release_memory()
    assert not [ref for ref in kept if ref() is not None]


def test_named_ranges_cover_the_step_in_order():
    seen = []

    class Listener:
        def __init__(self, name):
            self.name = name

        def __enter__(self):
            seen.append(self.name)

        def __exit__(self, *_):
            pass

    trial = _trial()
    with listen(Listener):
        trial.run()
    trial.run()
    assert tuple(seen) == PARTS[1:]
    with listen(Listener):  # the host fetches the next batch before it waits for the gradient's norm
        trial.step.micro_batch(trial.inputs, lambda: seen.append("next batch"))
    assert seen[-5:] == ["backward", "next batch", *PARTS[-3:]]


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
        _wait_for_all(children, tmp_path, None, begin + 60)
    assert time.monotonic() - begin < 30 and all(child.returncode for child in children)
    assert caught.value.returncode == returncode
