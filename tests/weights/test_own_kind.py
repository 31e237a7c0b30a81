"""A kind of backbone of ours is its spec, its module and a name: weights of it go out and come in by these alone."""

from __future__ import annotations

import dataclasses
from unittest import mock

import pytest
import torch

from dino_ds.errors import CheckpointError, ConfigError
from dino_ds.models.build import build_backbone
from dino_ds.models.specs.backbones import BACKBONES
from dino_ds.weights.export import FORMATS
from dino_ds.weights.load import Backbone, load
from tests.run.toys import ToySpec
from tests.weights.originals import images, randomised

SPEC = ToySpec(width=12)


@pytest.fixture(autouse=True)
def named():
    with mock.patch.dict(BACKBONES, {"toy": ToySpec()}):
        yield


@pytest.fixture
def model():
    return Backbone(randomised(build_backbone(SPEC, 32)), 32, "a test", {"backbone": "toy"})


def test_our_own_file_gives_it_back(tmp_path, model):
    FORMATS["safetensors"][0](model, tmp_path / "a.safetensors")
    again = load(tmp_path / "a.safetensors")
    assert (again.network.spec, again.image_size) == (SPEC, 32)
    assert torch.equal(again.features(images()), model.features(images())) and again.has_patches
    assert torch.equal(again.patch_tokens(images()), model.patch_tokens(images()))


def test_a_file_of_other_numbers_is_refused(tmp_path, model):
    other = Backbone(model.network, 32, "a test", {"backbone": "toy"})
    other.about["architecture"] = dataclasses.asdict(ToySpec(width=16))
    FORMATS["safetensors"][0](other, tmp_path / "a.safetensors")
    with pytest.raises(CheckpointError, match="the weights are of another architecture"):
        load(tmp_path / "a.safetensors")


def test_formats_of_others_have_no_place_for_it(tmp_path, model):
    with pytest.raises(ConfigError, match="ToySpec"):
        FORMATS["timm"][0](model, tmp_path / "out")
    assert not list(tmp_path.iterdir())
