"""Distillation of a frozen teacher, as whole runs: by heads and by features, stopped and resumed; what is refused."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor

from dino_ds.config.loading import load_recipe
from dino_ds.method.frozen import FrozenTeacher
from dino_ds.weights.frozen import digest, find_frozen
from tests.run.harness import MASKED, image_folder, log_of, read_metrics, train_tiny, whole_tensors

TEACHER = {"model.width": "48", "model.depth": "3", "model.heads": "3", "head.hidden": "64", "head.bottleneck": "24"}
PLAIN_HEAD = {"ibot_head.prototypes": "65536", "ibot_head.hidden": "2048", "ibot_head.bottleneck": "256"}
STUDENT = {"objective.freeze_prototypes": "0 steps", "model.drop_path": "0"}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    place = tmp_path_factory.mktemp("distill")
    image_folder(place / "root")
    assert train_tiny(place / "root", place / "teacher", max_steps=3, changes={**TEACHER, **MASKED}) is None
    return place


def _distil(place, name, changes=None, teacher="teacher", **options):
    changes = {**STUDENT, **MASKED, "teacher.source": str(place / teacher), **(changes or {})}
    return train_tiny(place / "root", place / name, changes=changes, **options)


@pytest.mark.slow
@pytest.mark.parametrize("distill", ["heads", "features"])
def test_distil_stop_and_resume(place, distill, monkeypatch):
    """The teacher stays, is in no checkpoint, and a resume, with it in another place, ends as if never stopped."""
    teachers = []
    made = FrozenTeacher.__init__
    monkeypatch.setattr(FrozenTeacher, "__init__", lambda self, *args: (made(self, *args), teachers.append(self))[0])
    how, whole, stopped = {"teacher.distill": distill}, f"{distill}-whole", f"{distill}-stopped"
    assert _distil(place, whole, how, max_steps=4) is None
    assert _distil(place, stopped, how, max_steps=2) is None
    if not (place / "moved").exists():
        shutil.copytree(place / "teacher", place / "moved")
    assert _distil(place, stopped, how, teacher="moved", max_steps=4, resume=True) is None
    first, second = (whole_tensors(place / run, 4) for run in (whole, stopped))
    assert first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)
    assert not [name for name in first if name.startswith("teachers.")]
    own = {"heads": "teacher.head.mlp.0.weight", "features": "teacher.cls_regression.weight"}[distill]
    assert own in first and ("teacher.head.mlp.0.weight" in first) == (distill == "heads")
    source = find_frozen(str(place / "teacher"))
    taught = [teacher for teacher in teachers if not isinstance(next(teacher.network.parameters()), FakeTensor)]
    assert len(taught) == 3  # besides those of the rehearsals that predict the memory
    for teacher in taught:
        state = teacher.network.state_dict()
        assert digest(state) == teacher.about["digest"]
        for name, tensor in source.backbone.items():
            assert name == "mask_token" or torch.equal(state[f"backbone.{name}"], tensor)
        assert not any(parameter.requires_grad for parameter in teacher.network.parameters())
    about = json.loads((place / whole / "teacher.json").read_text())["distilled_from"]
    assert about == {"source": str(place / "teacher"), "digest": taught[0].about["digest"]}


def test_softmax_centers_begin_as_the_teacher_s(place):
    """With center_momentum 1 the center after a step is the teacher's own."""
    theirs = whole_tensors(place / "teacher", 3)["center"]
    assert _distil(place, "center", {"objective.center_momentum": "1"}, max_steps=1) is None
    assert torch.equal(whole_tensors(place / "center", 1)["center"], theirs) and theirs.abs().max() > 0


@pytest.mark.slow
def test_a_file_without_heads_teaches_by_features_alone(place):
    file = place / "weights.safetensors"
    shutil.copy(place / "teacher/teacher.safetensors", file)
    shutil.copy(place / "teacher/teacher.json", file.with_suffix(".json"))
    said = _distil(place, "file", teacher=file.name)
    assert said == f"teacher.source {file} has no heads: set teacher.distill features, or give a run that has them"
    none = {"crops.mask": "none", "teacher.distill": "features", **PLAIN_HEAD}
    assert _distil(place, "global", {**none, "crops.num_local": "0"}, teacher=file.name, max_steps=1) is None
    assert "local crops are computed" not in log_of(place / "global")
    assert _distil(place, "file", none, teacher=file.name, max_steps=1) is None
    assert "set crops.num_local 0" in log_of(place / "file")
    (loss,) = [line["dino_loss"] for line in read_metrics(place / "file") if "dino_loss" in line]
    assert 0 < loss < 2


REFUSED = {
    "prototypes": ({"head.prototypes": "64"}, "head.prototypes 64 must be those of teacher.source RUN, 48: set"),
    "ibot prototypes": ({"ibot_head.prototypes": "64"}, "64 must be those of teacher.source RUN, 40"),
    "patch size": ({"model.patch_size": "16"}, "RUN has patches of 8 pixels and the student of 16: the loss of masked"),
    "crops": (
        {"crops.global_size": "36", "crops.local_size": "12", "model.patch_size": "4", "teacher.distill": "features"},
        "RUN can't take this run's crops: images of 36 x 36 pixels: wanted are h and w that are multiples",
    ),
    "missing": ({"teacher.source": "/nowhere/run"}, "teacher.source /nowhere/run: /nowhere/run does not exist; give"),
    "shared": ({"objective.ibot_head": "shared", **PLAIN_HEAD}, "RUN has a head of its own for patches: set"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_in_one_line_and_no_folder_is_left(place, case):
    changes, said = REFUSED[case]
    found = _distil(place, "refused", changes)
    assert found is not None and said in found.replace(str(place / "teacher"), "RUN") and "\n" not in found
    assert not (place / "refused").exists()


@pytest.mark.parametrize(
    ("student", "teacher"), [("quickstart_distill", "quickstart"), ("distill_vits16", "dinov3_vitl16")]
)
def test_a_recipe_fits_the_heads_of_the_teacher_that_it_names(student, teacher):
    one, other = (
        (r.head.prototypes, r.ibot_head.prototypes, r.objective.ibot_head, bool(r.objective.ibot_weight))
        for r in (load_recipe(student, {"teacher.source": "runs/there"}), load_recipe(teacher, {}))
    )
    assert one == other


def test_free_prototypes_of_a_teacher(place):
    free = {"head.free_prototypes": "true", "ibot_head.free_prototypes": "true"}
    assert train_tiny(place / "root", place / "free", max_steps=1, changes={**TEACHER, **MASKED, **free}) is None
    assert find_frozen(str(place / "free")).head("head").free_prototypes
    assert _distil(place, "of-free", teacher="free", max_steps=1) is None
