"""Lengths in different units: what would end no sooner than the run, once the images are counted."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest

from dino_ds.config.loading import load_recipe
from dino_ds.errors import ConfigError
from dino_ds.run.announcement import MOST_KEPT, slow_teachers
from dino_ds.run.beginning import check_lengths
from tests.run.harness import TINY, image_folder, log_of, losses_of, train_alone

GRAM = {"gram.weight": "1", "gram.start": "12 steps"}


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"model.freeze_backbone": "6 epochs"}, "model.freeze_backbone 6 epochs is step 12, and length 12 steps is 12"),
        ({"model.freeze_backbone": "96 images"}, "model.freeze_backbone 96 images is step 12"),
        ({"length": "2 epochs", "model.freeze_backbone": "5 steps"}, "length 2 epochs is 4 steps: the backbone would"),
        (GRAM, "Gram anchoring would never begin"),
        (GRAM | {"length": "6 epochs"}, "gram.start 12 steps is step 12, and length 6 epochs is 12 steps"),
    ],
)
def test_what_would_never_begin_is_refused(changes: dict[str, str], problem: str):
    with pytest.raises(ConfigError, match="shorten it") as caught:
        check_lengths(load_recipe(None, TINY | changes), 2, 99)
    assert problem in str(caught.value)


def test_what_lasts_to_the_end_is_said():
    assert (
        check_lengths(load_recipe(None, TINY | {"model.freeze_backbone": "5 epochs", "gram.start": "0 steps"}), 2, 99)
        == []
    )
    lines = check_lengths(load_recipe(None, TINY | {"length": "3 steps", "optimizer.warmup": "2 epochs"}), 2, 99)
    assert lines == [
        "optimizer.warmup 2 epochs is 4 steps, and length 3 steps is 3: the learning rate does not reach its peak"
    ]
    slow = {"objective.teacher_temp": "0.07", "objective.teacher_temp_warmup": "2 epochs"}
    slow |= {"objective.koleo_weight": "0.1..0.5 over 2 epochs"}
    lines = check_lengths(load_recipe(None, TINY | {"length": "3 steps"} | slow), 2, 99)
    assert lines == [
        "objective.teacher_temp_warmup 2 epochs is 4 steps, and length 3 steps is 3: objective.teacher_temp 0.07 is "
        "not reached",
        "the ramp of koleo's weight 2 epochs is 4 steps, and length 3 steps is 3: it does not reach 0.5",
    ]
    (line,) = check_lengths(load_recipe(None, TINY | {"optimizer.warmup": "2 epochs"}), 2, 3)
    assert "--max_steps ends at 3 (--length shortens these too): the learning rate" in line


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    place = tmp_path_factory.mktemp("begun")
    root = image_folder(place / "root")
    assert train_alone(root, place / "run", max_steps=3) is None
    return root, place / "run"


def test_a_run_without_an_end_to_its_freeze_does_not_begin(begun, tmp_path: Path):
    message = train_alone(begun[0], tmp_path / "run", changes={"model.freeze_backbone": "9 epochs"})
    assert message.startswith("model.freeze_backbone 9 epochs is step 18") and not (tmp_path / "run").exists()


@pytest.mark.parametrize("resume", [True, "auto"])
def test_an_end_that_lies_behind_is_refused(begun, resume):
    root, run = begun
    before = log_of(run)
    message = train_alone(root, run, max_steps=2, resume=resume)
    assert (
        message == f"--max_steps 2 lies behind: {run} has done 3 steps, and would end at 2; give more, or leave it out"
    )
    message = train_alone(root, run, resume=resume, changes={"length": "2 steps"}, allow_change="length")
    assert (
        message == f"length 2 steps lies behind: {run} has done 3 steps, and would end at 2; give more, or leave it out"
    )
    assert log_of(run) == before
    assert train_alone(root, run, max_steps=3, resume=resume) is None
    assert [step for step, _ in losses_of(run)] == [1, 2, 3]


def test_a_teacher_too_slow_for_its_run_is_named_with_a_momentum_that_is_not():
    """By the weights that the start has in the average at the end; runs of trained weights are not asked."""
    slow = load_recipe(None, TINY | {"teacher.momentum": "0.9999"})
    (said,) = slow_teachers(slow, 500)
    kept = math.prod(
        slow.teacher.momentum + (1 - slow.teacher.momentum) * (1 - math.cos(math.pi * t / 500)) / 2 for t in range(500)
    )
    assert f"still be {kept:.0%} what it began as: lower teacher.momentum" in said and kept > MOST_KEPT
    (advised,) = re.findall(r"\(here ([\d.]+) or less\)", said)
    assert slow_teachers(load_recipe(None, TINY | {"teacher.momentum": advised}), 500) == []
    assert (
        slow_teachers(load_recipe(None, TINY | {"teacher.momentum": "0.9999", "model.init_from": "x.pth"}), 500) == []
    )
