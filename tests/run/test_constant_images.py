"""Images of one color: counted, said, and an alarm where they are most."""

from __future__ import annotations

import numpy as np
import torch
from PIL import Image

from dino_ds.run.reports import WINDOWS, constant_images
from tests.ranks import run_on_ranks
from tests.run.harness import image_folder, log_of, read_metrics, train_tiny

STEPS = WINDOWS + 2
CHANGES = {"length": f"{STEPS} steps", "objective.freeze_prototypes": "2 steps"}


def _blacken(paths):
    for i, path in enumerate(paths):
        Image.fromarray(np.zeros((40 + i, 48, 3), np.uint8)).save(path)


def test_crops_without_contrast():
    """Every channel of both global crops counts; the noise of float arithmetic is no contrast."""
    noise = torch.rand(5, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    flat = torch.full((5, 3, 64, 64), -2.1) + 1e-6 * noise
    one, two = noise.clone(), noise.clone()
    one[:3], two[:2] = flat[:3], flat[:2]
    two[1, 2] = noise[1, 2]  # one channel
    assert constant_images([one, two]).tolist() == [True, False, False, False, False]


def test_a_few_are_said_once(tmp_path):
    root = image_folder(tmp_path / "images")
    paths = sorted(root.iterdir())
    _blacken(paths[:3])
    assert run_on_ranks(train_tiny, root, tmp_path / "few", changes=CHANGES) == [None, None]
    assert log_of(tmp_path / "few").count("of the images are of one color (constant_images of metrics.jsonl)") == 1
    parts = [record["constant_images"] for record in read_metrics(tmp_path / "few")]
    assert 0 < sum(parts) / len(parts) < 0.4
