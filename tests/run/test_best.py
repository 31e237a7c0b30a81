"""Evaluations during training change nothing; the best teacher is kept, and a run without progress ends."""

from __future__ import annotations

import math
import random
import shutil
from unittest import mock

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import dino_ds
from dino_ds.cli.main import main
from dino_ds.config import evaluation
from dino_ds.data.sources import build_source, split_off
from dino_ds.errors import CheckpointError
from dino_ds.evals import runner, suite, tracking
from dino_ds.evals.context import EvalContext, Settings
from dino_ds.evals.suite import evaluate
from dino_ds.report.folder import read_run
from dino_ds.weights import load, sidecar
from tests.ranks import run_on_ranks
from tests.run.harness import MASKED, image_folder, log_of, losses_of, read_metrics, train_tiny, whole_tensors

VALUES = {0: 30.0, 2: 40.0, 4: 70.0, 6: 60.0, 8: 69.0, 10: 50.0, 12: 20.0}
"""k-NN by step, of a run that gets worse."""
EVERY_TWO = {"eval.every": "2 steps", "eval.k": "5", "eval.bank_images": "5"}


def _train(values, root, run, ds="zero0_fp32.json", **how):
    evaluate, now = runner.EvalRunner.evaluate, [0]

    def at(self, moment):
        now[0] = moment.step
        return evaluate(self, moment)

    def knn(context):
        context.begin()  # as far as a check before training goes
        return {"knn_5": values[now[0]] if hasattr(context.backbone, "network") else 25.0}

    with mock.patch.object(suite, "knn", knn), mock.patch.object(runner.EvalRunner, "evaluate", at):
        return train_tiny(root, run, ds, **how)


def train(root, run, values=VALUES, world=1, ds="zero0_fp32.json", changes=None, **how):
    known = EVERY_TWO | {"eval.root": str(root)} | (changes or {})
    said = run_on_ranks(_train, values, root, run, ds, changes=known, world=world, **how)
    assert len(set(said)) == 1
    return said[0]


def best_of(run):
    return sidecar.read_sidecar(run / "best_teacher.safetensors")


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return image_folder(tmp_path_factory.mktemp("best") / "images", 20, 2)


@pytest.fixture(scope="module")
def straight(root, tmp_path_factory):
    """A run that gets worse after step 4."""
    run = tmp_path_factory.mktemp("best") / "straight"
    assert train(root, run, changes={"keep_checkpoints": "1"}) is None
    return run


def test_a_run_that_gets_worse_keeps_its_best_teacher(straight):
    assert sorted(path.name for path in (straight / "checkpoints").glob("step_*")) == ["step_00000004", "step_00000012"]
    about, tensors = best_of(straight), load_file(straight / "best_teacher.safetensors")
    assert about["step"] == 4 and about["best"] == {"metric": "knn", "value": 70.0, "start": 30.0}
    whole = whole_tensors(straight, 4)
    assert all(torch.equal(tensor, whole[f"teacher.backbone.{name}"]) for name, tensor in tensors.items())
    assert "best     step 4: knn 70; newest 20; start 30 (best_teacher.safetensors)" in log_of(straight)


def test_a_run_below_its_start_says_so_and_best_is_the_start(root, tmp_path):
    """No checkpoint of step 0 is made: the file alone has those weights."""
    run = tmp_path / "run"
    assert train(root, run, {0: 50.0, 2: 40.0, 4: 30.0}, changes={"length": "4 steps"}) is None
    assert best_of(run)["step"] == 0 and "best is the start" in log_of(run)
    assert "best     step 0: knn 50; newest 30; start 50 (best_teacher.safetensors)" in log_of(run)
    assert not (run / "checkpoints/step_00000000").exists()


STOPS = {"eval.stop_after": "3 evaluations"}


@pytest.fixture(scope="module")
def stopped(root, tmp_path_factory):
    """A run on two ranks that ends by itself after step 10: 69 and 60 are no progress from 70, nor is 50."""
    run = tmp_path_factory.mktemp("best") / "stopped"
    assert train(root, run, world=2, ds="zero2_bf16.json", changes=STOPS) is None
    return run


def test_a_run_without_progress_ends_as_finished(stopped):
    log = log_of(stopped)
    assert "done     step 10 of 12" in log and "ended    eval.stop_after: 3 evaluations have not bettered knn 70" in log
    assert read_run(stopped).state == "finished" and (stopped / "checkpoints/step_00000010").is_dir()
    stalled = {r["step"]: r["stalled_evaluations"] for r in read_metrics(stopped) if "stalled_evaluations" in r}
    assert stalled == {0: 0, 2: 0, 4: 0, 6: 1, 8: 2, 10: 3}


def test_a_run_ends_at_the_same_step_after_a_resume(stopped, root, tmp_path):
    """Cut at a step that is evaluated only because it was the last one: that does not count. Ended, it stays so."""
    run, values = tmp_path / "run", VALUES | {7: 71.0, 11: 1.0}
    for steps, resume in ((5, False), (7, True), (None, True)):
        how = {"max_steps": steps, "resume": resume, "world": 2, "ds": "zero2_bf16.json", "changes": STOPS}
        assert train(root, run, values | {5: 10.0}, **how) is None
    assert best_of(run)["step"] == 7 and losses_of(run) == losses_of(stopped)
    assert train(root, run, values, changes=STOPS, resume=True, world=2, ds="zero2_bf16.json") is None
    assert losses_of(run) == losses_of(stopped)


WHOLE = MASKED | {
    "eval.val_share": "0.5", "eval.every": "4 steps", "eval.keep_best": "val_loss", "data.global_batch": "2",
    "objective.koleo_weight": "0.1", "objective.koleo_ranks": "all", "objective.centering": "sinkhorn",
    "length": "4 steps",
}  # fmt: skip


def _val(run):
    lines = [record for record in read_metrics(run) if "val_loss" in record]
    return {line["step"]: {key: v for key, v in line.items() if key.startswith("val_")} for line in lines}


def test_the_held_out_loss_is_the_same_on_any_number_of_ranks(root, tmp_path):
    """Of terms that compare images too; to the bit at step 0. One of two ranks has no micro-batch at the end."""
    found = []
    held_out = len(split_off(build_source("folder", str(root), "train", False), str(root), 0.5)[1])
    assert held_out // 2 % 2 == 1
    for world in (1, 2):
        run = tmp_path / str(world)
        assert run_on_ranks(train_tiny, root, run, "zero0_fp32.json", changes=WHOLE, world=world) == [None] * world
        found.append(_val(run))
        assert best_of(run)["best"]["metric"] == "val_loss"
    assert found[0][0] == found[1][0] and {"val_ibot_kl", "val_koleo_loss"} <= found[0][0].keys()
    assert found[0][4]["val_loss"] == pytest.approx(found[1][4]["val_loss"], rel=1e-4)  # sums in another order


def test_the_next_start_has_the_best_from_its_checkpoint(straight, root, tmp_path):
    """Where the process has died before the file was written."""
    run = shutil.copytree(straight, tmp_path / "run")
    (run / "best_teacher.safetensors").unlink()
    assert train(root, run, changes={"keep_checkpoints": "1"}, resume=True) is None
    for name, tensor in load_file(straight / "best_teacher.safetensors").items():
        assert torch.equal(tensor, load_file(run / "best_teacher.safetensors")[name])


def test_the_best_teacher_is_used_by_its_path(straight, root, tmp_path):
    run = shutil.copytree(straight, tmp_path / "run")
    best = run / "best_teacher.safetensors"
    with_heads, alone = dino_ds.load(run / "checkpoints/step_00000004"), dino_ds.load(best)
    assert with_heads.heads and not alone.heads and alone.about["step"] == with_heads.about["step"] == 4
    main(["pictures", str(best), "--only", "pca", "--root", str(root)])
    assert list(run.glob("pictures/best_teacher/*.png")) or list(run.glob("pictures-best_teacher/*.png"))
    best.write_bytes(b"damaged")
    with pytest.raises(CheckpointError, match="is damaged"):
        dino_ds.load(best)


def test_less_is_better_of_a_loss_and_nothing_of_what_is_not_a_number():
    best = tracking.Best("val_loss", patience=2)
    seen = [best.see(i, value, True, i == 0) for i, value in enumerate((3.0, math.nan, 2.0, None, 2.5))]
    assert [i for i, better in enumerate(seen) if better] == [0, 2]
    assert (best.step, best.stalled, best.finished) == (2, 1, "")


def test_as_good_as_the_start_is_the_trained_one_and_a_task_without_mistakes_tells_nothing():
    best = tracking.Best("knn")
    assert [best.see(i, 100.0, True, i == 0) for i in range(3)] == [True, True, False] and best.step == 1
    assert best.lines(1)[1:] == ["warning  whether it has learned can't be told: knn was 100 before training"]


FROM_FEATURES = [name for name in evaluation.EVALUATIONS if name not in evaluation.BENCHMARKS]
K = 5


def _train_watched(root, run, changes):
    """Its message, what the generators give next, and how many images the teacher has described each time."""
    seen, original = [], load.Backbone.features
    torch.manual_seed(1)
    np.random.seed(1)
    random.seed(1)
    counting = mock.patch.object(load.Backbone, "features", lambda *a: (seen.append(len(a[1])), original(*a))[1])
    with counting:
        message = train_tiny(root, run, "zero2_bf16.json", changes={"length": "2 steps", **changes})
    return message, (float(torch.rand(1)), float(np.random.rand()), random.random()), sum(seen)


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    folder = tmp_path_factory.mktemp("evaluation")
    image_folder(folder / "images", 24, 3), image_folder(folder / "test", 9, 3, seed=1)
    return folder


@pytest.fixture(scope="module")
def runs(images):
    """(a run that evaluates and draws, one that does neither, what `_train_watched` says of both)."""
    root = images / "images"
    changes = {"eval.every": "2 steps", "eval.evals": ",".join(FROM_FEATURES), "eval.root": str(images / "test")}
    changes |= {"eval.k": str(K), "eval.pictures_every": "2 steps", "eval.val_root": str(images / "test")}
    with_, without = images / "with", images / "without"
    said = [run_on_ranks(_train_watched, root, run, how) for run, how in ((with_, changes), (without, {}))]
    return with_, without, said


def test_training_does_not_notice_and_features_are_computed_once_for_all_evaluations(runs):
    """24 training and 9 test images at steps 0 and 2, on either rank; pictures take the training images once more."""
    with_, without, said = runs
    for watched, alone in zip(*said, strict=True):
        assert watched[0] is None and alone[0] is None
        assert watched[1] == alone[1]
    assert [sum(seen for _, _, seen in ranks) for ranks in said] == [2 * (24 + 9 + 24), 0]
    assert losses_of(with_) == losses_of(without)
    ours, theirs = whole_tensors(with_, 2), whole_tensors(without, 2)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert _val(with_).keys() == {0, 2}


def test_results_are_those_of_the_saved_teacher(runs, images):
    """`dino-ds eval` finds the same with the same settings on the run's file, in any precision."""
    run, _, _ = runs
    kept = tracking.read_results(run / "evaluations.json")
    assert list(kept) == list(FROM_FEATURES)
    sources = tuple(build_source("folder", str(images / part), "train", False) for part in ("images", "test"))
    context = EvalContext(dino_ds.load(run), Settings(ks=(K,), workers=0), torch.device("cpu"), lambda: sources)
    for name, result in kept.items():
        assert (result["step"], result["images"], result["train_images"] or 24, result["test_images"]) == (2, 16, 24, 9)
        assert result["results"] == pytest.approx(evaluate(name, context), rel=1e-3, abs=1e-3)


def test_metrics_tensorboard_and_pictures_have_them_under_clear_names(runs):
    run, _, _ = runs
    records = [r for r in read_metrics(run) if "knn_top1" in r]
    assert [r["step"] for r in records] == [0, 2]
    kept = tracking.read_results(run / "evaluations.json")
    assert records[-1]["knn_top1"] == pytest.approx(kept["knn"]["results"][f"knn_{K}"])
    for name in FROM_FEATURES[1:]:
        for metric, value in kept[name]["results"].items():
            assert records[-1][f"eval/{metric}"] == pytest.approx(value)
    events = EventAccumulator(str(run / "tensorboard"))
    events.Reload()
    assert {"loss", "kl", "knn_top1", "eval/linear", "eval/rankme"} <= set(events.Tags()["scalars"])
    for name in ("map", "neighbors", "pca"):
        assert [event.step for event in events.Images(name)] == [0, 2]
        for step in (0, 2):
            with Image.open(run / f"pictures/step_{step:08d}/{name}.png") as picture:
                assert min(picture.size) > 100
