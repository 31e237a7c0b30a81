"""The optimizer, and which parameters share a learning rate and a weight decay.

Source: facebookresearch/dino `get_params_groups`: biases and one-dimensional weights are not decayed; tokens and
position embeddings are. The prototypes have a group of their own: lr 0 is the only exact freeze at every ZeRO stage.
Layer-wise learning rates: facebookresearch/dinov2 `get_params_groups_with_decay`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from dino_ds.engine.lars import Lars
from dino_ds.engine.muon import Muon, matrices_of
from dino_ds.engine.schedules import ScheduleValues
from dino_ds.errors import ConfigError
from dino_ds.models.network import Network

DECAY, NO_DECAY, PROTOTYPES = "decay", "no_decay", "prototypes"
BACKBONE = "backbone_"
"""Prefix of DECAY and NO_DECAY for the groups of a backbone that is frozen for a while."""
NAMES = (DECAY, NO_DECAY, PROTOTYPES, BACKBONE + DECAY, BACKBONE + NO_DECAY)
WHOLE = "network"
PATCH_EMBED = "patch_embed"
"""The module of a backbone whose learning rate `patch_embed_lr` multiplies."""


@dataclass(frozen=True)
class OptimizerOptions:
    """Options of the recipe's section `optimizer`. By default one learning rate, clipping by one global norm (DINO).

    kind: adamw, with `betas` and `eps`; sgd, with `momentum`; lars, with `momentum` and `trust`; or muon, with
    `momentum` and `scale` for weight matrices, and adamw with its options for the rest.
    """

    layer_decay: float = 1.0
    patch_embed_lr: float = 1.0
    clip_by: str = WHOLE
    kind: str = "adamw"
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    momentum: float = 0.9
    trust: float = 0.001
    scale: float = 1.0


ONE_RATE = OptimizerOptions()


def build_optimizer(network: Network, options: OptimizerOptions, fused: bool = True) -> torch.optim.Optimizer:
    """The optimizer of the trained parameters, at learning rate 0; `fused`: AdamW and SGD in one kernel.

    Raises ConfigError where Muon has no matrix to orthogonalize.
    """
    groups = parameter_groups(network, options)
    if options.kind == "lars":
        return Lars(groups, options.momentum, options.trust)
    if options.kind == "sgd":
        return torch.optim.SGD(groups, lr=0.0, momentum=options.momentum, fused=fused, foreach=False)
    adamw: dict[str, Any] = {"betas": options.betas, "eps": options.eps, "fused": fused, "foreach": False}
    if options.kind == "muon":
        named = dict(network.named_parameters())
        blocks = {named[name]: count for name, count in matrices_of(network).items()}
        return Muon(groups, blocks, options.momentum, options.scale, **adamw)
    return torch.optim.AdamW(groups, lr=0.0, **adamw)


def parameter_groups(network: Network, options: OptimizerOptions = ONE_RATE) -> list[dict[str, Any]]:
    """The optimizer's parameter groups, without frozen parameters and without empty groups, which DeepSpeed would drop.

    Keys of a group: "name", by which `group_settings` gives its lr and weight decay; "lr_multiplier", a factor on that
    lr; "part", the part of the network with which its gradient is clipped; "kind", the optimizer that updates it.
    Groups of the same name differ in another of these keys. Raises ConfigError for a learning rate of a patch embedding
    that the network does not have, and where Muon has no matrix to orthogonalize.
    """
    groups: dict[tuple[str, str, float, str], list[nn.Parameter]] = {}
    matrices = matrices_of(network) if options.kind == "muon" else {}
    multipliers = _backbone_multipliers(network, options)
    for name, parameter in filter(lambda pair: pair[1].requires_grad, network.named_parameters()):
        freezes = network.freezes_backbone and name.startswith("backbone.")
        part = WHOLE if options.clip_by == WHOLE else name.partition(".")[0]
        kind = "adamw" if options.kind == "muon" and name not in matrices else options.kind
        key = part, (BACKBONE if freezes else "") + _group_of(name, parameter), multipliers.get(name, 1.0), kind
        groups.setdefault(key, []).append(parameter)
    if options.kind == "muon" and all(kind != "muon" for *_, kind in groups):
        raise ConfigError(
            "optimizer.kind muon orthogonalizes matrices of linear layers and convolutions, and this network trains "
            "none: set optimizer.kind adamw"
        )
    parts = list(dict.fromkeys(part for part, *_ in groups))
    order = sorted(groups, key=lambda key: (parts.index(key[0]), NAMES.index(key[1]), *key[2:]))
    return [{"params": groups[k], "name": k[1], "part": k[0], "lr_multiplier": k[2], "kind": k[3]} for k in order]


def _backbone_multipliers(network: Network, options: OptimizerOptions) -> dict[str, float]:
    """Multipliers of the learning rates of the backbone's parameters: decay ** (layers above)."""
    layers = network.backbone.layers()
    top = len(network.backbone.segments()) + 1
    patches = {name: options.patch_embed_lr for name in layers if name.partition(".")[0] == PATCH_EMBED}
    if options.patch_embed_lr != 1.0 and not patches:
        raise ConfigError(
            f"optimizer.patch_embed_lr {options.patch_embed_lr:g} multiplies the learning rate of a backbone's module "
            f"{PATCH_EMBED}, and this one has none: leave it out"
        )
    return {
        f"backbone.{name}": options.layer_decay ** (top - layer) * patches.get(name, 1.0)
        for name, layer in layers.items()
    }


def _group_of(name: str, parameter: nn.Parameter) -> str:
    if name.rpartition(".")[0].endswith("prototypes"):  # their learned lengths too, if any
        return PROTOTYPES
    # A parameter that ZeRO 3 has partitioned is empty; its full shape is `ds_shape`.
    shape = getattr(parameter, "ds_shape", parameter.shape)
    return NO_DECAY if name.endswith(".bias") or len(shape) == 1 else DECAY


def group_settings(schedule: ScheduleValues) -> dict[str, dict[str, float]]:
    """The lr and weight_decay of the groups of each name in this step; both are 0 in a frozen group."""

    def settings(frozen: bool, weight_decay: float) -> dict[str, float]:
        moves = 0.0 if frozen else 1.0
        return {"lr": schedule.lr * moves, "weight_decay": weight_decay * moves}

    return {
        DECAY: settings(False, schedule.weight_decay),
        NO_DECAY: settings(False, 0.0),
        PROTOTYPES: settings(schedule.prototypes_frozen, schedule.weight_decay),
        BACKBONE + DECAY: settings(schedule.backbone_frozen, schedule.weight_decay),
        BACKBONE + NO_DECAY: settings(schedule.backbone_frozen, 0.0),
    }


def apply_settings(groups: Iterable[dict[str, Any]], settings: dict[str, dict[str, float]]) -> None:
    """Set lr and weight decay, as `group_settings` gives them, in an optimizer's `groups`."""
    for group in groups:
        group.update(settings[group["name"]])
        group["lr"] *= group["lr_multiplier"]
