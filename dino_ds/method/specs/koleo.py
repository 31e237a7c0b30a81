"""Description of the KoLeo term: CLS features of different images spread apart."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from dino_ds.method.specs.base import StepImages, TermSpec


@dataclass(frozen=True)
class KoLeoSpec(TermSpec):
    """KoLeo among the images of a rank's own micro-batch, or of all ranks'."""

    ranks: Literal["own", "all"] = "own"

    label: ClassVar[str] = "KoLeo, sum over the global crops"

    def needs_images_together(self, step: StepImages) -> int:
        return step.together if self.ranks == "all" else step.micro_batch
