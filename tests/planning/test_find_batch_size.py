"""find-batch-size: what is tried, what is taken, and what is written."""

from __future__ import annotations

import json

import pytest

from dino_ds.config.ds_config import find_ds_config, load_ds_config
from dino_ds.errors import ConfigError
from dino_ds.options.machine import FindBatchSizeOptions
from dino_ds.planning.find_batch_size import Tried, fastest, find_largest, run, write_batch
from dino_ds.planning.fit import with_batch
from tests.planning.measure.tiny import tiny_ds, tiny_recipe


def _run(global_batch="2", memory_gib=1.0, ranks=1, write=None):
    options = FindBatchSizeOptions(memory_gib=memory_gib, ranks=ranks, steps=1, threads=1, write=write, json=True)
    run(options, recipe=tiny_recipe(data__global_batch=global_batch), ds=tiny_ds(0), ds_path="test.json")


@pytest.mark.parametrize("most", [1, 2, 48, 64, 100, 512, 700])
def test_search_finds_the_limit_to_a_16th_and_tries_few(most):
    for limit in (0, 1, 3, 5, 47, 48, 63, 64, 65, 300, 511, 512, 5000):
        tried = []

        def fits(size, limit=limit, tried=tried):
            tried.append(size)
            return size <= limit

        found, best = find_largest(fits, most), min(limit, most)
        assert found <= best and best - found <= max(0, found // 16)
        assert len(tried) == len(set(tried)) <= 14
        assert all(1 <= size <= most for size in tried)


def test_the_fastest_divides_the_global_batch():
    tried = [Tried(8, True, 50.0, 1.0), Tried(16, True, 90.0, 2.0), Tried(30, True, 99.0, 3.0), Tried(32, False)]
    assert fastest(tried, 480).micro_batch == 30
    assert fastest(tried, 64).micro_batch == 16


@pytest.mark.slow
def test_the_real_step_is_measured(capsys):
    _run("1", memory_gib=20.0)
    result = json.loads(capsys.readouterr().out)
    (tried,) = result["tried"]
    assert tried["fits"] and tried["images_per_second"] > 0
    assert result["largest"] == result["best"] == result["accumulation"] == tried["micro_batch"] == 1
    assert 0.1 < tried["predicted_gib"] <= 1.5 * tried["memory_gib"]


def test_too_much_memory_is_told_in_one_line():
    with pytest.raises(ConfigError, match=r"not one image fits into 0.1 GiB: recompute activations"):
        _run(memory_gib=0.1)


def test_what_can_not_be_is_refused_before_anything_starts(tmp_path):
    with pytest.raises(ConfigError, match="global batch 3 is not a multiple of 2 ranks"):
        _run("3", ranks=2)
    with pytest.raises(ConfigError, match="its folder is missing"):
        _run(write=str(tmp_path / "none/x.json"))


def test_writing_keeps_the_rest_and_the_comments(tmp_path):
    path = tmp_path / "mine.json"
    path.write_text('{\n  // mine\n  "gradient_clipping": 0.3,\n  "train_micro_batch_size_per_gpu": "auto"\n}\n')
    write_batch(path, {}, "unused.json", 24)
    assert "// mine" in path.read_text()
    assert load_ds_config(str(path), {}) == {
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": 0.3,
        "train_micro_batch_size_per_gpu": 24,
    }


def test_a_new_file_is_the_config_that_was_measured(tmp_path):
    shipped = find_ds_config("ds_configs/zero2_bf16.json")
    given = load_ds_config(shipped, {})
    write_batch(tmp_path / "copy.json", given, shipped, 8)
    assert load_ds_config(str(tmp_path / "copy.json"), {}) == with_batch(given, 8, "auto")
    changed = load_ds_config(shipped, {"zero_optimization.stage": "1"})
    write_batch(tmp_path / "changed.json", changed, shipped, 8)
    assert load_ds_config(str(tmp_path / "changed.json"), {})["zero_optimization"]["stage"] == 1
    assert list(tmp_path.glob("*.tmp")) == []


def test_a_file_that_is_no_ds_config_stays_as_it_is(tmp_path):
    path = tmp_path / "x.json"
    path.write_text('{"gradient_clippping": 1}')
    with pytest.raises(ConfigError, match="gradient_clippping"):
        write_batch(path, {}, "unused.json", 8)
    assert path.read_text() == '{"gradient_clippping": 1}' and len(list(tmp_path.iterdir())) == 1
