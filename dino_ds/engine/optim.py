"""Which parameters share a learning rate and a weight decay.

Source: facebookresearch/dino `get_params_groups`: biases and one-dimensional weights are not decayed; tokens and
position embeddings are. The prototypes have a group of their own: lr 0 is the only exact freeze at every ZeRO stage.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from dino_ds.models.network import Network
from dino_ds.schedules import ScheduleValues

DECAY, NO_DECAY, PROTOTYPES = "decay", "no_decay", "prototypes"
BACKBONE = "backbone_"
"""Before the first two, of the backbone's own groups in a network whose backbone is frozen for a while."""


def parameter_groups(network: Network) -> list[dict[str, Any]]:
    """AdamW's parameter groups, found later by their "name"; empty ones are left out, as DeepSpeed would drop them."""
    names = [DECAY, NO_DECAY, PROTOTYPES, BACKBONE + DECAY, BACKBONE + NO_DECAY]
    groups: dict[str, list[nn.Parameter]] = {name: [] for name in names}
    for name, parameter in network.named_parameters():
        own = network.freezes_backbone and name.startswith("backbone.")
        groups[(BACKBONE if own else "") + _group_of(name, parameter)].append(parameter)
    return [{"params": params, "name": name} for name, params in groups.items() if params]


def _group_of(name: str, parameter: nn.Parameter) -> str:
    if name.endswith("prototypes.weight"):
        return PROTOTYPES
    # A parameter that ZeRO 3 has partitioned is empty itself.
    shape = getattr(parameter, "ds_shape", parameter.shape)
    return NO_DECAY if name.endswith(".bias") or len(shape) == 1 else DECAY


def group_settings(knobs: ScheduleValues) -> dict[str, dict[str, float]]:
    """lr and weight_decay of each group in this step; a frozen group has none of either."""

    def settings(frozen: bool, weight_decay: float) -> dict[str, float]:
        moves = 0.0 if frozen else 1.0
        return {"lr": knobs.lr * moves, "weight_decay": weight_decay * moves}

    return {
        DECAY: settings(False, knobs.weight_decay),
        NO_DECAY: settings(False, 0.0),
        PROTOTYPES: settings(knobs.prototypes_frozen, knobs.weight_decay),
        BACKBONE + DECAY: settings(knobs.backbone_frozen, knobs.weight_decay),
        BACKBONE + NO_DECAY: settings(knobs.backbone_frozen, 0.0),
    }
