"""Twelve of timm's families and networks of a user's own: each trains, or is refused in one line that says why."""

from __future__ import annotations

import random

import pytest
import torch
from timm.layers import StdConv2d
from torch import Tensor, nn

from dino_ds.basics.own_code import allow_code
from dino_ds.errors import ConfigError
from dino_ds.method.build import build_network, check_levers
from dino_ds.method.ema import _low_precision_copy
from dino_ds.models.foreign import ForeignBackbone
from dino_ds.models.network import Network
from dino_ds.models.specs.base import BackboneOptions
from dino_ds.models.specs.foreign import ForeignSpec
from tests.engine.harness import ds_config, fp32_student, run_windows
from tests.engine.test_cnn import BATCH, SIZES, build, foreign_recipe
from tests.ranks import run_on_ranks
from tests.reference import copied

FAMILIES = {
    "resnet18": '{"channels": [8, 16, 16, 24], "layers": [1, 1, 1, 1]}',
    "convnext_atto": '{"depths": [1, 1, 1, 1], "dims": [8, 16, 16, 24]}',
    "regnetx_002": '{"w0": 8, "wa": 8.0, "wm": 2.0, "group_size": 8, "depth": 8}',
    "test_efficientnet": "{}",
    "mobilenetv3_small_050": "{}",
    "swin_tiny_patch4_window7_224": '{"embed_dim": 16, "depths": [1, 1], "num_heads": [2, 2], "window_size": 4}',
    "densenet121": '{"growth_rate": 4, "block_config": [1, 1, 2, 1]}',
    "vgg11_bn": '{"mlp_ratio": 0.01}',
    "xcit_nano_12_p16_224": '{"embed_dim": 32, "depth": 2, "num_heads": 2}',
    "deit3_small_patch16_224": '{"embed_dim": 32, "depth": 2, "num_heads": 2}',
    "vit_tiny_r_s16_p8_224": '{"embed_dim": 32, "depth": 1, "num_heads": 2}',
    "test_mambaout": "{}",
    "eva02_tiny_patch14_224": '{"patch_size": 16, "embed_dim": 32, "depth": 2, "num_heads": 2}',
    "resnet50_gn": '{"channels": [32, 32, 32, 32], "layers": [1, 1, 1, 1]}',
}
WITHOUT_DROP_PATH = {"densenet121", "vgg11_bn"}


def _recipe(name: str, arguments: str = "{}", **changes: str):
    drop_path = "0" if name in WITHOUT_DROP_PATH or ":" in name else "0.1"
    plain = {"model__drop_path": drop_path, "optimizer__warmup": "0 steps", "optimizer__eps": "1e-12",
             "optimizer__lr": "0.01", "objective__freeze_prototypes": "0 steps"}  # fmt: skip
    return foreign_recipe(name, arguments, **(plain | changes))


def _two_steps(stage: int, families: list[str]) -> dict[str, tuple[list[float], list[str]]]:
    found = {}
    for name in families:
        recipe = _recipe(name, FAMILIES[name])
        step = build(recipe, stage)
        assert not torch.backends.cuda.cudnn_sdp_enabled()  # its gradients were NaN for one query on an H200
        losses = run_windows(step, 0, 2, BATCH, SIZES)
        network = build_network(recipe, step.engine.config.performance)
        start, parameters = copied(network.state_dict()), dict(network.named_parameters())
        end = fp32_student(step.engine, network)
        found[name] = losses, [key for key in parameters if torch.equal(start[key], end[key])]
    return found


SAMPLE = ("resnet18", "densenet121", "swin_tiny_patch4_window7_224", "xcit_nano_12_p16_224", "vit_tiny_r_s16_p8_224")


@pytest.fixture(scope="module")
def trained():
    return run_on_ranks(_two_steps, 2, list(SAMPLE))[0]


@pytest.mark.parametrize(
    "name", [*SAMPLE, *(pytest.param(n, marks=pytest.mark.full) for n in FAMILIES if n not in SAMPLE)]
)
def test_every_parameter_moves(name, trained):
    losses, unmoved = trained[name] if name in trained else run_on_ranks(_two_steps, 2, [name])[0][name]
    assert all(0 < loss < 10 for loss in losses) and unmoved == []


def test_stages_agree(trained):
    """Networks whose segments take and give other things than one map have the same losses at stages 0 and 2. 1e-3:
    Adam, with so small an epsilon, follows the rounding of gradients that are 0."""
    families = ["densenet121", "swin_tiny_patch4_window7_224"]
    for name, (losses, _) in run_on_ranks(_two_steps, 0, families)[0].items():
        assert trained[name][0] == pytest.approx(losses, rel=1e-3)


def _build(recipe):
    return build_network(recipe, ds_config(0, "fp32", BATCH).performance)


class Plain(nn.Module):
    """A good class, from which the others go wrong."""

    def __init__(self, in_chans: int, width: int = 12, dropout: float = 0.0, unused: bool = False) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(in_chans, width, 4, stride=4), nn.BatchNorm2d(width)
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(width, 5) if unused else None

    def forward(self, images: Tensor) -> Tensor:
        return self.dropout(self.norm(self.stem(images)).relu())


class Wrong(Plain):
    """One that can't be trained, and `how`."""

    def __init__(self, in_chans: int, how: str) -> None:
        super().__init__(in_chans)
        self.how = how
        if how == "constant":
            self.scale = torch.ones(12, 1, 1)
        elif how == "tied":
            self.again = nn.Conv2d(in_chans, 12, 4, stride=4)
            self.again.weight = self.stem.weight
        elif how == "moving":
            self.register_buffer("mean", torch.zeros(()), persistent=False)
        elif how == "double":
            self.double()
        elif how == "lazy":
            self.stem = nn.LazyConv2d(12, 4, stride=4)
        elif how == "empty":
            self.stem = self.norm = nn.Identity()

    def forward(self, images: Tensor) -> Tensor:
        if self.how == "raises":
            raise RuntimeError("no\nweights here")
        features = super().forward(images.double() if self.how == "double" else images)
        if self.how == "constant":
            return features * self.scale
        if self.how == "tied":
            return features + self.again(images)
        if self.how == "tossing":
            return features * random.random()
        if self.how == "moving" and self.training:
            self.mean.lerp_(features.detach().mean(), 0.1)
        return features.flatten(2) if self.how == "sequences" else features


class NoModule:
    def __init__(self, in_chans: int) -> None:
        pass


OWN = [
    ("Plain", '{"dropout": 0.1}', "draws random numbers of its own .aten.bernoulli_.*switch dropout off"),
    ("Wrong", '{"how": "tossing"}', "draws random numbers of its own .random.*switch dropout off"),
    (
        "Wrong",
        '{"how": "moving"}',
        "its buffer mean changes with each pass, .*: make it persistent",
    ),
    ("Plain", '{"unused": true}', "no gradient to its parameter head.weight and 1 more: remove what is not used"),
    ("Plain", '{"with": 3}', "can't be made with in_chans=3 and model.arguments .*unexpected keyword argument"),
    ("Wrong", '{"how": "constant"}', "its scale is a plain tensor, which moves to no device"),
    ("Wrong", '{"how": "double"}', "its parameter stem.weight is float64, wanted is float32"),
    ("Wrong", '{"how": "lazy"}', "has lazy layers .* give them their sizes"),
    ("Wrong", '{"how": "empty"}', "can't be trained: it has no parameters"),
    ("Wrong", '{"how": "tied"}', "its parameters stem.weight and again.weight are one tensor"),
    ("Wrong", '{"how": "sequences"}', r"its features have shape \[2, 12, 3136\], wanted is \(b, d\)"),
    ("Wrong", '{"how": "raises"}', "gives no features of images: no weights here"),
    ("NoModule", "{}", "has no torch.nn.Module NoModule"),
    ("Missing", "{}", "has no torch.nn.Module Missing"),
]


@pytest.mark.parametrize(("name", "arguments", "message"), OWN)
def test_own_classes_that_can_t_are_refused(name, arguments, message):
    with pytest.raises(ConfigError, match=message) as refused:
        _build(_recipe(f"tests.models.test_families:{name}", arguments))
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("name", "lever", "owners"),
    [("resnet18", "packed", "ViTs that dino"), ("vit_tiny_patch16_224", "channels_last", "networks that dino_ds does")],
)
def test_levers_without_effect_are_refused(name, lever, owners):
    performance = ds_config(0, "fp32", BATCH, dino_ds={lever: False}).performance
    with pytest.raises(ConfigError, match=f"dino_ds.{lever} false is for {owners}"):
        check_levers(_recipe(name, FAMILIES.get(name, "{}")), performance)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model__backbone": "mixer_s32_224", "model__drop_path": "0"}, "mixer_s32_224 can't take images of"),
        ({"model__stochastic_depth": "batched"}, "model.stochastic_depth batched is for ViTs that dino_ds builds"),
        ({"crops__mask": "dinov2", "objective__ibot_weight": "1"}, "needs a backbone that hides patches, and resnet18"),
        ({"model__backbone": "convnext_atto", "teacher__batch_norm": "ema"}, "convnext_atto has no BatchNorm"),
        ({"model__backbone": "tests.weights.own:Own", "model__drop_path": "0.1"}, "Own has no stochastic depth"),
    ],
)
def test_options_that_do_not_go_with_a_backbone(changes, message):
    with pytest.raises(ConfigError, match=message):
        _build(_recipe("resnet18", **changes))


TINY_VIT = (
    '{"embed_dims": [8, 8, 8, 16], "depths": [1, 1, 1, 1], "num_heads": [1, 1, 1, 1], "window_sizes": [2, 2, 2, 2]}'
)


class Standardised(nn.Module):
    """Each of its children is a segment."""

    def __init__(self, in_chans: int) -> None:
        super().__init__()
        self.stem, self.last = StdConv2d(in_chans, 16, 3), nn.Linear(16, 8)

    def forward(self, images: Tensor) -> Tensor:
        return self.last(self.stem(images).mean((2, 3)))


def _built(name, arguments="{}"):
    torch.manual_seed(0)
    return ForeignBackbone(ForeignSpec(name, arguments=arguments), 64, BackboneOptions())


@pytest.mark.slow
@torch.no_grad()
def test_attention_biases_of_a_teacher_are_those_of_its_weights():
    """timm's TinyViT, LeViT, EfficientFormer and EfficientViT keep them from pass to pass in evaluation."""
    backbone, images = _built("tiny_vit_5m_224", TINY_VIT).eval(), torch.randn(2, 3, 64, 64)
    before = backbone.features(images)
    state = backbone.state_dict()
    state = {n: tensor + ("attention_biases" in n) * torch.rand_like(tensor.float()) for n, tensor in state.items()}
    backbone.load_state_dict(state)
    fresh = _built("tiny_vit_5m_224", TINY_VIT).eval()
    fresh.load_state_dict(state)
    assert torch.equal(backbone.features(images), fresh.features(images))
    assert not torch.equal(backbone.features(images), before)


@torch.no_grad()
def test_a_low_precision_copy_has_what_autocast_casts():
    """Equal to the bit; weights of a convolution that standardises them stay FP32, where it is a segment too."""
    allow_code([own := f"{__name__}:Standardised"])
    network = Network(_built(own), {}, {}, ["cls"]).eval()
    running, (copies, _) = _low_precision_copy(network, torch.bfloat16)
    assert [tuple(tensor.shape) for tensor in copies] == [(8, 16), (8,)]
    images = {"global": [torch.randn(4, 3, 32, 32)]}
    torch._foreach_copy_(copies, [network.backbone.get_parameter(f"last.{name}") for name in ("weight", "bias")])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(running(images)["cls"], network(images)["cls"])


@pytest.mark.parametrize(("wanted", "found"), [(None, False), (False, False), (True, True)])
def test_images_are_channels_last_where_it_is_asked_for(wanted, found):
    """On a CPU not by default. The features are the same to 1e-5: sums in another order."""
    images, seen = torch.randn(2, 3, 64, 64), []
    spec = ForeignSpec("resnet18", arguments='{"channels": [8, 8, 8, 8], "layers": [1, 1, 1, 1]}')
    backbone = ForeignBackbone(spec, 64, BackboneOptions(channels_last=wanted)).eval()
    backbone.conv1.register_forward_pre_hook(
        lambda module, given: seen.append(given[0].is_contiguous(memory_format=torch.channels_last))
    )
    other = ForeignBackbone(spec, 64, BackboneOptions(channels_last=not found)).eval()
    other.load_state_dict(backbone.state_dict())
    torch.testing.assert_close(backbone.features(images), other.features(images), rtol=1e-5, atol=1e-5)
    assert seen == [found]
