"""Gram anchoring's own teachers: one that the EMA teacher replaces now and then, and one that never moves.

Source: DINOv3, section 4 (arXiv 2508.10104); facebookresearch/dinov3 `gram.rep_update`.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from dino_ds.config.crops import GRAM
from dino_ds.engine.schedules import ScheduleValues
from dino_ds.errors import CheckpointError
from dino_ds.method.frozen import FrozenTeacher
from dino_ds.method.teacher import Teacher
from dino_ds.models.network import Network

_DIGEST = "sha256"


class GramTeacher(Teacher):
    """A backbone, whole on every rank, that becomes what that of `ema` is when the schedule says so.

    Its matrices may be of a lower precision than the EMA teacher's. A checkpoint holds all of it.
    """

    def __init__(self, network: Network, dtype: torch.dtype, ema: Network) -> None:
        super().__init__(network, dtype)
        self._ema = ema

    def rests(self, schedule: ScheduleValues) -> bool:
        return not schedule.weights[GRAM]

    @torch.no_grad()
    def begin_step(self, schedule: ScheduleValues) -> None:
        if schedule.replace_gram:
            own, theirs = _tensors(self.network), _tensors(self._ema)
            torch._foreach_copy_(list(own.values()), [theirs[name] for name in own])

    def state(self) -> dict[str, Tensor]:
        return self.network.state_dict()

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """A run that begins with another's state, which has no such teacher, keeps its own."""
        if state:
            super().load_state(state)


class FixedGramTeacher(FrozenTeacher):
    """A backbone of a file. A checkpoint holds the digest of its weights, which must be the same on a resume."""

    def rests(self, schedule: ScheduleValues) -> bool:
        return not schedule.weights[GRAM]

    def state(self) -> dict[str, Tensor]:
        return {_DIGEST: torch.tensor(list(bytes.fromhex(self.about["digest"])), dtype=torch.uint8)}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """As of `GramTeacher`. Raises CheckpointError for other weights."""
        if state and not torch.equal(state[_DIGEST].cpu(), self.state()[_DIGEST]):
            raise CheckpointError(
                f"gram.teacher {self.about['source']} has other weights than the one that this run was trained with: "
                "put those back in its place"
            )


def _tensors(network: Network) -> dict[str, Tensor]:
    """Of the backbone, without gradients."""
    backbone = network.backbone
    return {name: tensor.detach() for name, tensor in (*backbone.named_parameters(), *backbone.named_buffers())}
