"""Which teacher of a run is the best by one metric, and how many evaluations have found none that is better."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from dino_ds.basics.digits import short
from dino_ds.config.evaluation import EVALUATION_OF, VAL_LOSS, EvalSection
from dino_ds.errors import ConfigError


@dataclass
class Best:
    """The best value of `metric` so far, its `step`, and the value at the start of the run.

    patience: evaluations without progress after which the run ends, or None for never; those count that are due by
    eval.every, whatever starts a run is made of. Progress is a change of `min_delta` from the last value that counted.
    """

    metric: str
    patience: int | None = None
    min_delta: float = 0.0
    value: float | None = None
    step: int | None = None
    start: float | None = None
    start_step: int | None = None
    newest: float | None = None
    reference: float | None = None
    stalled: int = 0
    seen: int | None = None
    """Step of the newest evaluation, or None before the first one."""
    measured_on: tuple[int, ...] = ()
    """Numbers of images and neighbours: values of others are not comparable."""

    @staticmethod
    def from_recipe(section: EvalSection, names: tuple[str, ...]) -> Best | None:
        """The tracker that `eval` asks for, where `names` are evaluated. Raises ConfigError where the metric is not."""
        metric = section.keep_best
        if metric == "auto":
            metric = "knn" if "knn" in names else "none"
        if metric == "none":
            if section.stop_after:
                raise ConfigError(
                    "eval.stop_after needs a metric, and without labelled test images there is no k-NN: name images "
                    "(--eval.root FOLDER) or a metric (--eval.keep_best val_loss or rankme)"
                )
            return None
        if metric != VAL_LOSS and EVALUATION_OF[metric] not in names:
            raise ConfigError(f"eval.keep_best {metric} needs labelled test images: name some (--eval.root FOLDER)")
        return Best(metric, section.stop_after, section.min_delta)

    def begin(self) -> None:
        """Forget the values of the run that a stage began with."""
        fresh = Best(self.metric, self.patience, self.min_delta, measured_on=self.measured_on)
        vars(self).update(vars(fresh))

    def see(self, step: int, value: float | None, due: bool, at_start: bool) -> bool:
        """Take the value of an evaluation, or None where it was not possible; whether it is the best one so far.

        due: it is one of those that eval.every asks for. at_start: the run has made no step yet.
        """
        self.seen = step
        if value is None:
            return False
        self.newest = value
        if at_start:
            self.start, self.start_step = value, step
        if due:
            self._count(value)
        better = math.isfinite(value) and (self.value is None or self._gain(value, self.value) > 0)
        if better:
            self.value, self.step = value, step
        return better

    def _count(self, value: float) -> None:
        gain = self._gain(value, self.reference) if self.reference is not None else math.inf
        if math.isfinite(value) and gain > 0 and gain >= self.min_delta:
            self.reference, self.stalled = value, 0
        else:
            self.stalled += 1

    def _gain(self, value: float, than: float) -> float:
        return than - value if self.metric == VAL_LOSS else value - than

    @property
    def finished(self) -> str:
        """The reason to end the run, or "" to go on."""
        if self.patience is None or self.stalled < self.patience:
            return ""
        by = f" by {self.min_delta:g}" if self.min_delta else ""
        what = f"{self.metric} {self._shown(self.reference)}"
        return f"eval.stop_after: {self.stalled} evaluations have not bettered {what}{by}"

    def lines(self, kept: int | None) -> list[str]:
        """Lines for the end of the run; `kept` is the step of the teacher that the folder has as the best, if any."""
        if self.value is None:
            return []
        values = f"{self.metric} {self._shown(self.value)}; newest {self._shown(self.newest)}{self._of_start()}"
        found = [f"best     step {self.step}: {values} (--weights best)"]
        if self.step != kept:
            there = "none" if kept is None else f"that of step {kept}"
            found.append(f"warning  the best teacher could not be saved: best_teacher.safetensors is {there}")
        began, now = self.start, self.newest
        if began is not None and now is not None and self.seen != self.start_step and self._gain(now, began) <= 0:
            best = "the start" if self.step == self.start_step else f"step {self.step}"
            found.append(
                f"warning  training has ended no better than the weights that it began with ({self.metric} "
                f"{self._shown(began)}, now {self._shown(now)}): best is {best}"
            )
        return found

    def _of_start(self) -> str:
        """Words for the value at the start, and by how much the best one is better."""
        if self.start is None or self.value is None:
            return ""
        gain = self._gain(self.value, self.start)
        how = f"is beaten by {self._shown(gain)}" if gain > 0 else "stays best"
        return f"; start {self._shown(self.start)}, which {how}"

    @staticmethod
    def _shown(value: float | None) -> str:
        return "unknown" if value is None else short(value, 4)

    def state_dict(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name not in ("patience", "min_delta")}

    def load_state_dict(self, state: dict[str, Any] | None) -> list[str]:
        """Take back what `state_dict` gave; a note where its values are not comparable, and forgotten. A version that
        had none gave None."""
        if state is None:
            return []
        if (state["metric"], tuple(state["measured_on"])) != (self.metric, self.measured_on):
            return [f"the best teacher is sought anew: it was the best by {state['metric']}, or on other images"]
        known = {name: state[name] for name in self.state_dict() if name != "measured_on"}
        vars(self).update(known)
        return []
