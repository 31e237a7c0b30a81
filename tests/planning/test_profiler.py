"""profile: the verdict on steps that are made to be bound by one resource, and the files of a real step."""

from __future__ import annotations

import json

import pytest
import torch

from dino_ds.basics.ranges import PARTS, named_range
from dino_ds.engine.process import init_distributed
from dino_ds.errors import ConfigError
from dino_ds.options.bench import ProfileOptions
from dino_ds.planning.profiler import judge, profile_step, run
from tests.planning.measure.tiny import tiny_ds, tiny_recipe


def _profile(out, recipe, stage=0):
    options = ProfileOptions(out=str(out), batch=4, steps=2, warmup=1, threads=1, json=True)
    run(options, recipe=recipe, ds=tiny_ds(stage), ds_path="test.json")


def _matrix_product():
    a = torch.ones(700, 700)
    for _ in range(3):
        a @ a


def _slow_data():
    with named_range("data"):
        _matrix_product()
    _matrix_product()


@pytest.mark.parametrize(("step", "resource"), [(_slow_data, "input"), (_matrix_product, "compute")])
@pytest.mark.slow
def test_what_bounds_a_step_is_seen(step, resource, tmp_path):
    """Of operators that a busy machine makes no others; see test_the_rule for those of microseconds."""
    init_distributed()
    result = profile_step(step, 1, 2, tmp_path)
    assert result["bound_by"] == resource, result["reason"]


@pytest.mark.parametrize(
    ("data", "calls", "on_gpu", "resource"),
    [
        (0.11, [("aten::mm", 0.8)], False, "input"),
        (0.09, [("aten::mm", 0.8)], False, "compute"),
        (0.0, [("aten::mm", 0.69)], False, "host"),
        (0.0, [("aten::mm", 0.00001)] * 90_000, False, "host"),
        (0.0, [("aten::mm", 0.00001)] * 90_000, True, "compute"),
        (0.0, [("aten::mm", 0.3), ("aten::_fused_adamw_", 0.25), ("aten::native_layer_norm", 0.25)], True, "memory"),
        (0.0, [("aten::convolution", 0.3), ("aten::_flash_attention", 0.3), ("aten::gelu", 0.3)], True, "compute"),
        (0.0, [("aten::mm", 0.3), ("c10d::allreduce_", 0.2), ("gloo:all_reduce", 0.3)], True, "communication"),
    ],
)
def test_the_rule(data, calls, on_gpu, resource):
    bound = judge(1.0, data, calls, on_gpu)
    assert bound["bound_by"] == resource and bound["reason"] and bound["advice"]


@pytest.mark.slow
def test_a_real_step_leaves_traces_with_named_parts(tmp_path, capsys):
    recipe = tiny_recipe(data__source="cifar10")  # that has no folder: noise, as for a recipe without images
    _profile(tmp_path, recipe, stage=1)
    result = json.loads(capsys.readouterr().out)
    assert result["data"] == "noise" and result["steps"] == 2
    assert set(result["parts"]) == set(PARTS[1:])
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    spans = [event["dur"] for event in events if event.get("name") in PARTS and event["cat"] == "user_annotation"]
    assert 0 < sum(result["parts"].values()) <= result["step_seconds"]
    assert sum(result["parts"].values()) == pytest.approx(sum(spans) / 1e6 / 2, rel=0.3)
    names = [event.get("name") for event in events]
    assert names.count("teacher") == 2 and names.count("ProfilerStep#3") == 1
    assert json.loads((tmp_path / "summary.json").read_text())["bound_by"] == result["bound_by"]


def test_a_folder_that_can_not_be_made_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="can't be made"):
        _profile(tmp_path / "file/x", tiny_recipe())
