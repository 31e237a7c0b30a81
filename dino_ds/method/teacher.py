"""The contract of a teacher, and the teachers of a run by name."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from dino_ds.config.crops import EMA, CropGroup, Masks
from dino_ds.engine.schedules import ScheduleValues
from dino_ds.models import batch_norm, fused
from dino_ds.models.base import Backbone, Crops
from dino_ds.models.network import Network, Output


class Teacher:
    """A network that is whole on every rank and never trained; this base class never changes its weights. network: on
    its device, with equal weights on all ranks; dtype: autocast's in forward passes, while weights keep their own."""

    def __init__(self, network: Network, dtype: torch.dtype = torch.float32) -> None:
        self.network = network.eval().requires_grad_(False)
        self.dtype = dtype
        self._device = next(network.parameters()).device
        self._running = network
        self._batch_norms: list[batch_norm.BatchNorm] = []  # layers of `_running` that normalize by the batch
        self._unsynced: list[Tensor] = []

    @torch.no_grad()
    def __call__(self, crops: Crops, masks: Masks) -> dict[str, Output]:
        """This teacher's crops by group, and the student's masks -> the network's outputs by name. The masks select
        patches of the output: none is hidden from the teacher."""
        hidden = {group: {"rows": mask["rows"]} for group, mask in masks.items() if group in crops}
        for norm in self._batch_norms:
            norm.training = True
        try:
            with torch.autocast(self._device.type, dtype=self.dtype, enabled=self.dtype != torch.float32):
                return self._running(crops, None, hidden)
        finally:
            for norm in self._batch_norms:
                norm.training = False

    def begin_step(self, schedule: ScheduleValues) -> None:
        """Called on every rank before each step, and again when a run resumes at that step."""

    def rests(self, schedule: ScheduleValues) -> bool:
        """Whether no loss term needs this teacher in this step."""
        return False

    def update(self, schedule: ScheduleValues) -> None:
        """Called on every rank after each applied step."""

    def moving_buffers(self) -> dict[str, Tensor]:
        """The buffers that the forward pass changes, by the network's names; a skipped step restores them."""
        return {}

    def unsynced_statistics(self) -> list[Tensor]:
        """Moving buffers, FP32, that differ between ranks until an applied step replaces them by their mean."""
        return self._unsynced

    @property
    def backbone(self) -> Backbone:
        """The backbone with the newest weights, FP32 as in teacher.safetensors. To be used while `evaluating`."""
        return self.network.backbone

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Compute as `dino-ds eval` does: in FP32, without gradients, and with nothing compiled."""
        with torch.no_grad(), fused.uncompiled():
            yield

    def state(self) -> dict[str, Tensor]:
        """The tensors that a checkpoint must hold, by reference, by the network's names; {} if they never change."""
        return {}

    @torch.no_grad()
    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Restore what `state` gave. Raises KeyError for a missing tensor."""
        for name, tensor in self.state().items():
            tensor.copy_(state[name])


class Teachers:
    """A run's teachers by name; `groups` say which crops each sees; `exported`, the EMA teacher, is the run's product.
    In a checkpoint its tensors are teacher.NAME, and those of other teachers are teachers.TEACHER.NAME."""

    def __init__(self, teachers: Mapping[str, Teacher], groups: Sequence[CropGroup]) -> None:
        self._teachers = dict(teachers)
        self._groups = {name: [group.name for group in groups if name in group.teachers] for name in teachers}
        self.exported = self._teachers[EMA]
        self._prefix = {name: "teacher." if name == EMA else f"teachers.{name}." for name in teachers}

    def __call__(self, crops: Crops, masks: Masks, schedule: ScheduleValues) -> dict[str, dict[str, Output]]:
        """All crops of a micro-batch by group -> outputs by teacher, for teachers that see crops and do not rest."""
        return {
            name: teacher({group: crops[group] for group in self._groups[name]}, masks)
            for name, teacher in self._teachers.items()
            if self._groups[name] and not teacher.rests(schedule)
        }

    def __getitem__(self, name: str) -> Teacher:
        return self._teachers[name]

    def items(self) -> Iterable[tuple[str, Teacher]]:
        return self._teachers.items()

    def get(self, name: str) -> Teacher | None:
        return self._teachers.get(name)

    def update(self, schedule: ScheduleValues) -> None:
        for teacher in self._teachers.values():
            teacher.update(schedule)

    def begin_step(self, schedule: ScheduleValues) -> None:
        for teacher in self._teachers.values():
            teacher.begin_step(schedule)

    def moving_buffers(self) -> dict[str, Tensor]:
        """The buffers that forward passes of all teachers move, by their names in a checkpoint."""
        moving = [(self._prefix[name], teacher.moving_buffers()) for name, teacher in self._teachers.items()]
        return {f"{prefix}{name}": buffer for prefix, named in moving for name, buffer in named.items()}

    def unsynced_statistics(self) -> list[Tensor]:
        return [tensor for teacher in self._teachers.values() for tensor in teacher.unsynced_statistics()]

    def state(self) -> dict[str, Tensor]:
        states = [(self._prefix[name], teacher.state()) for name, teacher in self._teachers.items()]
        return {f"{prefix}{name}": tensor for prefix, state in states for name, tensor in state.items()}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        for name, teacher in self._teachers.items():
            prefix = self._prefix[name]
            teacher.load_state({key.removeprefix(prefix): t for key, t in state.items() if key.startswith(prefix)})
