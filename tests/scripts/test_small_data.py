"""scripts.small_data: which images it takes, how long it trains, and a whole measurement."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from scripts import small_data

CHECKOUT = Path(__file__).parents[2]


@pytest.fixture
def images(tmp_path):
    """Two classes, dark and light: 40 training and 12 test images of each."""
    rng = np.random.default_rng(0)
    for split, count in (("train", 40), ("test", 12)):
        for label, level in (("dark", 0), ("light", 128)):
            (folder := tmp_path / split / label).mkdir(parents=True)
            for number in range(count):
                Image.fromarray(rng.integers(level, level + 128, (16, 16, 3), np.uint8)).save(folder / f"{number}.png")
    return tmp_path


@pytest.mark.slow
def test_teacher_untrained_network_and_pixels_are_compared(images):
    """Standard output is one JSON object, and nothing else."""
    tiny = ["crops.global_size=16", "crops.local_size=8", "data.global_batch=8", "model.depth=1"]
    tiny += ["head.bottleneck=8", "model.width=16", "model.heads=1", "optimizer.warmup=16 images"]
    words = [sys.executable, "-m", "scripts.small_data", "--data", f"{images}:60", "--objective", "small", "--json"]
    words += ["--seeds", "1", "--first-seed", "3", "--minutes", "0.005"]
    words += [word for key in tiny for word in ("--set", key)]
    done = subprocess.run(words, cwd=CHECKOUT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["train_images"] == 60 and found["images"] % 8 == 0
    assert found["raw_pixels"]["knn"] == 100
    (run,) = found["runs"]
    assert run["untrained"].keys() == run["teacher"].keys() == {"knn", "ridge", "linear"}
    assert run["seed"] == 3 and run["cpu_minutes"] > 0 and not run["collapsed"]
    assert "1 seed(s), 0 collapsed" in small_data.page(found)
