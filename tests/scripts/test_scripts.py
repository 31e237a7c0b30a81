"""Scripts that only this project runs: `make gpu-check` without a GPU, launches as counted, ds configs by GPU tier."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from dino_ds.config.ds_config import CHECKOUT
from dino_ds.config.loading import load_recipe
from dino_ds.costs.step_costs import count_parameters
from dino_ds.planning.fit import fit
from scripts import gpu_check, gpu_counts
from scripts.gpu_check import Part, all_parts, dry, run_all
from scripts.tiers import FOLDER, file_text, pages, plan_all
from tests.sample import sampled

SPEED = {"images": 64, "images_per_second": 2000.4, "ms": 32.0, "predicted_ms": [31.0, 52.0], "mfu": 0.31, "gib": 6.5}
SPEED |= {"launches": 860, "predicted_launches": 869, "predicted_gib": 6.1, "ratio_to_plain": 1.5}
CARD = {"card": "a card", "gib": 24.0, "bf16": True}
MEASURED = [part.name for part in all_parts(Path("x")) if part.name.startswith(("paths", "speed"))]


def test_command_lines_are_accepted(tmp_path):
    parts = [part for part in all_parts(tmp_path) if part.name not in MEASURED]
    configs = {path.stem for path in (CHECKOUT / "ds_configs").glob("*.json")}
    assert {f"config_{name}" for name in configs} <= {part.name for part in parts}
    assert [line for part in parts for line in dry(part)] == []
    parts[0].commands[0].append("--optimizer.lrr=1")
    assert "optimizer.lrr" in dry(parts[0])[0]


@pytest.mark.slow
@pytest.mark.parametrize(("name",), sampled([(name,) for name in MEASURED], lambda cell: (cell[0].partition("_")[0],)))
def test_what_is_measured_runs_in_small(name):
    found = gpu_check.measure(name, small=True)
    assert "problem" not in found
    if name.startswith("speed"):
        assert found["images_per_second"] > 0 and found["predicted_launches"] > 100
        assert ("ratio_to_plain" in found) == (name == "speed_vits16")
    else:
        assert [(row["difference"], row["right"]) for row in found["paths"]] == [("0.0e+00", True)]


def test_a_part_that_crashes_hangs_or_leaves_nothing_fails_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_check, "describe_card", lambda: CARD)

    def part(name, code="", seconds=60, look=dict, **options):
        return Part(name, seconds, [[sys.executable, "-c", code]], look, **options)

    right = part("right", "print('slower: plain in place of fast')")
    parts = [
        part("crash", "import os, sys; print('out of memory', file=sys.stderr, flush=True); os.abort()"),
        part("hang", "import time; time.sleep(99)", seconds=6, alone=True),
        part("nothing", look=lambda: json.loads((tmp_path / "absent").read_text())),
        part("speed_vits16", look=lambda: SPEED),
        part("differs", look=lambda: {"problem": "not equal: fused"}),
    ]
    assert not run_all([*parts, right], tmp_path)
    result = json.loads((tmp_path / "result.json").read_text())
    problems = [found.get("problem", "").partition(":")[0] for found in result["parts"].values()]
    assert problems == ["exit code -6", "not done after 6 s", "no result", "", "not equal", ""] and not result["passed"]
    text = re.sub(" +", " ", (tmp_path / "page.md").read_text())
    assert "| vits16 | 64 | 2000 | 31 % | 32 (31 to 52) | 860 (869) | 6.5 (6.1) | 1.50 |" in text
    assert text.startswith("# gpu-check: NOT PASSED") and "out of memory" in text and right.result["slower"][0] in text
    assert run_all([right], tmp_path) and "gpu-check: passed" in (tmp_path / "page.md").read_text()


def test_without_a_gpu_it_says_so_in_a_line():
    with pytest.raises(SystemExit, match="gpu-check: no GPU is found"):
        gpu_check.main()


PARTS = ["teacher", "targets", "student", "loss", "backward", "optimizer", "ema", "prototypes"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "config, images, launches, gigabytes, of_prototypes",
    [
        pytest.param("vits16", 64, 326, 12.1, (60, 2.3), marks=pytest.mark.full),
        pytest.param("dinov2_vitl14", 64, 726, 101.3, (239, 64.0), marks=pytest.mark.full),
        ("dinov3_vitl16", 32, 684, 31.2, (133, 12.9)),
    ],
)
def test_ceilings(config, images, launches, gigabytes, of_prototypes):
    """Of what a step launches and moves; lower one when you get below it."""
    found = gpu_counts.count(load_recipe(config, {"model.depth": "2"}), images)
    assert list(found["launches"]) == list(found["gigabytes"]) == PARTS
    own = {of: found[of].pop("prototypes") for of in ("launches", "gigabytes")}
    assert own["launches"] <= of_prototypes[0] and own["gigabytes"] <= of_prototypes[1], own
    assert sum(found["launches"].values()) <= launches, found["launches"]
    assert sum(found["gigabytes"].values()) <= gigabytes, found["gigabytes"]
    assert found["executed_tflop"] < found["credited_tflop"]
    assert found["peak_gib"] > 0


@pytest.fixture(scope="module")
def planned():
    return plan_all()


@pytest.mark.full
def test_files_and_tables_are_those_of_the_planner(planned):
    """Every card and size is rehearsed, for minutes. If this fails after a change of the planner: make tiers."""
    expected = {f"{found.name}.json": file_text(found) for _, found in planned if found is not None}
    assert expected == {path.name: path.read_text() for path in FOLDER.glob("*.json")}
    assert all(page.read_text() == text for page, text in pages(planned).items())


@pytest.mark.full
def test_a_second_copy_of_the_weights_is_counted():
    """ZeRO++'s hpZ keeps 2 bytes a weight, divided by the ranks of a node."""
    recipe = load_recipe("vitl16", {})
    zero = {"stage": 3, "zero_hpz_partition_size": 8}
    _, memory = fit(recipe, {"gradient_clipping": 0, "bf16": {"enabled": True}, "zero_optimization": zero}, "x", 64)
    assert memory.parts["second copy of the student"] == 2 * count_parameters(recipe) // 8
