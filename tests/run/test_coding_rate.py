"""Training by the coding rate, without prototypes: over ranks, ZeRO stages and a resume, and what a run says of it."""

from __future__ import annotations

import pytest

from dino_ds.config.loading import load_recipe
from dino_ds.errors import ConfigError
from dino_ds.run.reports import NEAR
from tests.ranks import run_on_ranks
from tests.run.harness import image_folder, log_of, losses_of, read_metrics, train_alone, train_tiny
from tests.run.test_resume import assert_same_checkpoint

RATE = {"objective.dino_weight": "0", "objective.coding_rate_weight": "1", "model.drop_path": "0"}


def test_two_ranks_equal_one_and_a_resume_goes_on_to_the_bit(tmp_path):
    """Covariances are summed over ranks, so ZeRO 3 on two ranks has the losses of one process: to 1e-4, as four steps
    of Adam at a high rate carry FP32's rounding on. Metrics have the term's parts, and nothing of prototypes."""
    images, how = image_folder(tmp_path / "images"), {"changes": RATE}
    assert train_alone(images, tmp_path / "alone", max_steps=4, **how) is None
    assert run_on_ranks(train_tiny, images, tmp_path / "ranks", "zero3_fp32.json", 4, **how) == [None, None]
    for (_, one), (_, two) in zip(losses_of(tmp_path / "alone"), losses_of(tmp_path / "ranks"), strict=True):
        assert two == pytest.approx(one, abs=1e-4)
    for steps, resume in ((2, False), (4, True)):
        parts = (images, tmp_path / "parts", "zero3_fp32.json", steps, resume)
        assert run_on_ranks(train_tiny, *parts, **how) == [None, None]
    assert losses_of(tmp_path / "parts") == losses_of(tmp_path / "ranks")
    assert_same_checkpoint(tmp_path / "parts", tmp_path / "ranks", 4)
    for line in read_metrics(tmp_path / "alone"):
        assert line["loss"] == pytest.approx(1 - line["view_cosine"] - line["coding_rate"], abs=1e-5)
        assert not {"teacher_entropy", "kl"} & line.keys()


def test_a_collapse_without_prototypes_reaches_log_and_metrics(tmp_path):
    images = image_folder(tmp_path / "images")
    first, *others = sorted(images.iterdir())
    for path in others:
        path.write_bytes(first.read_bytes())
    plain = {f"crops.{name}": "0" for name in ("num_local", "jitter", "blur", "grayscale", "flip", "solarize")}
    plain["crops.global_scale"] = "0.99,1"
    still = {"length": "15 steps", "optimizer.lr": "1e-12", "optimizer.min_lr": "0", "optimizer.warmup": "2 steps"}
    assert train_tiny(images, tmp_path / "run", changes=RATE | plain | still | {"log_every": "1"}) is None
    assert log_of(tmp_path / "run").count("the student gives every image the same feature (coding_spread 0.0") == 1
    last = read_metrics(tmp_path / "run")[-1]
    assert last["collapsed"] == 1 and last["coding_spread"] < NEAR and last["view_cosine"] > 0.9


def test_a_frozen_teacher_is_refused():
    with pytest.raises(ConfigError, match="compares the student with its own average, not with a frozen teacher"):
        load_recipe(None, RATE | {"teacher.distill": "heads"})
