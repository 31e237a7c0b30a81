"""`dino-ds plan` as people and programs meet it, and its figures of DINOv3's networks."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from dataclasses import asdict

import pytest
import torch

from dino_ds.cli.main import main
from dino_ds.config.ds_config import load_ds_config, resolve_ds_config
from dino_ds.config.loading import load_recipe
from dino_ds.costs.step_costs import count_parameters, frozen_spec, student_facts
from dino_ds.models.specs.backbones import VITS
from dino_ds.models.vit import VisionTransformer
from dino_ds.planning.fit import checkpoint_bytes, fit

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
        ("8", "does not fit: it needs 78.7 of 8 GiB; ZeRO 3, checkpointing with micro-batch 4 would"),
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
        (["--gpu", "t4-16g", "--gpus", "24"], "512 is not a multiple of 24 GPUs: add --data.global_batch 504"),
        (["--gpu", "t4-16g", "--write", "config.yaml"], "config.yaml is there already"),
        (["--gpu", "t4-16g", "--write", "x", "--ds_config", "ds_configs/zero1_fp16.json"], "leave --ds_config out"),
    ],
)
def test_mistakes_are_one_line(words, message, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["plan", *words])
    assert stopped.value.code == 2
    said = capsys.readouterr().err
    assert message in said and len(said.splitlines()) == 1


ROTARY = {"model.backbone": "vit_small_patch16_dinov3", "model.depth": "3"}
GRAM = {"gram.weight": "2", "gram.crop_size": "448"}
VIT_L = {"teacher.source": "vit_large_patch16_dinov3", "model.backbone": "vit_small_patch16_dinov3"}
IBOT = {"objective.ibot_weight": "1", "crops.mask": "dinov3", "objective.ibot_head": "shared"}


def _fit(changes: dict[str, str], stage: int = 2, ranks: int = 8):
    ds = {"gradient_clipping": 3.0, "bf16": {"enabled": True}, "zero_optimization": {"stage": stage}}
    ds |= {"train_micro_batch_size_per_gpu": 8}
    return fit(load_recipe("vits16", ROTARY | changes), ds, "x", ranks, 80)


def _measured(capsys, *words: str):
    main(["plan", "--gpu", "a100-80g", "--config", "vits16", *words])
    return capsys.readouterr().out


def test_a_gram_teacher_takes_memory_and_room_in_the_checkpoint():
    """Matrices in the engine's precision, without heads; one that is not a snapshot is not saved."""
    recipe, without = load_recipe("vits16", ROTARY | GRAM), load_recipe("vits16", ROTARY)
    backbone = {n: k for n, k in student_facts(recipe).sizes.items() if n.startswith("backbone.")}
    held = _fit(GRAM).memory.parts["Gram teacher"]
    assert 2 * sum(backbone.values()) < held < 2.1 * sum(backbone.values())
    assert "Gram teacher" not in _fit({"gram.weight": "2", "gram.teacher": "ema"}).memory.parts
    assert checkpoint_bytes(recipe) - checkpoint_bytes(without) == 4 * sum(backbone.values())
    fixed = load_recipe("vits16", ROTARY | GRAM | {"gram.teacher": "runs/other"})
    assert checkpoint_bytes(fixed) == checkpoint_bytes(without)


@pytest.mark.parametrize("distill", ["heads", "features"])
def test_a_frozen_teacher_is_counted_by_its_own_architecture(distill):
    changes = VIT_L | {"teacher.distill": distill}
    recipe = load_recipe("vits16", ROTARY | changes)
    large = VITS["vit_large_patch16_dinov3"]
    assert frozen_spec(recipe) == large
    with torch.device("meta"):
        own = sum(p.numel() for p in VisionTransformer(large, 224).parameters())
    parts = _fit(changes).memory.parts
    heads = 0 if distill == "features" else 4 * 65536 * 256
    assert 2 * own + heads < parts["frozen teacher"] < 2.05 * own + heads * 1.2
    assert parts["teacher"] == 4 * count_parameters(recipe)
    assert any("cls_regression" in name for name in student_facts(recipe).sizes) == (distill == "features")


def test_the_architecture_of_a_run_is_read_from_its_json(tmp_path, capsys):
    spec = dataclasses.replace(VITS["vit_base_patch16_dinov3"], depth=2, local_cls_norm=True)
    (tmp_path / "teacher.json").write_text(json.dumps({"architecture": asdict(spec)}))
    known = load_recipe("vits16", {"teacher.source": str(tmp_path)})
    assert frozen_spec(known) == dataclasses.replace(spec, local_cls_norm=False)
    unknown = tmp_path / "weights.pth"
    unknown.write_bytes(b"")
    page = _measured(capsys, "--teacher.source", str(unknown), "--model.depth", "1")
    line = f"teacher.source {unknown} does not say its architecture without being read: its memory is not counted"
    assert line in page and "frozen teacher" not in page
    assert "no teacher.source: an EMA teacher is counted" in _measured(
        capsys, "--teacher.distill", "heads", "--model.depth", "1"
    )
