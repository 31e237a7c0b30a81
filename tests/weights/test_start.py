"""`model.init_from`: a start computes what its source computes, or is refused with the flags that make it so."""

from __future__ import annotations

import re
from argparse import Namespace
from typing import Any

import pytest
import timm
import torch
from torch import nn

import dino_ds.cli.main as cli
from dino_ds.config.crops import FROZEN
from dino_ds.config.ds_config import resolve_ds_config
from dino_ds.config.ds_schema import PerformanceOptions
from dino_ds.config.loading import dump_recipe, load_recipe
from dino_ds.config.model import ModelSection
from dino_ds.config.recipe import Recipe
from dino_ds.data.normalization import Normalization
from dino_ds.errors import CheckpointError
from dino_ds.method.build import build_network, build_objective
from dino_ds.method.frozen import build_teacher, find_teacher
from dino_ds.method.networks import TeacherParts
from dino_ds.method.specs.ours import FrozenSpec
from dino_ds.models.network import Network
from dino_ds.weights.export import export_safetensors
from dino_ds.weights.load import Backbone
from dino_ds.weights.start import as_source, find_start
from tests.planning.measure.tiny import DS
from tests.run.harness import TINY
from tests.weights.originals import Original

OURS = {"model.patch_size": "8", "model.width": "64", "model.depth": "2", "model.heads": "2"}
IMAGES = torch.randn(3, 3, 32, 32, generator=torch.Generator().manual_seed(1))


def _recipe(source, **changes: str) -> Recipe:
    return load_recipe(None, {**TINY, **OURS, "model.init_from": str(source), **changes})


def _from_source(source, **changes: str) -> Recipe:
    """The recipe that the command line makes of one that says nothing of the network."""
    given = {key: value for key, value in TINY.items() if not key.startswith("model.")}
    changes = {"model.backbone": "from_source", **changes}
    return as_source(load_recipe(None, {**given, "model.init_from": str(source), **changes}), None)


def _start(source, **changes: str) -> Network:
    return build_network(_recipe(source, **changes), PerformanceOptions())


def _features(network: Network) -> torch.Tensor:
    with torch.no_grad():
        return network.backbone.eval().features(IMAGES)


def _huggingface(folder, kind: str, **changes):
    """Their network of random weights, saved by themselves, and its CLS features."""
    transformers = pytest.importorskip("transformers")
    numbers = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 32, "patch_size": 8}
    mlp = {"intermediate_size": 256} if kind == "ViT" else {}
    config = getattr(transformers, f"{kind}Config")(**{**numbers, **mlp, **changes})
    torch.manual_seed(0)
    model = getattr(transformers, f"{kind}Model")(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            nn.init.normal_(parameter, std=0.2)
        model.save_pretrained(folder)
        return model(pixel_values=IMAGES).last_hidden_state[:, 0]


GATED = {"num_register_tokens": 4, "use_gated_mlp": True, "hidden_act": "silu", "intermediate_size": 256}
GATED |= {"query_bias": False, "value_bias": False}  # zero ones go into a network without any and back


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "changes", "said", "flags"),
    [
        ("Dinov2", {}, "it has layer scale True, not False;", "--model.backbone vit_small_patch14_dinov2"),
        ("DINOv3ViT", GATED, "rope separate, not None", "--model.backbone vit_small_plus_patch16_dinov3"),
        ("ViT", {"num_attention_heads": 8}, "it has heads 8, not 2;", "--model.heads 8"),
        (
            "Dinov2WithRegisters",
            {"use_swiglu_ffn": True, "hidden_size": 192, "num_attention_heads": 3},
            "width 192, not 64, heads 3, not 2, registers 4, not 0, swiglu True, not False, layer scale True, not",
            "--model.backbone vit_giant_patch14_reg4_dinov2 --model.width 192 --model.heads 3",
        ),
    ],
)
def test_another_architecture_is_refused_with_the_flags_that_fit(tmp_path, kind, changes, said, flags):
    """With them, and with from_source, the student computes what transformers computes: 1e-5."""
    theirs = _huggingface(tmp_path, kind, **changes)
    with pytest.raises(CheckpointError) as caught:
        _start(tmp_path)
    line = str(caught.value)
    assert "\n" not in line and said in line
    assert line.endswith(f"; start with {flags}, or with --model.backbone from_source")
    given = dict(re.findall(r"--(\S+) (\S+)", flags))
    for recipe in (_recipe(tmp_path, **given), _from_source(tmp_path)):
        torch.testing.assert_close(_features(build_network(recipe, PerformanceOptions())), theirs, rtol=1e-5, atol=1e-5)


def test_what_no_recipe_builds_is_named(tmp_path):
    _huggingface(tmp_path, "ViT", intermediate_size=192)
    for start in (_start, _from_source):
        with pytest.raises(CheckpointError, match=r"builds no network with patch_size 8, .*MLP outputs 192") as e:
            start(tmp_path)
        assert "\n" not in str(e.value)


@pytest.mark.slow
def test_what_training_alone_needs_of_rotary_vits(tmp_path):
    """Mask token and norm of local crops' CLS tokens; biases that are zero, or that the file has not."""
    both = {"crops.mask": "dinov3", "objective.ibot_weight": "1", "model.local_cls_norm": "true"}
    both |= {"model.backbone": "vit_small_patch16_dinov3_qkvb"}
    theirs = _start("none", **both)
    for name, parameter in theirs.named_parameters():
        nn.init.normal_(parameter, std=0.0 if name.endswith(("q_bias", "v_bias")) else 0.2)
    torch.save(theirs.backbone.state_dict(), tmp_path / "a.pth")
    same = _start(tmp_path / "a.pth", **both)
    for name, parameter in same.backbone.named_parameters():
        assert parameter.equal(theirs.backbone.get_parameter(name)), name
    other = _start(tmp_path / "a.pth", **{"model.backbone": "vit_small_patch16_dinov3"})
    assert "its norm for CLS tokens of local crops is left out" in other.started_from
    assert "its biases of queries and values, all zero, are left out" in other.started_from
    assert "its mask token is left out" in other.started_from
    torch.testing.assert_close(_features(other), _features(theirs), rtol=1e-5, atol=1e-5)
    torch.save(other.backbone.state_dict(), tmp_path / "a.pth")
    back = _start(tmp_path / "a.pth", **both)
    assert "it has no biases of queries and values: ours start at zero" in back.started_from
    assert "it has no norm for CLS tokens of local crops: our own starts anew" in back.started_from
    torch.testing.assert_close(_features(back), _features(theirs), rtol=1e-5, atol=1e-5)


def test_the_log_names_another_range_of_values(tmp_path):
    backbone, path = _start("none").backbone, tmp_path / "a.safetensors"
    about = {"value_range": [0, 4095], "mean": 0.5, "std": 0.2}
    export_safetensors(Backbone(backbone, 32, "a test", about), path)
    weights = find_start(_recipe(path).model)
    assert weights.notes[-1] == "it was trained on values of 0,4095, this run is on 8-bit images (--data.value_range)"
    assert find_start(_recipe(path).model, (0.0, 4095.0)).notes == []


def test_the_source_s_architecture_on_the_command_line(tmp_path, monkeypatch):
    """It is that of the run itself when it is resumed without the file."""
    content = {"teacher": Original(32, 8, 192, 3, 3).state_dict(), "args": Namespace(arch="vit_tiny")}
    torch.save(content, source := tmp_path / "a.pth")
    seen: list[Recipe] = []
    monkeypatch.setattr(cli, "call", lambda command, options, files: seen.append(files["recipe"]))
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    words = ["train", f"--data.root={tmp_path}", f"--run_dir={tmp_path / 'run'}", f"--model.init_from={source}"]
    words += ["--ds_config=ds_configs/zero0_fp32.json", "--model.backbone=from_source", "--model.heads=3"]
    cli.main(words)
    assert seen[0].model.spec() == ModelSection(patch_size=8, width=192, depth=3, heads=3).spec()
    (tmp_path / "run/checkpoints/step_00000001").mkdir(parents=True)
    (tmp_path / "run/config.yaml").write_text(dump_recipe(seen[0]))
    source.unlink()
    cli.main([*words, "--resume"])
    assert seen[1] == seen[0]


def test_from_source_takes_the_place_of_the_recipe_s_numbers_and_asks_for_heads(tmp_path):
    torch.save(Original(32, 8, 64, 2, 2).state_dict(), tmp_path / "a.pth")
    with pytest.raises(CheckpointError, match="how many attention heads a width of 64"):
        _from_source(tmp_path / "a.pth")
    assert _from_source(tmp_path / "a.pth", **{"model.heads": "2"}).model.spec().heads == 2
    recipe = _from_source(tmp_path / "a.pth", **{"model.heads": "2", "model.depth": "1"})
    assert recipe.model.spec().depth == 2


CONFIG = resolve_ds_config({**DS, "train_micro_batch_size_per_gpu": "auto"}, "test.json", 8, 1)


@pytest.mark.slow
def test_timm_s_features_by_their_own_normalization(monkeypatch):
    """A network trained on images less .5, of a run whose images are less ImageNet's mean; weights are not looked for
    on the hub. A map of one place, resized to the student's grid, has another width than the image's features."""
    create = timm.create_model
    monkeypatch.setattr(timm, "create_model", lambda name, pretrained=False, **how: create(name, **how))
    torch.manual_seed(0)
    theirs = create("mobilenetv3_small_100", num_classes=0).eval()
    stated = Normalization(tuple(theirs.default_cfg["mean"]), tuple(theirs.default_cfg["std"]))
    torch.manual_seed(0)
    given = {"teacher.source": "mobilenetv3_small_100.lamb_in1k", "teacher.distill": "features",
             "objective.ibot_weight": "1", "data.mean": "0.5,0.5,0.5", "data.std": "0.5,0.5,0.5"}  # fmt: skip
    recipe = load_recipe(None, {**TINY, **OURS, **given})
    frozen = find_teacher(recipe)
    objective = build_objective(recipe, torch.device("cpu"), frozen)
    without_student: Any = None
    teacher = build_teacher(FrozenSpec(FROZEN), TeacherParts(recipe, CONFIG, without_student, objective, frozen))
    pixels = [image.sigmoid() for image in (IMAGES[:2], IMAGES[1:])]
    ours = Normalization((0.5,) * 3, (0.5,) * 3)
    assert ours != stated
    found = teacher({"global": [ours(image) for image in pixels]}, {})
    with torch.no_grad():
        wanted = theirs(stated(torch.cat(pixels)))
    torch.testing.assert_close(found["cls/global"], wanted, rtol=1e-4, atol=1e-4)
    width = found["patches/global"].shape[-1]
    assert width != wanted.shape[-1]
    queries = build_objective(recipe, torch.device("cpu")).queries
    assert (queries["dino"].width, queries["ibot"].width) == (wanted.shape[-1], width)
    assert teacher.network.head_names == () and FROZEN in recipe.groups[0].teachers
