"""A request to stop is obeyed wherever it finds the ranks, and nothing is lost. More in tests/faults."""

from __future__ import annotations

import functools
import os
import signal
import time

import pytest

from tests.faults import inject, jobs
from tests.training.harness import image_folder, losses_of


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    return image_folder(tmp_path_factory.mktemp("images"), 24, 3)


@pytest.fixture(scope="module")
def straight(images, tmp_path_factory):
    """The losses of twelve steps that nobody has disturbed."""
    run = tmp_path_factory.mktemp("straight") / "run"
    assert jobs.start(run, images).wait(120).codes == [0, 0]
    return losses_of(run)


def _freeze_loader_and_ask(rank):
    """Rank 1's images stop coming, and then rank 0 is asked to stop: it waits in a collective for rank 1."""
    inject.at_step(5, (1,), inject.freeze_loader)(rank)
    inject.at_step(6, (0,), functools.partial(_ask_soon, signal.SIGUSR1))(rank)


def _ask_soon(number):
    """From a child, while this process goes on."""
    pid = os.getpid()
    if os.fork() == 0:
        time.sleep(1)
        os.kill(pid, number)
        os._exit(0)


def test_a_rank_whose_images_do_not_come_holds_nobody_up(images, straight, tmp_path):
    """All save the step that all have done; the run goes on with the very images that had not come."""
    run, changes = tmp_path / "run", {"data.workers": "1"}
    outcome = jobs.start(run, images, fault=_freeze_loader_and_ask, changes=changes).wait(120)
    assert outcome.codes == [75, 75] and outcome.orphans == [] and outcome.errors == []
    saved = losses_of(run)[-1][0]
    assert f"stopped  by SIGUSR1 (rank 0) at step {saved}; saved step {saved}." in outcome.text
    assert 5 <= saved < 12
    assert jobs.start(run, images, resume=True, changes=changes).wait(120).codes == [0, 0]
    assert losses_of(run) == straight


def _slow_evaluation(rank):
    """Batches of one image, half a second each; rank 1 is asked to stop at the first one after step 2."""
    from dino_ds.evals import features
    from dino_ds.teacher import Teacher

    features._BATCH = 1
    original, asked = Teacher.features, []

    def slow(teacher, views):
        if rank == 1 and not asked and _steps_done() == 2:
            asked.append(True)
            inject.mark()
            os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.5 if _steps_done() == 2 else 0)
        return original(teacher, views)

    Teacher.features = slow


def _steps_done():
    import gc

    from dino_ds.step import DinoStep

    return next(thing.applied_steps for thing in gc.get_objects() if isinstance(thing, DinoStep))


def test_an_evaluation_is_not_waited_for(images, tmp_path):
    test = image_folder(tmp_path / "test", 24, 3, seed=1)
    run, changes = tmp_path / "run", {"eval.every": "2 steps", "eval.root": str(test)}
    outcome = jobs.start(run, images, fault=_slow_evaluation, changes=changes).wait(120)
    assert outcome.codes == [75, 75] and outcome.orphans == []
    assert "stopped  by SIGTERM (rank 1) at step 2; saved step 2." in outcome.text
    assert "k-NN     at step 0" in outcome.text and "k-NN     at step 2" not in outcome.text
    assert outcome.seconds < 11  # the rest of the evaluation would sleep for 12


def test_a_forwarded_signal_is_no_second_one(images, tmp_path):
    """Ctrl-C reaches all processes of a terminal, and a launcher sends its ranks another signal."""
    fault = inject.at_step(4, (0, 1), inject.send(signal.SIGINT, 2, pause=0.5))
    outcome = jobs.start(tmp_path / "run", images, fault=fault, changes={"length": "100000 steps"}).wait(60)
    assert outcome.codes == [75, 75] and outcome.errors == []


def test_a_stop_file_that_was_obeyed_is_gone(images, straight, tmp_path):
    """It may lie there before the run begins; the next start goes on."""
    run = tmp_path / "run"
    run.mkdir()
    (run / "stop").touch()
    slow = inject.at_step(1, (0, 1), inject.act(time.sleep, 0.5), times=1000)
    outcome = jobs.start(run, images, fault=slow).wait(120)
    assert outcome.codes == [75, 75]
    assert "stopped  by the stop file (rank 0) at step " in outcome.text
    assert not (run / "stop").exists()
    assert jobs.start(run, images, resume=True).wait(120).codes == [0, 0]
    assert losses_of(run) == straight
