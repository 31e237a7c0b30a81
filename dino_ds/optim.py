"""Which parameters share a learning rate and a weight decay.

Source: facebookresearch/dino `get_params_groups`: biases and one-dimensional weights are not decayed; tokens and
position embeddings are. The prototypes have a group of their own: lr 0 is the only exact freeze at every ZeRO stage.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from dino_ds.schedules import Knobs

DECAY, NO_DECAY, PROTOTYPES = "decay", "no_decay", "prototypes"


def parameter_groups(network: nn.Module) -> list[dict[str, Any]]:
    """AdamW's parameter groups, found later by their "name"; empty ones are left out, as DeepSpeed would drop them."""
    groups: dict[str, list[nn.Parameter]] = {DECAY: [], NO_DECAY: [], PROTOTYPES: []}
    for name, parameter in network.named_parameters():
        groups[_group_of(name, parameter)].append(parameter)
    return [{"params": params, "name": name} for name, params in groups.items() if params]


def _group_of(name: str, parameter: nn.Parameter) -> str:
    if name.endswith("prototypes.weight"):
        return PROTOTYPES
    # A parameter that ZeRO 3 has partitioned is empty itself.
    shape = getattr(parameter, "ds_shape", parameter.shape)
    return NO_DECAY if name.endswith(".bias") or len(shape) == 1 else DECAY


def group_settings(knobs: Knobs) -> dict[str, dict[str, float]]:
    """lr and weight_decay of each group in this step."""
    frozen = 0.0 if knobs.prototypes_frozen else 1.0
    return {
        DECAY: {"lr": knobs.lr, "weight_decay": knobs.weight_decay},
        NO_DECAY: {"lr": knobs.lr, "weight_decay": 0.0},
        PROTOTYPES: {"lr": knobs.lr * frozen, "weight_decay": knobs.weight_decay * frozen},
    }
