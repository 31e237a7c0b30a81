"""The four contracts hold for one more crop group, backbone, loss term and teacher (tests/run/toys.py).

Whole runs on two ranks: trained, resumed to the bit, and their product written.
"""

from __future__ import annotations

import json
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file

import dino_ds
from dino_ds.engine.engine import Progress
from dino_ds.errors import ConfigError
from dino_ds.method.step import TrainingStep
from dino_ds.models.base import CLS
from dino_ds.models.build import build_backbone
from tests.ranks import run_on_ranks
from tests.reference import copied
from tests.run.harness import image_folder, log_of, read_metrics, train_tiny, whole_tensors
from tests.run.toys import ToySpec, installed

TOY = {"model.backbone": "toy", "model.drop_path": "0.0"}
TOY |= {f"model.{key}": "none" for key in ("patch_size", "width", "depth", "heads")}
LENGTH = {"length": "4 steps", "optimizer.warmup": "1 steps", "save_every": "2 steps"}


def _train(root, run, ds, resume, changes):
    """Its message, and whether the frozen teacher is as it was made, in evaluation mode, and not trained."""
    with installed() as made:
        message = train_tiny(root, run, ds, resume=resume, changes=LENGTH | changes)
    frozen, before = made[0]
    after = frozen.network.state_dict()
    unchanged = all(torch.equal(before[name], tensor) for name, tensor in after.items())
    return message, unchanged and not any(p.requires_grad for p in frozen.network.parameters())


def _same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize(
    ("ds", "changes"), [("zero0_fp32.json", TOY), ("zero2_bf16.json", {}), ("zero3_fp32.json", TOY)], ids=str
)
def test_a_second_of_each_trains_resumes_and_is_written(tmp_path, ds, changes):
    """Stage 0, 2, 3. A run that stopped after step 2 ends as one that did not, buffers and statistics with it."""
    root, straight, resumed = image_folder(tmp_path / "images"), tmp_path / "straight", tmp_path / "resumed"
    assert run_on_ranks(_train, root, straight, ds, False, changes) == [(None, True)] * 2
    short = changes | {"length": "4 steps"}
    assert run_on_ranks(_train_until_2, root, resumed, ds, short) == [(None, True)] * 2
    assert run_on_ranks(_train, root, resumed, ds, True, changes) == [(None, True)] * 2
    whole = whole_tensors(straight, 4)
    assert _same(whole, whole_tensors(resumed, 4))
    assert {"center", "toy_mean"} < whole.keys() and whole["toy_mean"].abs().sum() > 0
    lines = [line for line in read_metrics(straight) if "loss" in line]
    assert all({"teacher_entropy", "kl", "dino_loss", "toy_loss", "toy_distance"} < line.keys() for line in lines)
    for line in lines:
        assert line["loss"] == pytest.approx(line["dino_loss"] + line["toy_loss"], rel=1e-5)
        assert line["kl"] == pytest.approx(line["dino_loss"] - line["teacher_entropy"], abs=1e-5)
    written, prefix = load_file(straight / "teacher.safetensors"), "teacher.backbone."
    teacher = {name.removeprefix(prefix): t for name, t in whole.items() if name.startswith(prefix)}
    assert _same(written, teacher)
    if changes:
        _check_the_toy(straight, whole, written)


def _train_until_2(root, run, ds, changes):
    with installed() as made:
        message = train_tiny(root, run, ds, max_steps=2, changes=LENGTH | changes)
    return message, bool(made)


def _check_the_toy(run, whole, written):
    """Its buffers are those of the student, averaged as the weights are, or copied if whole numbers."""
    assert whole["student.backbone.scale.calls"] == whole["teacher.backbone.scale.calls"] == 4
    assert 0 < abs(whole["teacher.backbone.scale.scale"] - 1) < abs(whole["student.backbone.scale.scale"] - 1)
    assert "memory   predicted peak " in log_of(run)
    about = json.loads((run / "teacher.json").read_text())
    assert about["backbone"] == "toy" and about["architecture"]["width"] == 24
    network = build_backbone(ToySpec(), 32)
    network.load_state_dict(written)
    images = torch.randn(2, 3, 32, 32)
    with installed():
        model = dino_ds.load(run)
        with pytest.raises(ConfigError, match="not a Vision Transformer"):
            model.attention(images)
    with torch.no_grad():
        assert torch.equal(model.features(images), network.eval().features(images))
    assert model.patch_tokens(images).shape == (2, 4, 4, 24)


def _spoil_second_window(root, run):
    """Whether the second window is skipped, and what it changed of the state that all ranks hold."""
    original, seen = TrainingStep.micro_batch, []

    def micro_batch(step, inputs, *others):
        if step.applied_steps != 1 or seen:
            return original(step, inputs, *others)
        before = copied(step.state())
        spoilt = {name: [crop * float("nan") for crop in group] for name, group in inputs.crops.items()}
        out = original(step, inputs._replace(crops=spoilt), *others)
        after = copied(step.state())
        seen.append((out.progress, [name for name in before if not torch.equal(before[name], after[name])]))
        return out

    with installed(), mock.patch.object(TrainingStep, "micro_batch", micro_batch):
        message = train_tiny(root, run, "zero2_fp32.json", changes=LENGTH | TOY)
    return message, seen


def test_a_skipped_window_leaves_the_buffers_as_they_were(tmp_path):
    """The forward pass has moved the student's; the run goes on from what they were."""
    for message, seen in run_on_ranks(_spoil_second_window, image_folder(tmp_path / "images"), tmp_path / "run"):
        assert message is None and seen == [(Progress.SKIPPED, [])]
    assert torch.isfinite(whole_tensors(tmp_path / "run", 4)["student.backbone.scale.scale"])


def test_what_a_backbone_does_not_have_is_refused(tmp_path):
    with installed():
        message = train_tiny(image_folder(tmp_path / "images"), tmp_path / "run", changes=TOY | {"model.heads": "4"})
    assert message is not None and "model.heads" in message and "toy" in message


def test_patch_features_lie_as_the_patches_do():
    """A ViT gives rows of one crop after another for two groups of crops, and the CLS features as without them."""
    from dino_ds.models.specs.backbones import ViTSpec

    vit = build_backbone(ViTSpec(8, 32, 2, 2), 32).eval()
    crops = {"global": [torch.randn(3, 3, 32, 32) for _ in range(2)], "local": [torch.randn(3, 3, 16, 16)]}
    with torch.no_grad():
        both = vit(crops, patches=("global", "local"))
        torch.testing.assert_close(both[CLS], vit(crops)[CLS], rtol=1e-5, atol=1e-5)
        alone = vit({"global": crops["global"][1:]}, patches=("global",))["patches/global"]
    assert both["patches/global"].shape == (6, 16, 32) and both["patches/local"].shape == (3, 4, 32)
    torch.testing.assert_close(both["patches/global"][3:], alone, rtol=1e-5, atol=1e-5)
