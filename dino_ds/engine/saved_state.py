"""A saved training state: flat FP32 tensors of every rank, and layouts that say where each parameter's elements lie.
Any rank reads the elements that it needs, however many ranks saved and however they shared the work.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from dino_ds.errors import CheckpointError

MASTER, STEP = "master", "step"
_ADAM, _MOMENTUM = ("exp_avg", "exp_avg_sq"), ("momentum_buffer",)
MOMENTS = {"adamw": _ADAM, "sgd": _MOMENTUM, "lars": _MOMENTUM, "muon": _MOMENTUM}
"""Names of the moments that each kind of optimizer keeps for a weight."""
# Elements read at a time: bounds the extra memory of loading to 64 MiB.
_READ_ELEMENTS = 16 * 2**20

Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class EngineState:
    """One rank's part of the state. tensors: FP32, 1-D; the engine's own on their device, not copies."""

    tensors: dict[str, Tensor]
    layout: dict[str, Any]


class SavedState(Protocol):
    """The parts of all ranks that saved, in rank order, wherever they are stored."""

    layouts: list[dict[str, Any]]

    def read(self, rank: int, name: str, start: int, stop: int) -> Tensor:
        """Read elements [start, stop) of the tensor `name` of `rank`, FP32, on the CPU."""
        ...


class Piece(NamedTuple):
    """Elements [start, stop) of `parameter` lie from `offset` on in a flat tensor."""

    parameter: str
    start: int
    stop: int
    offset: int


class _Stored(NamedTuple):
    """Elements [start, stop) of a parameter lie from `offset` on in the flat tensors `flat` of `rank`."""

    start: int
    stop: int
    rank: int
    flat: str
    offset: int


def layout_of(
    flats: Iterable[tuple[str, int, str, Iterable[Piece]]], optimizer: str, shared: dict[str, Any] | None
) -> dict[str, Any]:
    """The layout of one rank as plain JSON, from (name, step, kind, pieces) of its flat tensors; on rank 0 with the
    values `shared` by all ranks, and the kind of `optimizer`.

    "flats" is a list of {"name", "step", "pieces"}; a piece [parameter, start, stop, offset] says that elements [start,
    stop) of the parameter lie from `offset` on in the tensor "NAME.master" and in its moments, such as "NAME.exp_avg";
    with step 0 there are no moments yet. A flat tensor that another kind of optimizer updates, such as AdamW beside
    Muon, has a "kind" of its own.
    """
    listed = []
    for name, step, kind, pieces in flats:
        extra = {} if kind == optimizer else {"kind": kind}
        listed.append({"name": name, "step": step, **extra, "pieces": [list(p) for p in pieces]})
    return {"flats": listed, **({"optimizer": optimizer} | shared if shared else {})}


class SavedParameters:
    """A saved state by parameter, whichever ranks saved it. Raises CheckpointError for missing or double elements."""

    def __init__(self, saved: SavedState) -> None:
        self._read = saved.read
        self._stored: dict[str, list[_Stored]] = {}
        self._steps: dict[str, int] = {}
        self.kinds: dict[str, str] = {}
        try:
            shared = self.shared = {key: value for key, value in saved.layouts[0].items() if key != "flats"}
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
                        stored = _Stored(int(start), int(stop), rank, flat["name"], int(offset))
                        self._stored.setdefault(name, []).append(stored)
                        if self._steps.setdefault(name, int(flat["step"])) != flat["step"]:
                            raise CheckpointError(f"the checkpoint has two step counts for {name}: it is damaged")
            self._check_whole()
        except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
            raise CheckpointError(f"the checkpoint has a layout that can't be used ({error!r})") from None

    def _check_whole(self) -> None:
        for name in dict.fromkeys([*self.shapes, *self._stored]):
            parts = sorted(self._stored.get(name, []))
            ends = [0, *(part.stop for part in parts)]
            if [part.start for part in parts] != ends[:-1] or ends[-1] != math.prod(self.shapes[name]):
                raise CheckpointError(f"the checkpoint does not hold every element of {name} once: it is damaged")
            self._stored[name] = parts

    def check_fits(self, shapes: Shapes) -> None:
        """Raises CheckpointError unless the network's parameters have these names and `shapes`."""

        def shown(shapes_of: Shapes, name: str) -> str:
            return str(list(shapes_of[name])) if name in shapes_of else "absent"

        names = dict.fromkeys([*shapes, *self.shapes])
        differ = [name for name in names if shapes.get(name) != self.shapes.get(name)]
        if differ:
            first = differ[0]
            raise CheckpointError(
                f"model differs from the checkpoint in {len(differ)} tensors, first {first} "
                f"{shown(self.shapes, first)} vs {shown(shapes, first)}"
            )

    def step_of(self, parameters: Iterable[str]) -> int:
        """Number of steps that the moments of these parameters have seen: 0 without moments, 1 if none were
        counted.

        Raises CheckpointError if it differs among them: a flat tensor of the optimizer has only one count.
        """
        steps = {self._steps.get(name, 0): name for name in parameters}
        if len(steps) > 1:
            (a, first), (b, second) = list(steps.items())[:2]
            raise CheckpointError(
                f"the moments of {first} have seen {a} steps and those of {second} {b}, and they now share a group"
            )
        return next(iter(steps), 0)

    def read(self, kind: str, parameter: str, start: int, stop: int) -> Iterator[tuple[int, Tensor]]:
        """Elements [start, stop) of a parameter's MASTER or one of its moments, as (first element, values) in order."""
        for part in self._stored[parameter]:
            first, last = max(start, part.start), min(stop, part.stop)
            for begin in range(first, last, _READ_ELEMENTS):
                end = min(begin + _READ_ELEMENTS, last)
                offset = part.offset + begin - part.start
                yield begin, self._read(part.rank, f"{part.flat}.{kind}", offset, offset + end - begin)


def even_shares(shapes: Shapes, rank: int, ranks: int) -> list[Piece]:
    """The pieces of `rank` if the elements of all parameters are cut into `ranks` equal runs; every offset is 0."""
    total = sum(math.prod(shape) for shape in shapes.values())
    left, right = total * rank // ranks, total * (rank + 1) // ranks
    pieces, begin = [], 0
    for name, shape in shapes.items():
        end = begin + math.prod(shape)
        if max(left, begin) < min(right, end):
            pieces.append(Piece(name, max(left, begin) - begin, min(right, end) - begin, 0))
        begin = end
    return pieces
