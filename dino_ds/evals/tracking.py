"""Values of evaluations over a run: the best teacher by a metric, k-NN beside its baselines, and the newest results."""

from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dino_ds.basics import files, formatting
from dino_ds.config.evaluation import EVALUATION_OF, VAL_LOSS, EvalSection, margin_of_chance
from dino_ds.config.recipe import Recipe
from dino_ds.errors import ConfigError

RESULTS = "evaluations.json"
"""The file in a run folder with the newest result of each evaluation, a value is null where it is not known:

{"knn": {"step": 1500, "images": 96000, "date": "2026-11-21", "data": null, "train_images": 2880, "test_images": 936,
"seconds": 3.1, "results": {"knn_10": 76.2, ...}}, ...}; `images`: number of images that the teacher had seen; `data`:
images of the evaluation, if not those of the run."""
SHARED, MOST_SHARED = "shared", 0.5
"""Key of the share of test images that are training images too, and the share from which on k-NN tells nothing."""


def name_images(source: str, root: str | None) -> str:
    """The public name of images: without the folders above them."""
    if root is None or (source != "folder" and ":" not in source):
        return source
    folder = Path(os.path.abspath(root))
    return f"{folder.parent.name}/{folder.name}" if folder.name in ("train", "val", "test") else folder.name


def read_results(path: Path) -> dict[str, dict[str, Any]]:
    """Results by evaluation, none if the file is absent. Raises OSError, ValueError."""
    return files.read_object(path) if path.is_file() else {}


def write_results(path: Path, new: dict[str, dict[str, Any]]) -> None:
    """Replace the results of the evaluations in `new`, and keep all others. Raises OSError, ValueError."""
    kept = {**read_results(path), **as_json(new)}
    files.replace_file(path, json.dumps(kept, indent=1) + "\n")


def as_json(results: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The results with None for numbers that are not finite, such as the precision of a query without positives."""
    return {
        name: {**kept, "results": {key: v if math.isfinite(v) else None for key, v in kept["results"].items()}}
        for name, kept in results.items()
    }


@dataclass
class Best:
    """The best value of `metric` so far, its `step`, and the value at the start of the run.
    patience: number of evaluations without progress after which the run ends, None for never. Only evaluations that
    eval.every asks for count, also over restarts. Progress is a value better than in all earlier ones."""

    metric: str
    patience: int | None = None
    value: float | None = None
    step: int | None = None
    start: float | None = None
    start_step: int | None = None
    newest: float | None = None
    reference: float | None = None
    stalled: int = 0
    seen: int | None = None  # step of the newest evaluation, or None before the first one
    basis: str = ""
    """A digest of the images and settings of the evaluation: only values with the same digest are comparable."""

    @staticmethod
    def from_recipe(section: EvalSection, names: tuple[str, ...]) -> Best | None:
        """The tracker that `section` asks for, or None. Raises ConfigError if evaluations `names` lack its metric."""
        metric = section.keep_best
        if metric == "auto":
            metric = "knn" if "knn" in names else "none"
        if metric == "none":
            if section.patience:
                problem = "eval.stop_after needs a metric, and without labeled test images there is no k-NN"
                remedy = "name images (--eval.root FOLDER) or a metric (--eval.keep_best val_loss or rankme)"
                raise ConfigError(f"{problem}: {remedy}")
            return None
        if metric != VAL_LOSS and EVALUATION_OF[metric] not in names:
            problem = f"eval.keep_best {metric} needs labeled test images"
            remedy = "name some (--eval.root FOLDER), or hold some out (--eval.val_share 0.1, of class folders)"
            raise ConfigError(f"{problem}: {remedy}")
        return Best(metric, section.patience)

    def see(self, step: int, value: float | None, due: bool, at_start: bool) -> bool:
        """Record the value of an evaluation, None if it was not possible; returns whether it is the best so far.
        due: whether eval.every asks for this evaluation. at_start: whether the run has made no step yet."""
        self.seen = step
        if value is None:
            return False
        self.newest = value
        if at_start:
            self.start, self.start_step = value, step
        if due and math.isfinite(value) and self._gain(value, self.reference) > 0:
            self.reference, self.stalled = value, 0
        elif due:
            self.stalled += 1
        gain = self._gain(value, self.value)
        # A trained teacher as good as the one at the start takes its place.
        better = math.isfinite(value) and (gain > 0 or (gain == 0 and self.step == self.start_step))
        if better:
            self.value, self.step = value, step
        return better

    def _gain(self, value: float, than: float | None) -> float:
        if than is None:
            return math.inf
        return than - value if self.metric == VAL_LOSS else value - than

    @property
    def finished(self) -> str:
        """The reason to end the run, or "" to go on."""
        if self.patience is None or self.stalled < self.patience:
            return ""
        best = f"{self.metric} {self._shown(self.reference)}"
        return f"eval.stop_after: {self.stalled} evaluations have not bettered {best}"

    def lines(self, kept: int | None) -> list[str]:
        """Lines for the end of the run; kept: step of the best teacher in the run folder, if any."""
        if self.value is None:
            return []
        start = "" if self.start is None else f"; start {self._shown(self.start)}"
        values = f"{self.metric} {self._shown(self.value)}; newest {self._shown(self.newest)}{start}"
        lines = [f"best     step {self.step}: {values} (best_teacher.safetensors)"]
        if self.step != kept:
            there = "none" if kept is None else f"that of step {kept}"
            lines.append(f"warning  the best teacher could not be saved: best_teacher.safetensors is {there}")
        began, now = self.start, self.newest
        if began is not None and now is not None and self.seen != self.start_step and self._gain(now, began) <= 0:
            best = "the start" if self.step == self.start_step else f"step {self.step}"
            worse = f"training has ended no better than the weights that it began with ({self.metric} "
            worse += f"{self._shown(began)}, now {self._shown(now)}): best is {best}"
            solved = f"whether it has learned can't be told: {self.metric} was 100 before training"
            lines.append(f"warning  {solved if began == now == 100 else worse}")
        return lines

    @staticmethod
    def _shown(value: float | None) -> str:
        return "unknown" if value is None else formatting.short(value, 4)

    def state_dict(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "patience"}

    def load_state_dict(self, state: dict[str, Any] | None) -> list[str]:
        """Restore what `state_dict` returned; returns a note if its values are not comparable, and drops them. None:
        the run of the checkpoint kept no best teacher."""
        if state is None:
            return []
        if state["metric"] != self.metric or state["basis"] != self.basis:
            other = f"by {state['metric']}" if state["metric"] != self.metric else "on other images or settings"
            known = "" if state["value"] is None else f", {self._shown(state['value'])} at step {state['step']}"
            return [f"the best teacher so far{known}, was the best {other}: it is sought anew"]
        vars(self).update({name: state[name] for name in self.state_dict() if name != "basis"})
        return []


@dataclass
class Knn:
    """k-NN accuracies of a run in percent: of raw pixels, of the network before training, and of the newest teacher.
    chance: by guessing; images: of the test; shared: share of these that is trained on; began_as: what `untrained` is
    the accuracy of, in words."""

    chance: float = 0.0
    images: int = 0
    shared: float = 0.0
    began_as: str = "untrained network"
    raw: float | None = None
    untrained: float | None = None
    latest: float | None = None
    step: int | None = None  # step of `latest`
    has_baselines_shown: bool = field(default=False, compare=False)
    """Whether this process has logged the baselines of the newest value."""

    def see(self, step: int, latest: float, raw: float, at_start: bool = False) -> None:
        """Record the values of an evaluation; at_start: of the network with which the run or stage begins."""
        self.step, self.latest, self.raw = step, latest, raw
        self.untrained = latest if at_start else self.untrained

    def notes(self) -> list[str]:
        """A note on how much chance changes the accuracy: by 5 points or more with fewer than 400 test images."""
        margin = margin_of_chance(self.images) if 0 < self.images < 400 else 0.0
        note = f"k-NN asks about {self.images} images: differences below {margin:.0f} points may be chance"
        return [note] if margin else []

    def line(self) -> str:
        """The newest value next to its baselines: raw pixels, chance, and the network before training."""
        untrained = f", {self.began_as} {self.untrained:.1f} %" if self.untrained is not None else ""
        return f"raw pixels {self.raw:.1f} %{untrained}, teacher {self.latest:.1f} % (chance {self.chance:.1f} %)"

    def news(self) -> str:
        """The newest value; the first time beside its baselines."""
        if self.has_baselines_shown and self.latest is not None and self.untrained is not None:
            return f"teacher {self.latest:.1f} % ({self.latest - self.untrained:+.1f} since the {self.began_as})"
        self.has_baselines_shown = True
        return self.line()

    def warning(self, cut: bool = False) -> str | None:
        """Warn of test images that are trained on, or of a k-NN below raw pixels'. cut: --max_steps ended the run."""
        if self.shared >= MOST_SHARED:
            return "test images are training images too: k-NN does not tell whether it has learned (--eval.root)"
        if self.latest is None or self.raw is None or self.latest >= self.raw:
            return None
        remedy = "to the end (--max_steps cut this run short)" if cut else "longer (--length)"
        below = f"the teacher's k-NN is below that of raw pixels ({self.latest:.1f} % and {self.raw:.1f} %)"
        return f"{below}; train {remedy}, or on more images"

    def summary(self, cut: bool = False) -> list[str]:
        """The warning, if there is one, and the newest k-NN, as lines of the log; `cut` as for `warning`."""
        if self.latest is None:
            return []
        warnings = [f"warning  {warning}"] if (warning := self.warning(cut)) else []
        return [*warnings, f"k-NN     at step {self.step}: {self.line()}"]

    def state_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("raw", "untrained", "latest", "step")}

    def load_state_dict(self, state: dict[str, Any], comparable: bool) -> list[str]:
        """Restore what `state_dict` returned; if it is not `comparable`, drop it and return a note."""
        if comparable:
            vars(self).update({name: state[name] for name in self.state_dict()})
        elif state["latest"] is not None:
            values = f"k-NN {state['latest']:.1f} % at step {state['step']}, raw pixels {state['raw']:.1f} %"
            other = "what training began with are of other images or settings: they are forgotten, and measured anew"
            return [f"{values} and {other}"]
        return []


def evaluated_every(recipe: Recipe, epoch_steps: int) -> int:
    """Steps between evaluations; a period in epochs or images is shortened so that a short run has ten evaluations."""
    batch, every = recipe.data.global_batch, recipe.eval.every
    steps = every.in_steps(batch, epoch_steps)
    if every.unit == "steps":
        return steps
    length = recipe.length.in_steps(batch, epoch_steps) - recipe.length.begin
    return min(steps, max(1, length // 10))
