"""ResNets, ConvNeXts and own classes: out to the formats of others and back, the same features; else refused."""

from __future__ import annotations

import functools
import json
import re

import pytest
import timm
import torch
from torch import Tensor

from dino_ds.basics.own_code import allow_code
from dino_ds.config.ds_schema import PerformanceOptions
from dino_ds.config.loading import load_recipe
from dino_ds.config.recipe import Recipe
from dino_ds.errors import CheckpointError, ConfigError
from dino_ds.method.build import build_network
from dino_ds.models.foreign import build_backbone
from dino_ds.models.network import Network
from dino_ds.models.prototypes import DinoHead
from dino_ds.models.specs.foreign import ForeignSpec
from dino_ds.weights.export import FORMATS
from dino_ds.weights.load import Backbone, load
from dino_ds.weights.sidecar import read_sidecar
from dino_ds.weights.start import as_source
from tests.run.harness import TINY
from tests.weights.originals import assert_same, images, randomised

RESNET = ForeignSpec("resnet18", 3, '{"channels": [8, 8, 16, 16], "layers": [1, 1, 1, 1]}')
CONVNEXT = ForeignSpec("convnext_atto", 3, '{"depths": [1, 1, 1, 1], "dims": [8, 8, 16, 16]}')
OWN = ForeignSpec("tests.weights.own:Own", 4, '{"width": 12}')
allow_code([OWN.name])
MEAN = "no file says the mean and std of its images: ImageNet's, unless data.mean sets others"
SIZE = "no file says the size of its images: 224 pixels are assumed"
SPECS = {"resnet": RESNET, "convnext": CONVNEXT, "own": OWN}
HEAD = {"head.prototypes": "24", "head.hidden": "24", "head.bottleneck": "8", "head.batch_norm": "true"}


def _images(channels: int = 3, height: int = 64, width: int = 64) -> Tensor:
    return images(height, width, channels=channels)


def _model(spec: ForeignSpec) -> Backbone:
    about = {"step": 3, "images": 24, "mean": 0.4, "std": 0.2}
    return Backbone(randomised(build_backbone(spec, 64)), 64, "here", about)


def _exported(kind: str, form: str, tmp_path) -> tuple[Backbone, str]:
    model, place = _model(SPECS[kind]), tmp_path / f"x.{form}"
    assert FORMATS[form](model, place)
    return model, str(place)


class TestOut:
    def test_transformers(self, tmp_path):
        transformers = pytest.importorskip("transformers")
        model, place = _exported("resnet", "timm", tmp_path)
        theirs = transformers.AutoModel.from_pretrained(place)
        theirs.save_pretrained(tmp_path / "again")  # with its own prefix before every name
        assert_same(load(tmp_path / "again").features(_images()), model.features(_images()))

    def test_refused(self, tmp_path):
        words = "is a class of your own, which neither timm nor transformers can build: take --format safe"
        with pytest.raises(ConfigError, match=words):
            _exported("own", "timm", tmp_path)
        assert not list(tmp_path.iterdir())


class TestIn:
    @pytest.mark.slow
    def test_files_of_dino_s_training(self, tmp_path):
        """A ResNet-18 inside MultiCropWrapper, the student inside DDP; torchvision's names, recognized by shapes."""
        theirs = randomised(timm.create_model("resnet18", num_classes=0))
        head = randomised(DinoHead(512, 24, 8, 40, 3).add_batch_norm(False))
        names = {"prototypes.weight": "last_layer.weight_v"}
        network = {f"backbone.{n}": t for n, t in theirs.state_dict().items()}
        network |= {f"head.{names.get(n, n)}": t for n, t in head.state_dict().items()}
        torch.save({"teacher": network, "student": {f"module.{n}": t for n, t in network.items()}}, tmp_path / "a.pth")
        ours = load(tmp_path / "a.pth")
        assert_same(ours.features(_images()), theirs(_images()))
        assert ours.heads["head"].keys() == head.state_dict().keys() and ours.notes == [SIZE, MEAN]

    @pytest.mark.slow
    def test_a_convnext_of_facebookresearch(self, tmp_path):
        """As DINOv3's: its final norm twice, the names of ConvNeXt's own code."""
        theirs = randomised(timm.create_model("convnext_tiny", num_classes=0))
        renames = {r"stages\.(\d)\.downsample\.": r"downsample_layers.\1.", "stem": "downsample_layers.0"}
        renames |= {r"\.blocks": "", "conv_dw": "dwconv", r"mlp\.fc": "pwconv", r"head\.norm": "norm"}
        tensors = {
            functools.reduce(lambda text, pair: re.sub(*pair, text), renames.items(), key): tensor
            for key, tensor in theirs.state_dict().items()
        }
        tensors |= {f"norms.3.{key}": tensors[f"norm.{key}"] for key in ("weight", "bias")}
        torch.save(tensors, tmp_path / "a.pth")
        ours = load(tmp_path / "a.pth")
        assert ours.title == "convnext_tiny" and ours.notes == [SIZE, MEAN]
        assert_same(ours.features(_images()), theirs(_images()))

    @pytest.mark.slow
    def test_a_name_where_no_file_has_one(self, tmp_path):
        theirs = randomised(timm.create_model("convnext_atto", num_classes=3))
        torch.save(theirs.state_dict(), tmp_path / "a.pth")
        with pytest.raises(CheckpointError, match=r"no Vision Transformer .* another network .*: --backbone") as line:
            load(tmp_path / "a.pth")
        assert "\n" not in str(line.value)
        ours = load(tmp_path / "a.pth", backbone="convnext_atto")
        assert_same(ours.features(_images()), theirs.forward_head(theirs.forward_features(_images()), pre_logits=True))
        assert ours.notes == ["its classifier is left out: head.fc.bias, head.fc.weight", SIZE, MEAN]
        said = {"resnet18": "neither a resnet18 nor a Vi", "resnet81": "nearest are", "vit_tiny_patch16_224": "lea"}
        for name, words in said.items():
            with pytest.raises(CheckpointError, match=words):
                load(tmp_path / "a.pth", backbone=name)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"arguments": '{"layers": [1000000000, 1, 1, 1]}'}, "1000000000 among its arguments"),
        ({"arguments": '{"channels": [1e400]}'}, "inf among its arguments"),
        ({"arguments": '{"checkpoint_path": "/etc/passwd"}'}, "may not have checkpoint_path"),
        ({"arguments": '{"pretrained": true}'}, "may not have pretrained"),
        ({"arguments": '{"layers": "many"}'}, "timm can't build"),
        ({"arguments": "[]"}, "not a JSON object"),
        ({"arguments": "[" * 4000}, "deep|JSON"),
        ({"in_chans": "3"}, "in_chans 3"),
        ({"in_chans": 4}, r"conv1.weight \[64, 3, 7, 7\] vs \[64, 4, 7, 7\]"),
        ({"name": "resnet34"}, "wanted are its name"),
    ],
    ids=lambda value: str(value)[:40] if isinstance(value, dict) else "",
)
def test_json_of_unknown_origin_is_data(tmp_path, fields, words):
    """At worst it is refused in one line."""
    FORMATS["safetensors"](_model(RESNET), tmp_path / "x.safetensors")
    about = read_sidecar(tmp_path / "x.safetensors")
    about["architecture"] |= fields
    (tmp_path / "x.json").write_text(json.dumps(about))
    with pytest.raises(CheckpointError, match=words) as caught:
        load(tmp_path / "x.safetensors")
    assert "\n" not in str(caught.value) and "x.safetensors" in str(caught.value)


def _recipe(source: object, spec: ForeignSpec = RESNET, **changes: str) -> Recipe:
    model = {"model.backbone": spec.name, "model.arguments": spec.arguments, "model.in_chans": str(spec.in_chans)}
    given = {key: value for key, value in TINY.items() if not key.startswith("model.")}
    model |= {"model.drop_path": "0", "model.init_from": str(source)}
    return load_recipe(None, {**given, **HEAD, **model, **changes})


def _start(recipe: Recipe) -> Network:
    return build_network(recipe, PerformanceOptions())


class TestStart:
    @pytest.mark.parametrize(
        ("spec", "changes", "words"),
        [
            (ForeignSpec("resnet34"), {}, "is a resnet18, not a resnet34; start with --model.backbone resnet18"),
            (ForeignSpec("resnet18"), {}, "x.safetensors lacks 48 of 120 tensors: backbone.layer1.1.bn1.bias"),
            (RESNET, {"model.backbone": "vit_tiny_patch16_224", "model.arguments": "{}"}, "is a resnet18, not a Vi"),
        ],
        ids=["name", "shapes", "vit"],
    )
    def test_refused(self, tmp_path, spec, changes, words):
        _, place = _exported("resnet", "safetensors", tmp_path)
        with pytest.raises(CheckpointError, match=words) as caught:
            _start(_recipe(place, spec, **changes))
        assert "\n" not in str(caught.value)

    def test_from_source_has_the_weights_arguments(self, tmp_path):
        _, place = _exported("resnet", "timm", tmp_path)
        other = _recipe(place, **{"model.backbone": "from_source", "model.arguments": '{"layers": [3, 1, 1, 1]}'})
        with pytest.raises(ConfigError, match=r"arguments .* has no effect: .* takes those of the weights"):
            as_source(other, None)


def test_what_a_model_gives():
    model = _model(CONVNEXT)
    images = _images(3, 100, 160)
    assert model.patch_tokens(images).shape == (3, 3, 5, 16) and model.features(images).shape == (3, 16)
    assert (model.stride, model.side_multiple, model.width, model.is_vit) == (32, 1, 16, False)
    for asked in (model.attention, lambda x: model.last_tokens(x, 1), lambda _: model.vit):
        with pytest.raises(ConfigError, match="convnext_atto is not a Vision Transformer"):
            asked(images)
    with pytest.raises(ConfigError, match=r"wanted are \(b, 3, h, w\)"):
        model.features(_images(4))
