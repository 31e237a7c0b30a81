"""scripts.bench_knn at a tiny size: what it prints, and what it says without faiss."""

from __future__ import annotations

import json
import sys

import pytest

from dino_ds.errors import ConfigError
from scripts import bench_knn

TINY = {"queries": 40, "bank": 300, "width": 8, "k": 5, "images": 3}


@pytest.fixture(autouse=True)
def _one_thread(monkeypatch):
    monkeypatch.setattr(bench_knn, "usable_cores", lambda: [0])


@pytest.mark.slow
def test_beside_faiss(capsys):
    pytest.importorskip("faiss")
    bench_knn.main(**TINY, as_json=True)
    result = json.loads(capsys.readouterr().out)
    assert result["same_neighbours"] == 1.0
    (row,) = result["searches"]
    assert row["search_ratio"] == pytest.approx(row["faiss_search_seconds"] / row["search_seconds"])
    assert result["features_seconds"] > 0


def test_without_faiss(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "faiss", None)  # as if it were not there
    bench_knn.main(**TINY)
    assert "faiss-cpu is not installed (pip install faiss-cpu)" in capsys.readouterr().out


def test_what_can_t_be_measured():
    with pytest.raises(ConfigError, match="--k 500 is more than the 300 rows"):
        bench_knn.main(**{**TINY, "k": 500})
