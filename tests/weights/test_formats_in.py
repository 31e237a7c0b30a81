"""Weights in: networks of other projects, built as they build them, give the same features when read: 1e-5."""

from __future__ import annotations

import itertools
import json
import re
from argparse import Namespace

import pytest
import safetensors.torch
import timm
import torch
from torch import nn

from dino_ds.basics.names import weights_elsewhere
from dino_ds.errors import CheckpointError
from dino_ds.models.prototypes import DinoHead
from dino_ds.weights.load import load
from dino_ds.weights.read import read_weights
from tests.reference import product
from tests.sample import sampled
from tests.weights.originals import Original, OriginalHead, assert_same, images, randomised

SMALL = {"size": 32, "patch": 8, "width": 64, "depth": 2, "heads": 1}


class TestFacebook:
    def test_an_mae_with_its_decoder(self, tmp_path):
        original = Original(**SMALL)
        decoder = {"mask_token": torch.zeros(1, 1, 32), "decoder_pos_embed": torch.zeros(1, 17, 32)}
        names = ("embed", "blocks.0.attn.qkv", "norm", "pred")
        decoder |= {f"decoder_{name}.weight": torch.zeros(32, 32) for name in names}
        torch.save({"model": original.state_dict() | decoder}, tmp_path / "a.pth")
        ours = load(tmp_path / "a.pth", heads=1)
        assert_same(ours.features(images()), original(images()))
        assert ours.notes == [
            "6 tensors not used (decoder_blocks.0.attn.qkv.weight, decoder_embed.weight, decoder_norm.weight, ...)",
            "no file says the mean and std of its images: ImageNet's, unless data.mean sets others",
        ]

    @pytest.mark.parametrize("swiglu", [False, True])
    @pytest.mark.parametrize("registers", [0, 4])
    def test_dinov2(self, tmp_path, registers, swiglu):
        """LayerScale, mask token, SwiGLU, registers with a position of the class token; two ways to resize."""
        original = Original(**SMALL, v2=True, registers=registers, swiglu=swiglu)
        torch.save(original.state_dict(), tmp_path / "dinov2.pth")
        ours = load(tmp_path / "dinov2.pth", heads=1)
        for size in ((32, 32), (40, 24), (16, 16)):
            assert_same(ours.features(images(*size)), original(images(*size)))
        assert ours.mask_token.equal(original.mask_token)

    def test_checkpoints_of_dino_s_training(self, tmp_path):
        """{"student", "teacher", "optimizer", "args", ...} as main_dino.py saves it, the student inside DDP."""
        backbones = {name: Original(**SMALL) for name in ("student", "teacher")}
        heads = {name: OriginalHead(64, 40, hidden=48, bottleneck=16) for name in backbones}
        content = {}
        for name, backbone in backbones.items():
            wrapped = nn.ModuleDict({"backbone": backbone, "head": heads[name]})
            ddp = "module." if name == "student" else ""
            content[name] = {f"{ddp}{key}": t for key, t in wrapped.state_dict().items()}
        content |= {"optimizer": {"state": {}}, "epoch": 3, "dino_loss": {"center": torch.zeros(1, 40)}}
        content |= {"args": Namespace(arch="vit_small", output_dir=tmp_path), "fp16_scaler": {"scale": 65536.0}}
        torch.save(content, tmp_path / "checkpoint.pth")
        read = read_weights(tmp_path / "checkpoint.pth")
        head = DinoHead(64, 48, 16, 40, 3)
        head.load_state_dict(read.heads["head"])
        assert read.notes == []
        features = backbones["teacher"](images())
        assert_same(product(head(features)), heads["teacher"](features))
        assert_same(load(tmp_path / "checkpoint.pth", heads=1).features(images()), features)

    def test_a_head_of_one_layer_and_one_with_lengths(self, tmp_path):
        wrapped = nn.ModuleDict({"backbone": Original(**SMALL), "head": OriginalHead(64, 40, 1, bottleneck=16)})
        wrapped["head"].last_layer.weight_g.data.mul_(torch.linspace(0.5, 2, 40)[:, None])
        torch.save({"teacher": wrapped.state_dict()}, tmp_path / "a.pth")
        read = read_weights(tmp_path / "a.pth")
        head = DinoHead(64, 48, 16, 40, 1, learned_lengths=True)
        head.load_state_dict(read.heads["head"])
        features = torch.randn(5, 64)
        assert_same(product(head(features)), wrapped["head"](features))
        assert read.notes == []

    @pytest.mark.parametrize(
        "wrap",
        [
            lambda s: {"state_dict": {f"module.backbone.{n}": t for n, t in s.items()}},
            lambda s: {"model": {f"_orig_mod.{n}": t for n, t in s.items()}},
            lambda s: {f"my_module.{n}": t for n, t in s.items()},
            lambda s: {"state_dict": {f"model.encoder.{n}": t for n, t in s.items()}, "epoch": 1},
            lambda s: {f"teacher_{n}": t for n, t in {f"backbone.{n}": t for n, t in s.items()}.items()},
            lambda s: s | {"head.weight": torch.zeros(10, 64), "head.bias": torch.zeros(10)},
            lambda s: {n: t.half() for n, t in s.items()},
        ],
        ids=["state_dict, DDP", "compiled", "a name", "lightning", "teacher_backbone", "classifier", "half"],
    )
    def test_wrapped(self, tmp_path, wrap):
        original = Original(**SMALL)
        torch.save(wrap(original.half().float().state_dict()), tmp_path / "a.pth")
        ours = load(tmp_path / "a.pth", heads=1)
        assert_same(ours.features(images()), original(images()))
        assert not ours.heads


TIMM = ["vit_small_patch16_224", "vit_small_patch14_dinov2", "vit_small_patch14_reg4_dinov2"]
TIMM += ["vit_giant_patch14_reg4_dinov2", "deit3_small_patch16_224"]


@pytest.mark.parametrize(("name", "size"), sampled(itertools.product(TIMM, [32, 48])))
def test_timm(tmp_path, name, size):
    """A file with a classifier is read; DeiT III has no position for the class token."""
    sizes = {"embed_dim": 192, "num_heads": 3, "img_size": size, "patch_size": 8, "depth": 2}
    theirs = randomised(timm.create_model(name, global_pool="token", num_classes=7, **sizes))
    safetensors.torch.save_file(theirs.state_dict(), tmp_path / "model.safetensors")
    ours = load(tmp_path / "model.safetensors", heads=3)
    given = images(size, size)
    with torch.no_grad():
        assert_same(ours.features(given), theirs.forward_head(theirs.forward_features(given), pre_logits=True))
    assert ours.image_size == size and "head.bias" in str(ours.notes)


HF = [
    ("ViT", {"intermediate_size": 256}),
    ("Dinov2", {"mlp_ratio": 4}),
    ("Dinov2WithRegisters", {"mlp_ratio": 4, "use_swiglu_ffn": True, "hidden_act": "silu"}),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "changes", "form"), sampled((*kind, form) for kind in HF for form in ("safetensors", "index", "bin"))
)
def test_huggingface(tmp_path, kind, changes, form):
    """Their own model, saved by `save_pretrained`; heads of 48 only config.json tells. In one file or several."""
    transformers = pytest.importorskip("transformers")
    numbers = {"hidden_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 32, "patch_size": 8}
    numbers |= {"layer_norm_eps": 0.3}  # theirs are 1e-12 and 1e-6: this one is seen
    config = getattr(transformers, f"{kind}Config")(**numbers, **changes)
    theirs = randomised(getattr(transformers, f"{kind}ForImageClassification")(config))
    theirs.save_pretrained(tmp_path, max_shard_size="200KB" if form == "index" else "1GB")
    assert (tmp_path / "model.safetensors.index.json").is_file() == (form == "index")
    if form == "bin":
        state = safetensors.torch.load_file(tmp_path / "model.safetensors")
        torch.save(state, tmp_path / "pytorch_model.bin")
        (tmp_path / "model.safetensors").unlink()
    ours = load(tmp_path)
    with torch.no_grad():
        tokens = theirs.base_model(pixel_values=images()).last_hidden_state
    assert_same(ours.features(images()), tokens[:, 0])
    assert "tensors not used (" in str(ours.notes)  # its classifier and mask token
    if kind == "Dinov2WithRegisters":  # the one whose way to resize positions is ours
        with torch.no_grad():
            tokens = theirs.base_model(pixel_values=images(40, 24)).last_hidden_state
        assert_same(ours.features(images(40, 24)), tokens[:, 0])


class TestRefused:
    def _saved(self, tmp_path, change=lambda state: state):
        path = tmp_path / "a.pth"
        torch.save(change(dict(Original(**SMALL).state_dict())), path)
        return path

    def _line(self, path, **how):
        with pytest.raises(CheckpointError) as caught:
            load(path, **how)
        line = str(caught.value)
        assert "\n" not in line and str(path) in line
        return line

    @pytest.mark.parametrize(
        ("change", "says"),
        [
            ({"norm_pre.weight": torch.ones(64)}, "another kind of network: dino_ds's ViT has no norm_pre.weight"),
            ({"norm.bias": torch.zeros(64).index_fill(0, torch.tensor(3), torch.nan)}, "NaN, infinity .* in norm.bias"),
            ({"head.last_layer.weight_v": torch.full((4, 4), torch.nan)}, "NaN, infinity"),
            # Building what a name asks for would never end: blocks are counted by their tensors.
            ({"blocks.1000000000.norm1.bias": torch.zeros(64)}, "it has tensors of 3 blocks, and their last is called"),
            ({f"blocks.{'9' * 5000}.norm1.bias": torch.zeros(64)}, "it has tensors of 3 blocks"),
            ({"pos_embed": torch.zeros(1, 12, 64)}, "11 places for patches, which is not a square"),
            ({"momentum.patch_embed.proj.weight": torch.zeros(1)}, "several networks, and not one teacher: , momentum"),
        ],
        ids=lambda value: "" if isinstance(value, str) else str(next(iter(value)))[:40],
    )
    def test_tensors(self, tmp_path, change, says):
        assert re.search(says, self._line(self._saved(tmp_path, lambda state: state | change)))

    @pytest.mark.parametrize("parts", [{"a": ["model.safetensors"]}, {"a": 3}, {"a": "../x.safetensors"}, [], {}])
    def test_an_index_of_no_files(self, tmp_path, parts):
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": parts}))
        assert "model.safetensors.index.json names no files of weights beside it" in self._line(tmp_path)

    def test_heads(self, tmp_path):
        path = self._saved(tmp_path)
        assert "5 attention heads do not divide the width 64" in self._line(path, heads=5)
        assert load(path, heads=2).vit.arch.heads == 2
        assert "a width of 64 in 2 blocks has (usual: 1): name them" in self._line(path)
        torch.save(Original(**(SMALL | {"width": 96, "heads": 3})).state_dict(), path)
        (tmp_path / "model.safetensors").write_bytes(safetensors.torch.save(load(path, heads=3).vit.state_dict()))
        (tmp_path / "config.json").write_text(json.dumps({"num_attention_heads": 3}))
        assert "--heads 2, and the file says 3" in self._line(tmp_path, heads=2)

    @pytest.mark.slow
    def test_another_activation(self, tmp_path):
        transformers = pytest.importorskip("transformers")
        numbers = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 1, "image_size": 32}
        config = transformers.ViTConfig(**numbers, intermediate_size=64, patch_size=8, hidden_act="quick_gelu")
        transformers.ViTModel(config).save_pretrained(tmp_path)
        assert "its MLP has quick_gelu" in self._line(tmp_path)


NAME = "vit_tiny_patch16_224.augreg_in21k_ft_in1k"


@pytest.fixture
def cache(tmp_path, monkeypatch):
    constants = pytest.importorskip("huggingface_hub.constants")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.file_download.constants", constants)
    return tmp_path / "hub"


@pytest.mark.slow
def test_from_the_cache(cache):
    """The real ViT-Ti/16 with its classifier, as the hub keeps it, and the same features as timm's."""
    theirs = randomised(timm.create_model(NAME, depth=12))
    snapshot = cache / f"models--timm--{NAME}/snapshots/0123abcd"
    snapshot.mkdir(parents=True)
    safetensors.torch.save_file(theirs.state_dict(), snapshot / "model.safetensors")
    (snapshot.parent.parent / "refs").mkdir()
    (snapshot.parent.parent / "refs/main").write_text("0123abcd")
    ours = load(NAME)
    image = images(224, 224, 1)
    with torch.no_grad():
        assert_same(ours.features(image), theirs.forward_head(theirs.forward_features(image), pre_logits=True))
    assert (ours.vit.arch.heads, ours.image_size) == (3, 224)


def test_without_a_network(cache):
    with pytest.raises(CheckpointError, match=f"the weights of {NAME} are neither in the cache") as caught:
        load(NAME)
    assert str(caught.value).endswith("give a file of weights") and "\n" not in str(caught.value)
    with pytest.raises(CheckpointError, match=r"Invalid pretrained tag \(dnio\)"):
        load("vit_small_patch16_224.dnio")


def test_an_unknown_hub_is_not_asked_again_and_again(cache, monkeypatch):
    """Its cache is used, and its client's switch is set back."""
    constants = pytest.importorskip("huggingface_hub.constants")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "https://hub.invalid")
    monkeypatch.setattr("dino_ds.weights.read.getproxies", dict)
    with pytest.raises(CheckpointError, match=r"nor available \(no network: hub\.invalid is not known here\); give a"):
        load(NAME)
    assert constants.HF_HUB_OFFLINE is False


@pytest.mark.slow
def test_other_networks_of_timm(monkeypatch):
    create = timm.create_model
    monkeypatch.setattr(timm, "create_model", lambda name, pretrained, **how: create(name, **how))
    name, image = "vit_tiny_r_s16_p8_224", images(224, 224, 1)
    torch.manual_seed(0)
    theirs = create(name, num_classes=0).eval()
    torch.manual_seed(0)
    ours, stated = load(name), theirs.default_cfg
    assert ours.network.spec.name == name and ours.image_size == 224
    assert (ours.normalization.mean, ours.normalization.std) == (stated["mean"], stated["std"])
    with torch.no_grad():
        torch.testing.assert_close(ours.features(image), theirs(image), rtol=1e-5, atol=1e-5)
    with pytest.raises(CheckpointError, match="Did you mean vit_small_patch16_224"):
        load("vit_smal_patch16_224")


def test_timm_has_the_weights_that_answers_name():
    kinds = ("vits16", "vits16plus", "vitb16", "vitl16", "vith16plus", "vit7b16", "convnext-tiny")
    for name in (
        *(f"dinov2_vit{size}14{kind}" for size in "sblg" for kind in ("", "_reg", "_lc")),
        *(f"facebook/dinov2{kind}-{size}" for size in ("small", "giant") for kind in ("", "-with-registers")),
        *(f"facebook/dinov3-{kind}-pretrain-lvd1689m" for kind in kinds),
        *(f"facebook/dino-vit{size}{patch}" for size in "sb" for patch in (8, 16)),
        *("dinov3_vitb16", "dinov3_convnext_large", "hf-hub:timm/vit_small_patch14_dinov2.lvd142m"),
        "facebook/dinov3-vitl16-pretrain-sat493m",
    ):
        answer = weights_elsewhere(name)
        assert answer is not None and re.findall(r" as ([\w.]+)", answer)[0] in timm.list_pretrained(), name
