"""Images of one color, and files that are all the same: named, counted, and an alarm where they are most."""

from __future__ import annotations

import numpy as np
import torch
from PIL import Image

from dino_ds.health.collapse import WINDOWS, CollapseAlarm
from dino_ds.run.image_reports import ConstantImages, constant_images
from tests.engine.test_speed_options import HostReads
from tests.ranks import run_on_ranks
from tests.run.harness import image_folder, log_of, read_metrics, train_tiny

STEPS = WINDOWS + 2
CHANGES = {"length": f"{STEPS} steps", "objective.freeze_prototypes": "2 steps"}


def _blacken(paths, same_size=False):
    for i, path in enumerate(paths):
        Image.fromarray(np.zeros((40 + i * (not same_size), 48, 3), np.uint8)).save(path)


def test_crops_without_contrast():
    """Every channel of both global crops counts; the noise of float arithmetic is no contrast."""
    noise = torch.rand(5, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    flat = torch.full((5, 3, 64, 64), -2.1) + 1e-6 * noise
    one, two = noise.clone(), noise.clone()
    one[:3], two[:2] = flat[:3], flat[:2]
    two[1, 2] = noise[1, 2]  # one channel
    assert constant_images([one, two]).tolist() == [True, False, False, False, False]


def test_the_host_reads_nothing_until_names_are_asked_for():
    seen, flat = ConstantImages(), [torch.zeros(2, 3, 32, 32)] * 2
    with HostReads() as reads:
        seen.add(constant_images(flat), ["a", "b"])
        seen.add(constant_images(flat), ["b", "c"])
    assert reads.count == 0 and seen.take_names() == ["a", "b", "c"] and seen.take_names() == []


def test_the_alarm_for_images_of_one_color():
    alarm = CollapseAlarm(4096, warmup_steps=100)
    said = [alarm.look(step, 4.0, 1.0, constant=0.9) for step in range(WINDOWS + 5)]
    assert [i for i, text in enumerate(said) if text] == [WINDOWS - 1] and alarm.on
    assert "90% of the images are of one color" in said[WINDOWS - 1] and "look-data" in said[WINDOWS - 1]
    assert "over" in alarm.look(99, 4.0, 1.0, constant=0.1) and not alarm.on


def test_a_few_are_named_once_and_a_folder_of_them_is_an_alarm(tmp_path):
    root = image_folder(tmp_path / "images")
    paths = sorted(root.iterdir())
    _blacken(paths[:3])
    assert run_on_ranks(train_tiny, root, tmp_path / "few", changes=CHANGES) == [None, None]
    lines = [line.partition(" ")[2] for line in log_of(tmp_path / "few").splitlines() if "image of one color" in line]
    assert sorted(lines) == [f"warning  image of one color: {path}" for path in paths[:3]]
    parts = [record["constant_images"] for record in read_metrics(tmp_path / "few")]
    assert 0 < sum(parts) / len(parts) < 0.4

    _blacken(paths, same_size=True)
    assert run_on_ranks(train_tiny, root, tmp_path / "all", changes=CHANGES) == [None, None]
    log = log_of(tmp_path / "all")
    assert f"collapse after step {WINDOWS}: 100% of the images are of one color" in log
    assert log.count("image of one color: ") == 20 and "note     16 images that were compared are the same file" in log
    assert [record["constant_images"] for record in read_metrics(tmp_path / "all")] == [1.0] * STEPS
