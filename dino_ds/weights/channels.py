"""Weights for images of other channels than those they were trained on: the first convolutions are adapted."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from dino_ds.errors import CheckpointError, ConfigError
from dino_ds.models.build import build_backbone, tensor_shapes
from dino_ds.models.specs.base import BackboneSpec
from dino_ds.weights.tensors import Weights

_PATCHES = "patch_embed.proj.weight"
_SAME = 1e-4
"""Largest difference of features that are taken for equal, as a part of the largest feature: far above rounding."""


def channels_of(weights: Weights) -> int:
    """The number of channels of the images that `weights` are for."""
    return weights.backbone[_PATCHES].shape[1] if weights.spec is None else weights.spec.in_chans


def adapt_channels(weights: Weights, channels: int) -> tuple[Weights, str]:
    """`weights` of a backbone for images of `channels` channels, and a text on how they were made.

    A gray image, which is equal in all channels, keeps its features; the text says where that is not certain. Raises
    CheckpointError where something else than a convolution depends on the number of channels.
    """
    before, spec = channels_of(weights), weights.spec
    if before < 1:
        raise CheckpointError(f"its {_PATCHES} is for images without channels")
    names = [_PATCHES] if spec is None else first_convolutions(spec, channels, weights.image_size)
    own = {name: tensor for name in names if (tensor := weights.backbone.get(name)) is not None}
    own = {name: tensor for name, tensor in own.items() if tensor.ndim == 4 and tensor.shape[1] == before}
    backbone = weights.backbone | {name: adapt_convolution(tensor, channels) for name, tensor in own.items()}
    adapted = replace(weights, backbone=backbone, spec=None if spec is None else _with_channels(spec, channels))
    return adapted, _said(names, before, channels, spec is None or _keeps_gray(weights, adapted))


def _said(names: list[str], before: int, channels: int, is_same: bool) -> str:
    how = f"they repeat the {before} in order, each divided by the number of its copies"
    if channels < before:
        how = f"each is the sum of the {before}, divided by {channels}" if channels > 1 else f"the sum of the {before}"
    how = f"its channels are adapted from {before} to {channels} ({', '.join(names)}): {how}"
    if not names:
        how = f"it was made for {before} channels, and none of its tensors depends on their number"
    return (
        f"{how}; {'gray images keep their features' if is_same else 'gray images may have other features than before'}"
    )


def adapt_convolution(weight: Tensor, channels: int) -> Tensor:
    """A convolution's weight (outputs, c, h, w) for images of `channels` in the place of c, as FP32.

    More channels repeat the c in order, each divided by the number of its copies; fewer are all the sum of the c,
    divided by their number. The sum over the channels, by which a gray image is multiplied, stays. For one channel and
    multiples of c this is timm's `adapt_input_conv`; for others that divides all by channels / c and changes the sum.
    """
    weight, before = weight.float(), weight.shape[1]
    if channels < before:
        return weight.sum(1, keepdim=True).repeat(1, channels, 1, 1) / channels
    copied = torch.arange(channels) % before
    return weight[:, copied] / copied.bincount()[copied].view(1, -1, 1, 1)


def first_convolutions(spec: BackboneSpec, channels: int, image_size: int) -> list[str]:
    """Names of the weights whose shape depends on the number of channels of the images: of convolutions of these.

    timm's `first_conv` names them for its own models; this finds them for a user's class too.
    """
    try:
        before, after = (tensor_shapes(one, image_size) for one in (spec, _with_channels(spec, channels)))
    except ConfigError as error:
        raise CheckpointError(str(error)) from None
    names = sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))
    for name in names:
        old, new = before.get(name, ()), after.get(name, ())
        is_convolution = len(old) == 4 and old[1] == spec.in_chans and new == (old[0], channels, *old[2:])
        if not is_convolution:
            raise CheckpointError(
                f"it is for images of {spec.in_chans} channels, this run's have {channels} (model.in_chans), and its "
                f"{name} {list(old)} can't be adapted to {list(new)}: start without it, or from weights for as many"
            )
    return names


def _with_channels(spec: Any, channels: int) -> Any:
    return replace(spec, in_chans=channels)


@torch.no_grad()
def _keeps_gray(before: Weights, after: Weights) -> bool:
    """Whether a gray image has the same features as before, by computing them: a user's class may do anything with its
    weights, and some of timm's standardise them. False also where the network can't be filled or run."""
    found = []
    for weights in (before, after):
        assert weights.spec is not None
        side = weights.image_size
        image = torch.rand(1, 1, side, side, generator=torch.Generator().manual_seed(0))
        try:
            backbone = build_backbone(weights.spec, side).eval()
            backbone.load_state_dict(weights.backbone)
            found.append(backbone.features(image.expand(-1, weights.spec.in_chans, -1, -1)))
        except Exception:  # whatever a foreign network raises; tensors that are not its own are refused by name later
            return False
    return bool((found[0] - found[1]).abs().max() <= _SAME * found[0].abs().max())
