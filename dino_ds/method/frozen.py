"""Frozen teachers, which never change, and their networks from files; a checkpoint holds only their digests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from dino_ds.basics.rehearsal import rehearsing
from dino_ds.config.crops import Masks
from dino_ds.config.ds_values import DsConfig, PerformanceOptions
from dino_ds.data.normalization import Normalization
from dino_ds.engine import distributed
from dino_ds.engine.device import DTYPES, device
from dino_ds.engine.schedules import ScheduleValues
from dino_ds.errors import CheckpointError
from dino_ds.method.networks import build_head, speed_options
from dino_ds.method.teacher import Teacher
from dino_ds.models.base import Crops, is_cast
from dino_ds.models.build import build_backbone
from dino_ds.models.initialization import Placer, take_drawn_weights
from dino_ds.models.network import Network, Output, Query
from dino_ds.models.specs.base import BackboneOptions
from dino_ds.models.trained import adapters_in
from dino_ds.weights.fit import fit_tensors
from dino_ds.weights.frozen import FrozenSource, digest

_DIGEST = "sha256"


class FrozenTeacher(Teacher):
    """A teacher whose weights come from a file; `notes` are lines about it for the log.

    Args:
        about: source and digest of its tensors, as in a checkpoint's manifest.
        theirs: normalization of the images that it was trained on.
        ours: normalization of this run's images.
    """

    def __init__(
        self, network: Network, dtype: torch.dtype, about: dict[str, Any], theirs: Normalization, ours: Normalization
    ) -> None:
        super().__init__(network, dtype)
        self.about = about
        self.notes: list[str] = []
        self._change = None if theirs == ours else _between(ours, theirs).to(self._device)

    @torch.no_grad()
    def __call__(self, crops: Crops, masks: Masks) -> dict[str, Output]:
        if self._change is not None:
            offset, factor = (part.view(-1, 1, 1) for part in self._change)
            crops = {name: [crop * factor + offset for crop in group] for name, group in crops.items()}
        return super().__call__(crops, masks)


class FixedTeacher(FrozenTeacher):
    """The frozen teacher of one loss `term`, idle while the term's weight is 0; the recipe's `key` has its path.

    A checkpoint holds the digest of its weights, which must be the same on a resume.
    """

    term: ClassVar[str]
    key: ClassVar[str]

    def rests(self, schedule: ScheduleValues) -> bool:
        return not schedule.weights[self.term]

    def state(self) -> dict[str, Tensor]:
        return {_DIGEST: torch.tensor(list(bytes.fromhex(self.about["digest"])), dtype=torch.uint8)}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Compare a saved digest with this teacher's. Raises CheckpointError for other weights."""
        if state and not torch.equal(state[_DIGEST].cpu(), self.state()[_DIGEST]):
            raise CheckpointError(
                f"{self.key} {self.about['source']} has other weights than the one that this run was trained with: "
                "put those back in its place"
            )


def _between(ours: Normalization, wanted: Normalization) -> Tensor:
    """(2, c): offset and factor (applied first) that turn images normalized by `ours` into those by `wanted`."""
    (offset, factor), (their_offset, their_factor) = ours.offset_and_factor(), wanted.offset_and_factor()
    ratio = their_factor / factor
    return torch.stack((their_offset - offset * ratio, ratio))


def place_frozen(network: Network, source: FrozenSource, config: DsConfig) -> str:
    """Fill a `network` on the meta device with the tensors of `source`, on this process's device.

    Matrices are in the engine's precision where autocast would cast them to it: results are the same. Every rank must
    call it.
    Returns the digest of its tensors. Raises CheckpointError for tensors that do not fit the network, and if ranks have
    read different tensors.
    """
    dtype = DTYPES[config.precision]
    if rehearsing():
        allocate(network, dtype)
        return ""
    with distributed.raise_on_all_ranks():
        tensors = _tensors(source, network)
    checksum = digest(tensors)
    if len(set(distributed.gather_objects(checksum))) > 1:
        raise CheckpointError(f"{source.name}: ranks have read different weights there")
    _fill(network, tensors, partial(_place, dtype=dtype))
    if config.performance.compile != "off":
        network.backbone.compile_segments(config.performance.compile)
    return checksum


def meta_network(
    source: FrozenSource,
    performance: PerformanceOptions,
    outputs: Sequence[str],
    queries: Mapping[str, Query] = MappingProxyType({}),
) -> Network:
    """The network of `source` on the meta device; outputs that `queries` name are its heads', others features."""
    options = BackboneOptions(pos_embed_interpolation=source.interpolation, **speed_options(performance))
    asked = {name: query for name, query in queries.items() if name in outputs}
    with torch.device("meta"):
        backbone = build_backbone(source.spec, source.image_size, options)
        names = dict.fromkeys(query.head for query in asked.values())
        heads = {name: build_head(source.spec.width, source.head(name)) for name in names}
    return Network(backbone, heads, asked, [name for name in outputs if name not in asked])


def _tensors(source: FrozenSource, network: Network) -> dict[str, torch.Tensor]:
    """The source's tensors under the network's names. Raises CheckpointError if they do not fit."""
    wanted = {name: tuple(tensor.shape) for name, tensor in network.state_dict().items()}
    only = network.backbone.training_only
    tensors = {f"backbone.{name}": tensor for name, tensor in source.backbone.items() if name not in only}
    for name in only:
        if (shape := wanted.get(f"backbone.{name}")) is not None:
            tensors[f"backbone.{name}"] = source.backbone.get(name, torch.zeros(shape))
    for name, shape in adapters_in(wanted).items():
        tensors.setdefault(name, torch.zeros(shape))  # a file has them merged into its weights
    for name in network.head_names:
        tensors |= {f"{name}.{key}": tensor for key, tensor in source.heads[name].items()}
    return fit_tensors(tensors, wanted, source.interpolation, f"{source.name} lacks", f"{source.name} is")


def allocate(network: Network, dtype: torch.dtype) -> None:
    """Allocate a network on this process's device without values, in `dtype` where autocast would cast at each use."""
    for module in network.modules():
        for parameter in module.parameters(recurse=False) if is_cast(module) else ():
            parameter.data = parameter.data.to(dtype)
    network.to_empty(device=device())


@torch.no_grad()
def _place(module: nn.Module, dtype: torch.dtype) -> None:
    """Copy the module's own tensors to this process's device, matrices in `dtype`."""
    for parameter in module.parameters(recurse=False):
        parameter.data = parameter.data.to(device(), dtype if is_cast(module) else torch.float32, copy=True)
    for name, buffer in list(module.named_buffers(recurse=False)):
        setattr(module, name, buffer.to(device(), copy=True))


def _fill(network: Network, tensors: dict[str, torch.Tensor], placer: Placer) -> None:
    """Give each module its tensors and call `placer` on it, so that not all are in memory twice."""
    drawn = network.backbone.drawn()
    if drawn is not None:  # it may have buffers that no file holds
        drawn.load_state_dict({name: tensors[f"backbone.{name}"] for name in drawn.state_dict()})
        take_drawn_weights(network.backbone, drawn, placer)
    inside = set(network.backbone.modules()) if drawn is not None else set()
    for name, module in network.named_modules():
        if module in inside:
            continue
        prefix = f"{name}." if name else ""
        if any(f"{prefix}{key}" not in tensors for key, _ in module.named_buffers(recurse=False)):
            module.to_empty(device="cpu", recurse=False)
            module.reset_parameters()  # `Backbone` requires this of modules with buffers
        for key, _ in list(module.named_parameters(recurse=False)):
            module.register_parameter(key, nn.Parameter(tensors[f"{prefix}{key}"], requires_grad=False))
        for key, _ in list(module.named_buffers(recurse=False)):
            if f"{prefix}{key}" in tensors:
                setattr(module, key, tensors[f"{prefix}{key}"])
        placer(module)
