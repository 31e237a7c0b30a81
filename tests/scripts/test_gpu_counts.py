"""Ceilings of what a step launches and moves on a GPU, rehearsed; lower one when you get below it."""

from __future__ import annotations

import pytest

from dino_ds.config.loading import load_recipe
from scripts import gpu_counts

pytestmark = pytest.mark.slow

PARTS = ["teacher", "targets", "student", "loss", "backward", "optimizer", "ema", "prototypes"]
BLOCKS = {"model.depth": "2"}
"""With whole networks each of these takes ten seconds; what prototypes take does not depend on the blocks."""


@pytest.mark.parametrize(
    "config, images, launches, gigabytes, of_prototypes",
    [
        ("vits16", 64, 326, 12.1, (60, 2.3)),
        ("dinov2_vitl14", 64, 726, 101.3, (239, 64.0)),
        ("dinov3_vitl16", 32, 684, 31.2, (133, 12.9)),
    ],
)
def test_ceilings(config: str, images: int, launches: int, gigabytes: float, of_prototypes: tuple[int, float]):
    found = gpu_counts.count(load_recipe(config, BLOCKS), images)
    assert list(found["launches"]) == list(found["gigabytes"]) == PARTS
    own = {of: found[of].pop("prototypes") for of in ("launches", "gigabytes")}
    assert own["launches"] <= of_prototypes[0] and own["gigabytes"] <= of_prototypes[1], own
    assert sum(found["launches"].values()) <= launches, found["launches"]
    assert sum(found["gigabytes"].values()) <= gigabytes, found["gigabytes"]
    assert found["executed_tflop"] < found["credited_tflop"]
    assert found["peak_gib"] > 0
