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
    "one prototype": "lower optimizer.lr or raise objective.teacher_temp; with Sinkhorn-Knopp raise data.global_batch, "
    "else lower objective.center_momentum",
    "uniform": "lower optimizer.lr; with Sinkhorn-Knopp raise objective.koleo_weight or lengthen optimizer.warmup, "
    "else lower objective.teacher_temp (DINO: 0.04 to 0.07)",
}
_SPREAD_HINT = "lower optimizer.lr, lengthen optimizer.warmup or raise data.global_batch"


class _Alarm:
    """Reports a symptom once it has lasted for WINDOWS lines of metrics, and again only after a recovery. It never
    stops a run."""

    def __init__(self) -> None:
        self._windows, self._kind = 0, ""
        self.on = False

    def _report(self, step: int, kind: str, symptom: str) -> str:
        """Count a line of metrics with a symptom of this kind; returns the line of an alarm that starts, else ""."""
        self._windows = self._windows + 1 if kind and kind == self._kind else int(bool(kind))
        self._kind, was_on = kind, self.on
        self.on = bool(kind) and (was_on or self._windows >= WINDOWS)
        return f"collapse after step {step}: {symptom}" if self.on and not was_on else ""


class CollapseAlarm(_Alarm):
    """Checks the entropy and the KL of targets over prototypes in each line of metrics.

    Source: DINO, section 5.3 and figure 7 (arXiv 2104.14294): KL -> 0 is a constant output; the entropy tells which:
    -> 0 without centering (one prototype takes all images), -> ln K without sharpening (uniform targets). Uniform
    targets are normal before the end of the learning rate's warm-up.

    Sinkhorn-Knopp gives equal rows uniform targets, and so a constant output shows as these.

    rows: what has one target each, an image or a patch.
    """

    def __init__(self, prototypes: int, warmup_steps: int, rows: str = "image") -> None:
        super().__init__()
        self._most, self._rows, self._warmup_steps = math.log(prototypes), rows, warmup_steps

    def look(self, step: int, entropy: float, kl: float) -> str:
        """The alarm's line when it starts, else "". Entropy and KL in nats are means since the last line of metrics."""
        kind = ""
        if abs(kl) < NO_KL * self._most:
            if entropy < NEAR * self._most:
                kind = "one prototype"
            elif entropy > (1 - NEAR) * self._most and step > self._warmup_steps:
                kind = "uniform"
        symptom = (
            f"the teacher gives every {self._rows} the same target ({kind}; entropy {entropy:.3f} of {self._most:.3f} "
            f"nats, KL {kl:.4f}; DINO, figure 7); {_HINTS.get(kind)}"
        )
        return self._report(step, kind, symptom)


class SpreadAlarm(_Alarm):
    """Checks the spread of features over images, for objectives without prototypes: 0 if all images have one feature, 1
    if they fill the sphere. A low spread is normal before the end of the warm-up."""

    def __init__(self, name: str, warmup_steps: int) -> None:
        super().__init__()
        self._name, self._warmup_steps = name, warmup_steps

    def look(self, step: int, spread: float) -> str:
        """The alarm's line when it starts, else "". `spread` is the mean since the last line of metrics."""
        kind = "one feature" if spread < NEAR and step > self._warmup_steps else ""
        symptom = f"the student gives every image the same feature ({self._name} {spread:.3f} of 1); {_SPREAD_HINT}"
        return self._report(step, kind, symptom)
