"""Evaluations of the teacher while it trains; for k-NN with the baselines that make the number mean something."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from dino_ds.basics.digits import short
from dino_ds.config.evaluation import EVALUATION_OF
from dino_ds.config.recipe import Recipe
from dino_ds.data.base import Source
from dino_ds.data.held_out import held_out_images
from dino_ds.data.normalisation import Normalisation
from dino_ds.data.sources import build_source
from dino_ds.engine import distributed
from dino_ds.errors import ConfigError, DataError
from dino_ds.evals.advice import changes_that_help, with_recipe_keys
from dino_ds.evals.best import Best
from dino_ds.evals.context import EvalContext, Settings
from dino_ds.evals.features import GaveUp, keep_generators, raw_pixels
from dino_ds.evals.held_out_loss import HeldOutLoss, describe_losses
from dino_ds.evals.results import RESULTS, write_results
from dino_ds.evals.shared_images import note_on_shared
from dino_ds.evals.suite import describe_result, evaluate, preflight_eval
from dino_ds.method.teacher import Teacher
from dino_ds.run.run import AtStep, Moment
from dino_ds.run.teacher_files import best_step
from dino_ds.weights.load import Backbone

Results = dict[str, dict[str, Any]]
"""Results by evaluation, as RUN/evaluations.json keeps them."""


class EvalRunner(AtStep):
    """Evaluates every `every` steps by `names` of EVALUATIONS, always on the same images: `sources`, train and test.

    `best` tracks the best teacher and `held_out` measures a loss, each None where the recipe does not ask for it. It
    keeps the k-NN accuracies (percent) of raw pixels, of the untrained network and of the newest teacher, and its step.
    All ranks must make one. Raises ConfigError or DataError, on all ranks, for an evaluation that is not possible.
    """

    def __init__(
        self,
        names: Sequence[str],
        every: int,
        sources: tuple[Source, Source | None],
        settings: Settings,
        image_size: int,
        normalisation: Normalisation,
    ) -> None:
        self._names, self._every, self._settings, self._size = names, every, settings, image_size
        self._normalisation = normalisation
        self._sources = sources
        self.chance = 0.0
        self._compared: list[float] = []
        self._advice = ["train longer (--length)", "on more images"]
        self._notes: list[str] = []
        self._noted: set[str] = set()
        self.raw: float | None = None
        self.untrained: float | None = None
        self.latest: float | None = None
        self._latest_step: int | None = None
        self.best: Best | None = None
        self.held_out: HeldOutLoss | None = None
        self._improved = False
        self._began_as = "untrained network"
        for name in names:
            self._check(name)

    @classmethod
    def build(cls, recipe: Recipe, train: Source, epoch_steps: int) -> EvalRunner | None:
        """The runner of a recipe's `eval` section; None where that says "0 steps", or nothing and there are no labels.

        Every rank must call it. Raises as the constructor does.
        """
        settings, data = recipe.eval, recipe.data
        every = settings.every.in_steps(data.global_batch, epoch_steps)
        named = not data.own_files or settings.root is not None
        names = (("knn",) if named else ()) if settings.evals == "auto" else settings.evals
        if every == 0:
            return None
        best = Best.from_recipe(settings, names)
        test = None
        with distributed.raise_on_all_ranks():
            held_out = held_out_images(recipe, train)
            if named:
                root = settings.root if data.own_files else data.root
                test = build_source(data.source, root, "test", data.download)
        if not names and held_out is None:
            return None
        how = Settings(
            ks=(settings.k,),
            temperature=settings.temperature,
            images=settings.bank_images,
            test_images=settings.test_images,
            workers=data.workers,
            value_range=data.known_range,
            benchmark_root=Path(settings.benchmark_root).expanduser() if settings.benchmark_root else None,
        )
        runner = cls(names, every, (train, test), how, recipe.crops.global_size, Normalisation.of(recipe))
        if best is not None:
            counts = len(test or ()), len(held_out or ())
            best.measured_on = (settings.k, settings.bank_images, settings.test_images, *counts)
        runner.best = best
        if recipe.model.init_from is not None or recipe.stage_start is not None:
            runner._began_as = "start"
        runner.held_out = None if held_out is None else HeldOutLoss(recipe, held_out)
        runner._advice += changes_that_help(recipe)
        runner._notes += note_on_shared(names, train, test, "eval.root")
        if settings.root is not None and not data.own_files:
            runner._notes.append(
                f"eval.root {settings.root} is not read: data.source {data.source} has its own test images"
            )
        return runner

    def _check(self, name: str) -> None:
        """Raises ConfigError or DataError where evaluation `name` lacks something; notes what k-NN is compared by."""
        try:
            context = preflight_eval(name, self._settings, lambda: self._sources)
        except (ConfigError, DataError) as error:
            raise with_recipe_keys(name, error) from None
        if name == "knn":
            self.chance = 100.0 / len(context.train_source.classes or ())
            images = len(context.train_indices), len(context.test_indices)
            self._compared = [*self._settings.ks, self._settings.temperature, *images]

    def due(self, step: int, last: bool) -> bool:
        return last or step % self._every == 0

    def run(self, moment: Moment) -> bool:
        """Metrics, lines of the log, and RUN/evaluations.json."""
        self._improved, losses = False, dict[str, float]()
        results = self.evaluate(moment)
        if results is not None and self.held_out is not None:
            found = self.held_out.measure(moment)
            results, losses = (None, losses) if found is None else (results, found)
        if results is None:
            return False
        stalled = self._track(moment, results, losses)
        if results or losses:
            moment.log.write({"step": moment.step, **self.metrics(results), **losses, **stalled})
        moment.log.info(*self.lines(results), *describe_losses(losses, moment.step))
        if distributed.rank() == 0:
            try:
                write_results(moment.run_dir / RESULTS, results)
            except (OSError, ValueError) as error:
                moment.log.info(f"warning  {RESULTS} can't be written: {error}; training continues")
        return True

    def _track(self, moment: Moment, results: Results, losses: dict[str, float]) -> dict[str, int]:
        """Show the newest value to the tracker of the best; metrics of it."""
        if self.best is None:
            return {}
        if moment.at_start:
            self.best.begin()
        name = self.best.metric
        found = results.get(EVALUATION_OF.get(name, ""), {}).get("results", losses)
        value = self.latest if name == "knn" and name in results else found.get(name)
        due = moment.at_start or moment.step % self._every == 0
        self._improved = self.best.see(moment.step, value, due, moment.at_start)
        return {} if self.best.patience is None else {"stalled_evaluations": self.best.stalled}

    def missed(self, step: int, at_start: bool) -> bool:
        if self.best is None:
            return False
        return at_start or (self.best.seen not in (None, step) and step % self._every == 0)

    def improved(self) -> bool:
        return self._improved

    def finished(self) -> str:
        return self.best.finished if self.best is not None else ""

    def ending(self, run_dir: Path) -> list[str]:
        return self.best.lines(best_step(run_dir)) if self.best is not None else []

    def evaluate(self, moment: Moment) -> Results | None:
        """The results at a moment, or None, on all ranks, if a stop was requested on one of them.

        Data that can't be evaluated is an error at step 0; later it is left out and noted. Training's random
        numbers stay as they are.
        """
        teacher = live_teacher(moment.teacher, self._size, self._normalisation)
        with suppress(GaveUp), keep_generators(moment.device), teacher as model:
            return self._evaluate(model, moment)
        return None

    def _evaluate(self, model: Backbone, moment: Moment) -> Results:
        def context_of(model: Any) -> EvalContext:
            return EvalContext(
                model, self._settings, moment.device, lambda: self._sources, moment.stop_requested, progress=False
            )

        pixels = SimpleNamespace(features=raw_pixels, image_size=self._size, normalisation=self._normalisation)
        context, results, raw = context_of(model), Results(), self.raw
        for name in self._names:
            if any(distributed.gather_objects(moment.stop_requested())):
                raise GaveUp
            began = time.monotonic()
            try:
                found = evaluate(name, context)
                if name == "knn" and raw is None:
                    (raw,) = evaluate(name, context_of(pixels)).values()
            except (ConfigError, DataError) as error:
                if moment.step == 0:
                    raise with_recipe_keys(name, error) from None
                context.notes.append(f"{name} can't be evaluated at step {moment.step}: {error}")
                continue
            about = {"step": moment.step, "images": moment.images}
            results[name] = describe_result(name, context, found, time.monotonic() - began, about)
        self._notes += context.notes
        if "knn" in results:
            (self.latest,) = results["knn"]["results"].values()
            self._latest_step = moment.step
            self.raw = raw
            self.untrained = self.latest if moment.step == 0 else self.untrained
        return results

    def metrics(self, results: Results) -> dict[str, float]:
        """The metrics of metrics.jsonl and TensorBoard: k-NN with its baselines, the others as eval/METRIC."""
        found: dict[str, float] = {}
        for name, result in results.items():
            if name == "knn":
                assert self.latest is not None and self.raw is not None
                found |= {"knn_top1": self.latest, "knn_raw_pixels": self.raw, "knn_chance": self.chance}
            else:
                found |= {f"eval/{metric}": value for metric, value in result["results"].items()}
        return found

    def lines(self, results: Results) -> list[str]:
        """Lines for the log, each note once; the same on all ranks."""
        lines = [f"evals    {note}" for note in dict.fromkeys(self._notes) if note not in self._noted]
        self._noted.update(self._notes)
        self._notes.clear()
        for name, result in results.items():
            values = ", ".join(f"{metric} {short(value, 4)}" for metric, value in result["results"].items())
            label, text = ("k-NN", self.knn_summary()) if name == "knn" else (name, f"{values}; {result['seconds']} s")
            lines.append(f"{label:<8} at step {result['step']}: {text}")
        return lines

    def knn_summary(self) -> str:
        """k-NN next to its baselines: raw pixels, chance, and the network before training."""
        untrained = f", {self._began_as} {self.untrained:.1f} %" if self.untrained is not None else ""
        return f"raw pixels {self.raw:.1f} %{untrained}, teacher {self.latest:.1f} % (chance {self.chance:.1f} %)"

    def warning(self, cut: bool = False) -> str | None:
        """A warning, with advice, where the newest features are worse than raw pixels, else None.

        `cut`: whether --max_steps ended the run before its length.
        """
        if self.latest is None or self.raw is None or self.latest >= self.raw:
            return None
        learned = ""
        if self.untrained is not None:
            helped = "has helped, but not enough" if self.latest > self.untrained else "has not helped"
            learned = f"; the {self._began_as}'s was {self.untrained:.1f} %, so training {helped} yet"
        advice = ["train to the end (--max_steps cut this run short)", *self._advice[1:]] if cut else self._advice
        return (
            f"the teacher's k-NN is below that of raw pixels ({self.latest:.1f} % and {self.raw:.1f} %){learned}; "
            f"{', or '.join(advice)}"
        )

    def short(self) -> str:
        return f"k-NN {self.latest:.1f} %" if self.latest is not None else ""

    def summary(self, cut: bool = False) -> list[str]:
        """The newest k-NN, and the warning if there is one, as lines of the log; `cut` as for `warning`."""
        if self.latest is None:
            return []
        warning = self.warning(cut)
        at = "" if self._latest_step is None else f"at step {self._latest_step}: "  # unknown from an older version
        return [f"k-NN     {at}{self.knn_summary()}", *([f"warning  {warning}"] if warning else [])]

    def state_dict(self) -> dict[str, Any]:
        measured = {"raw": self.raw, "untrained": self.untrained, "latest": self.latest, "step": self._latest_step}
        best = {} if self.best is None else {"best": self.best.state_dict()}
        return {**measured, "of": self._compared, **best}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Baselines of other images or other numbers of neighbours are forgotten: they are not comparable."""
        if "of" not in state or state["of"] == self._compared:
            self.raw, self.untrained, self.latest = state["raw"], state["untrained"], state["latest"]
            self._latest_step = state.get("step")
        self._notes += self.best.load_state_dict(state.get("best")) if self.best is not None else []


@contextmanager
def live_teacher(teacher: Teacher, image_size: int, normalisation: Normalisation) -> Iterator[Backbone]:
    """The newest teacher, not a copy: in FP32 whatever the precision of training, and without a compiler.

    `image_size` is the native side in pixels.
    """
    model = Backbone(teacher.backbone, image_size, "the teacher", {})
    model.normalisation = normalisation
    with teacher.evaluating():
        yield model
