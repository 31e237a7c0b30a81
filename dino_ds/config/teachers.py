"""The sections `teacher` and `gram` of the recipe's schema. No torch here."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import model_validator

from dino_ds.config.crops import EMA, FROZEN
from dino_ds.config.fields import (
    Count,
    Fraction01,
    Length,
    LengthField,
    PathText,
    Ramp,
    Section,
    Side,
    StageLengthField,
    WeightField,
    option,
)
from dino_ds.config.model import ArgumentsField

SNAPSHOT = "snapshot"
"""The value of gram.teacher for the EMA teacher as it is at gram.start."""


class TeacherSection(Section):
    source: PathText | None = option(
        None,
        "to distil: the frozen teacher, a run, weights or a timm name; none = the EMA",
        learned=False,  # but the digest of its weights must stay the same
    )
    distill: Literal["heads", "features"] | None = option(
        None, "of teacher.source the targets: its heads' outputs (none too), or its features"
    )
    momentum: Fraction01 = option(0.996, "EMA momentum of the teacher at the start")
    momentum_end: Fraction01 = option(1.0, "EMA momentum at the end (cosine in between)")
    batch_norm: Literal["auto", "reference", "ema", "frozen"] = option(
        "auto",
        "teacher's BatchNorm: by its batch (reference: DINO), the student's averages (ema), the start's (frozen)",
    )
    others: ArgumentsField = option("{}", 'further EMA teachers, for such terms: {"NAME": {"momentum": 0.9995, ...}}')

    @model_validator(mode="after")
    def _check(self) -> TeacherSection:
        if self.source is None and self.distill == "features":
            raise ValueError("distill features has no effect without source: name a teacher (--teacher.source RUN)")
        return self

    @property
    def taught_by(self) -> str:
        """The name of the teacher whose outputs are the targets."""
        return EMA if self.source is None else FROZEN


class GramSection(Section):
    weight: WeightField = option(
        Ramp(0.0), "of Gram anchoring: similarities of patches stay a teacher's; a ramp begins at gram.start"
    )
    teacher: PathText = option(
        SNAPSHOT, "snapshot = the EMA teacher at gram.start, ema = as it is, or a run or checkpoint", by_content=True
    )
    start: StageLengthField = option(
        Length(0, "steps"), "when the snapshot is taken; the weight is 0 before it", inside_run=True
    )
    refresh_every: LengthField = option(
        Length(0, "steps"), "from gram.start on, how often the EMA teacher replaces it; 0 = never"
    )
    refreshes: Count = option(3, "replacements, at most")
    crop_size: Side | None = option(
        None, "side of crops of its own, without colors: 1 to 2 times the global ones; none = these"
    )
    refused: ClassVar = {
        "gram.weight 0": "gram",
        "gram.refresh_every 0": "gram.refreshes",
        "gram.teacher ema": "gram.crop_size gram.refresh_every",
    }

    @property
    def own_crop_size(self) -> int | None:
        """Side in pixels of the crops that only the Gram teacher sees, or None without such crops."""
        return self.crop_size if self.weight and self.teacher != EMA else None
