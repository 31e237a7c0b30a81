"""A run that would sit at ln K is recognized, and the remedy that it prints makes it learn."""

from __future__ import annotations

import math
import re

from dino_ds.config.loading import load_recipe
from dino_ds.run.announcement import MOST_KEPT, slow_teachers
from scripts.measures import PACKAGE
from tests.run.harness import TINY, log_of, read_metrics, train_tiny

PHOTOS = PACKAGE / "data/photos"
LENGTH = {
    "data.global_batch": "16",
    "crops.augment": "low_res",
    "crops.local_scale": "0.25,0.5",
    "model.drop_path": "0",
    "objective.freeze_prototypes": "0 steps",
    "optimizer.warmup": "10 steps",
    "teacher.momentum": "0.98",
    "length": "120 steps",
    "log_every": "4",
}
HOT = {"objective.teacher_temp": "0.3", "objective.warmup_teacher_temp": "0.3"}
MOST = math.log(int(TINY["head.prototypes"]))


def _last_targets(run):
    """Entropy and KL of the last line, as parts of ln K."""
    last = read_metrics(run)[-1]
    return last["teacher_entropy"] / MOST, last["kl"] / MOST


def test_flat_targets_are_recognized_and_the_temperature_advised_makes_them_decide(tmp_path):
    """The alarm, then the same run with the option that it names, at the least of the values that it gives."""
    assert train_tiny(PHOTOS, tmp_path / "hot", changes=LENGTH | HOT) is None
    (said,) = [line for line in log_of(tmp_path / "hot").splitlines() if "collapse after step" in line]
    key, low = re.search(r"\(uniform;.*lower (\S+) \(DINO: ([\d.]+) to", said).groups()
    entropy, kl = _last_targets(tmp_path / "hot")
    assert entropy > 0.99 and kl < 0.005 and read_metrics(tmp_path / "hot")[-1]["collapsed"] == 1
    cure = {key: low, "objective.warmup_teacher_temp": low}
    assert train_tiny(PHOTOS, tmp_path / "cured", changes=LENGTH | cure) is None
    assert "collapse" not in log_of(tmp_path / "cured")
    entropy, kl = _last_targets(tmp_path / "cured")
    assert entropy < 0.95 and kl > 0.02


def test_a_teacher_too_slow_for_its_run_is_named_with_a_momentum_that_is_not():
    """By the weights that the start has in the average at the end; runs of trained weights are not asked."""
    slow = load_recipe(None, TINY | LENGTH | {"teacher.momentum": "0.9999"})
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
