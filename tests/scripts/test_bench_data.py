"""scripts.bench_data: a real run of each pipeline on the embedded photographs."""

from __future__ import annotations

import json

import numpy as np
import pytest
from PIL import Image

from dino_ds.config.crops import dino_groups
from dino_ds.config.loading import load_recipe
from dino_ds.data.multicrop import MultiCrop
from dino_ds.errors import ConfigError, DataError
from scripts import bench_data
from scripts.pil_pipeline import PilPipeline
from tests.data.files import encoded, photo

SMALL = {"crops.global_size": "32", "crops.local_size": "16", "crops.num_local": "2", "model.patch_size": "8"}


def _measure(**changes: str):
    recipe = load_recipe(None, {**SMALL, **{key.replace("__", "."): value for key, value in changes.items()}})
    return bench_data.measure(recipe, images=3, rounds=2)[0]


@pytest.mark.slow
def test_every_pipeline_is_measured(capsys, tmp_path, monkeypatch):
    small = load_recipe(None, SMALL)
    monkeypatch.setattr(bench_data, "load_recipe", lambda *_: small)
    bench_data.main(images=3, rounds=2, out=str(tmp_path / "out"))
    result = json.loads((tmp_path / "out/data.json").read_text())
    assert Image.open(tmp_path / "out/data.png").width == 850
    for name in ("pil", "exact", "split_worker", "device", "decode"):
        assert result["pipelines"][name]["images_per_second"] > 0
    assert result["ratio_split_to_pil"] > 0 and result["distance_levels"] < 8
    assert result["read"]["loose"]["warm"] > 0 and result["read"]["shard"]["warm"] > 0
    assert result["images"]["count"] == 3 and result["images"]["largest"][1] == 256
    assert result["host"]["versions"]["torch"]
    page = capsys.readouterr().out
    assert "| split_worker" in page and "the embedded photographs" in page and "loose files" in page


def test_data_root_chooses_the_images_and_bad_ones_are_left_out(tmp_path):
    photo(70, 50).save(tmp_path / "a.png")
    (tmp_path / "b.png").write_bytes(b"no image")
    images = _measure(data__root=str(tmp_path))["images"]
    assert (images["where"], images["count"], images["largest"]) == (str(tmp_path), 1, (70, 50))


def test_what_can_not_be_measured_is_said(tmp_path):
    with pytest.raises(ConfigError, match=r"data\.source photos has none"):
        _measure(data__source="photos")
    (tmp_path / "b.png").write_bytes(b"no image")
    with pytest.raises(DataError, match=r"none of 1 images .* can be read, the last one .*b\.png"):
        _measure(data__root=str(tmp_path))


def test_the_pil_pipeline_is_dinos():
    """As many crops, of the same sizes, scaled alike: means and deviations over draws agree with MultiCrop's."""
    multicrop = MultiCrop(dino_groups(32, (0.4, 1.0), 16, (0.05, 0.4), 2), "dino")
    data = encoded(photo(), "PNG")
    theirs = [PilPipeline(multicrop)(data) for _ in range(60)]
    ours = [multicrop(Image.fromarray(np.array(photo())), seed) for seed in range(60)]
    assert [crop.shape for crop in theirs[0]] == [crop.shape for crop in ours[0]]
    for view in range(4):
        a, b = (np.array([float(crops[view].mean()) for crops in some]) for some in (theirs, ours))
        assert abs(a.mean() - b.mean()) <= 5 * np.sqrt((a.var() + b.var()) / 60)
    with pytest.raises(ConfigError, match=r"DINO's pipeline has no crops\.rotation"):
        PilPipeline(MultiCrop.of(load_recipe(None, {"crops.rotation": "0.5"})))
