"""Teachers from files: their heads' logits and features are the original's, whatever the images were normalised by."""

from __future__ import annotations

from typing import Any

import pytest
import timm
import torch

from dino_ds.config.ds_config import resolve_ds_config
from dino_ds.config.loading import load_recipe
from dino_ds.data.normalisation import Normalisation
from dino_ds.method.build import build_objective
from dino_ds.method.build_frozen import build_teacher, find_teacher
from dino_ds.method.parts import TeacherParts
from dino_ds.method.specs.distill import FROZEN, FrozenSpec
from tests.planning.measure.tiny import DS
from tests.weights.originals import Original, OriginalHead

CONFIG = resolve_ds_config({**DS, "train_micro_batch_size_per_gpu": "auto"}, "test.json", 8, 1)


def _frozen(source, **changes):
    given = {"teacher.source": str(source), "crops.global_size": "32", "crops.local_size": "16"}
    own = {"model.patch_size": "8", "model.width": "64", "model.depth": "1", "model.heads": "2"}
    own["head.prototypes"] = "24"
    recipe = load_recipe(None, {**given, **own, **{key.replace("__", "."): value for key, value in changes.items()}})
    found = find_teacher(recipe)
    objective = build_objective(recipe, torch.device("cpu"), found)
    without_student: Any = None
    return build_teacher(FrozenSpec(FROZEN), TeacherParts(recipe, CONFIG, without_student, objective, found))


def _images():
    return [torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(i)) for i in range(2)]


def test_the_head_of_a_dino_checkpoint(tmp_path):
    """1e-4: FP32, twelve blocks with weights of 0.2."""
    torch.manual_seed(0)
    vit, head = Original(32, 8, 192, 12, 3), OriginalHead(192, 24, hidden=32, bottleneck=16)
    tensors = {f"backbone.{k}": t for k, t in vit.state_dict().items()}
    tensors |= {f"head.{k}": t for k, t in head.state_dict().items()}
    torch.save({"teacher": tensors, "epoch": 3}, tmp_path / "checkpoint.pth")
    teacher, images = _frozen(tmp_path / "checkpoint.pth"), _images()
    logits = teacher({"global": images}, {})["dino"]
    found = logits.multiply(logits.rows, torch.empty(4, 24)) * logits.scale
    with torch.no_grad():
        torch.testing.assert_close(found, head(vit(torch.cat(images))), rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_timm_s_features_by_their_own_normalisation(monkeypatch):
    """A network trained on images less .5, of a run whose images are less ImageNet's mean; weights are not looked for
    on the hub. A map of one place, resized to the student's grid, has another width than the image's features."""
    create = timm.create_model
    monkeypatch.setattr(timm, "create_model", lambda name, pretrained=False, **how: create(name, **how))
    torch.manual_seed(0)
    theirs = create("mobilenetv3_small_100", num_classes=0).eval()
    stated = Normalisation(tuple(theirs.default_cfg["mean"]), tuple(theirs.default_cfg["std"]))
    torch.manual_seed(0)
    changes = {"teacher__distill": "features", "objective__ibot_weight": "1", "data__mean": "0.5,0.5,0.5"}
    teacher = _frozen("mobilenetv3_small_100.lamb_in1k", **changes, data__std="0.5,0.5,0.5")
    pixels = [image.sigmoid() for image in _images()]
    ours = Normalisation((0.5,) * 3, (0.5,) * 3)
    assert ours != stated
    found = teacher({"global": [ours(image) for image in pixels]}, {})
    with torch.no_grad():
        wanted = theirs(stated(torch.cat(pixels)))
    torch.testing.assert_close(found["cls/global"], wanted, rtol=1e-4, atol=1e-4)
    width = found["patches/global"].shape[-1]
    assert width != wanted.shape[-1]
    changes |= {"teacher__source": "mobilenetv3_small_100.lamb_in1k", "crops__global_size": "32"}
    recipe = load_recipe(None, {key.replace("__", "."): value for key, value in changes.items()} | {
        "data.std": "0.5,0.5,0.5", "crops.local_size": "16", "model.patch_size": "8"})  # fmt: skip
    queries = build_objective(recipe, torch.device("cpu")).queries
    assert (queries["dino"].width, queries["ibot"].width) == (wanted.shape[-1], width)
    assert teacher.network.head_names == () and FROZEN in recipe.groups[0].teachers
