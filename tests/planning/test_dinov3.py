"""The planner on DINOv3's recipes: Gram anchoring, a frozen teacher, several resolutions."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import asdict

import pytest
import torch

from dino_ds.cli.main import main
from dino_ds.config.loading import load_recipe
from dino_ds.costs.settings import frozen_spec
from dino_ds.costs.step_costs import count_parameters, student_facts
from dino_ds.models.specs.backbones import VITS
from dino_ds.models.vit import VisionTransformer
from dino_ds.planning.fit import fit
from dino_ds.planning.host import checkpoint_bytes

ROTARY = {"model.backbone": "vit_small_patch16_dinov3", "model.depth": "3"}
GRAM = {"gram.weight": "2", "gram.crop_size": "448"}
LARGE = {"teacher.source": "vit_large_patch16_dinov3", "model.backbone": "vit_small_patch16_dinov3"}
IBOT = {"objective.ibot_weight": "1", "crops.mask": "dinov3", "objective.ibot_head": "shared"}


def _fit(changes: dict[str, str], stage: int = 2, ranks: int = 8):
    ds = {"gradient_clipping": 3.0, "bf16": {"enabled": True}, "zero_optimization": {"stage": stage}}
    ds |= {"train_micro_batch_size_per_gpu": 8}
    return fit(load_recipe("vits16", ROTARY | changes), ds, "x", ranks, 80)


def _backbone_weights(spec) -> int:
    with torch.device("meta"):
        return sum(p.numel() for p in VisionTransformer(spec, 224).parameters())


def _plan(capsys, *words: str):
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
    changes = LARGE | {"teacher.distill": distill}
    recipe = load_recipe("vits16", ROTARY | changes)
    large = VITS["vit_large_patch16_dinov3"]
    assert frozen_spec(recipe) == large
    own = _backbone_weights(large)
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
    page = _plan(capsys, "--teacher.source", str(unknown), "--model.depth", "1")
    line = f"teacher.source {unknown} does not say its architecture without being read: its memory is not counted"
    assert line in page and "frozen teacher" not in page
    assert "no teacher.source: an EMA teacher is counted" in _plan(
        capsys, "--teacher.distill", "heads", "--model.depth", "1"
    )
