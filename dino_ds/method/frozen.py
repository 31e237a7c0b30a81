"""The frozen teacher of a distillation: it never moves, and a checkpoint holds its digest alone."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dino_ds.config.crops import Masks
from dino_ds.data.normalisation import Normalisation
from dino_ds.method.teacher import Teacher
from dino_ds.models.base import Crops
from dino_ds.models.network import Network, Output


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


def _between(ours: Normalisation, theirs: Normalisation) -> Tensor:
    """(2, c): what is added to images that are normalised by `ours`, and their factor before, to have them `theirs`."""
    (offset, factor), (their_offset, their_factor) = ours.offset_and_factor(), theirs.offset_and_factor()
    ratio = their_factor / factor
    return torch.stack((their_offset - offset * ratio, ratio))
