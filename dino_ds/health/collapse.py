"""An alarm for a collapsed teacher: without it a run may train for weeks, its loss falling, and learn nothing."""

from __future__ import annotations

import math

NEAR = 0.02
"""Fraction of ln K within which the entropy counts as 0 or as ln K, and spread below which features count as one."""
NO_KL = 0.01
"""Fraction of ln K below which the KL says that the teacher gives every image the same target."""
WINDOWS = 10
"""Consecutive lines of metrics before the alarm: a single batch may come near either bound."""
_HINTS = {
    "one prototype": "the targets are too sharp for the center to keep up: raise objective.teacher_temp, lower "
    "objective.center_momentum or optimizer.lr",
    "uniform": "the targets are too flat: lower objective.teacher_temp (DINO: 0.04 to 0.07), or optimizer.lr",
    "one feature": "lower optimizer.lr, lengthen optimizer.warmup or raise data.global_batch",
}
_BALANCED_HINTS = {
    "one prototype": "Sinkhorn-Knopp balances only rows that differ, and many of them: raise data.global_batch or "
    "objective.teacher_temp, lower optimizer.lr",
    "uniform": "the teacher's outputs are all alike: lower optimizer.lr, raise objective.koleo_weight or lengthen "
    "optimizer.warmup",
}


class _Alarm:
    """Reports a symptom once it has lasted for WINDOWS lines of metrics, and again only after a recovery. It never
    stops a run."""

    def __init__(self) -> None:
        self._windows, self._kind = 0, ""
        self.on = False

    def _report(self, kind: str, began: str, over: str) -> str:
        """Count a line of metrics of this kind; returns `began` if the alarm starts, `over` if it ends, else ""."""
        self._windows = self._windows + 1 if kind and kind == self._kind else int(bool(kind))
        self._kind = kind
        if not kind and self.on:
            self.on = False
            return over
        if self.on or self._windows < WINDOWS:
            return ""
        self.on = True
        return began


class CollapseAlarm(_Alarm):
    """Checks the entropy and the KL of targets over prototypes in each line of metrics.

    Source: DINO, section 5.3 and figure 7 (arXiv 2104.14294): KL -> 0 is a constant output; the entropy tells which:
    -> 0 without centering (one prototype takes all images), -> ln K without sharpening (uniform targets). Uniform
    targets are normal before the end of the learning rate's warm-up.

    rows: what has one target each, an image or a patch. balanced: Sinkhorn-Knopp makes the targets; equal rows get
    uniform ones, and so a constant output shows as uniform targets.
    """

    def __init__(self, prototypes: int, warmup_steps: int, rows: str = "image", balanced: bool = False) -> None:
        super().__init__()
        self._most, self._rows, self._balanced = math.log(prototypes), rows, balanced
        self._warmup_steps = warmup_steps

    def look(self, step: int, entropy: float, kl: float) -> str:
        """The alarm's line when it starts or ends, else "". Entropy and KL in nats are means since the last line of
        metrics."""
        kind = self._kind_of(step, entropy, kl)
        whose = "" if self._rows == "image" else f" for every {self._rows}"
        over = f"collapse after step {step}: over{whose}; entropy {entropy:.3f}, KL {kl:.3f}"
        hints = _HINTS | _BALANCED_HINTS if self._balanced else _HINTS
        began = (
            f"collapse after step {step}: the teacher gives every {self._rows} the same target ({kind}; entropy "
            f"{entropy:.3f} of {self._most:.3f} nats, KL {kl:.4f}, for {WINDOWS} lines; DINO, figure 7); "
            f"{hints.get(kind)}"
        )
        return self._report(kind, began, over)

    def _kind_of(self, step: int, entropy: float, kl: float) -> str:
        if not abs(kl) < NO_KL * self._most:
            return ""
        if entropy < NEAR * self._most:
            return "one prototype"
        return "uniform" if entropy > (1 - NEAR) * self._most and step > self._warmup_steps else ""


class SpreadAlarm(_Alarm):
    """Checks the spread of features over images, for objectives without prototypes: 0 if all images have one feature, 1
    if they fill the sphere. A low spread is normal before the end of the warm-up."""

    def __init__(self, name: str, warmup_steps: int) -> None:
        super().__init__()
        self._name, self._warmup_steps = name, warmup_steps

    def look(self, step: int, spread: float) -> str:
        """The alarm's line when it starts or ends, else "". `spread` is the mean since the last line of metrics."""
        kind = "one feature" if spread < NEAR and step > self._warmup_steps else ""
        measured = f"{self._name} {spread:.3f} of 1"
        alike = f"the student gives every image the same feature ({measured}, for {WINDOWS} lines)"
        began = f"collapse after step {step}: {alike}; {_HINTS.get(kind)}"
        return self._report(kind, began, f"collapse after step {step}: over; {measured}")
