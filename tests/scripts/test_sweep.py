"""The sweep, and the planner's model of links against published runs."""

from __future__ import annotations

import json

import pytest

from dino_ds.config.loading import load_recipe
from dino_ds.costs.communication import Traffic
from dino_ds.planning.gpus import GPUS
from dino_ds.planning.speed import Cluster, collective_seconds, exposed_seconds
from scripts import sweep as sweeping
from scripts.sweep import sweep
from tests.scripts.published import PUBLISHED, measured_share, simulate


def _is_png(path) -> bool:
    return path.read_bytes()[:4] == b"\x89PNG"


@pytest.mark.full
def test_more_memory_and_more_sharding_never_fit_less(monkeypatch):
    monkeypatch.setattr(sweeping, "BACKBONES", ("vit_giant_patch14_dinov2",))
    cells = {(c["backbone"], c["place"], c["card_gb"]): c for c in sweep(load_recipe("vits16", {}), 8)["cells"]}
    for (backbone, place, box), cell in cells.items():
        assert cell["largest_with_checkpointing"] >= cell["largest"]
        smaller = [c for (b, p, other), c in cells.items() if (b, p) == (backbone, place) and other < box]
        assert all(c["largest"] <= cell["largest"] for c in smaller)
        if place == "3+host":
            assert cell["largest"] >= cells[backbone, "3", box]["largest"]


@pytest.mark.full
def test_the_sweep_is_drawn(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(sweeping, "BACKBONES", ("vit_small_patch16_224", "vit_7b_patch16_reg4"))
    sweeping.main(str(tmp_path / "new"), gpus=8)
    assert json.loads((tmp_path / "new/plan.json").read_text())["gpus"] == 8
    assert _is_png(tmp_path / "new/plan.png")
    assert "vit_7b_patch16_reg4" in (tmp_path / "new/plan.md").read_text()


@pytest.mark.parametrize("run", PUBLISHED, ids=lambda run: run.name)
def test_published_runs_are_met(run):
    """Within 5 % of the rate."""
    found = simulate(run)
    for gpus, share in measured_share(run).items():
        assert found[gpus] == pytest.approx(share, abs=0.05)


def test_a_collective_takes_its_bytes_over_its_slowest_link():
    gpu = GPUS["a100-80g"]
    one_node, two_nodes = Cluster(gpu, 8, 1, 25.0), Cluster(gpu, 8, 2, 25.0)
    traffic = Traffic("", "all-gather", 8 * 10**9, 1, 8)
    assert collective_seconds(traffic, one_node) == pytest.approx(7 / (0.75 * 300), rel=1e-3)
    wide = Traffic("", "all-gather", 16 * 10**9, 1, 16)
    assert collective_seconds(wide, two_nodes) == pytest.approx(15 / (0.75 * 25), rel=1e-3)


def test_what_goes_on_meanwhile_hides_it():
    cluster = Cluster(GPUS["a100-80g"], 8, 1, 25.0)
    hidden = Traffic("", "all-gather", 10**9, 1, 8, "backward")
    seconds = collective_seconds(hidden, cluster)
    assert exposed_seconds([hidden], cluster, 1.0, 0.5) == 0
    assert exposed_seconds([hidden], cluster, 0.0, 0.0) == pytest.approx(seconds)
