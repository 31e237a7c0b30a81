"""A request to stop is obeyed wherever it finds the ranks, and nothing is lost. More in tests/faults."""

from __future__ import annotations

import json
import os
import pty
import signal
import sys
import time

import pytest

from dino_ds.evals import linear
from dino_ds.health.beat import Beat
from dino_ds.method.step import TrainingStep
from dino_ds.run.metrics import RunLog
from dino_ds.run.stop import CallersStopRequests, StopRequests
from tests.faults import inject, jobs
from tests.ranks import run_on_ranks
from tests.run.harness import image_folder, log_of, read_metrics, train_tiny


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    return image_folder(tmp_path_factory.mktemp("images"), 24, 3)


def _steps_of_this_process():
    original, steps = TrainingStep.micro_batch, []

    def micro_batch(step, *values):
        steps[:] = [step]
        return original(step, *values)

    TrainingStep.micro_batch = micro_batch
    return steps


def _asked_to_stop_in_a_fit(root, run, changes):
    """Rank 1, as a classifier's fit begins after step 2."""
    original, micro_batch = linear.minimise, TrainingStep.micro_batch
    steps = _steps_of_this_process()

    def minimise(*values):
        if os.environ["RANK"] == "1" and steps and steps[0].applied_steps == 2:
            os.kill(os.getpid(), signal.SIGTERM)
            while not values[-1]():
                time.sleep(0.01)
        return original(*values)

    linear.minimise = minimise
    try:
        return train_tiny(root, run, changes=changes)
    finally:
        linear.minimise, TrainingStep.micro_batch = original, micro_batch


def test_the_fit_of_a_classifier_is_not_waited_for(images, tmp_path):
    run, test = tmp_path / "run", image_folder(tmp_path / "test", 9, 3, seed=1)
    changes = {"eval.evals": "linear", "eval.every": "2 steps", "eval.root": str(test), "length": "4 steps"}
    changes["log_every"] = "10"
    assert run_on_ranks(_asked_to_stop_in_a_fit, images, run, changes) == ["stopped"] * 2
    assert "stopped  by SIGTERM (rank 1) at step 2; saved step 2." in log_of(run)
    assert json.loads((run / "evaluations.json").read_text())["linear"]["step"] == 0
    assert [line["step"] for line in read_metrics(run) if "eval/linear" in line] == [0]
    assert [line["step"] for line in read_metrics(run) if "loss" in line] == [2]  # the saved step has a line
    assert run_on_ranks(train_tiny, images, run, resume=True, changes=changes) == [None, None]


def test_a_forwarded_signal_is_no_second_one(images, tmp_path):
    """Ctrl-C reaches all processes of a terminal, and a launcher sends its ranks another signal."""
    twice = inject.at_step(4, (0, 1), inject.send(signal.SIGINT, 2, pause=0.1))
    fault = inject.both(inject.forwarded_within(60), twice)
    outcome = jobs.start(tmp_path / "run", images, fault=fault, changes={"length": "100000 steps"}).wait(120)
    assert outcome.codes == [75, 75] and outcome.errors == []


@pytest.mark.parametrize("of_a_program", [False, True])
@pytest.mark.parametrize("ignored", [False, True])
def test_the_end_of_a_terminal_stops_the_run_unless_nohup_ignores_it(ignored, of_a_program):
    handler, before = signal.SIG_IGN if ignored else signal.SIG_DFL, signal.getsignal(signal.SIGHUP)
    beat, asked = Beat(), []
    wanted = CallersStopRequests(beat) if of_a_program else StopRequests(beat, asked.append, lambda *_: None)
    signal.signal(signal.SIGHUP, handler)
    try:
        with wanted as stop:
            stop.install(lambda: asked.append("ask"))
            os.kill(os.getpid(), signal.SIGHUP)
            until = time.monotonic() + (0.1 if ignored else 10)
            while not stop.why and time.monotonic() < until:
                time.sleep(0.01)
        assert signal.getsignal(signal.SIGHUP) is handler
    finally:
        signal.signal(signal.SIGHUP, before)
    assert (stop.why, asked) == (("", []) if ignored else ("SIGHUP", ["ask"]))


def test_a_closed_terminal_does_not_keep_a_run_from_saving(tmp_path, monkeypatch):
    """Later lines are in log.txt only; the process' own output goes nowhere once a stop was requested."""
    there, here = pty.openpty()
    kept = os.dup(2)
    log = RunLog(tmp_path, 0)
    try:
        os.dup2(here, 2)
        with monkeypatch.context() as patch, open(2, "w", closefd=False) as terminal:
            patch.setattr(sys, "stderr", terminal)
            os.close(there)
            log.info("saved")
            stop = StopRequests(Beat(), print, print)
            stop.install(lambda: None)
            stop.request("SIGHUP")
            assert os.write(2, b"stopped") == 7
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(here)
        log.close()
    assert (tmp_path / "log.txt").read_text().endswith("saved\n")
