"""Evaluations of the teacher while it trains; for k-NN with the baselines that make the number mean something."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dino_ds import distributed
from dino_ds.config.recipe import Recipe
from dino_ds.data.base import Source
from dino_ds.data.sources import build_source
from dino_ds.errors import ConfigError, DataError
from dino_ds.evals.features import generators_kept, raw_pixels
from dino_ds.evals.live import LiveTeacher
from dino_ds.evals.rehearsal import preflight_eval
from dino_ds.evals.results import describe_result
from dino_ds.evals.subject import EvalContext, GaveUp, Settings
from dino_ds.evals.suite import evaluate, images_of
from dino_ds.teacher import Teacher

Results = dict[str, dict[str, Any]]
"""By evaluation, as RUN/evaluations.json keeps them."""


class EvalRunner:
    """Evaluates every `every` steps by `names` of EVALUATIONS, always on the same images, `train` and `test`.

    Of k-NN it keeps the accuracy (percent) of raw pixels, of the untrained network and of the newest teacher. All ranks
    must make one. Raises ConfigError or DataError, on all ranks, for an evaluation that can't be made.
    """

    def __init__(
        self,
        names: Sequence[str],
        every: int,
        train: Source,
        test: Source | None,
        settings: Settings,
        image_size: int,
    ) -> None:
        self._names, self._every, self._settings, self._size = names, every, settings, image_size
        self._sources = (train, test)
        self.chance = 0.0
        self._compared: list[float] = []
        self._notes: list[str] = []
        self._said: set[str] = set()
        self.raw: float | None = None
        self.untrained: float | None = None
        self.latest: float | None = None
        for name in names:
            self._check(name)

    @classmethod
    def build(cls, recipe: Recipe, train: Source, epoch_steps: int) -> EvalRunner | None:
        """None where evaluation is switched off, or by itself and there is nothing labelled to evaluate on.

        All ranks must call it. Raises ConfigError or DataError, on all ranks, for an evaluation that can't be made.
        """
        settings, data = recipe.eval, recipe.data
        every = settings.every.in_steps(data.global_batch, epoch_steps)
        named = not data.own_files or settings.root is not None
        names = (("knn",) if named else ()) if settings.evals == "auto" else settings.evals
        if every == 0 or not names:
            return None
        test = None
        with distributed.raise_on_all_ranks():
            if named:
                root = settings.root if data.own_files else data.root
                test = build_source(data.source, root, "test", data.download)
        how = Settings(
            ks=(settings.k,),
            temperature=settings.temperature,
            images=settings.bank_images,
            test_images=settings.test_images,
            workers=data.workers,
            value_range=data.known_range,
            benchmark_root=Path(settings.benchmark_root).expanduser() if settings.benchmark_root else None,
        )
        return cls(names, every, train, test, how, recipe.crops.global_size)

    def _check(self, name: str) -> None:
        """Raises ConfigError, DataError."""
        try:
            rehearsed = preflight_eval(name, self._settings, lambda: self._sources)
        except (ConfigError, DataError) as error:
            raise _explained(name, error) from None
        if name == "knn":
            self._remember_neighbours(rehearsed)

    def _remember_neighbours(self, subject: EvalContext) -> None:
        """What the accuracies depend on, and that of chance."""
        self.chance = 100.0 / len(subject.train_source.classes or ())
        images = len(subject.train_indices), len(subject.test_indices)
        self._compared = [*self._settings.ks, self._settings.temperature, *images]

    def due(self, step: int) -> bool:
        return step % self._every == 0

    def evaluate(
        self,
        teacher: Teacher,
        step: int,
        images: int,
        device: torch.device,
        give_up: Callable[[], bool] = lambda: False,
    ) -> Results | None:
        """After `step` steps, 0 for the untrained network, of `images` images; all ranks must call it.

        `give_up` is asked every batch; where it has said yes on any rank nothing is evaluated: None, on all ranks.
        What can't be evaluated is an error of the data at step 0; later it is left out and noted. Training's random
        numbers stay as they are.
        """
        with generators_kept(device):
            try:
                return self._evaluate(LiveTeacher(teacher, self._size), step, images, device, give_up)
            except GaveUp:
                return None

    def _evaluate(
        self, model: LiveTeacher, step: int, images: int, device: torch.device, give_up: Callable[[], bool]
    ) -> Results:
        def subject(of: Any) -> EvalContext:
            return EvalContext(of, self._settings, device, lambda: self._sources, give_up, progress=False)

        asked, results, raw = subject(model), Results(), self.raw
        for name in self._names:
            if any(distributed.gather_objects(give_up())):
                raise GaveUp
            began = time.monotonic()
            try:
                found = evaluate(name, asked)
                if name == "knn" and raw is None:
                    (raw,) = evaluate(name, subject(_RawPixels(self._size))).values()
            except (ConfigError, DataError) as error:
                if step == 0:
                    raise _explained(name, error) from None
                asked.notes.append(f"{name} can't be evaluated at step {step}: {error}")
                continue
            results[name] = describe_result(found, time.monotonic() - began, step, images, **images_of(name, asked))
        self._notes += asked.notes
        if "knn" in results:
            (self.latest,) = results["knn"]["results"].values()
            self.raw = raw
            self.untrained = self.latest if step == 0 else self.untrained
        return results

    def metrics(self, results: Results) -> dict[str, float]:
        """As metrics.jsonl and TensorBoard have them: k-NN with its baselines, the others as eval/METRIC."""
        found: dict[str, float] = {}
        for name, result in results.items():
            if name == "knn":
                assert self.latest is not None and self.raw is not None
                found |= {"knn_top1": self.latest, "knn_raw_pixels": self.raw, "knn_chance": self.chance}
            else:
                found |= {f"eval/{metric}": value for metric, value in result["results"].items()}
        return found

    def lines(self, results: Results) -> list[str]:
        """For people; what was noted is said once. The same on all ranks."""
        said = [f"evals    {note}" for note in dict.fromkeys(self._notes) if note not in self._said]
        self._said.update(self._notes)
        self._notes.clear()
        for name, result in results.items():
            values = ", ".join(f"{metric} {value:.4g}" for metric, value in result["results"].items())
            label, text = ("k-NN", self.knn_summary()) if name == "knn" else (name, f"{values}; {result['seconds']} s")
            said.append(f"{label:<8} at step {result['step']}: {text}")
        return said

    def knn_summary(self) -> str:
        """The honest line of k-NN: what pixels and chance give, before and after."""
        untrained = f", untrained network {self.untrained:.1f} %" if self.untrained is not None else ""
        return f"raw pixels {self.raw:.1f} %{untrained}, teacher {self.latest:.1f} % (chance {self.chance:.1f} %)"

    def warning(self) -> str | None:
        """At the end of a run whose features are worse than none, what to try; else None."""
        if self.latest is None or self.raw is None or self.latest >= self.raw:
            return None
        return (
            f"the teacher's k-NN is below that of raw pixels ({self.latest:.1f} % and {self.raw:.1f} %): it has "
            "learned nothing of use yet; train longer (--length), on more images, with smaller patches "
            "(--model.patch_size), or images of 32 to 64 pixels with --crops.augment low_res"
        )

    def state_dict(self) -> dict[str, Any]:
        return {"raw": self.raw, "untrained": self.untrained, "latest": self.latest, "of": self._compared}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Baselines of other images or neighbours are forgotten; they would be compared with what they are not."""
        if "of" not in state or state["of"] == self._compared:
            self.raw, self.untrained, self.latest = state["raw"], state["untrained"], state["latest"]


class _RawPixels:
    """The baseline that any learning must beat, as a `Model` for k-NN."""

    def __init__(self, image_size: int) -> None:
        self.image_size = image_size

    def features(self, images: Tensor) -> Tensor:
        return raw_pixels(images)


def _explained(name: str, error: ConfigError | DataError) -> ConfigError | DataError:
    """An evaluation's own words, with our keys for the flags of `dino-ds eval`."""
    words = {
        "(--images)": "(eval.bank_images, eval.test_images)",
        "--images": "--eval.bank_images",
        "--test_root": "--eval.root",
        "--benchmark_root": "--eval.benchmark_root",
        "--k": "--eval.k",
    }
    text = re.sub("|".join(map(re.escape, words)), lambda flag: words[flag[0]], str(error))
    return type(error)(f"eval.evals {name}: {text}")
