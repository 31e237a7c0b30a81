"""Gram anchoring's own teacher: a backbone that stays as it is until the EMA teacher takes its place.

Source: DINOv3, section 4 (arXiv 2508.10104); facebookresearch/dinov3 `gram.rep_update`.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from dino_ds.config.crops import GRAM
from dino_ds.errors import CheckpointError
from dino_ds.models.base import is_cast
from dino_ds.models.network import Network
from dino_ds.schedules import ScheduleValues
from dino_ds.teachers.base import Teacher

_DIGEST = "sha256"


class GramTeacher(Teacher):
    """Whole on every rank, in `dtype` where autocast would cast to it at each use: see `store_low`.

    Args: `network` and `dtype` as of `Teacher`; `ema` the network that replaces it when the schedule says so, None: it
    never moves. A checkpoint then holds the `digest` of its weights alone, hexadecimal, and a run whose weights have
    another can't be resumed; `place` is what the user calls them.
    """

    def __init__(
        self, network: Network, dtype: torch.dtype, ema: Network | None = None, place: str = "", digest: str = ""
    ) -> None:
        super().__init__(network, dtype)
        self._ema, self._place = ema, place
        self._digest = torch.tensor(list(bytes.fromhex(digest)), dtype=torch.uint8)

    def rests(self, schedule: ScheduleValues) -> bool:
        return not schedule.weights[GRAM]

    @torch.no_grad()
    def begin_step(self, schedule: ScheduleValues) -> None:
        if self._ema is not None and schedule.replace_gram:
            own, theirs = _tensors(self.network), _tensors(self._ema)
            torch._foreach_copy_(list(own.values()), [theirs[name] for name in own])

    def state(self) -> dict[str, Tensor]:
        return {_DIGEST: self._digest} if self._ema is None else self.network.state_dict()

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """A run that begins with another's state, which has no such teacher, keeps its own."""
        if not state:
            return
        if self._ema is not None:
            super().load_state(state)
        elif not torch.equal(state[_DIGEST].cpu(), self._digest):
            raise CheckpointError(
                f"gram.teacher {self._place} has other weights than the one that this run was trained with: put those "
                "back in its place"
            )


def _tensors(network: Network) -> dict[str, Tensor]:
    """Of the backbone, without gradients."""
    backbone = network.backbone
    return {name: tensor.detach() for name, tensor in (*backbone.named_parameters(), *backbone.named_buffers())}


def store_low(network: Network, dtype: torch.dtype) -> Network:
    """Its matrices that autocast casts to `dtype` at each use are from now on kept in it: the results are the same."""
    for module in network.modules():
        if is_cast(module):
            for parameter in module.parameters(recurse=False):
                parameter.data = parameter.data.to(dtype)
    return network
