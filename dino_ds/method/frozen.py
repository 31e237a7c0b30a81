"""Frozen teachers: they never move, and a checkpoint holds their digests alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from dino_ds.config.crops import Masks
from dino_ds.data.normalisation import Normalisation
from dino_ds.engine.schedules import ScheduleValues
from dino_ds.errors import CheckpointError
from dino_ds.method.teacher import Teacher
from dino_ds.models.base import Crops
from dino_ds.models.network import Network, Output

_DIGEST = "sha256"


class FrozenTeacher(Teacher):
    """Args: as of `Teacher`; `about`: where it is from and the digest of its tensors, as manifests have them; `theirs`
    and `ours`: what was removed of the images that it was trained on, and of those of this run. `notes` for people."""

    def __init__(
        self, network: Network, dtype: torch.dtype, about: dict[str, Any], theirs: Normalisation, ours: Normalisation
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
    """The frozen teacher of one `term`, whose weight says when it rests; its place stands in the recipe's `key`.

    A checkpoint holds the digest of its weights, which must be the same on a resume.
    """

    term: ClassVar[str]
    key: ClassVar[str]

    def rests(self, schedule: ScheduleValues) -> bool:
        return not schedule.weights[self.term]

    def state(self) -> dict[str, Tensor]:
        return {_DIGEST: torch.tensor(list(bytes.fromhex(self.about["digest"])), dtype=torch.uint8)}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Check the digest that `state` gave, if there is one. Raises CheckpointError for other weights."""
        if state and not torch.equal(state[_DIGEST].cpu(), self.state()[_DIGEST]):
            raise CheckpointError(
                f"{self.key} {self.about['source']} has other weights than the one that this run was trained with: "
                "put those back in its place"
            )


def _between(ours: Normalisation, theirs: Normalisation) -> Tensor:
    """(2, c): what is added to images that are normalised by `ours`, and their factor before, to have them `theirs`."""
    (offset, factor), (their_offset, their_factor) = ours.offset_and_factor(), theirs.offset_and_factor()
    ratio = their_factor / factor
    return torch.stack((their_offset - offset * ratio, ratio))
