"""The scripts that measure, at a tiny size."""

from __future__ import annotations

import json
import sys

import numpy as np
import pytest
from PIL import Image

from dino_ds.config.crops import dino_groups
from dino_ds.config.loading import load_recipe
from dino_ds.data.multicrop import MultiCrop
from scripts import bench_attention, bench_data, bench_knn, bench_loss
from scripts.bench_plan import measure_cell
from scripts.pil_pipeline import PilPipeline
from tests.data.files import encoded, photo
from tests.planning.measure.tiny import tiny_recipe


def test_attention(capsys):
    bench_attention.measure(tiny_recipe(), 2, 2, as_json=True)
    result = json.loads(capsys.readouterr().out)
    found = {(row["name"], row["shape"]): row for row in result["attention"]}
    assert {shape for _, shape in found} == {"4 x 17", "4 x 5", "both"}
    for name in ("naive", "sdpa auto", "sdpa math"):
        assert found[name, "both"]["both_ms"] > 0
    assert all(row["skipped"] or row["forward_ms"] > 0 for row in found.values())


def test_loss_and_ema_and_knn(capsys):
    bench_loss.measure(tiny_recipe(), 2, 2)
    page = capsys.readouterr().out
    assert "loss: " in page and "x the time of a copy" in page
    pytest.importorskip("faiss")
    bench_knn.main(queries=40, bank=300, width=8, k=5, images=3, as_json=True)
    result = json.loads(capsys.readouterr().out)
    assert result["same_neighbours"] == 1.0 and result["features_seconds"] > 0


@pytest.mark.slow
def test_every_pipeline_of_crops(tmp_path, monkeypatch):
    """DINO's own and ours, on the embedded photographs; its crops are scaled as ours."""
    changes = {"crops.global_size": "32", "crops.local_size": "16", "crops.num_local": "2", "model.patch_size": "8"}
    monkeypatch.setattr(bench_data, "load_recipe", lambda *_: load_recipe(None, changes))
    bench_data.main(images=3, rounds=2, out=str(tmp_path / "out"))
    result = json.loads((tmp_path / "out/data.json").read_text())
    for name in ("pil", "exact", "split_worker", "device", "decode"):
        assert result["pipelines"][name]["images_per_second"] > 0
    assert result["distance_levels"] < 8 and result["read"]["shard"]["warm"] > 0
    assert (tmp_path / "out/data.png").is_file()
    multicrop = MultiCrop(dino_groups(32, (0.4, 1.0), 16, (0.05, 0.4), 2), "dino")
    theirs = [PilPipeline(multicrop)(encoded(photo(), "PNG")) for _ in range(60)]
    ours = [multicrop(Image.fromarray(np.array(photo())), seed) for seed in range(60)]
    for view in range(4):
        a, b = (np.array([float(crops[view].mean()) for crops in some]) for some in (theirs, ours))
        assert abs(a.mean() - b.mean()) <= 5 * np.sqrt((a.var() + b.var()) / 60)


@pytest.mark.skipif(sys.platform != "linux", reason="the resident set of glibc's heap")
@pytest.mark.full
def test_a_process_grows_by_what_is_predicted():
    """The growth agrees within 10 %; scripts.bench_plan measures all sizes, stages and ranks."""
    shape = {"model.width": "256", "model.heads": "4", "model.depth": "4", "head.prototypes": "8192"}
    recipe = load_recipe("vitti16", shape | {"crops.global_size": "96", "crops.local_size": "48"})
    found = measure_cell(recipe, {"gradient_clipping": 3.0, "zero_optimization": {"stage": 3}}, 8, 1)
    assert found["predicted_mib"] > 200
    assert found["ratio"] == pytest.approx(1, abs=0.1), found
