"""The planner's bytes are those that a process grows by."""

from __future__ import annotations

import sys

import pytest

from dino_ds.config.loading import load_recipe
from scripts.bench_plan import measure_cell

SHAPE = {
    "model.width": "256",
    "model.heads": "4",
    "model.depth": "4",
    "crops.global_size": "96",
    "crops.local_size": "48",
    "head.prototypes": "8192",
}


@pytest.mark.skipif(sys.platform != "linux", reason="the resident set of glibc's heap")
@pytest.mark.slow
def test_a_process_grows_by_what_is_predicted():
    """Within 10 %; all sizes, stages and ranks are measured by scripts.bench_plan."""
    ds = {"gradient_clipping": 3.0, "zero_optimization": {"stage": 3}}
    found = measure_cell(load_recipe("vitti16", SHAPE), ds, 8, 1)
    assert found["predicted_mib"] > 200
    assert found["ratio"] == pytest.approx(1, abs=0.1), found
