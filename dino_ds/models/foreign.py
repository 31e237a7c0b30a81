"""A timm network, or the user's own, as a backbone whose parameters keep their names; and the class of any spec."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from dino_ds.errors import ConfigError, one_line
from dino_ds.models import batch_norm, drop_path
from dino_ds.models.base import CLS, NOTHING, Backbone, Crops, patches_of
from dino_ds.models.specs.backbones import ViTSpec
from dino_ds.models.specs.base import BackboneOptions, BackboneSpec
from dino_ds.models.specs.foreign import ForeignSpec, create, facts_of, features_of
from dino_ds.models.vit import VisionTransformer


class ForeignBackbone(Backbone):
    """A backbone whose features a foreign network computes by its own code, in one pass per crop size. The network's
    parameters, buffers and modules are registered in this module too, so that they keep timm's names. Stochastic depth
    is drawn per image, as in our own networks."""

    def __init__(self, spec: ForeignSpec, image_size: int, options: BackboneOptions) -> None:
        from timm.layers import DropPath  # takes seconds, which runs of our own ViTs are spared

        super().__init__(spec)
        self._foreign, self.options, self.image_size = spec, options, image_size
        self._facts = facts_of(spec)
        network = create(spec, image_size, options.drop_path)
        batch_norm.use_own_batch_norm(network, options.sync_batch_norm)
        for name, module in list(network.named_modules()):
            if isinstance(module, DropPath):
                network.set_submodule(name, KeyedDropPath(float(module.drop_prob or 0.0), module.scale_by_keep))
        # The same dictionaries, not copies: moving the tensors of one module moves those of the other.
        self._parameters, self._buffers, self._modules = network._parameters, network._buffers, network._modules
        self._network = (network,)  # in a tuple: not registered as a child
        self._known_shapes: dict[tuple[int, int], tuple[tuple[int, ...], tuple[int, ...] | None]] = {}
        self._segments = [network.get_submodule(name) for name in self._facts.segments]
        self._drops = [module for module in self.modules() if isinstance(module, KeyedDropPath)]
        self._caching: list[Any] = [module for module in self.modules() if hasattr(module, "attention_bias_cache")]
        for i, segment in enumerate(self._segments):
            _make_segment(segment, i, self)

    def train(self, mode: bool = True) -> ForeignBackbone:
        self._network[0].training = mode  # the children are this module's own
        super().train(mode)
        return self

    def segments(self) -> Sequence[nn.Module]:
        return self._segments

    def drawn(self) -> Backbone:
        with torch.device("cpu"):
            return ForeignBackbone(self._foreign, self.image_size, self.options)

    def patch_grid(self, height: int, width: int) -> tuple[int, int]:
        patches = self._shapes(height, width)[1] if self._facts.patch_width else None
        if patches is None:
            raise ConfigError(f"{self._foreign.name} gives features of whole images only, none of patches")
        return patches[1], patches[2]

    def check_trainable(self) -> None:
        if self._facts.untrainable:
            raise ConfigError(f"model.backbone {self._foreign.name} can't be trained: {self._facts.untrainable}")

    def check_image(self, height: int, width: int) -> None:
        try:
            self._shapes(height, width)
        except Exception as error:  # whatever a foreign network raises
            why = f"{self._foreign.name} can't take images of {height} x {width} pixels: {one_line(error).rstrip('.')}"
            raise ConfigError(why) from None

    def _shapes(self, height: int, width: int) -> tuple[tuple[int, ...], tuple[int, ...] | None]:
        """Shapes of the features of two images, and of their patch features, or None without patch features."""
        if (height, width) not in self._known_shapes:
            built = self._network[0]
            with torch.device("meta"), torch.no_grad():
                network = built if next(built.parameters()).is_meta else create(self._foreign, self.image_size)
                mode = network.training
                image, patches = features_of(network.eval(), torch.zeros(2, self._foreign.in_chans, height, width))
                network.train(mode)
            of_patches = None if patches is None else tuple(patches.shape)
            self._known_shapes[height, width] = tuple(image.shape), of_patches
        return self._known_shapes[height, width]

    def forward(
        self,
        crops: Crops,
        drop_keys: Tensor | None = None,
        patches: Sequence[str] = (),
        masks: Mapping[str, Tensor] = NOTHING,
        step_key: int | None = None,
    ) -> dict[str, Tensor]:
        """See `Backbone.forward`; no patch can be hidden from a foreign network."""
        assert not masks
        views = sum(len(group) for group in crops.values())
        draws, before = None, 0
        if drop_keys is not None and self._drops:
            draws = drop_path.drop_path_draws(drop_keys, views, -(-len(self._drops) // 2)).flatten(0, 1)
        cls, patch_features = list[Tensor](), dict[str, Tensor]()
        for _, run in itertools.groupby(crops, key=lambda name: crops[name][0].shape[-2:]):
            names = [*run]
            images = torch.cat([crop for name in names for crop in crops[name]])
            batch_draws = None if draws is None else draws[:, before : before + len(images)]
            before += len(images)
            for i, drop in enumerate(self._drops):
                drop.draws = None if batch_draws is None else batch_draws[i]
            for module in self._caching:  # LeViT and its kin: in evaluation they would reuse the first pass's biases
                module.attention_bias_cache = {}
            if images.is_meta or not torch.is_autocast_enabled(images.device.type):
                images = images.to(next(self.parameters()).dtype)
            if images.is_cuda if self.options.channels_last is None else self.options.channels_last:
                images = images.contiguous(memory_format=torch.channels_last)
            image, maps = features_of(self._network[0], images)
            cls.append(image)
            if maps is not None:
                parts = maps.split([sum(len(crop) for crop in crops[name]) for name in names])
                named = [pair for pair in zip(names, parts, strict=True) if pair[0] in patches]
                patch_features |= {patches_of(name): part.flatten(1, 2) for name, part in named}
        return {CLS: torch.cat(cls), **patch_features}


class KeyedDropPath(nn.Module):
    """Drops the residual branch of images whose draw in `draws` (b,) is below the rate; of none if `draws` is None."""

    def __init__(self, rate: float, scaled: bool) -> None:
        super().__init__()
        self.rate, self.scaled = rate, scaled
        self.draws: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.draws is None or not self.training or not self.rate:
            return x
        kept = (self.draws >= self.rate).to(x.dtype).view(-1, *[1] * (x.ndim - 1))
        return x * (kept / (1 - self.rate) if self.scaled else kept)


class _Segment(nn.Module):
    """Base class that `_make_segment` gives to a module: calls then go through the backbone's `run_segment`."""

    def __call__(self, *inputs: Any, **keywords: Any) -> Any:
        drops = self.__dict__["_keyed_drops"]
        run = partial(_run, super().__call__, drops, [drop.draws for drop in drops], keywords)
        number, backbone = self.__dict__["_place_in_backbone"]
        # Lists are copied: DenseNet appends to a list after a segment got it.
        copied = [list(argument) if isinstance(argument, list) else argument for argument in inputs]
        return backbone.run_segment(number, run, *copied)


def _run(
    call: Callable[..., Any], drops: list[KeyedDropPath], draws: list[Tensor | None], keywords: Any, *inputs: Any
) -> Any:
    """`call(*inputs)` with the `draws` of its first pass, also when activation checkpointing repeats it later."""
    for drop, draw in zip(drops, draws, strict=True):
        drop.draws = draw
    return call(*inputs, **keywords)


def _make_segment(module: nn.Module, number: int, backbone: Backbone) -> None:
    forward = type(module).forward
    members: dict[str, Any] = {"__module__": type(module).__module__}
    if isinstance(forward, FunctionType):
        # torch.compile limits the variants of a code object. Blocks of a class share one but differ in shapes: copy it.
        context = forward.__globals__, None, forward.__defaults__, forward.__closure__
        members["forward"] = copied = FunctionType(forward.__code__.replace(), *context)
        copied.__kwdefaults__ = forward.__kwdefaults__
    module.__class__ = type(type(module).__name__, (_Segment, type(module)), members)
    module.__dict__["_place_in_backbone"] = (number, backbone)  # in a tuple: not registered as a child
    module.__dict__["_keyed_drops"] = [part for part in module.modules() if isinstance(part, KeyedDropPath)]


BACKBONE_CLASSES: dict[type[BackboneSpec], Callable[..., Backbone]] = {
    ViTSpec: VisionTransformer,
    ForeignSpec: ForeignBackbone,
}
"""The class of the backbones that each kind of spec describes: it takes spec, side of the native crop and options."""


def build_backbone(spec: BackboneSpec, image_size: int, options: BackboneOptions | None = None) -> Backbone:
    """Build a backbone, initialized by its class; `image_size`: side of its native crop in pixels."""
    return BACKBONE_CLASSES[type(spec)](spec, image_size, options or BackboneOptions())


def tensor_shapes(
    spec: BackboneSpec, image_size: int, options: BackboneOptions | None = None
) -> dict[str, tuple[int, ...]]:
    """Shapes of a backbone's tensors by name, without memory for them. Raises ConfigError."""
    with torch.device("meta"):
        state = build_backbone(spec, image_size, options).state_dict()
    return {name: tuple(tensor.shape) for name, tensor in state.items()}
