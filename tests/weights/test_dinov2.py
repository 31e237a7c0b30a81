"""dinov2's and dinov3's weights: read under each project's names, and written so that timm computes the same."""

from __future__ import annotations

import dataclasses
import json
import re

import pytest
import safetensors.torch
import timm
import torch
from torch import Tensor, nn

from dino_ds.config.ds_schema import PerformanceOptions
from dino_ds.config.loading import change_recipe, load_recipe
from dino_ds.errors import CheckpointError
from dino_ds.method.build import build_network
from dino_ds.models.network import Network
from dino_ds.models.specs.backbones import VITS
from dino_ds.models.specs.base import BackboneOptions
from dino_ds.models.vit import VisionTransformer
from dino_ds.weights.export import export_timm
from dino_ds.weights.load import Backbone, load
from dino_ds.weights.start import as_source
from tests.reference import from_reference_v2, golden_v2
from tests.run.harness import TINY
from tests.sample import sampled
from tests.weights.originals import Original, assert_same, images

MASKED = {"crops.mask": "dinov2", "objective.ibot_weight": "1"}
HEADS = {
    f"{head}.{key}": value
    for head in ("head", "ibot_head")
    for key, value in {"prototypes": "96", "hidden": "64", "bottleneck": "32", "learned_lengths": "true"}.items()
}
TOY = {"model.backbone": "vit_small_patch14_dinov2", "model.patch_size": "4", "model.width": "48", "model.heads": "3"}
"""The network of the recorded trajectories; native images of 32 pixels, two blocks."""


def _start(source: object, **changes: str) -> Network:
    recipe = load_recipe(None, {**TINY, **TOY, **MASKED, **HEADS, "model.init_from": str(source), **changes})
    return build_network(recipe, PerformanceOptions())


def _recorded() -> dict[str, Tensor]:
    return {name.removeprefix("init."): t for name, t in golden_v2("trajectory_dinov2").items() if name[:5] == "init."}


@pytest.fixture(params=["teacher_checkpoint", "training"])
def saved(request, tmp_path):
    theirs = _recorded()
    content: dict[str, object] = {"teacher": theirs}
    if request.param == "training":
        # Names under student.block_chunks 2, blocks.CHUNK.BLOCK: one of two blocks in each.
        theirs = {re.sub(r"blocks\.(\d+)\.", r"blocks.\1.\1.", name): t for name, t in theirs.items()}
        whole = {f"teacher.{name}": t for name, t in theirs.items()}
        whole |= {f"student.{name}": t + 1 for name, t in theirs.items()}
        content = {"model": whole | {"dino_loss.center": torch.zeros(1, 96)}, "optimizer": {}, "iteration": 3}
    torch.save(content, tmp_path / "a.pth")
    return tmp_path / "a.pth"


def test_a_run_starts_from_its_teacher_heads_and_mask_token_included(saved):
    network, expected = _start(saved), from_reference_v2(_recorded(), learned_lengths=True)
    assert expected.keys() == dict(network.named_parameters()).keys()
    for name, parameter in network.named_parameters():
        assert torch.equal(parameter, expected[name]), name
    said = network.started_from
    assert "(dinov2): 35 tensors of the backbone; the head too (8 tensors); the ibot_head too (8 tensors)" in said


def test_heads_that_one_of_the_two_lacks(tmp_path):
    theirs = _recorded()
    torch.save({"teacher": {n: t for n, t in theirs.items() if n[:9] != "ibot_head"}}, tmp_path / "tied.pth")
    assert "the head too (8 tensors); it has no ibot_head: our own" in _start(tmp_path / "tied.pth").started_from
    torch.save({"teacher": theirs}, tmp_path / "own.pth")
    shared = {key: value for key, value in HEADS.items() if not key.startswith("ibot_head")}
    recipe = {**TINY, **TOY, **MASKED, **shared, "objective.ibot_head": "shared"}
    recipe["model.init_from"] = str(tmp_path / "own.pth")
    network = build_network(load_recipe(None, recipe), PerformanceOptions())
    assert "the head too (8 tensors); its ibot_head is not used" in network.started_from
    network = _start(tmp_path / "own.pth", **{"ibot_head.learned_lengths": "false"})
    said = r"prototypes' lengths \(0\.9\d+ to 1\.\d+\) are left out: they are 1 here \(--ibot_head\.learned_lengths\)"
    assert re.search(said, network.started_from)


def test_a_mask_token_that_only_one_of_the_two_has(tmp_path):
    """Said in a few words: left out where nothing is hidden; zero where the file has none, as timm's."""
    torch.save(Original(32, 4, 48, 2, 3, v2=True, registers=4).state_dict(), tmp_path / "a.pth")
    flags = {"model.backbone": "vit_small_patch14_reg4_dinov2", "model.pos_embed_interpolation": "antialias"}
    plain = load_recipe(None, {**TINY, **TOY, **flags, "model.init_from": str(tmp_path / "a.pth")})
    network = build_network(plain, PerformanceOptions())
    assert network.backbone.mask_token is None
    assert "its mask token is left out: this run hides no patches; " in network.started_from
    model = load(tmp_path / "a.pth", heads=3)
    export_timm(model, tmp_path / "timm")
    network = _start(tmp_path / "timm", **flags)
    assert torch.equal(network.backbone.mask_token, torch.zeros(1, 48))
    assert "it has no mask token: our own starts at zero; " in network.started_from


KINDS = [name for name, spec in VITS.items() if spec.rope is not None]
SIZE = 64


def _images(*size: int) -> Tensor:
    return images(*(size or (SIZE, SIZE)), count=2)


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


def _backbone(name: str, **changes: object) -> Backbone:
    spec = dataclasses.replace(VITS[name], **{"width": 128, "heads": 2, "depth": 2, **changes})
    vit = VisionTransformer(spec, SIZE, BackboneOptions())
    _random(vit)
    return Backbone(vit, SIZE, "a test", {"timm_name": name, "step": 3, "images": 24})


@pytest.mark.parametrize(
    "name", sampled(KINDS, lambda name: (VITS[name].swiglu, VITS[name].mlp_ratio, VITS[name].qkv_bias))
)
def test_timm_s_file_gives_timm_s_features(name, tmp_path):
    whole = VITS[name]
    spec = dataclasses.replace(whole, depth=2, width=128, heads=128 * whole.heads // whole.width)
    arguments = {"depth": spec.depth, "embed_dim": spec.width, "num_heads": spec.heads}
    theirs = _random(timm.create_model(name, num_classes=0, global_pool="token", **arguments))
    torch.save(theirs.state_dict(), tmp_path / "a.pth")
    ours = load(tmp_path / "a.pth", heads=spec.heads)
    assert ours.vit.arch == spec and ours.image_size == 224
    assert "no file says the size of its images: 224 pixels are assumed" in ours.notes
    with torch.no_grad():
        for size in ((SIZE, SIZE), (96, 48)):
            assert_same(ours.features(_images(*size)), theirs(_images(*size)), 1e-4)
    safetensors.torch.save_file(theirs.state_dict(), tmp_path / "model.safetensors")
    config = {"architecture": name, "model_args": arguments, "pretrained_cfg": {"input_size": [3, 256, 256]}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    folder = load(tmp_path)
    note = "no file says the mean and std of its images: ImageNet's, unless data.mean sets others"
    assert (folder.vit.arch, folder.image_size, folder.notes) == (spec, 256, [note])


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
    assert_same(ours.features(_images()), model.features(_images()), 1e-4)
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
