"""What a run shows on the screen, and k-NN on images that eval.val_share holds out of training."""

from __future__ import annotations

import io
import sys
import time
from types import SimpleNamespace
from unittest import mock

import pytest
from tqdm import tqdm

from dino_ds.config.loading import load_recipe
from dino_ds.data.sources import labeled_test, training_images
from dino_ds.evals.runner import EvalRunner
from dino_ds.run import reports
from dino_ds.run.loop import Loop
from dino_ds.run.metrics import RunLog
from tests.ranks import run_on_ranks
from tests.run.harness import TINY, image_folder, log_of, read_metrics, train_tiny

SHARE = {
    "eval.val_share": "0.3", "eval.every": "2 steps", "eval.k": "5", "eval.pictures_every": "4 steps",
    "length": "6 steps",
}  # fmt: skip
DETAILS = ("ZeRO", "kernels", "prototypes", "saves ", "save ", "entropy", "bottleneck", "micro-batch")


def _seen(images, run, **how):
    """The outcome of a run, the lines on its screen, and the names of the images that it trained on."""
    lines, names, train = [], [], Loop._train

    def spy(loop, inputs_of, *rest):
        names.extend(inputs_of.names)
        return train(loop, inputs_of, *rest)

    with mock.patch.object(tqdm, "write", lambda line, **_: lines.append(line)), mock.patch.object(Loop, "_train", spy):
        return train_tiny(images, run, changes={**TINY, **SHARE, "save_every": "1 steps"}, **how), lines, names


def _several(images, place):
    return [_seen(images, place / "run", max_steps=4), _seen(images, place / "run", resume=True, verbose=True)]


@pytest.fixture(scope="module")
def starts(tmp_path_factory):
    """A folder of 40 images in two classes, and the starts of a run: with the default screen, then resumed, verbose."""
    place = tmp_path_factory.mktemp("screen")
    return (place, *run_on_ranks(_several, image_folder(place / "images", 40, classes=2), place, world=1)[0])


def test_the_screen_says_what_is_trained_and_what_moves(starts):
    place, (said, lines, _), _ = starts
    first = next(number for number, line in enumerate(lines) if line.startswith("step 1/"))
    assert said is None and first <= 12 and not [line for line in lines if any(word in line for word in DETAILS)]
    start = "\n".join(lines[:first])
    assert "2 global crops of 32 px, 2 local of 16" in start and "length   4 steps of the schedules' 6" in start
    assert f"\nfolder   {place / 'run'}" in start and "\nrecipe   the defaults as it is" in start
    moving = [line for line in lines[first:] if line.startswith("k-NN ") and " raw pixels " not in line]
    assert len(moving) == 2 and all("since the untrained network)" in line for line in moving)
    assert "raw pixels" in lines[-3] and "untrained network" in lines[-3]
    picture = place / "run/pictures/step_00000004/map.png"
    assert lines[-2] == f"picture  {picture}" and picture.is_file() and lines[-1].startswith("report   dino-ds report ")


def test_the_log_has_the_rest_and_verbose_shows_it(starts):
    place, (_, short, _), (said, long, _) = starts
    logged = [line.partition(" ")[2] for line in log_of(place / "run").splitlines()]
    assert said is None and logged[-len(long) :] == long and set(short) < set(logged)
    for word in ("batch    global batch 8", "engine   ZeRO 0", "save     step 6: ", "memory   "):
        assert any(line.startswith(word) for line in long)


def test_held_out_images_are_test_images_and_never_trained_on(starts):
    place, *both = starts
    recipe = load_recipe(None, {**TINY, **SHARE, "data.root": str(place / "images")})
    train = training_images(recipe.data, recipe.eval.val_share)
    test = labeled_test(train)
    held_out = {test.name(index) for index in range(len(test))}
    assert set(test.labels) == {0, 1} and len(held_out) + len(train) == 40
    trained_on = {name for _, _, names in both for name in names}
    assert trained_on and not trained_on & held_out
    assert [line["step"] for line in read_metrics(place / "run") if "knn_top1" in line] == [0, 2, 4, 6]
    named = load_recipe(None, {**TINY, **SHARE, "data.root": str(place / "images"), "eval.root": str(place / "images")})
    assert len(EvalRunner.build(named, train, 3)._sources[1]) == 40
    none = load_recipe(None, {**TINY, **SHARE, "data.root": str(place / "images"), "eval.k": "30"})
    runner = EvalRunner.build(none, train, 3)
    assert runner._names == () and "no k-NN on the held-out images: " in runner._notes[0] and runner.held_out


def test_a_run_that_ends_early_is_not_warned_of_what_its_length_would_show(tmp_path):
    images, changes = image_folder(tmp_path / "images", 10), {**TINY, "eval.every": "0 steps", "length": "20000 steps"}
    assert run_on_ranks(train_tiny, images, tmp_path / "run", max_steps=1, changes=changes, world=1) == [None]
    assert "10 images are few" in (log := log_of(tmp_path / "run")) and "LightlyTrain advises" not in log


def test_a_terminal_shows_a_bar(tmp_path, monkeypatch):
    screen = io.StringIO()
    monkeypatch.setattr(screen, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stderr", screen)
    log = RunLog(tmp_path, 0)
    for step in (3, 4):  # from a checkpoint of step 2
        log.progress(step, 8)
        time.sleep(0.15)  # tqdm draws ten times a second
    log.close()
    assert "25 %|" in screen.getvalue() and "| 4/8 " in screen.getvalue() and screen.getvalue().endswith("\r")


def test_a_run_says_how_long_it_will_take_seconds_after_its_first_step(monkeypatch):
    def said(first: int, last: int, warmup: int = 0) -> list[str]:
        lines, now = [], [0.0]
        step = SimpleNamespace(applied_steps=first, schedules=SimpleNamespace(steps=last, warmup_steps=warmup))
        options = SimpleNamespace(last_step=last, global_batch=8)
        monkeypatch.setattr(reports.time, "monotonic", lambda: now[0])
        of_run = object.__new__(reports.Reports)
        of_run._run, of_run._log = SimpleNamespace(step=step, options=options), SimpleNamespace(info=lines.append)
        of_run._began, of_run._after_first, of_run._foretold = (0.0, first), None, False
        for _ in range(20):  # the first step takes 21 s, all others 1
            step.applied_steps, now[0] = step.applied_steps + 1, now[0] + (21 if now[0] == 0 else 1)
            of_run.foretell()
        return lines

    assert said(0, 206) == ['time     about 3.3 min left; a quarter of it: a new run with --length "412 images"']
    assert said(0, 206, 60)[0].endswith('--length "412 images" --optimizer.warmup "10 %"')
    assert said(100, 306) == ["time     about 3.3 min left"]
    assert said(0, 60) == []
