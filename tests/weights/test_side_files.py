"""Numbers that a file beside weights claims are checked as options are, and a kill between two files loses nothing."""

from __future__ import annotations

import contextlib
import json
import math

import pytest
import torch

from dino_ds.errors import CheckpointError
from dino_ds.weights.export import export_safetensors, export_timm
from dino_ds.weights.load import load
from dino_ds.weights.sidecar import read_sidecar
from tests.weights.huggingface import write_native
from tests.weights.test_weights import _backbone

BAD = (math.nan, math.inf, -math.inf, 1e308, -1, 0, True, "x", None, [1.0])


def _numbers(content: object, path: tuple[object, ...] = ()) -> list[tuple[object, ...]]:
    """Paths of all numbers in a JSON."""
    if isinstance(content, bool) or not isinstance(content, dict | list | int | float):
        return []
    if isinstance(content, int | float):
        return [path]
    entries = content.items() if isinstance(content, dict) else enumerate(content)
    return [found for key, value in entries for found in _numbers(value, (*path, key))]


SIDE_FILES = {
    "teacher.json": (export_safetensors, "a.safetensors", "a.json"),
    "timm": (export_timm, "timm", "timm/config.json"),
    "Hugging Face": (write_native, "hf", "hf/config.json"),
    "processor": (write_native, "hf", "hf/preprocessor_config.json"),
}


@pytest.mark.parametrize("kind", SIDE_FILES)
def test_no_number_beside_weights_makes_features_that_are_none(tmp_path, kind):
    """Each number in turn, each bad value: refused, or it makes no feature that is not a number."""
    write, weights, side = SIDE_FILES[kind]
    model = _backbone("vit_small_patch14_dinov2")
    model.about["value_range"] = [0.0, 255.0]
    write(model, tmp_path / weights)
    content = read_sidecar(tmp_path / weights) if kind == "teacher.json" else json.loads((tmp_path / side).read_text())
    pixels = torch.randint(0, 256, (48, 40, 3), dtype=torch.uint8).numpy()
    numbers = _numbers(content)
    # Every value in a fifth of the numbers, and in each number two of the values.
    for path, bad in [(path, bad) for i, path in enumerate(numbers) for bad in BAD[i % 5 :: 5]]:
        changed = json.loads(json.dumps(content))
        place = changed
        for key in path[:-1]:
            place = place[key]
        place[path[-1]] = bad
        (tmp_path / side).write_text(json.dumps(changed))
        with contextlib.suppress(CheckpointError):
            found = load(tmp_path / weights)
            assert torch.isfinite(found.features(found.preprocess(pixels)[None])).all(), (path, bad)
