"""Where an engine keeps its FP32 master weights, said in terms that need no knowledge of DeepSpeed.

`Engine.masters()` gives a list of these; `Teacher` follows them. Names are those of `named_parameters()`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor


@dataclass(frozen=True)
class WholeMasters:
    """Every rank holds every element: (name, FP32 tensor of the parameter's shape)."""

    parameters: list[tuple[str, Tensor]]


@dataclass(frozen=True)
class FlatMasters:
    """ZeRO 1 and 2: the parameters lie in one flat buffer of `numel` elements, cut into one equal shard a rank.

    layout: (name, offset in the flat buffer); shard(): this rank's FP32 shard, on any device.
    """

    numel: int
    layout: list[tuple[str, int]]
    shard: Callable[[], Tensor]
    process_group: Any


@dataclass(frozen=True)
class PartitionedMasters:
    """ZeRO 3: every parameter is cut into one piece a rank; a rank's pieces are concatenated in its shard.

    layout: (name, offset in the shard, elements of a piece); the last pieces of a parameter may hold padding.
    """

    layout: list[tuple[str, int, int]]
    shard: Callable[[], Tensor]
    process_group: Any


Masters = WholeMasters | FlatMasters | PartitionedMasters
