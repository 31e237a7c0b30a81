"""Evaluates the teacher during training; k-NN accuracies come with baselines that give them a meaning.

The held-out loss is the objective's own, on images that are never trained on: always the same crops, against the
teacher's targets. Every micro-batch is measured by itself, whatever the number of ranks: terms that compare images
(Sinkhorn-Knopp, KoLeo) see one micro-batch, and the means over images are equal to the bit on any number of ranks whose
kernels round alike."""

from __future__ import annotations

import hashlib
import sys
import time
from collections.abc import Generator, Sequence
from contextlib import closing, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

from dino_ds.basics.formatting import short
from dino_ds.config.evaluation import BENCHMARKS, EVALUATION_OF, VAL_LOSS
from dino_ds.config.recipe import Recipe
from dino_ds.data.batches import LoaderBatch, LoaderOptions, MultiCropDataset, as_it_is, started, worker_options
from dino_ds.data.image_set import digest_of
from dino_ds.data.images import Source, evenly_spaced_indices
from dino_ds.data.loader import to_device
from dino_ds.data.multicrop import MultiCrop
from dino_ds.data.normalization import Normalization
from dino_ds.data.sources import build_source, held_out_images, labeled_test
from dino_ds.engine import distributed
from dino_ds.errors import ConfigError, DataError
from dino_ds.evals.context import EvalContext, Settings, images_in_use, live_teacher
from dino_ds.evals.features import GaveUp, ImageMemory, keep_generators, raw_pixels
from dino_ds.evals.suite import OF_ONE_SET, describe_result, evaluate, note_on_shared, preflight_eval, with_recipe_keys
from dino_ds.evals.tracking import RESULTS, SHARED, Best, Knn, evaluated_every, write_results
from dino_ds.health.beat import Event
from dino_ds.run.run import PeriodicTask, StepContext
from dino_ds.run.run_folder import best_step
from dino_ds.weights.load import Backbone

Results = dict[str, dict[str, Any]]  # results by evaluation, as RUN/evaluations.json keeps them


class EvalRunner(PeriodicTask):
    """Runs the evaluations `names` every `every` steps, always on the same images: `sources`, train and test.
    `best` tracks the best teacher and `held_out` measures a loss; each is None if the recipe does not ask for it. All
    ranks must construct it. Raises ConfigError or DataError, on all ranks, for an evaluation that is not possible."""

    def __init__(
        self,
        names: Sequence[str],
        every: int,
        sources: tuple[Source, Source | None],
        settings: Settings,
        image_size: int,
        normalization: Normalization,
    ) -> None:
        self._names, self._every, self._settings, self._size = names, every, settings, image_size
        self._normalization, self._sources = normalization, sources
        self._notes, self._noted = list[str](), set[str]()
        self.knn, self._memory = Knn(), ImageMemory()
        self.best: Best | None = None
        self.held_out: HeldOutLoss | None = None
        self._improved = False
        self._anew = False  # a checkpoint's values are not comparable: they are measured again before training goes on
        for name in names:
            try:
                context = preflight_eval(name, settings, lambda: sources)
            except (ConfigError, DataError) as error:
                raise with_recipe_keys(name, error) from None
            if name == "knn":
                self.knn.chance = 100.0 / len(context.labeled_sources[0].classes or ())
                self.knn.images = len(context.test_indices)
        digest = ""
        if distributed.rank() == 0:
            pairs = zip(sources, (settings.images, settings.test_images or settings.images), strict=True)
            of_images = [digest_of(images, images_in_use(images, most)) for images, most in pairs if images is not None]
            values = settings.ks, settings.temperature, settings.value_range, image_size, normalization
            digest = hashlib.blake2b(repr([*values, *of_images]).encode(), digest_size=16).hexdigest()
        self.basis = distributed.gather_objects(digest)[0]
        """A digest of the images and settings: only values with the same digest are comparable."""

    @classmethod
    def build(cls, recipe: Recipe, train: Source, epoch_steps: int) -> EvalRunner | None:
        """The runner for a recipe's `eval` section, None if there is nothing to evaluate. Every rank must call it."""
        section, data = recipe.eval, recipe.data
        every = evaluated_every(recipe, epoch_steps)
        if every == 0:
            return None
        with distributed.raise_on_all_ranks():
            held_out, test = held_out_images(recipe, train), _test_images(recipe, train)
        benchmarks = Path(section.benchmark_root).expanduser() if section.benchmark_root else None
        how: dict[str, Any] = {"workers": data.workers, "value_range": data.known_range, "benchmark_root": benchmarks}
        settings = Settings((section.k,), images=section.bank_images, test_images=section.test_images, **how)
        names, problem = _find_names(recipe, train, test, settings)
        best = Best.from_recipe(section, names)
        if not names and held_out is None:
            return None
        runner = cls(names, every, (train, test), settings, recipe.crops.global_size, Normalization.of(recipe))
        runner.best = best
        if recipe.model.init_from is not None or recipe.stage_start is not None:
            runner.knn.began_as = "start"
        runner.held_out = None if held_out is None else HeldOutLoss(recipe, held_out)
        if best is not None:
            best.basis = runner.held_out.basis if best.metric == VAL_LOSS and runner.held_out else runner.basis
        unread = f"eval.root {section.root} is not read: data.source {data.source} has its own test images"
        runner._notes += [unread] * (section.root is not None and not data.own_files)
        runner.knn.shared, shared = note_on_shared(names, train, test, "eval.root")
        runner._notes += [*problem, *runner.knn.notes(), *shared]
        if section.val_root:
            runner._notes += note_on_shared([VAL_LOSS], train, held_out, "eval.val_root", "held-out")[1]
        return runner

    def due(self, step: int, last: bool) -> bool:
        return last or step % self._every == 0

    def run(self, moment: StepContext) -> bool:
        """Evaluate; write metrics, lines of the log, and RUN/evaluations.json. False if a stop was requested."""
        self._improved, losses = False, dict[str, float]()
        results = self.evaluate(moment)
        if results is not None and self.held_out is not None:
            measured = self.held_out.measure(moment)
            results, losses = (None, losses) if measured is None else (results, measured)
        if results is None:
            return False
        metrics, knn = dict[str, Any](), self.knn
        for name, result in results.items():
            named = {f"eval/{metric}": value for metric, value in result["results"].items()}
            of_knn = {"knn_top1": knn.latest, "knn_raw_pixels": knn.raw, "knn_chance": knn.chance}
            metrics |= of_knn if name == "knn" else named
        metrics |= losses
        if self.best is not None:
            if moment.at_start:  # the values of the run that a stage began with are forgotten
                self.best = Best(self.best.metric, self.best.patience, basis=self.best.basis)
            values = results.get(EVALUATION_OF.get(self.best.metric, ""), {}).get("results", losses)
            is_knn = self.best.metric == "knn" and "knn" in results
            value = self.knn.latest if is_knn else values.get(self.best.metric)
            due = moment.at_start or moment.step % self._every == 0
            self._improved = self.best.see(moment.step, value, due, moment.at_start)
            metrics |= {} if self.best.patience is None else {"stalled_evaluations": self.best.stalled}
        if self._anew and not moment.at_start:
            metrics["measured_anew"] = 1  # evaluations before it were on other images or settings
        self._anew = False
        if results or losses:
            moment.log.write({"step": moment.step, **metrics})
        moment.log.info(*self.lines(results))
        if losses:
            moment.log.info(f"val_loss at step {moment.step}: {losses['val_loss']:.4f}")
        if distributed.rank() == 0:
            try:
                write_results(moment.run_dir / RESULTS, results)
            except (OSError, ValueError) as error:
                moment.log.info(f"warning  {RESULTS} can't be written: {error}; training continues")
        return True

    def missed(self, step: int, at_start: bool) -> bool:
        was_due = self.best is not None and self.best.seen not in (None, step) and step % self._every == 0
        return self._anew or at_start or was_due

    def improved(self) -> bool:
        return self._improved

    def finished(self) -> str:
        return self.best.finished if self.best is not None else ""

    def ending(self, run_dir: Path, cut: bool) -> list[str]:
        best = self.best.lines(best_step(run_dir)) if self.best is not None else []
        return [*best, *self.knn.summary(cut)]

    def evaluate(self, moment: StepContext) -> Results | None:
        """Evaluate the teacher, without changing training's random numbers; None on all ranks if one was asked to stop.
        Data that can't be evaluated is an error at step 0; later the evaluation is skipped, with a note."""
        teacher = live_teacher(moment.teacher, self._size, self._normalization)
        with suppress(GaveUp), keep_generators(moment.device), teacher as model:
            return self._evaluate(model, moment)
        return None

    def _evaluate(self, model: Backbone, moment: StepContext) -> Results:
        settings, device, give_up = self._settings, moment.device, moment.stop_requested

        def context_of(model: Any) -> EvalContext:
            context = EvalContext(model, settings, device, lambda: self._sources, give_up, progress=False)
            context.memory = self._memory
            return context

        pixels = SimpleNamespace(features=raw_pixels, image_size=self._size, normalization=self._normalization)
        context, results, raw = context_of(model), Results(), self.knn.raw
        for name in self._names:
            if any(distributed.gather_objects(moment.stop_requested())):
                raise GaveUp
            began = time.monotonic()
            try:
                values = evaluate(name, context)
                if name == "knn" and raw is None:
                    (raw,) = evaluate(name, context_of(pixels)).values()
            except (ConfigError, DataError) as error:
                if moment.step == 0:
                    raise with_recipe_keys(name, error) from None
                context.notes.append(f"{name} can't be evaluated at step {moment.step}: {error}")
                continue
            about = {"step": moment.step, "images": moment.images}
            results[name] = describe_result(name, context, values, time.monotonic() - began, about)
        self._notes += context.notes
        if "knn" in results:
            assert raw is not None
            (latest,) = results["knn"]["results"].values()
            self.knn.see(moment.step, latest, raw, moment.at_start)
            results["knn"] |= {SHARED: self.knn.shared} if self.knn.shared else {}
        return results

    def lines(self, results: Results) -> list[str]:
        """Lines for the log, each note once; the same on all ranks."""
        lines = [f"evals    {note}" for note in dict.fromkeys(self._notes) if note not in self._noted]
        self._noted.update(self._notes)
        self._notes.clear()
        for name, result in results.items():
            values = {"" if metric == name else f"{metric} ": value for metric, value in result["results"].items()}
            shown = ", ".join(f"{metric}{short(value, 4)}" for metric, value in values.items())
            label, text = ("k-NN", self.knn.news()) if name == "knn" else (name, shown)
            line, detail = f"{label:<8} at step {result['step']}: {text}", name == "statistics" and "knn" in results
            lines.append(Event(line, label, detail))
        return lines

    def state_dict(self) -> dict[str, Any]:
        best = {} if self.best is None else {"best": self.best.state_dict()}
        return {**self.knn.state_dict(), "basis": self.basis, **best}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned; values on other images or settings are dropped, and measured again."""
        lines = self.knn.load_state_dict(state, state["basis"] == self.basis)
        lines += self.best.load_state_dict(state.get("best")) if self.best is not None else []
        self._anew, self._notes = bool(lines), [*self._notes, *lines]


def _test_images(recipe: Recipe, train: Source) -> Source | None:
    """The labeled test images: those of eval.root or of a dataset, else those that eval.val_share holds out; None if no
    evaluation needs them."""
    data, root, evals = recipe.data, recipe.eval.root, recipe.eval.evals
    if data.own_files and root is None:
        needed = evals == "auto" or set(evals) - {*OF_ONE_SET, *BENCHMARKS}
        return labeled_test(train) if needed else None
    return build_source(data.source, root if data.own_files else data.root, "test", data.download)


def _find_names(
    recipe: Recipe, train: Source, test: Source | None, settings: Settings
) -> tuple[tuple[str, ...], list[str]]:
    """A run's evaluations, and a note if eval.evals "auto" asks for k-NN on held-out images that is not possible."""
    section = recipe.eval
    if section.evals != "auto" or test is None:
        return () if section.evals == "auto" else section.evals, []
    if recipe.data.own_files and section.root is None:
        try:
            preflight_eval("knn", settings, lambda: (train, test))
        except DataError as error:
            return (), [f"no k-NN on the held-out images: {with_recipe_keys('knn', error)}"]
    return ("knn",), []


class HeldOutLoss:
    """Measures the held-out loss as val_loss, and the scalars and the KL of loss terms, each as val_NAME.
    Crops and masks depend on the images and a fixed seed alone. Raises DataError for fewer than two images."""

    def __init__(self, recipe: Recipe, source: Source) -> None:
        self._recipe, self._source = recipe, source
        count = min(len(source), recipe.eval.test_images)
        if count < 2:
            raise DataError(f"a held-out loss needs two images, and there is {count}: name more, or a larger share")
        # Micro-batches have 32 to 63 images, or fewer if the global batch or the count is smaller, but never one.
        parts = max(1, count // min(32, max(2, recipe.data.global_batch)))
        chosen = evenly_spaced_indices(len(source), count)
        self._parts = [part.tolist() for part in np.array_split(np.array(chosen), parts)]
        self._noted, self._memory = False, ImageMemory()
        self.basis = digest_of(source, chosen)
        """A digest of the images: only values with the same digest are comparable."""

    def measure(self, moment: StepContext) -> dict[str, float] | None:
        """The metrics, {} if images can't be read any more, or None if a stop was requested; the same on all ranks.
        Leaves training's state and random numbers unchanged. Raises DataError only at the start of a run."""
        assert moment.training is not None
        scalars, losses, bad = moment.training.objective.scalars, dict[int, list[float]](), list[str]()
        ranks, mine = distributed.world_size(), distributed.rank()
        rounds = [self._parts[first : first + ranks] for first in range(0, len(self._parts), ranks)]
        # In the last round a rank without a part repeats another rank's: every rank must join each pass.
        my_parts = [parts[mine % len(parts)] for parts in rounds]
        kept = self._memory.batches("held out", lambda: self._batches(my_parts, moment), _copied)
        with keep_generators(moment.device), closing(kept) as batches:
            for number, (part, batch) in enumerate(zip(my_parts, batches, strict=True)):
                error = batch if isinstance(batch, DataError) else None
                answers = distributed.gather_objects((moment.stop_requested(), error))
                if any(stop for stop, _ in answers):
                    return None
                if error := next((error for _, error in answers if error), None):
                    if moment.at_start:
                        raise error
                    moment.log.info(f"evals    no held-out loss at step {moment.step}: {error}")
                    return {}
                assert isinstance(batch, LoaderBatch)
                bad += batch.bad
                with distributed.alone():
                    loss, values = moment.training.measure(to_device(batch, moment.device))
                if mine < len(rounds[number]):
                    losses[number * ranks + mine] = [len(part), float(loss), *(float(values[name]) for name in scalars)]
        return self._means(losses, bad, moment)

    def _means(self, losses: dict[int, list[float]], bad: list[str], moment: StepContext) -> dict[str, float]:
        """Means over all images, summed in the order of the micro-batches and not of the ranks."""
        assert moment.training is not None
        answers, objective = distributed.gather_objects((losses, bad)), moment.training.objective
        rows = dict(sorted((number, row) for by_number, _ in answers for number, row in by_number.items())).values()
        unreadable = sorted({name for _, names in answers for name in names})
        if unreadable and not self._noted:
            such = ", ".join(unreadable[:5])
            moment.log.info(f"evals    {len(unreadable)} held-out images can't be read, others stand for them: {such}")
            self._noted = True
        images = sum(row[0] for row in rows)
        names = ("loss", *objective.scalars)
        means = {name: sum(row[0] * row[i] for row in rows) / images for i, name in enumerate(names, 1)}
        means |= {entropy.kl: means[entropy.loss] - means[entropy.scalar] for entropy in objective.entropies}
        return {f"val_{name}": value for name, value in means.items()}

    def _batches(self, my_parts: list[list[int]], moment: StepContext) -> Generator[Any, None, None]:
        """Yield a LoaderBatch for each list of images, or a DataError in its stead."""
        options = LoaderOptions.of(self._recipe, seed=0, device=moment.device, shares=())
        keys = [[(0, index) for index in part] for part in my_parts]
        dataset = MultiCropDataset(self._source, MultiCrop.of(self._recipe), options)
        workers = worker_options(self._recipe.data.workers)
        loader: Any = DataLoader(dataset, batch_sampler=keys, collate_fn=as_it_is, **workers)
        with started(loader, self._source) as batches:
            yield from batches


def _copied(batch: Any) -> tuple[Any, int]:
    """A copy of a batch and its size in bytes; an error counts as too large to be kept."""
    if not isinstance(batch, LoaderBatch):
        return batch, sys.maxsize
    return batch.moved(torch.Tensor.clone), sum(crops.nbytes for crops in batch.crops.values())
