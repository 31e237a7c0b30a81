"""DINOv3's weights: read under each project's names, and written so that timm and transformers compute the same.

Features are compared to 1e-4, the issue's bound; what was measured is below 2e-5.
"""

from __future__ import annotations

import dataclasses
import json

import pytest
import safetensors.torch
import timm
import torch
from torch import Tensor, nn

from dino_ds.config.ds_schema import PerformanceOptions
from dino_ds.config.loading import change_recipe, load_recipe
from dino_ds.errors import CheckpointError, ConfigError
from dino_ds.method.build import build_network
from dino_ds.models.specs.backbones import VITS, ViTSpec
from dino_ds.models.specs.base import BackboneOptions
from dino_ds.models.vit import VisionTransformer
from dino_ds.weights.export import FORMATS, export_timm
from dino_ds.weights.load import Backbone, load
from dino_ds.weights.sidecar import read_sidecar
from dino_ds.weights.start import as_source
from tests.sample import sampled
from tests.weights.originals import assert_same, images

KINDS = [name for name, spec in VITS.items() if spec.rope is not None]
SIZE = 64


def _images(*size: int) -> Tensor:
    return images(*(size or (SIZE, SIZE)), count=2)


def _same(ours: Tensor, theirs: Tensor) -> None:
    assert_same(ours, theirs, 1e-4)


def _random(model: nn.Module) -> nn.Module:
    """Weights that matter everywhere, and keep what passes through many blocks of a size."""
    torch.manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            scale = 0.5 / parameter.shape[-1] ** 0.5 if parameter.ndim > 1 and "token" not in name else 0.3
            parameter.normal_(std=scale)
            if "norm" in name and name.endswith("weight"):
                parameter.add_(1)
    return model.eval()


def _spec(name: str) -> ViTSpec:
    """Two narrow blocks of the released one."""
    spec = VITS[name]
    return dataclasses.replace(spec, depth=2, width=128, heads=128 * spec.heads // spec.width)


def _backbone(name: str, **changes: object) -> Backbone:
    spec = dataclasses.replace(VITS[name], **{"width": 128, "heads": 2, "depth": 2, **changes})
    vit = VisionTransformer(spec, SIZE, BackboneOptions())
    _random(vit)
    return Backbone(vit, SIZE, "a test", {"timm_name": name, "step": 3, "images": 24})


def _traits(name: str) -> tuple[object, ...]:
    spec = VITS[name]
    return spec.swiglu, spec.mlp_ratio, spec.qkv_bias


@pytest.mark.parametrize("name", sampled(KINDS, _traits))
def test_timm_s_file_gives_timm_s_features(name, tmp_path):
    spec = _spec(name)
    arguments = {"depth": spec.depth, "embed_dim": spec.width, "num_heads": spec.heads}
    theirs = _random(timm.create_model(name, num_classes=0, global_pool="token", **arguments))
    torch.save(theirs.state_dict(), tmp_path / "a.pth")
    ours = load(tmp_path / "a.pth", heads=spec.heads)
    assert ours.vit.arch == spec and ours.image_size == 224
    assert "no file says the size of its images: taken for 224 pixels" in ours.notes
    with torch.no_grad():
        for size in ((SIZE, SIZE), (96, 48)):
            _same(ours.features(_images(*size)), theirs(_images(*size)))
    safetensors.torch.save_file(theirs.state_dict(), tmp_path / "model.safetensors")
    config = {"architecture": name, "model_args": arguments, "pretrained_cfg": {"input_size": [3, 256, 256]}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    folder = load(tmp_path)
    assert (folder.vit.arch, folder.image_size, folder.notes) == (spec, 256, [])


@pytest.mark.parametrize("name", sampled(KINDS, _traits))
def test_our_file_is_timm_s_by_the_line_in_its_json(name, tmp_path):
    """The name and arguments that teacher.json's `load` says build it, strictly."""
    model = _backbone(name)
    FORMATS["safetensors"][0](model, tmp_path / "a.safetensors")
    about = json.loads((tmp_path / "a.json").read_text())
    theirs = timm.create_model(about["timm_name"], **about["timm_arguments"], num_classes=0).eval()
    theirs.load_state_dict(safetensors.torch.load_file(tmp_path / "a.safetensors"))
    again = load(tmp_path / "a.safetensors")
    assert again.vit.arch == model.vit.arch and again.image_size == SIZE
    with torch.no_grad():
        for size in ((SIZE, SIZE), (96, 48)):
            _same(model.features(_images(*size)), theirs(_images(*size)))
            torch.testing.assert_close(again.features(_images(*size)), model.features(_images(*size)))


def _as_released(model: Backbone, **more: Tensor) -> dict[str, Tensor]:
    """The names of facebookresearch/dinov3, its masked bias of keys and its rounded periods."""
    names = {"gamma_1": "ls1.gamma", "gamma_2": "ls2.gamma", "fc1_g": "w1", "fc1_x": "w2"}
    gated, out = model.vit.arch.swiglu, dict[str, Tensor]()
    for name, tensor in model.vit.state_dict().items():
        for ours, theirs in (names | ({"mlp.fc2": "mlp.w3"} if gated else {})).items():
            name = name.replace(ours, theirs)
        if name.endswith("q_bias"):
            d, attention = len(tensor), name.removesuffix("q_bias")
            v = model.vit.state_dict()[name.replace("q_bias", "v_bias")]
            out[f"{attention}qkv.bias"] = torch.cat((tensor, torch.full((d,), 9.0), v))
            out[f"{attention}qkv.bias_mask"] = torch.cat((torch.ones(d), torch.zeros(d), torch.ones(d)))
        elif not name.endswith("v_bias"):
            out["storage_tokens" if name == "reg_token" else name] = tensor
    heads, width = model.vit.arch.heads, model.vit.arch.width
    count = width // heads // 4
    out["rope_embed.periods"] = (100.0 ** (torch.arange(count) / count)).bfloat16()
    return out | more


@pytest.mark.parametrize("name", ["vit_small_patch16_dinov3_qkvb", "vit_7b_patch16_dinov3"])
def test_files_of_facebookresearch(name, tmp_path):
    """Heads by the periods, as many for the 7B's wider ones; the mask token and the norm of local crops kept."""
    model = _backbone(name, heads=2, local_cls_norm=True)
    mask = torch.randn(1, 128)
    torch.save(_as_released(model, mask_token=mask), tmp_path / "a.pth")
    ours = load(tmp_path / "a.pth")
    assert ours.vit.arch == dataclasses.replace(model.vit.arch, local_cls_norm=False)
    assert ours.mask_token is not None and ours.mask_token.equal(mask)
    assert "rounded, by up to 0.2 %" in ours.notes[0] or "rounded, by up to 0.3 %" in ours.notes[0]
    _same(ours.features(_images()), model.features(_images()))
    if name.endswith("_qkvb"):  # a start says nothing of learned positions, whose key it would refuse
        recipe = load_recipe(None, {"model.init_from": str(tmp_path / "a.pth"), "model.backbone": "from_source"})
        recipe = as_source(change_recipe(recipe, {"model.heads": "2"}), None)
        said = build_network(recipe, PerformanceOptions()).started_from
        assert said and "rounded, by up to" in said and "pos_embed_interpolation" not in said
    training = {f"backbone.{n}": t for n, t in _as_released(model).items()}
    head = {"mlp.0.weight": torch.randn(8, 128), "last_layer.weight": torch.randn(5, 8)}
    training |= {f"dino_head.{n}": t for n, t in head.items()}
    torch.save({"teacher": training}, tmp_path / "b.pth")
    assert load(tmp_path / "b.pth").heads["head"]["prototypes.weight"].equal(head["last_layer.weight"])


def test_what_can_t_be_taken_is_said(tmp_path):
    model = _backbone("vit_small_patch16_dinov3_qkvb")
    released = _as_released(model)

    def line(change: dict[str, Tensor | None], **how: int) -> str:
        torch.save({n: t for n, t in (released | change).items() if t is not None}, tmp_path / "a.pth")
        with pytest.raises(CheckpointError) as caught:
            load(tmp_path / "a.pth", **how)
        assert "\n" not in str(caught.value)
        return str(caught.value)

    bias = "blocks.1.attn.qkv.bias"
    assert f"its keys have a bias ({bias})" in line({f"{bias}_mask": None})
    half = torch.full((384,), float("nan")).index_fill(0, torch.arange(128, 256), 0.0)
    assert "blocks.1.attn.q_bias" in line({f"{bias}_mask": half})
    assert "periods are 1 to 9, not 1 to 74.99" in line({"rope_embed.periods": torch.linspace(1, 9, 16)})
    assert "a width of 128 in 2 blocks has (usual: 2): name them" in line({"rope_embed.periods": None})
    assert "--heads 4, and the file says 2" in line({}, heads=4)
    assert "ViT with rotary positions has no projectors.0.weight" in line({"projectors.0.weight": torch.ones(1)})
    assert "it lacks" in line({"cls_token": None}) or "class token" in line({"cls_token": None})


def test_formats_that_have_no_such_rotary_positions(tmp_path):
    unlike = _backbone("vit_small_patch16_dinov3", rms_norm=True)
    with pytest.raises(ConfigError) as caught:
        export_timm(unlike, tmp_path / "out")
    assert "\n" not in str(caught.value)
    FORMATS["safetensors"][0](unlike, tmp_path / "a.safetensors")
    _same(load(tmp_path / "a.safetensors").features(_images()), unlike.features(_images()))


@pytest.mark.parametrize("change", [{"rope": "both"}, {"rope_base": 1.0}, {"rope_max_period": 9.0}, {"rope": None}])
def test_json_with_impossible_rotary_positions(change, tmp_path):
    model = _backbone("vit_small_patch16_dinov3")
    FORMATS["safetensors"][0](model, tmp_path / "a.safetensors")
    about = read_sidecar(tmp_path / "a.safetensors")
    about["architecture"] |= change
    (tmp_path / "a.json").write_text(json.dumps(about))
    with pytest.raises(CheckpointError, match="describes another network"):
        load(tmp_path / "a.safetensors")
