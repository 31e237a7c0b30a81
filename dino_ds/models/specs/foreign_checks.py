"""Checks of a foreign network before it is trained; on the meta device, where it takes no memory."""

from __future__ import annotations

import pickle
import random
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from dino_ds.errors import one_line

if TYPE_CHECKING:
    from torch import Tensor, nn


def has_batch_norm(network: nn.Module) -> bool:
    """Whether the network has BatchNorm of any project (a subclass of torch's)."""
    from torch import nn

    return any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in network.modules())


def has_lazy_layers(network: nn.Module) -> bool:
    """Whether the network has tensors that have no shapes before the first image."""
    from torch.nn.parameter import is_lazy

    return any(is_lazy(tensor) for tensor in (*network.parameters(), *network.buffers()))


def why_untrainable(network: nn.Module, features: Callable[[], Tensor]) -> str:
    """Why `network`, on the meta device, can't be trained, or "". `features` computes its features (b, d).

    Under ZeRO a parameter without a gradient keeps an old gradient or is waited for forever; random numbers that are
    not a function of the image differ in the recomputation of a segment and after a resume.
    """
    import torch
    from timm.layers import DropPath
    from torch.utils._python_dispatch import TorchDispatchMode

    if unusable := _why_unusable(network):
        return unusable
    drawn: list[str] = []
    before = _unsaved(network)

    class Draws(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if torch.Tag.nondeterministic_seeded in function.tags:
                drawn.append(str(function))
            return function(*args, **(kwargs or {}))

    network.train()
    for module in network.modules():
        if isinstance(module, DropPath):  # ours takes its place
            module.eval()
    states = random.getstate(), pickle.dumps(np.random.get_state())
    try:
        with torch.enable_grad(), Draws():
            image = features()
            if image.requires_grad:
                image.sum().backward()
    except Exception as error:  # whatever a foreign network raises
        return f"in training it raises {one_line(error)}"
    others = random.getstate(), pickle.dumps(np.random.get_state())
    drawn += [name for name, old, new in zip(("random", "numpy.random"), states, others, strict=True) if old != new]
    if drawn:
        advice = "which can't be drawn again: switch dropout off (drop_rate, attn_drop_rate of timm's)"
        return f"it draws random numbers of its own ({drawn[0]}), {advice}"
    if moved := [name for name, version in _unsaved(network).items() if before.get(name) != version]:
        return f"its buffer {moved[0]} changes with each pass, and no checkpoint holds it: make it persistent"
    idle = [name for name, parameter in network.named_parameters() if parameter.grad is None]
    if idle:
        more = f" and {len(idle) - 1} more" if len(idle) > 1 else ""
        return f"its features give no gradient to its parameter {idle[0]}{more}: remove what is not used"
    names = {id(parameter): name for name, parameter in network.named_parameters()}
    for name, parameter in network.named_parameters(remove_duplicate=False):
        if names[id(parameter)] != name:
            return f"its parameters {names[id(parameter)]} and {name} are one tensor"
    return ""


def _unsaved(network: nn.Module) -> dict[str, tuple[int, int]]:
    """What changes with a write to each buffer that the state of a network does not hold, by name."""
    held = network.state_dict().keys()
    return {name: (id(b), b._version) for name, b in network.named_buffers() if name not in held}


def _why_unusable(network: nn.Module) -> str:
    """Why the engine can't train a tensor of the network, or ""."""
    import torch

    for name, module in network.named_modules():
        plain = next((key for key, value in vars(module).items() if isinstance(value, torch.Tensor)), None)
        if plain is not None:
            path = f"{name}.{plain}".removeprefix(".")
            return f"its {path} is a plain tensor, which moves to no device: make it a parameter or a buffer"
    for name, parameter in network.named_parameters():
        if parameter.dtype != torch.float32:
            return f"its parameter {name} is {str(parameter.dtype).removeprefix('torch.')}, wanted is float32"
    return "" if any(True for _ in network.parameters()) else "it has no parameters"
