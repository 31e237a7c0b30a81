"""The contract of a backbone: what training, teachers and exports ask of a network, and its initialization."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from types import MappingProxyType
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dino_ds.errors import ConfigError
from dino_ds.models.batch_norm import again
from dino_ds.models.specs.base import BackboneSpec

Placer = Callable[[nn.Module], None]
"""Called with a module once the parameters and buffers that the module owns itself have values; may move them."""
Crops = Mapping[str, Sequence[Tensor]]
"""Crops of a micro-batch by group, in the recipe's order: a list of (b, c, h, w), one for each crop of an image."""
CLS = "cls"
NOTHING: Mapping[str, Any] = MappingProxyType({})  # a mapping without entries, for defaults


class Backbone(nn.Module, ABC):
    """A network that turns crops into features; the engine, the teachers and the exports know nothing else about it.
    `spec` is what the rest of the program knows without building it. The constructor takes (spec, side of the native
    crop in pixels, `dino_ds.models.specs.base.BackboneOptions`). A module that owns buffers must set their values
    in `reset_parameters` (or torch's `reset_running_stats`), as networks are built on the meta device, unless the class
    has `drawn`. Buffers must be equal on all ranks: a buffer that a forward pass changes has to be reduced there
    (`dino_ds.models.batch_norm` does). `training_only`: parameters of no use for features: teacher.safetensors leaves
    them out, and weights that a run starts from need not have them."""

    training_only: ClassVar[tuple[str, ...]] = ()

    def __init__(self, spec: BackboneSpec) -> None:
        super().__init__()
        self.spec, self._checkpointed, self.is_compiled = spec, 0, False

    @abstractmethod
    def forward(
        self,
        crops: Crops,
        drop_keys: Tensor | None = None,
        patches: Sequence[str] = (),
        masks: Mapping[str, Tensor] = NOTHING,
        step_key: int | None = None,
    ) -> dict[str, Tensor]:
        """Crops by group -> features by name, all crops in one pass. "cls": (v * b, d), crop-major, groups in order;
        for each group named in `patches`, "patches/GROUP": (v_g * b, (h / stride) * (w / stride), d), row by row.
        drop_keys (b,) int64: one key per image, from which the stochastic depth of its crops follows; None turns it
        off (teachers, evaluation). masks: by group, which patches are hidden, (v_g * b, patches of a crop) bool.
        step_key: one key for random choices that all images of a step share, or None outside training."""

    @abstractmethod
    def segments(self) -> Sequence[nn.Module]:
        """The parts that are compiled and recomputed one by one, in order; `forward` calls them by `run_segment`."""

    def drawn(self) -> Backbone | None:
        """A copy on the CPU that its class has initialized, or None if it can be initialized module by module."""
        return None

    def check_trainable(self) -> None:
        """Raise ConfigError for a network that gives features but can't be trained."""

    def check_image(self, height: int, width: int) -> None:
        """Raise ConfigError if the network can't take images with these sides in pixels."""
        multiple = self.spec.side_multiple
        if height % multiple or width % multiple:
            why = f"images of {height} x {width} pixels"
            raise ConfigError(f"{why}: wanted are h and w that are multiples of the patch size {multiple}")

    def patch_grid(self, height: int, width: int) -> tuple[int, int]:
        """Rows and columns of the patch features of an image of these sides. Raises ConfigError if it has none."""
        return height // self.spec.stride, width // self.spec.stride

    def layers(self) -> dict[str, int]:
        """The layer number of every parameter, by name, for layer-wise decay of learning rates. It is i + 1 in segment
        i, one more than the last segment's after all segments, and elsewhere that of the segment before, or 0."""
        segments = {id(p): i + 1 for i, segment in enumerate(self.segments()) for p in segment.parameters()}
        layers, before = {}, 0
        for name, parameter in self.named_parameters():
            before = max(before, segments.get(id(parameter), 0))
            last = before == len(self.segments()) and id(parameter) not in segments
            layers[name] = segments.get(id(parameter), before + last)
        return layers

    def features(self, images: Tensor) -> Tensor:
        """Images (b, c, h, w) -> features of the whole image (b, d)."""
        return self({"images": [images]})[CLS]

    def compile_segments(self, mode: str = "default", backend: str = "inductor") -> None:
        """torch.compile every segment. mode: torch's, but that "max-autotune" is without CUDA graphs here."""
        self.is_compiled = True
        torch_mode = {"default": None, "max-autotune": "max-autotune-no-cudagraphs"}.get(mode, mode)
        for segment in self.segments():
            segment.compile(dynamic=False, backend=backend, mode=torch_mode)

    def checkpoint_segments(self, count: int | None) -> None:
        """Recompute the first `count` segments, or all, in the backward pass."""
        self._checkpointed = len(self.segments()) if count is None else count

    def run_segment(self, i: int, segment: Callable[..., Any], *inputs: Any) -> Any:
        """Call `segment`, the i-th one or a function that calls it, with its activation checkpointing."""
        if i >= self._checkpointed or not torch.is_grad_enabled():
            return segment(*inputs)
        # Non-reentrant: the reentrant form reduces a gradient twice when a block sees several crops (ZeRO 2 and 3).
        # Nothing inside draws random numbers, so there is no RNG state to keep.
        how: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
        return checkpoint(segment, *inputs, **how, context_fn=lambda: (nullcontext(), again()))


def patches_of(group: str) -> str:
    return f"patches/{group}"


def masked_of(group: str) -> str:
    return f"masked/{group}"


def cls_of(group: str) -> str:
    return f"cls/{group}"


def resized_patches(patches: Tensor, count: int) -> Tensor:
    """Patches (images, n, d) of square images -> (images, count, d): bicubic `F.interpolate` without antialias. FP32 if
    they are resized, otherwise unchanged."""
    old, new = math.isqrt(patches.shape[1]), math.isqrt(count)
    assert old**2 == patches.shape[1] and new**2 == count, "images are square"
    if old == new:
        return patches
    maps = patches.float().unflatten(1, (old, old)).permute(0, 3, 1, 2)
    return F.interpolate(maps, size=(new, new), mode="bicubic", align_corners=False).flatten(2).mT


def is_cast(module: nn.Module) -> bool:
    """Whether autocast casts all weights that a module owns, so that results with a low-precision copy are the same."""
    # timm's convolutions that standardize their weights do so in FP32. Code is compared: a segment's forward is a copy.
    code = getattr(type(module).forward, "__code__", None)
    plain = code in (nn.Linear.forward.__code__, nn.Conv2d.forward.__code__)
    return plain or (isinstance(module, (nn.Linear, nn.Conv2d)) and type(module).__module__.startswith("dino_ds."))


def init_weights(part: nn.Module) -> None:
    """Initialize the weights of a backbone or head, in place of torch's defaults, at the end of its constructor."""
    for module in part.modules():
        _init_module(module)


def init_weights_in_pieces(part: nn.Module, placer: Placer) -> None:
    """Initialize `part`, a backbone or head on the meta device, by drawing weights on the CPU, module by module: no
    process needs to hold a whole network. They are bit for bit those of a constructor on a real device. Source:
    facebookresearch/dino; what it leaves to torch's defaults has torch's defaults here too."""
    for module in part.modules():
        if isinstance(module, nn.Linear):
            # Only to draw as many random numbers as a constructor: the weights are drawn below.
            nn.Linear(module.in_features, module.out_features, module.bias is not None)
        elif callable(reset := getattr(module, "reset_parameters", None)):
            _fill(module, reset, placer)
    for module in part.modules():
        if isinstance(module, nn.Linear) or hasattr(module, "init_tokens"):
            _fill(module, partial(_init_module, module), placer)
    left = [name for name, tensor in (*part.named_parameters(), *part.named_buffers()) if tensor.is_meta]
    assert not left, f"no reset_parameters() of its module gives a value to {left[0]}"


def take_drawn_weights(part: nn.Module, drawn: nn.Module, placer: Placer) -> None:
    """Give `part`, which is on the meta device, the weights of `drawn`, the same module initialized on the CPU."""
    for module, other in zip(part.modules(), drawn.modules(), strict=True):
        for name, parameter in other.named_parameters(recurse=False):
            setattr(module, name, nn.Parameter(parameter.detach()))
        for name, buffer in other.named_buffers(recurse=False):
            setattr(module, name, buffer)
        placer(module)


def _fill(module: nn.Module, draw_own: Callable[[], None], placer: Placer) -> None:
    for name, parameter in list(module.named_parameters(recurse=False)):
        setattr(module, name, nn.Parameter(torch.empty_like(parameter, device="cpu")))
    for name, buffer in list(module.named_buffers(recurse=False)):
        setattr(module, name, torch.empty_like(buffer, device="cpu"))
    draw_own()
    placer(module)


def _init_module(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        nn.init.trunc_normal_(module.weight, std=0.02)
        if module.bias is not None:
            nn.init.zeros_(module.bias)
    elif callable(init_tokens := getattr(module, "init_tokens", None)):
        init_tokens()
