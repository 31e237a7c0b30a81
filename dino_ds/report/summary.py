"""The figures of a run that a reader wants first (`--json` prints them), its verdict, its settings and origin."""

from __future__ import annotations

import math
import shlex
from typing import Any

import numpy as np

from dino_ds.basics.formatting import percent, short
from dino_ds.basics.names import step_name
from dino_ds.config.evaluation import margin_of_chance
from dino_ds.config.loading import code_of, recipe_options
from dino_ds.config.recipe import Recipe
from dino_ds.config.schema import flat_values, show_value
from dino_ds.config.stages import ORIGIN, Origin
from dino_ds.costs.step_costs import count_parameters, student_facts
from dino_ds.errors import ConfigError
from dino_ds.evals.tracking import MOST_SHARED, SHARED
from dino_ds.models.specs.backbones import ALL
from dino_ds.report.charts import EVALUATED, Curve, Metrics, find_others, summarize_knn
from dino_ds.report.folder import RunFiles
from dino_ds.report.html import Tag

_NOISE, _FALL = 1.0, 0.2
"""_NOISE: difference in accuracy that may be noise, in points. _FALL: share of the gain whose loss is reported."""


def summarize(run: RunFiles) -> dict[str, Any]:
    """Return plain values for JSON; None for what is unknown. Losses are in nats, accuracies in percent."""
    metrics = run.metrics
    waits, memory = metrics["data_wait_fraction"].finite, metrics["memory_gib"].finite
    return {
        "run": str(run.path),
        "state": run.state,
        "trained": describe_network(run),
        "step": run.step,
        "planned_steps": run.planned_steps,
        "first_step": metrics.first_step,
        "images": _count(metrics.images),
        "epoch": _count(metrics["epoch"]),
        "training_seconds": training_seconds(metrics),
        **{key: _last(metrics[key]) for key in ("loss", "teacher_entropy", "kl")},
        **{key: _last(metrics[key]) for key in find_others(metrics) if not key.startswith(EVALUATED)},
        "knn": summarize_knn(metrics),
        "best": run.best or None,
        "images_per_second": mean_rate(metrics),
        "data_wait_fraction": float(waits.mean()) if len(waits) else None,
        "memory_gib": float(memory.max()) if len(memory) else None,
        "memory_predicted_gib": _last(metrics["memory_predicted_gib"]),
        "skipped_steps": _count(metrics["skipped_steps"]),
        "bad_images": _count(metrics["bad_images"]),
        "evaluations": {e.name: {**e.about, "results": e.results} for e in run.evaluations},
        "incidents": run.events.counts,
        "notes": run.notes,
    }


def make_finding(run: RunFiles, knn: dict[str, float | int] | None) -> tuple[str, str]:
    """Judge whether the run has learned something: return good, odd or bad, and a sentence that says what to do."""
    path = shlex.quote(str(run.path))
    if run.metrics["collapsed"].last == 1:
        return "bad", (
            "Collapsed: the features of all images are alike. Start again with a smaller --optimizer.lr or a longer "
            "--optimizer.warmup; the incidents say more."
        )
    if knn is None:
        return "odd", (
            "Whether it has learned is not known: no labeled images were held out (--eval.val_share 0.1, of class "
            f"folders). For this run: dino-ds eval {path} --root TRAIN --test_root TEST."
        )
    shared = next((e.about.get(SHARED, 0) for e in run.evaluations if e.name == "knn"), 0)
    if shared >= MOST_SHARED:
        return "odd", (
            f"Whether it has learned is not known: {shared:.0%} of the test images looked at are training images too "
            f"(--eval.root). For this run: dino-ds eval {path} --root TRAIN --test_root TEST, with other images."
        )
    newest = f"{percent(knn['teacher'])} at step {knn['step']:,}"
    start = knn.get("untrained", knn.get("start"))
    known = {"at the start": start, "of raw pixels": knn.get("raw_pixels"), "by chance": knn.get("chance")}
    bar, name = max(((value, name) for name, value in known.items() if value is not None), default=(0.0, "before"))
    tests = next((e.about.get("test_images", 0) for e in run.evaluations if e.name == "knn"), 0)
    noise = max(_NOISE, margin_of_chance(tests) if tests > 0 else 0.0)
    if bar > 100 - noise:
        return "odd", (
            f"Whether it has learned can't be told: k-NN is {newest}, beside {percent(bar)} {name}. "
            "Ask about classes that are harder to tell apart (--eval.root)."
        )
    if knn["best"] <= bar + noise:
        chance = f" (differences below {noise:.0f} points may be chance)" if noise > 2 * _NOISE else ""
        return "odd", f"Not yet learned: k-NN is {newest}, beside {percent(bar)} {name}{chance}. Train longer."
    if knn["teacher"] < knn["best"] - max(noise, _FALL * (knn["best"] - bar)):
        step, best = f"{knn['best_step']:,}", percent(knn["best"])
        remedy = (
            f"take that teacher: dino-ds embed {path}/best_teacher.safetensors --out features.npy"
            if run.best
            else "next time keep the best: --eval.keep_best knn"
        )
        return "odd", f"Falls since step {step}: k-NN was {best}, and is {newest}; {remedy}, and end earlier."
    return "good", f"Learned: k-NN is {newest}, beside {percent(bar)} {name}."


def describe_network(run: RunFiles) -> str:
    """The network as "vit_tiny_patch16_224, patch 8, width 96, depth 2, 3 heads; 0.45 M weights with its head"."""
    if run.recipe is None:
        return "a network whose recipe can't be read"
    model = run.recipe.model
    try:
        weights = f"{short(count_parameters(run.recipe) / 1e6)} M weights with its head"
        if model.train != ALL:
            learning = sum(student_facts(run.recipe).trained.values()) / 1e6
            weights += f", {short(learning)} M trained ({model.train})"
    except ConfigError:  # the notes name the user's code that is missing
        weights = "how many weights is not known here"
    return f"{model.backbone}, {model.spec().sizes}; {weights}"


def training_seconds(metrics: Metrics) -> float | None:
    """Return the seconds in the run's own steps, without evaluations and pauses: images / (images per second), summed
    over lines."""
    images, rate = metrics.images, metrics["images_per_second"]
    if not len(images) or len(images) != len(rate):
        return None
    with np.errstate(divide="ignore", invalid="ignore"):
        seconds = np.diff(images.y, prepend=0) / rate.y
    return float(seconds[np.isfinite(seconds)].sum())


def mean_rate(metrics: Metrics) -> float | None:
    """Return the images per second of all training steps, without evaluations and pauses."""
    seconds, images = training_seconds(metrics), _last(metrics.images)
    return images / seconds if seconds and images else None


def _last(curve: Curve) -> float | None:
    """Return the last value, or None if there is none or it is not finite."""
    return curve.last if math.isfinite(curve.last) else None


def _count(curve: Curve) -> int | None:
    value = _last(curve)
    return None if value is None else int(value)


def changed_settings(run: RunFiles) -> list[tuple[Tag, str, str, str]]:
    """Return key, value, default and description of every setting that differs from the default."""
    if run.recipe is None:
        return []
    values, defaults = flat_values(run.recipe), flat_values(Recipe())
    return [
        (Tag(key, tag="code"), show_plain(values[key]), show_plain(defaults[key]), option.description)
        for option in recipe_options()
        for key in [option.name]
        if values[key] != defaults[key]
    ]


def show_plain(value: Any) -> str:
    return show_value(tuple(value) if isinstance(value, list) else value)


def environment_rows(run: RunFiles) -> list[tuple[str, str]]:
    data, versions = run.environment, run.environment.get("versions")
    skipped = ("versions", "starts", ORIGIN)
    rows = [(key, show_plain(value)) for key, value in data.items() if key not in skipped]
    if origin := Origin.read(run.path):
        rows.insert(0, ("began with", f"{origin.run}, step {origin.step} ({origin.stage_start}), run {origin.run_id}"))
    rows += [(kind, run.events.text(kind)) for kind in ("engine", "kernels") if kind in run.events.newest]
    return rows + ([(key, show_plain(value)) for key, value in versions.items()] if isinstance(versions, dict) else [])


def reproduction(run: RunFiles) -> str:
    """Return the command that repeats the training from the files of the run."""
    files = ["--config", f"{run.path}/config.yaml", "--ds_config", f"{run.path}/ds_config.json"]
    if origin := Origin.read(run.path):
        files += ["--from", f"{origin.run}/checkpoints/{step_name(origin.step)}"]
    last = run.events.fact("length", "last_step", int)
    files += ["--max_steps", str(last)] if last and run.planned_steps and last < run.planned_steps else []
    ranks = run.environment.get("ranks")
    several = isinstance(ranks, int) and ranks > 1
    program = ["torchrun", "--nproc_per_node", str(ranks), "dino_ds/train.py"] if several else ["dino-ds", "train"]
    code = ", ".join(code_of(run.recipe)) if run.recipe else ""
    warning = f"  # imports {code}, which config.yaml names: look at it first" if code else ""
    return shlex.join([*program, *files, "--run_dir", "NEW"]) + warning
