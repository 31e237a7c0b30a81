"""A network of a file that is never trained: filled with its weights and placed as a ds config says."""

from __future__ import annotations

import torch
from torch import nn

from dino_ds.basics.rehearsal import rehearsing
from dino_ds.config.ds_values import DsConfig, PerformanceOptions
from dino_ds.engine import distributed
from dino_ds.engine.device import DTYPES, device
from dino_ds.engine.placement import InferencePlacement
from dino_ds.errors import CheckpointError
from dino_ds.models.base import is_cast
from dino_ds.models.network import Network
from dino_ds.models.specs.base import BackboneOptions
from dino_ds.models.trained import adapters_in
from dino_ds.models.weights import take_drawn_weights
from dino_ds.weights.fit import fit_tensors
from dino_ds.weights.frozen import FrozenSource, digest


def place_frozen(network: Network, source: FrozenSource, config: DsConfig, whole: bool = False) -> str:
    """Fill a `network` on the meta device with the tensors of `source`, on this process's device.

    In the engine's precision, and as dino_ds.frozen_teacher says unless it is to be `whole`. Every rank must call it.
    Returns the digest of its tensors. Raises CheckpointError for tensors that are not the network's, and where ranks
    have read different ones.
    """
    performance = config.performance
    if rehearsing():
        return _fill_with_shapes(network, config)
    with distributed.raise_on_all_ranks():
        tensors = _tensors(source, network)
    found = digest(tensors)
    if len(set(distributed.gather_objects(found))) > 1:
        raise CheckpointError(f"{source.name}: ranks have read different weights there")
    kind = "whole" if whole else performance.frozen_teacher
    place = InferencePlacement(device(), DTYPES[config.precision], kind, network.backbone)
    _fill(network, tensors, place)
    place.finish()
    if performance.compile != "off" and kind == "whole":
        network.backbone.compile_segments(performance.compile)
    return found


def options_of(source: FrozenSource, performance: PerformanceOptions) -> BackboneOptions:
    """The options of a backbone that is never trained."""
    return BackboneOptions(
        pos_embed_interpolation=source.interpolation,
        attention=performance.attention,
        attention_backend=performance.attention_backend,
        packed=performance.packed,
        cls_only_last_block=performance.cls_only_last_block,
        channels_last=performance.channels_last,
    )


def _tensors(source: FrozenSource, network: Network) -> dict[str, torch.Tensor]:
    """The source's tensors under the network's names. Raises CheckpointError where they are not the source's."""
    wanted = {name: tuple(tensor.shape) for name, tensor in network.state_dict().items()}
    only = network.backbone.training_only
    theirs = {f"backbone.{name}": tensor for name, tensor in source.backbone.items() if name not in only}
    for name in only:
        if (shape := wanted.get(f"backbone.{name}")) is not None:
            theirs[f"backbone.{name}"] = source.backbone.get(name, torch.zeros(shape))
    for name, shape in adapters_in(wanted).items():
        theirs.setdefault(name, torch.zeros(shape))  # added to the weights of a file
    for name in network.head_names:
        theirs |= {f"{name}.{key}": tensor for key, tensor in source.heads[name].items()}
    return fit_tensors(theirs, wanted, source.interpolation, f"{source.name} lacks", f"{source.name} is")


def _fill_with_shapes(network: Network, config: DsConfig) -> str:
    """The network as it would be placed whole, without the weights of any file."""
    for module in network.modules():
        for parameter in module.parameters(recurse=False) if is_cast(module) else ():
            parameter.data = parameter.data.to(DTYPES[config.precision])
    network.to_empty(device=device())
    return ""


def _fill(network: Network, tensors: dict[str, torch.Tensor], place: InferencePlacement) -> None:
    """Give each module its own tensors and hand it to `place`: what that moves is never in memory as a whole."""
    drawn = network.backbone.drawn()
    if drawn is not None:  # it may have buffers that no file holds
        drawn.load_state_dict({name: tensors[f"backbone.{name}"] for name in drawn.state_dict()})
        take_drawn_weights(network.backbone, drawn, place)
    inside = set(network.backbone.modules()) if drawn is not None else set()
    for name, module in network.named_modules():
        if module in inside:
            continue
        prefix = f"{name}." if name else ""
        if any(f"{prefix}{key}" not in tensors for key, _ in module.named_buffers(recurse=False)):
            module.to_empty(device="cpu", recurse=False)
            module.reset_parameters()  # as `Backbone` asks of modules with buffers
        for key, _ in list(module.named_parameters(recurse=False)):
            module.register_parameter(key, nn.Parameter(tensors[f"{prefix}{key}"], requires_grad=False))
        for key, _ in list(module.named_buffers(recurse=False)):
            if f"{prefix}{key}" in tensors:
                setattr(module, key, tensors[f"{prefix}{key}"])
        place(module)
