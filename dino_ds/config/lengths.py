"""Durations as people write them: steps, epochs or images."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from fractions import Fraction

from dino_ds.errors import ConfigError

UNITS = ("steps", "epochs", "images")


@dataclass(frozen=True)
class Length:
    """A duration: optimizer steps, epochs (passes over the data) or images."""

    value: float
    unit: str
    assumed: bool = field(default=False, compare=False)
    """The unit was not given."""

    def __str__(self) -> str:
        return f"{int(self.value) if self.value == int(self.value) else self.value} {self.unit}"

    @staticmethod
    def parse(text: object) -> Length:
        """From "30 epochs", "30epochs", "1e6 images"; a bare number is steps. Raises ConfigError."""
        if isinstance(text, Length):
            return text
        match = re.fullmatch(r"\s*([0-9.][0-9._]*(?:[eE][+-]?[0-9]+)?)\s*([A-Za-z]*)\s*", str(text))
        units = {name: unit for unit in UNITS for name in (unit, unit[:-1])} | {"": "steps"}
        try:
            value = float(match[1]) if match else math.nan
        except ValueError:
            value = math.nan
        unit = units.get(match[2].lower()) if match else None
        if unit is None or not math.isfinite(value):
            raise ConfigError(f"{str(text)!r} is not a length: write '100 epochs', '5000 steps' or '1e6 images'")
        return Length(value, unit, assumed=not (match and match[2]))

    def in_steps(self, global_batch: int, steps_per_epoch: int) -> int:
        """Optimizer steps, rounded up, >= 0."""
        # Exact decimals: 0.1 epochs of 30 steps are 3 steps, not 3.0000000000000004.
        value = Fraction(repr(self.value))
        per_unit = {"steps": Fraction(1), "epochs": Fraction(steps_per_epoch), "images": Fraction(1, global_batch)}
        return math.ceil(value * per_unit[self.unit])
