"""The scripts that measure parts of the step, at a tiny size."""

from __future__ import annotations

import json

from scripts import bench_attention, bench_loss
from tests.measure.tiny import tiny_recipe


def test_attention(capsys):
    bench_attention.measure(tiny_recipe(), 2, 2, as_json=True)
    result = json.loads(capsys.readouterr().out)
    found = {(row["name"], row["shape"]): row for row in result["attention"]}
    assert {shape for _, shape in found} == {"4 x 17", "4 x 5", "both"}
    for name in ("naive", "sdpa auto", "sdpa math"):
        assert found[name, "both"]["both_ms"] > 0
    assert all(row["skipped"] or row["forward_ms"] > 0 for row in found.values())


def test_loss_and_ema(capsys):
    bench_loss.measure(tiny_recipe(), 2, 2)
    page = capsys.readouterr().out
    assert "loss: " in page and "x the time of a copy" in page
