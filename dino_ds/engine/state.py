"""Exports an engine's training state, and imports it under any ZeRO stage, number of ranks, precision and offload.
DeepSpeed's own files hold tensors in the layout of their stage, which another stage or number of ranks can't read. Here
a state is flat FP32 tensors of every rank, and layouts that say where each parameter's elements lie: any rank reads the
elements that it needs, however many ranks saved and however they shared the work."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dino_ds.engine import distributed, optim
from dino_ds.engine.masters import FlatMasters, Names, PartitionedMasters, refresh_weights, shards_of
from dino_ds.engine.muon import Matrix, Muon, Piece
from dino_ds.errors import CheckpointError

MASTER, STEP = "master", "step"
_ADAM, _MOMENTUM = ("exp_avg", "exp_avg_sq"), ("momentum_buffer",)
MOMENTS = {"adamw": _ADAM, "sgd": _MOMENTUM, "lars": _MOMENTUM, "muon": _MOMENTUM}
"""Names of the moments that each kind of optimizer keeps for a weight."""
_READ_ELEMENTS = 16 * 2**20  # elements read at a time: bounds the extra memory of loading to 64 MiB

Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class EngineState:
    """One rank's part of the state. tensors: FP32, 1-D; the engine's own on their device, not copies. layout: plain
    JSON. "flats" is a list of {"name", "step", "pieces"}; a piece [parameter, start, stop, offset] says that elements
    [start, stop) of the parameter lie from `offset` on in the tensor "NAME.master" and in its moments, such as
    "NAME.exp_avg"; with step 0 there are no moments yet. A flat tensor that another kind of optimizer updates, such as
    AdamW beside Muon, has a "kind" of its own. Rank 0's layout also has the values that all ranks share."""

    tensors: dict[str, Tensor]
    layout: dict[str, Any]


class SavedState(Protocol):
    """The parts of all ranks that saved, in rank order, wherever they are stored."""

    layouts: list[dict[str, Any]]

    def read(self, rank: int, name: str, start: int, stop: int) -> Tensor:
        """Read elements [start, stop) of the tensor `name` of `rank`, FP32, on the CPU."""


@dataclass(frozen=True)
class OptimizerShard:
    """A tensor of the inner optimizer: FP32 masters of this rank with its `state`, empty before the first step. group:
    the name of its parameter group; kind: that of the optimizer which updates it; pieces: the parameters' elements in
    it, in order; elements between them are padding."""

    name: str
    group: str
    kind: str
    master: Tensor
    state: dict[str, Any]
    pieces: list[Piece]

    def reset(self) -> None:
        for tensor in self.state.values():
            tensor.zero_()


def partitions_of(optimizer: Any, network: nn.Module, names: Names, shapes: Shapes) -> list[OptimizerShard]:
    """The tensors of `optimizer`, which deepspeed.initialize made for `network`: one per parameter at stage 0, else one
    per shard. shapes: those of the whole parameters."""
    if isinstance(optimizer, torch.optim.Optimizer):
        group_of = {id(p): group for group in optimizer.param_groups for p in group["params"]}
        trained = [(name, p, group_of[id(p)]) for name, p in network.named_parameters() if p.requires_grad]
        return [
            OptimizerShard(name, group["name"], group["kind"], p, optimizer.state[p], [Piece(name, 0, p.numel(), 0)])
            for name, p, group in trained
        ]
    state = optimizer.optimizer.state
    return [
        OptimizerShard(
            f"{group['name']}.{i}", group["name"], group["kind"], shard, state[shard], list(_pieces(masters, shapes))
        )
        for i, (masters, shard, group) in enumerate(shards_of(optimizer, names))
    ]


def _pieces(masters: FlatMasters | PartitionedMasters, shapes: Shapes, rank: int | None = None) -> Iterator[Piece]:
    """The pieces of parameters in the shard of this rank, or of another."""
    rank = dist.get_rank(masters.process_group) if rank is None else rank
    if isinstance(masters, PartitionedMasters):
        for name, offset, size in masters.layout:
            start, stop = rank * size, min((rank + 1) * size, math.prod(shapes[name]))
            if start < stop:
                yield Piece(name, start, stop, offset)
        return
    size = masters.numel // dist.get_world_size(masters.process_group)
    left, right = rank * size, (rank + 1) * size
    for name, offset in masters.layout:
        first, last = max(left, offset), min(right, offset + math.prod(shapes[name]))
        if first < last:
            yield Piece(name, first - offset, last - offset, first - left)


def lay_out_shards(inner: optim.Lars | Muon, optimizer: Any, names: Names, shapes: Shapes) -> None:
    """Under stages 1 to 3, tell `inner` which elements of flat shards belong to which parameter: LARS those of this
    rank's shards, Muon those of all ranks' shards."""
    for masters, shard, group in shards_of(optimizer, names):
        members = [str(entry[0]) for entry in masters.layout]
        if isinstance(inner, optim.Lars):
            adapted = [name for name in members if len(shapes[name]) != 1]
            pieces = [piece for piece in _pieces(masters, shapes) if piece.parameter in adapted]
            inner.lay_out(shard, pieces, adapted, masters.process_group)
        elif group["kind"] == "muon":
            blocks = {names[id(parameter)]: count for parameter, count in inner.blocks.items()}
            matrices = {name: Matrix(shapes[name][0], math.prod(shapes[name][1:]), blocks[name]) for name in members}
            ranks = range(dist.get_world_size(masters.process_group))
            of_ranks = [list(_pieces(masters, shapes, rank)) for rank in ranks]
            inner.lay_out(shard, matrices, of_ranks, masters.process_group)


def export_state(
    flats: list[OptimizerShard], shapes: Shapes, sharded: bool, kind: str, common: dict[str, Any]
) -> EngineState:
    """Return this rank's part of the state. Without sharding every rank holds everything, and returns an equal share.
    kind: the optimizer's; common: further values that all ranks share, besides `kind` and `shapes`."""
    # Numbers of steps that moments have seen, in one read from the device; 1 for moments without a count.
    counts = [flat.state[STEP] for flat in flats if STEP in flat.state]
    known = iter(torch.stack(counts).tolist() if counts else [])
    steps = {flat.name: int(next(known)) if STEP in flat.state else int(bool(flat.state)) for flat in flats}
    flats = flats if sharded else list(_even_share(flats, shapes))
    tensors, listed = {}, []
    for flat in flats:
        tensors[f"{flat.name}.{MASTER}"] = flat.master.detach().view(-1)
        if steps[flat.name]:
            tensors.update({f"{flat.name}.{key}": flat.state[key].view(-1) for key in MOMENTS[flat.kind]})
        extra = {} if flat.kind == kind else {"kind": flat.kind}
        pieces = [list(piece) for piece in flat.pieces]
        listed.append({"name": flat.name, "step": steps[flat.name], **extra, "pieces": pieces})
    layout: dict[str, Any] = {"flats": listed}
    if distributed.rank() == 0:
        layout |= {"optimizer": kind, "shapes": {name: list(shape) for name, shape in shapes.items()}, **common}
    return EngineState(tensors, layout)


def _even_share(flats: list[OptimizerShard], shapes: Shapes) -> Iterator[OptimizerShard]:
    """This rank's slices of whole parameters: all elements, one parameter after another, are cut evenly by rank."""
    by_name, total = {flat.name: flat for flat in flats}, sum(math.prod(shape) for shape in shapes.values())
    rank, ranks = distributed.rank(), distributed.world_size()
    left, right = total * rank // ranks, total * (rank + 1) // ranks
    begin = 0
    for name, shape in shapes.items():
        first, last = max(left - begin, 0), min(right - begin, math.prod(shape))
        begin += math.prod(shape)
        if first < last:
            flat = by_name[name]
            state = {k: value if k == STEP else value.view(-1)[first:last] for k, value in flat.state.items()}
            master = flat.master.detach().view(-1)[first:last]
            yield replace(flat, master=master, state=state, pieces=[Piece(name, first, last, 0)])


def import_state(
    saved: SavedState, flats: list[OptimizerShard], shapes: Shapes, optimizer: Any, kind: str
) -> SavedParameters:
    """Load a state into `flats`, in place, then into the weights; all ranks call it. Each reads only its own elements.
    Raises CheckpointError, on all ranks, if the saved state is of another network or not of this `kind`."""
    with distributed.raise_on_all_ranks(), torch.no_grad():
        parameters = SavedParameters(saved)
        if parameters.optimizer != kind:
            raise CheckpointError(f"the checkpoint has the moments of {parameters.optimizer}, optimizer.kind is {kind}")
        names = dict.fromkeys([*shapes, *parameters.shapes])
        if differ := [name for name in names if shapes.get(name) != parameters.shapes.get(name)]:
            first = differ[0]
            there, ours = (list(of[first]) if first in of else "absent" for of in (parameters.shapes, shapes))
            why = f"model differs from the checkpoint in {len(differ)} tensors, first {first} {there} vs {ours}"
            raise CheckpointError(why)
        for name, flat_kind in ((piece.parameter, flat.kind) for flat in flats for piece in flat.pieces):
            if parameters.kinds[name] != flat_kind:
                why = f"the checkpoint has the moments of {parameters.kinds[name]} for {name}, not {flat_kind}'s"
                raise CheckpointError(why)
        for flat in flats:
            _fill(flat.master, MASTER, flat.pieces, parameters)
            step = parameters.step_of(piece.parameter for piece in flat.pieces)
            if not step:
                flat.reset()
                continue
            if not flat.state:  # as the optimizer makes it in its first step
                if flat.kind == "adamw":
                    flat.state[STEP] = torch.zeros((), device=flat.master.device)
                flat.state.update({key: torch.zeros_like(flat.master) for key in MOMENTS[flat.kind]})
            if STEP in flat.state:
                flat.state[STEP].fill_(step)
            for key in MOMENTS[flat.kind]:
                _fill(flat.state[key], key, flat.pieces, parameters)
    refresh_weights(optimizer)
    return parameters


def _fill(tensor: Tensor, kind: str, pieces: list[Piece], parameters: SavedParameters) -> None:
    flat = tensor.detach().view(-1)
    flat.zero_()  # the padding
    for name, start, stop, offset in pieces:
        for first, values in parameters.read(kind, name, start, stop):
            flat[offset + first - start :][: values.numel()].copy_(values)


class SavedParameters:
    """A saved state by parameter, whichever ranks saved it. Raises CheckpointError for missing or double elements."""

    def __init__(self, saved: SavedState) -> None:
        self._read = saved.read
        # (start, stop, rank, flat, offset): elements [start, stop) lie from `offset` on in tensors `flat` of `rank`.
        self._stored: dict[str, list[tuple[int, int, int, str, int]]] = {}
        self._steps: dict[str, int] = {}
        self.kinds: dict[str, str] = {}
        try:
            shared = saved.layouts[0]
            self.shapes: dict[str, tuple[int, ...]] = {name: tuple(shape) for name, shape in shared["shapes"].items()}
            self.counters: dict[str, int] = {name: int(count) for name, count in shared["counters"].items()}
            self.optimizer: str = shared["optimizer"]
            self.loss_scaler: dict[str, float] = dict(shared["loss_scaler"] or {})
            for rank, layout in enumerate(saved.layouts):
                for flat in layout["flats"]:
                    kind = flat.get("kind", self.optimizer)
                    MOMENTS[kind]  # raises KeyError for an unknown kind
                    for name, start, stop, offset in flat["pieces"]:
                        self.kinds[name] = kind
                        stored = (int(start), int(stop), rank, flat["name"], int(offset))
                        self._stored.setdefault(name, []).append(stored)
                        if self._steps.setdefault(name, int(flat["step"])) != flat["step"]:
                            raise CheckpointError(f"the checkpoint has two step counts for {name}: it is damaged")
            for name in dict.fromkeys([*self.shapes, *self._stored]):
                parts = self._stored[name] = sorted(self._stored.get(name, []))
                ends = [0, *(stop for _, stop, *_ in parts)]
                if [start for start, *_ in parts] != ends[:-1] or ends[-1] != math.prod(self.shapes[name]):
                    raise CheckpointError(f"the checkpoint does not hold every element of {name} once: it is damaged")
        except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
            raise CheckpointError(f"the checkpoint has a layout that can't be used ({error!r})") from None

    def step_of(self, parameters: Iterable[str]) -> int:
        """Number of steps that these parameters' moments have seen: 0 without moments, 1 for moments without a count.
        Raises CheckpointError if it differs among them: a flat tensor of the optimizer has only one count."""
        steps = {self._steps.get(name, 0): name for name in parameters}
        if len(steps) > 1:
            (a, first), (b, second) = list(steps.items())[:2]
            why = f"the moments of {first} have seen {a} steps and those of {second} {b}, and they now share a group"
            raise CheckpointError(why)
        return next(iter(steps), 0)

    def read(self, kind: str, parameter: str, start: int, stop: int) -> Iterator[tuple[int, Tensor]]:
        """Elements [start, stop) of a parameter's MASTER or one of its moments, as (first element, values) in order."""
        for stored_start, stored_stop, rank, flat, stored_offset in self._stored[parameter]:
            last = min(stop, stored_stop)
            for begin in range(max(start, stored_start), last, _READ_ELEMENTS):
                end, offset = min(begin + _READ_ELEMENTS, last), stored_offset + begin - stored_start
                yield begin, self._read(rank, f"{flat}.{kind}", offset, offset + end - begin)
