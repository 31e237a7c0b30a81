"""The scripts that measure, at a tiny size."""

from __future__ import annotations

import json
import sys

import pytest

from dino_ds.config.loading import load_recipe
from dino_ds.errors import ConfigError
from scripts import bench_attention, bench_knn, bench_loss
from scripts.bench_plan import measure_cell
from tests.planning.measure.tiny import tiny_recipe


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


@pytest.mark.slow
def test_knn_with_and_without_faiss(capsys, monkeypatch):
    monkeypatch.setattr(bench_knn, "usable_cores", lambda: [0])
    tiny = {"queries": 40, "bank": 300, "width": 8, "k": 5, "images": 3}
    with pytest.raises(ConfigError, match="--k 500 is more than the 300 rows"):
        bench_knn.main(**tiny | {"k": 500})
    with monkeypatch.context() as without:
        without.setitem(sys.modules, "faiss", None)
        bench_knn.main(**tiny)
    assert "faiss-cpu is not installed (pip install faiss-cpu)" in capsys.readouterr().out
    pytest.importorskip("faiss")
    bench_knn.main(**tiny, as_json=True)
    result = json.loads(capsys.readouterr().out)
    assert result["same_neighbours"] == 1.0 and result["features_seconds"] > 0
    (row,) = result["searches"]
    assert row["search_ratio"] == pytest.approx(row["faiss_search_seconds"] / row["search_seconds"])


@pytest.mark.skipif(sys.platform != "linux", reason="the resident set of glibc's heap")
@pytest.mark.full
def test_a_process_grows_by_what_is_predicted():
    """The growth agrees within 10 %; scripts.bench_plan measures all sizes, stages and ranks."""
    shape = {"model.width": "256", "model.heads": "4", "model.depth": "4", "head.prototypes": "8192"}
    recipe = load_recipe("vitti16", shape | {"crops.global_size": "96", "crops.local_size": "48"})
    found = measure_cell(recipe, {"gradient_clipping": 3.0, "zero_optimization": {"stage": 3}}, 8, 1)
    assert found["predicted_mib"] > 200
    assert found["ratio"] == pytest.approx(1, abs=0.1), found
