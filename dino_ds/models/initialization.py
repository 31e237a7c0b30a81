"""Initializes the weights of a network.

Weights are initialized module by module, so that no process needs to hold a whole network. A network built on a real
device is initialized by its constructors. A network on the meta device gets the same weights, bit for bit, from
`init_weights_in_pieces`, which uses random numbers in the order in which the constructors use them.
Source: facebookresearch/dino; what it leaves to torch's defaults has torch's defaults here too.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import nn

Placer = Callable[[nn.Module], None]
"""Called with a module once the parameters and buffers that the module owns itself have values; may move them."""


def init_weights(part: nn.Module) -> None:
    """Initialize the weights of a backbone or head, in place of torch's defaults, at the end of its constructor."""
    for module in part.modules():
        _init_module(module)


def take_drawn_weights(part: nn.Module, drawn: nn.Module, placer: Placer) -> None:
    """Give `part`, which is on the meta device, the weights of `drawn`, the same module initialized on the CPU."""
    for module, other in zip(part.modules(), drawn.modules(), strict=True):
        for name, parameter in other.named_parameters(recurse=False):
            setattr(module, name, nn.Parameter(parameter.detach()))
        for name, buffer in other.named_buffers(recurse=False):
            setattr(module, name, buffer)
        placer(module)


def init_weights_in_pieces(part: nn.Module, placer: Placer) -> None:
    """Initialize `part`, a backbone or head on the meta device, by drawing weights on the CPU, module by module."""
    for module in part.modules():
        if isinstance(module, nn.Linear):
            nn.Linear(
                module.in_features, module.out_features, module.bias is not None
            )  # for its random numbers: its weights are drawn below
        elif callable(reset := getattr(module, "reset_parameters", None)):
            _fill(module, reset, placer)
    for module in part.modules():
        if isinstance(module, nn.Linear) or hasattr(module, "init_tokens"):
            _fill(module, partial(_init_module, module), placer)
    left = [name for name, tensor in (*part.named_parameters(), *part.named_buffers()) if tensor.is_meta]
    assert not left, f"no reset_parameters() of its module gives a value to {left[0]}"


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
