"""`dino-ds plan` as people and programs meet it."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from dino_ds.cli.main import main
from dino_ds.config.ds_config import load_ds_config, resolve_ds_config
from dino_ds.config.loading import load_recipe

LARGE = "--config", "vitl16", "--model.depth", "2"


def _plan(capsys, *words: str):
    main(["plan", *words, "--json"])
    return json.loads(capsys.readouterr().out)


@pytest.mark.slow
def test_a_plan_that_is_asked_again_and_reports_load_no_torch(capsys):
    """What was rehearsed is kept."""
    words = ["plan", "--gpu", "a100-40g", "--gpus", "8", "--model.depth", "2"]
    main(words)
    code = f"import sys, dino_ds.report.single_run; from dino_ds.cli.main import main; main({words!r})"
    code += "; assert 'torch' not in sys.modules"
    page = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    assert "recommended: ZeRO" in page and "fragmentation margin" in page and "hours" in page


def test_one_json_object_with_all_that_was_asked(capsys):
    found = _plan(capsys, *LARGE, "--gpu", "a100-80g", "--gpus", "8", "--nodes", "2")
    assert found["fits"] and found["max_micro_batch"] >= found["micro_batch"]
    assert sum(found["bytes_per_gpu"].values()) <= found["limit_bytes"]
    assert {"student", "teacher", "activations", "masters and moments"} <= found["bytes_per_gpu"].keys()
    assert found["micro_batch"] * found["accumulation"] * 16 == found["global_batch"] == 1024
    assert found["activation_bytes"]["with_checkpointing"] < found["activation_bytes"]["without_checkpointing"]
    assert "not measured" in found["time"]


def test_the_written_config_is_the_planned_one(capsys, tmp_path):
    path = tmp_path / "mine.json"
    found = _plan(capsys, *LARGE, "--gpu", "rtx3060-12g", "--gpus", "8", "--write", str(path))
    ds = load_ds_config(str(path), {})
    assert ds == found["ds_config"]
    config = resolve_ds_config(ds, str(path), load_recipe("vitl16", {}).data.global_batch, 8)
    assert (config.micro_batch, config.accumulation) == (found["micro_batch"], found["accumulation"])
    again = _plan(capsys, *LARGE, "--gpu", "rtx3060-12g", "--gpus", "8", "--ds_config", str(path))
    assert again["bytes_per_gpu"] == found["bytes_per_gpu"] and again["verdict"].startswith("fits: ")


@pytest.mark.parametrize(
    ("memory_gib", "verdict"),
    [
        ("80", "fits: 78.7 of 80 GiB; largest micro-batch that fits 73"),
        ("23.6", "fits with micro-batch 8, accumulation 8: as it is it needs 78.7 of 23.6 GiB"),
        ("8", "does not fit: it needs 78.7 of 8 GiB; ZeRO 3, checkpointing with micro-batch 4 would"),
        ("1", "does not fit: it needs 78.7 of 1 GiB; nothing fits 1 GiB"),
    ],
)
def test_a_config_that_does_not_fit_says_what_would(memory_gib, verdict, invented, capsys):
    given = "--memory_gib", memory_gib, "--gpus", "8", "--ds_config", "ds_configs/zero2_bf16.json", "--model.depth", "1"
    assert _plan(capsys, *given)["verdict"].startswith(verdict)


@pytest.mark.parametrize(
    ("gpu", "config", "words"),
    [("a100-80g", "zero2_fp16", "these GPUs have bf16"), ("t4-16g", "zero2_bf16", "has no bf16 units")],
)
def test_a_precision_that_is_not_the_card_s_is_named(gpu, config, words, invented, capsys):
    given = "--gpu", gpu, "--ds_config", f"ds_configs/{config}.json", "--model.depth", "1"
    assert any(words in line for line in _plan(capsys, *given)["warnings"])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "no GPU is given: --gpu NAME"),
        (["--gpu", "a100"], "Did you mean a100-40g"),
        (["--gpu", "t4-16g", "--backbone", "vit_gigant"], "here it is model.backbone"),
        (["--gpu", "t4-16g", "--gpus", "24"], "512 is not a multiple of 24 GPUs: add --data.global_batch 504"),
        (["--gpu", "t4-16g", "--ds.bf16.enabled", "true"], "none is given: name it with --ds_config"),
        (["--gpu", "t4-16g", "--write", "config.yaml"], "config.yaml is there already"),
        (["--gpu", "t4-16g", "--write", "nowhere/x.json"], "folder is missing"),
        (["--gpu", "t4-16g", "--write", "x", "--ds_config", "ds_configs/zero1_fp16.json"], "leave --ds_config out"),
    ],
)
def test_mistakes_are_one_line(words, message, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["plan", *words])
    assert stopped.value.code == 2
    said = capsys.readouterr().err
    assert message in said and len(said.splitlines()) == 1
