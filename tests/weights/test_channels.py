"""Weights for images of other channels than a run's: adapted so that gray images keep their features, or refused."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dino_ds.cli.main as cli
from dino_ds.basics.own_code import allow_code
from dino_ds.config.ds_schema import PerformanceOptions
from dino_ds.config.loading import load_recipe
from dino_ds.config.recipe import Recipe
from dino_ds.errors import CheckpointError
from dino_ds.method.build import build_network
from dino_ds.models.foreign import build_backbone
from dino_ds.models.specs.backbones import VITS
from dino_ds.models.specs.base import BackboneSpec
from dino_ds.models.specs.foreign import ForeignSpec
from dino_ds.weights.export import FORMATS
from dino_ds.weights.load import Backbone
from tests.run.harness import TINY
from tests.sample import sampled
from tests.weights.originals import assert_same, images, randomised

NUMBERS = {"patch_size": 8, "width": 64, "depth": 2, "heads": 2}
PLAIN = replace(VITS["vit_small_patch16_224"], **NUMBERS)
DINOV2 = replace(VITS["vit_small_patch14_dinov2"], **NUMBERS)
ROPE = replace(VITS["vit_small_patch16_dinov3"], **NUMBERS)
RESNET = ForeignSpec("resnet18", 3, '{"channels": [8, 8, 16, 16], "layers": [1, 1, 1, 1]}')
OWN = ForeignSpec("tests.weights.own:Own", 3, '{"width": 12}')
allow_code([OWN.name, f"{__name__}:Branches", f"{__name__}:Normed"])


class Branches(nn.Module):
    """Two convolutions of the images."""

    def __init__(self, in_chans: int) -> None:
        super().__init__()
        self.fine, self.coarse = nn.Conv2d(in_chans, 8, 4, 4), nn.Conv2d(in_chans, 8, 8, 4, padding=2)

    def forward(self, images: Tensor) -> Tensor:
        out: Tensor = self.fine(images) + self.coarse(images)
        return out


class Normed(nn.Module):
    """Begins with a norm of the channels."""

    def __init__(self, in_chans: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(in_chans)
        self.conv = nn.Conv2d(in_chans, 8, 4, 4)

    def forward(self, images: Tensor) -> Tensor:
        out: Tensor = self.conv(self.norm(images))
        return out


BRANCHES, NORMED = (ForeignSpec(f"{__name__}:{name}") for name in ("Branches", "Normed"))


@dataclass(frozen=True)
class Start:
    spec: BackboneSpec
    name: str
    form: str

    def write(self, folder, channels: int = 3) -> tuple[Any, str]:
        network = randomised(build_backbone(replace(self.spec, in_chans=channels), 32))
        place = folder / {"state": "x.pth", "timm": "x-timm"}.get(self.form, f"x.{self.form}")
        if self.form == "state":
            torch.save(network.state_dict(), place)
        else:
            about = {"mean": [0.4] * channels, "std": [0.2] * channels}
            FORMATS[self.form](Backbone(network, 32, "here", about), place)
        return network, str(place)


STARTS = {
    "a ViT of ours": Start(PLAIN, "vit_small_patch16_224", "safetensors"),
    "DINO's file": Start(PLAIN, "vit_small_patch16_224", "state"),
    "DINOv2's file": Start(DINOV2, "vit_small_patch14_dinov2", "state"),
    "rotary positions, timm's folder": Start(ROPE, "vit_small_patch16_dinov3", "timm"),
    "a ResNet": Start(RESNET, "resnet18", "timm"),
    "two first convolutions": Start(BRANCHES, BRANCHES.name, "safetensors"),
    "a class of one's own": Start(OWN, OWN.name, "safetensors"),
    "its tensors alone": Start(OWN, OWN.name, "state"),
}


def _recipe(start: Start, place: str, channels: int, **changes: str) -> Recipe:
    base = {key: value for key, value in TINY.items() if not key.startswith("model.")}
    model = {"backbone": start.name, "in_chans": str(channels), "init_from": place, "drop_path": "0"}
    model |= {"arguments": start.spec.arguments} if isinstance(start.spec, ForeignSpec) else NUMBERS
    given = {f"model.{key}": str(value) for key, value in model.items()}
    statistics = {f"data.{key}": ",".join([value] * channels) for key, value in (("mean", "0.4"), ("std", "0.2"))}
    return load_recipe(None, base | given | statistics | changes)


def _gray(channels: int) -> Tensor:
    return images(32, 32, channels=1).expand(-1, channels, -1, -1)


@pytest.mark.parametrize(("kind", "channels"), sampled(itertools.product(STARTS, [1, 2, 4, 7, 12])))
def test_gray_images_keep_their_features(tmp_path, kind, channels):
    """One value in all channels gives what it gave in three, within 1e-5; the log says how."""
    theirs, place = STARTS[kind].write(tmp_path)
    network = build_network(_recipe(STARTS[kind], place, channels), PerformanceOptions())
    with torch.no_grad():
        found, wanted = (one.eval().features(_gray(n)) for one, n in ((network.backbone, channels), (theirs, 3)))
    assert_same(found, wanted)
    said = network.started_from
    assert f"; its channels are adapted from 3 to {channels} (" in said and "; gray images keep their features" in said
    how = {1: ": the sum of the 3;", 2: ": each is the sum of the 3, divided by 2;"}
    assert how.get(channels, ": they repeat the 3 in order, each divided by the number of its copies;") in said


@pytest.mark.parametrize(("before", "after"), [(1, 3), (1, 5), (6, 3), (6, 4), (4, 6), (3, 3)])
def test_weights_for_any_channels_start_a_run_on_any(tmp_path, before, after):
    """The same rule; weights for as many are taken bit for bit, and nothing is said."""
    start = STARTS["a ViT of ours"]
    theirs, place = start.write(tmp_path, before)
    network = build_network(_recipe(start, place, after), PerformanceOptions())
    assert_same(network.backbone.eval().features(_gray(after)), theirs.eval().features(_gray(before)))
    assert ("adapted" in network.started_from) == (before != after)
    if before == after:
        assert torch.equal(network.backbone.patch_embed.proj.weight, theirs.patch_embed.proj.weight)


def test_what_is_no_convolution_of_the_images_is_refused(tmp_path):
    start = Start(NORMED, NORMED.name, "safetensors")
    _, place = start.write(tmp_path)
    with pytest.raises(CheckpointError, match=r"of 3 channels, .* have 4 .*norm.bias \[3\] can't be ad") as e:
        build_network(_recipe(start, place, 4), PerformanceOptions())
    assert "\n" not in str(e.value)


@pytest.mark.parametrize("kind", ["a ViT of ours", "a ResNet"])
@pytest.mark.parametrize(("before", "given", "wanted"), [(3, "4", 4), (6, None, 6), (6, "3", 3)])
def test_from_source_keeps_channels_that_are_given(tmp_path, kind, before, given, wanted):
    """All other numbers are those of the weights, and the channels where the recipe does not name them."""
    _, place = STARTS[kind].write(tmp_path, before)
    words = ["train", f"--data.root={tmp_path}", f"--run_dir={tmp_path / 'run'}", "--model.backbone=from_source"]
    words += [f"--model.init_from={place}", "--ds_config=ds_configs/zero0_fp32.json", "--crops.local_size=96"]
    words += [f"--model.in_chans={given}"] if given else []
    spec = cli.prepare(*cli.parse(words))[1]["recipe"].model.spec()
    assert spec.in_chans == wanted and spec == replace(STARTS[kind].spec, in_chans=wanted)
