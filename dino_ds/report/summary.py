"""The figures of a run that a reader wants first (`--json` prints them), its verdict, its settings and origin."""

from __future__ import annotations

import json
import math
import shlex
from typing import Any

import numpy as np

from dino_ds.basics.names import step_name
from dino_ds.config.begun_with import ORIGIN, Origin
from dino_ds.config.flat import flat_values
from dino_ds.config.loading import recipe_options
from dino_ds.config.recipe import Recipe
from dino_ds.config.schema import show_value
from dino_ds.costs.step_costs import count_parameters, student_facts
from dino_ds.errors import ConfigError
from dino_ds.models.specs.trained import ALL
from dino_ds.report.charts import EVALUATED, find_others, summarise_knn
from dino_ds.report.curves import Curve, Metrics
from dino_ds.report.folder import RunFiles
from dino_ds.report.html import Tag
from dino_ds.report.text import percent, short

_NOISE, _FALL = 1.0, 0.2
"""Points of accuracy that are noise, and the part of the gain whose loss is worth a word."""


def summarise(run: RunFiles) -> dict[str, Any]:
    """Plain values for JSON; None for what the run does not tell. Losses in nats, accuracies in percent."""
    metrics = run.metrics
    return {
        "run": str(run.path),
        "state": run.state,
        "trained": describe_network(run),
        "step": run.step,
        "planned_steps": run.planned_steps,
        "images": _count(metrics["images"]),
        "epoch": _count(metrics["epoch"]),
        "training_seconds": training_seconds(metrics),
        **{key: _last(metrics[key]) for key in ("loss", "teacher_entropy", "kl")},
        **{key: _last(metrics[key]) for key in find_others(metrics) if not key.startswith(EVALUATED)},
        "knn": summarise_knn(metrics),
        "best": run.best or None,
        "images_per_second": mean_rate(metrics),
        "data_wait_fraction": _mean(metrics["data_wait_fraction"]),
        "memory_gib": _most(metrics["memory_gib"]),
        "memory_predicted_gib": _last(metrics["memory_predicted_gib"]),
        "skipped_steps": _count(metrics["skipped_steps"]),
        "bad_images": _count(metrics["bad_images"]),
        "evaluations": {e.name: {**e.about, "results": e.results} for e in run.evaluations},
        "incidents": run.events.counts,
        "notes": run.notes,
    }


def judge(run: RunFiles, knn: dict[str, float | int] | None) -> tuple[str, str]:
    """Whether the run has learned something: good, odd or bad, and a sentence with what to do."""
    if run.metrics["collapsed"].last == 1:
        return "bad", "Collapsed: the features of all images are alike. The incidents say what to change."
    if knn is None:
        return "odd", "Whether it has learned is not known without labels: dino-ds eval RUN --root DIR --test_root DIR."
    newest = f"{percent(knn['teacher'])} at step {knn['step']:,}"
    best = f"{percent(knn['best'])} at step {knn['best_step']:,}"
    start = knn.get("untrained", knn.get("start"))
    known = {"at the start": start, "of raw pixels": knn.get("raw_pixels"), "by chance": knn.get("chance")}
    bar, name = max(((value, name) for name, value in known.items() if value is not None), default=(0.0, "before"))
    if knn["best"] <= bar + _NOISE:
        return "odd", f"Not yet learned: k-NN has reached {best}, beside {percent(bar)} {name}. Train longer."
    if knn["teacher"] < knn["best"] - max(_NOISE, _FALL * (knn["best"] - bar)):
        kept = "best_teacher.safetensors has it" if run.best else "--eval.keep_best knn_top1 would have kept it"
        return "odd", f"Learned, and worse again: k-NN was {best}, and is {newest}; {kept}."
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
    except ConfigError:  # the notes say which of the user's code is not here
        weights = "how many weights is not known here"
    return f"{model.backbone}, {model.spec().sizes}; {weights}"


def training_seconds(metrics: Metrics) -> float | None:
    """Seconds in steps alone: images over images per second, window by window; evaluations and pauses do not count."""
    images, rate = metrics["images"], metrics["images_per_second"]
    if not len(images) or len(images) != len(rate):
        return None
    with np.errstate(divide="ignore", invalid="ignore"):
        seconds = np.diff(images.y, prepend=0) / rate.y
    return float(seconds[np.isfinite(seconds)].sum())


def mean_rate(metrics: Metrics) -> float | None:
    """Images per second of training."""
    seconds, images = training_seconds(metrics), _last(metrics["images"])
    return images / seconds if seconds and images else None


def _last(curve: Curve) -> float | None:
    """The last value, or None if there is none or it is not finite."""
    return curve.last if math.isfinite(curve.last) else None


def _count(curve: Curve) -> int | None:
    value = _last(curve)
    return None if value is None else int(value)


def _most(curve: Curve) -> float | None:
    return float(curve.finite.max()) if len(curve.finite) else None


def _mean(curve: Curve) -> float | None:
    return float(curve.finite.mean()) if len(curve.finite) else None


def changed_settings(run: RunFiles) -> list[tuple[Tag, str, str, str]]:
    """Key, value, default and description of every setting that is not the default."""
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
    skipped = ("versions", "command", "starts", ORIGIN)
    rows = [(key, show_plain(value)) for key, value in data.items() if key not in skipped]
    if origin := Origin.read(run.path):
        rows.insert(0, ("began with", f"{origin.run}, step {origin.step} ({origin.stage_start}), run {origin.run_id}"))
    rows += [(kind, run.events.text(kind)) for kind in ("engine", "kernels") if kind in run.events.newest]
    return rows + ([(key, show_plain(value)) for key, value in versions.items()] if isinstance(versions, dict) else [])


def reproduction(run: RunFiles) -> dict[str, Any]:
    """The commands as they were given, one that uses the run's own files, and the versions."""
    versions, starts = run.environment.get("versions"), _starts(run.environment)
    lines = [
        f"# {start['time']}\n{command_line(start)}" if len(starts) > 1 else command_line(start) for start in starts
    ]
    files = ["--config", f"{run.path}/config.yaml", "--ds_config", f"{run.path}/ds_config.json"]
    if origin := Origin.read(run.path):
        files += ["--from", f"{origin.run}/checkpoints/{step_name(origin.step)}"]
    last = starts[-1] if starts else {"launcher": "", "ranks": run.environment.get("ranks")}
    pins = ""
    if isinstance(versions, dict):
        names = " ".join(f"{name}=={text}" for name, text in versions.items() if name not in ("python", "dino_ds"))
        pins = f"# Python {versions.get('python', '?')}, dino_ds {versions.get('dino_ds', '?')}\npip install {names}"
    return {
        "ds": json.dumps(run.ds, indent=2) if run.ds else "",
        "starts": starts,
        "commands": "\n".join(lines),
        "again": command_line(last | {"command": ["train.py", *files, "--run_dir", "NEW"]}),
        "pins": pins,
        "root": show_value(run.recipe.data.root) if run.recipe else "",
    }


def _starts(environment: dict[str, Any]) -> list[dict[str, Any]]:
    """Starts of a run, each with time, command, launcher and ranks; an older run has the last one only."""
    found = environment.get("starts")
    listed = found if isinstance(found, list) else [environment]
    return [
        {"time": str(start.get("time", "")), "command": command, "launcher": start.get("launcher"), "ranks": ranks}
        for start in listed
        if isinstance(start, dict)
        for command, ranks in [(start.get("command"), start.get("ranks"))]
        if isinstance(command, list) and command
    ]


def command_line(start: dict[str, Any]) -> str:
    """The command line on all processes of one machine; with torchrun if no launcher is known."""
    words = [str(word) for word in start["command"] if not str(word).startswith(("--local_rank", "--local-rank"))]
    ranks = start["ranks"]
    several = isinstance(ranks, int) and (ranks > 1 or start["launcher"])
    deepspeed = start["launcher"] == "deepspeed"
    launcher = ["deepspeed", "--num_gpus"] if deepspeed else ["torchrun", "--nproc_per_node"]
    if words[0] == "train.py":
        program = ["dino_ds/train.py"] if several else ["dino-ds", "train"]
    else:
        program = [*(["--module"] if deepspeed else ["-m"]), "dino_ds"] if several else [words[0]]
    return shlex.join([*([*launcher, str(ranks)] if several else []), *program, *words[1:]])
