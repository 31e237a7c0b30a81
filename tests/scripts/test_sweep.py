"""The sweep over models, cards and stages."""

from __future__ import annotations

import json

import pytest

from dino_ds.config.loading import load_recipe
from scripts import sweep as sweeping
from scripts.sweep import sweep


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
