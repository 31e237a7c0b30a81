"""Exports an engine's training state, and imports it under any ZeRO stage, number of ranks, precision and offload.

DeepSpeed's own files hold tensors in the layout of their stage, which another stage or number of ranks can't read. Here
a state is a list of flat FP32 tensors with the names of the parameters in them (`dino_ds.engine.saved_state`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dino_ds.engine import distributed, saved_state
from dino_ds.engine.masters import (
    FlatMasters,
    Names,
    PartitionedMasters,
    master_shards,
    refresh_weights,
    shard_groups,
    sharded_masters_of,
)
from dino_ds.engine.muon import Matrix, Muon, Slice
from dino_ds.engine.optim import Lars, Layer
from dino_ds.errors import CheckpointError


@dataclass(frozen=True)
class OptimizerShard:
    """A tensor of the inner optimizer: FP32 masters of this rank with its `state`, empty before the first step.

    group: the name of its parameter group; kind: that of the optimizer which updates it; pieces: the parameters'
    elements in it, in order; elements between them are padding.
    """

    name: str
    group: str
    kind: str
    master: Tensor
    state: dict[str, Any]
    pieces: list[saved_state.Piece]

    def reset(self) -> None:
        for tensor in self.state.values():
            tensor.zero_()


def partitions_of(optimizer: Any, network: nn.Module, names: Names, shapes: saved_state.Shapes) -> list[OptimizerShard]:
    """The tensors of `optimizer`, which deepspeed.initialize made for `network`: one per parameter at stage 0, else one
    per shard. shapes: those of the whole parameters."""
    if isinstance(optimizer, torch.optim.Optimizer):
        group_of = {id(p): group for group in optimizer.param_groups for p in group["params"]}
        trained = [(name, p, group_of[id(p)]) for name, p in network.named_parameters() if p.requires_grad]
        return [
            OptimizerShard(
                name, group["name"], group["kind"], p, optimizer.state[p], [saved_state.Piece(name, 0, p.numel(), 0)]
            )
            for name, p, group in trained
        ]
    masters = sharded_masters_of(optimizer, names)
    state = optimizer.optimizer.state
    return [
        OptimizerShard(
            f"{group['name']}.{i}", group["name"], group["kind"], shard, state[shard], list(_pieces(masters[i], shapes))
        )
        for i, (group, shard) in enumerate(zip(shard_groups(optimizer), master_shards(optimizer), strict=True))
    ]


def _pieces(
    masters: FlatMasters | PartitionedMasters, shapes: saved_state.Shapes, rank: int | None = None
) -> Iterator[saved_state.Piece]:
    """The pieces of parameters in the shard of this rank, or of another."""
    rank = dist.get_rank(masters.process_group) if rank is None else rank
    if isinstance(masters, PartitionedMasters):
        for name, offset, size in masters.layout:
            start, stop = rank * size, min((rank + 1) * size, math.prod(shapes[name]))
            if start < stop:
                yield saved_state.Piece(name, start, stop, offset)
        return
    size = masters.numel // dist.get_world_size(masters.process_group)
    left, right = rank * size, (rank + 1) * size
    for name, offset in masters.layout:
        first, last = max(left, offset), min(right, offset + math.prod(shapes[name]))
        if first < last:
            yield saved_state.Piece(name, first - offset, last - offset, first - left)


def lay_out_layers(lars: Lars, optimizer: Any, names: Names, shapes: saved_state.Shapes) -> None:
    """Tell `lars`, under stages 1 to 3, which elements of this rank's shards belong to which parameter."""
    for masters, shard in zip(sharded_masters_of(optimizer, names), master_shards(optimizer), strict=True):
        adapted = [entry[0] for entry in masters.layout if len(shapes[entry[0]]) != 1]
        number = {name: i for i, name in enumerate(adapted)}
        layers = [
            Layer(number[name], offset, stop - start)
            for name, start, stop, offset in _pieces(masters, shapes)
            if name in number
        ]
        lars.lay_out(shard, layers, len(adapted), masters.process_group)


def lay_out_matrices(muon: Muon, optimizer: Any, names: Names, shapes: saved_state.Shapes) -> None:
    """Tell `muon`, under stages 1 to 3, which elements of all ranks' shards belong to which matrix."""
    blocks = {names[id(parameter)]: count for parameter, count in muon.blocks.items()}
    groups = zip(sharded_masters_of(optimizer, names), master_shards(optimizer), shard_groups(optimizer), strict=True)
    for masters, shard, group in groups:
        if group["kind"] != "muon":
            continue
        number = {str(entry[0]): i for i, entry in enumerate(masters.layout)}
        matrices = [Matrix(shapes[name][0], math.prod(shapes[name][1:]), blocks[name]) for name in number]
        slices = [
            [Slice(number[piece.parameter], *piece[1:]) for piece in _pieces(masters, shapes, rank)]
            for rank in range(dist.get_world_size(masters.process_group))
        ]
        muon.lay_out(shard, matrices, slices, masters.process_group)


def export_state(
    flats: list[OptimizerShard], shapes: saved_state.Shapes, sharded: bool, kind: str, common: dict[str, Any]
) -> saved_state.EngineState:
    """Return this rank's part of the state. Without sharding every rank holds everything, and returns an equal share.

    kind: the optimizer's; common: further values that all ranks share, besides `kind` and `shapes`.
    """
    steps = dict(zip((flat.name for flat in flats), _steps(flats), strict=True))
    if not sharded:
        by_name = {flat.name: flat for flat in flats}
        mine = saved_state.even_shares(shapes, distributed.rank(), distributed.world_size())
        flats = [_part(by_name[piece.parameter], piece) for piece in mine]
    tensors = {}
    for flat in flats:
        tensors[f"{flat.name}.{saved_state.MASTER}"] = flat.master.detach().view(-1)
        if steps[flat.name]:
            tensors.update({f"{flat.name}.{key}": flat.state[key].view(-1) for key in saved_state.MOMENTS[flat.kind]})
    shared = {"shapes": {name: list(shape) for name, shape in shapes.items()}, **common}
    listed = [(flat.name, steps[flat.name], flat.kind, flat.pieces) for flat in flats]
    return saved_state.EngineState(
        tensors, saved_state.layout_of(listed, kind, shared if distributed.rank() == 0 else None)
    )


def _steps(flats: list[OptimizerShard]) -> list[int]:
    """Numbers of steps that moments have seen, in one read from the device; 1 for moments without a count."""
    counts = [flat.state[saved_state.STEP] for flat in flats if saved_state.STEP in flat.state]
    known = iter(torch.stack(counts).tolist() if counts else [])
    return [int(next(known)) if saved_state.STEP in flat.state else int(bool(flat.state)) for flat in flats]


def _part(flat: OptimizerShard, piece: saved_state.Piece) -> OptimizerShard:
    """Cut the elements of `piece` out of a flat that is one whole parameter."""

    def cut(tensor: Tensor) -> Tensor:
        return tensor.detach().view(-1)[piece.start : piece.stop]

    state = {key: value if key == saved_state.STEP else cut(value) for key, value in flat.state.items()}
    return OptimizerShard(flat.name, flat.group, flat.kind, cut(flat.master), state, [piece])


def import_state(
    saved: saved_state.SavedState, flats: list[OptimizerShard], shapes: saved_state.Shapes, optimizer: Any, kind: str
) -> saved_state.SavedParameters:
    """Load a state into `flats`, in place, then into the weights; all ranks call it. Each reads only its own elements.

    Raises CheckpointError, on all ranks, if the saved state is of another network or not of this `kind`.
    """
    with distributed.raise_on_all_ranks(), torch.no_grad():
        parameters = saved_state.SavedParameters(saved)
        if parameters.optimizer != kind:
            raise CheckpointError(f"the checkpoint has the moments of {parameters.optimizer}, optimizer.kind is {kind}")
        parameters.check_fits(shapes)
        for name, flat_kind in ((piece.parameter, flat.kind) for flat in flats for piece in flat.pieces):
            if parameters.kinds[name] != flat_kind:
                raise CheckpointError(
                    f"the checkpoint has the moments of {parameters.kinds[name]} for {name}, not {flat_kind}'s"
                )
        for flat in flats:
            _fill(flat.master, saved_state.MASTER, flat.pieces, parameters)
            _fill_moments(flat, parameters)
    refresh_weights(optimizer)
    return parameters


def _fill_moments(flat: OptimizerShard, parameters: saved_state.SavedParameters) -> None:
    step = parameters.step_of(piece.parameter for piece in flat.pieces)
    if step and not flat.state:  # as the optimizer makes it in its first step
        if flat.kind == "adamw":
            flat.state[saved_state.STEP] = torch.zeros((), device=flat.master.device)
        flat.state.update({key: torch.zeros_like(flat.master) for key in saved_state.MOMENTS[flat.kind]})
    if not step:
        flat.reset()
        return
    if saved_state.STEP in flat.state:
        flat.state[saved_state.STEP].fill_(step)
    for key in saved_state.MOMENTS[flat.kind]:
        _fill(flat.state[key], key, flat.pieces, parameters)


def _fill(tensor: Tensor, kind: str, pieces: list[saved_state.Piece], parameters: saved_state.SavedParameters) -> None:
    flat = tensor.detach().view(-1)
    flat.zero_()  # the padding
    for name, start, stop, offset in pieces:
        for first, values in parameters.read(kind, name, start, stop):
            flat[offset + first - start :][: values.numel()].copy_(values)
