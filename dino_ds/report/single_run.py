"""`dino-ds report`: a run's figures (`--json` prints them), its verdict, and its page by the template run.html."""

from __future__ import annotations

import base64
import io
import json
import math
import os
import shlex
from collections.abc import Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, features

from dino_ds import __version__
from dino_ds.basics.files import check_absent, replace_file, why_not_writable
from dino_ds.basics.formatting import duration, gib, nats, number, percent, short
from dino_ds.basics.names import step_name
from dino_ds.config import evaluation, loading, recipe
from dino_ds.config.schema import flat_values, show_value
from dino_ds.config.stages import ORIGIN, Origin
from dino_ds.costs.step_costs import count_parameters, student_facts
from dino_ds.errors import ConfigError
from dino_ds.evals.tracking import MOST_SHARED, SHARED
from dino_ds.models.specs.backbones import ALL
from dino_ds.options import commands, definition
from dino_ds.report import html
from dino_ds.report.folder import LEVELS, MOST_OF_A_KIND, RunFiles, read_run

_NOISE, _FALL = 1.0, 0.2
"""_NOISE: difference in accuracy that may be noise, in points. _FALL: share of the gain whose loss is reported."""
_STATES = {"failed": "ended by an error", "running": "still running", "unfinished": "not finished"}
_MOST = 12
_PICTURES = {
    "map": "Map of images: those whose features are alike lie together",
    "neighbors": "Nearest neighbors of six images, with the cosines of their features",
    "pca": "Patches, colored by the first three principal components of their features",
    "attention": "Attention of the CLS token, head by head",
}  # titles of the kinds of pictures, in the order of the page


def run(options: commands.ReportOptions) -> definition.Result:
    """Write RUN/report.html; return its path and a summary of the run. Raises ConfigError."""
    folder = Path(os.path.expanduser(options.run))
    page = Path(os.path.expanduser(options.out)) if options.out else folder / "report.html"
    if page != folder / "report.html":
        check_absent(page)
    if page.suffix not in (".html", ".htm"):
        raise ConfigError(f"--out {page} must end in .html")
    is_missing = not page.parent.is_dir()
    if (is_missing or page.is_dir() or why_not_writable(page)) and not (is_missing and page.parent == folder):
        raise ConfigError(f"{page} can't be written: {page.parent} is not a writable folder; name another with --out")
    files = read_run(folder)
    today = datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
    foot = html.render("foot.html", version=__version__, today=today, folders=[str(folder.resolve())])
    try:
        replace_file(page, html.build_document(files.name, draw_run(files) + foot))
    except OSError as error:
        raise ConfigError(f"{page} can't be written: {error.strerror or error}; name another with --out") from None
    facts = summarize(files)
    knn, planned = facts["knn"], facts["planned_steps"]
    of = f" of {number(planned)}" if planned else ""
    accuracy = f", k-NN {percent(knn.get('teacher'))} at step {number(knn['step'])}" if knn else ""
    text = (
        f"{facts['state']:<11}{facts['run']}: step {number(facts['step'])}{of}, loss {nats(facts['loss'])}{accuracy}, "
        f"{duration(facts['training_seconds'])} in steps, {number(facts['images_per_second'], 3)} images/s, "
        f"{gib(facts['memory_gib'])}\nreport     {page} ({number(page.stat().st_size / 1e6, 3)} MB)"
    )
    return definition.Result({"report": str(page), **facts}, text, value=page)


def summarize(run: RunFiles) -> dict[str, Any]:
    """Plain values for JSON; None for what is unknown. Losses are in nats, accuracies in percent."""
    metrics = run.metrics
    waits, memory = metrics["data_wait_fraction"].finite, metrics["memory_gib"].finite
    images, seconds = _last(metrics.images), training_seconds(metrics)
    return {
        "run": str(run.path),
        "state": run.state,
        "trained": describe_network(run),
        "step": run.step,
        "planned_steps": run.planned_steps,
        "first_step": metrics.first_step,
        "images": _count(metrics.images),
        "epoch": _count(metrics["epoch"]),
        "training_seconds": seconds,
        **{key: _last(metrics[key]) for key in ("loss", "teacher_entropy", "kl")},
        **{key: _last(metrics[key]) for key in html.find_others(metrics) if not key.startswith(html.EVALUATED)},
        "knn": html.summarize_knn(metrics),
        "best": run.best or None,
        "images_per_second": images / seconds if seconds and images else None,
        "data_wait_fraction": float(waits.mean()) if len(waits) else None,
        "memory_gib": float(memory.max()) if len(memory) else None,
        "memory_predicted_gib": _last(metrics["memory_predicted_gib"]),
        **{key: _count(metrics[key]) for key in ("skipped_steps", "bad_images")},
        "evaluations": run.evaluations,
        "incidents": run.events.counts,
        "notes": run.notes,
    }


def judge_run(run: RunFiles, knn: dict[str, float | int] | None) -> tuple[str, str]:
    """Whether the run has learned something: good, odd or bad, and a sentence that says what to do."""
    path = shlex.quote(str(run.path))
    if run.metrics["collapsed"].last == 1:
        remedy = "Start again with a smaller --optimizer.lr or a longer --optimizer.warmup; the incidents say more."
        return "bad", f"Collapsed: the features of all images are alike. {remedy}"
    remedy = f"For this run: dino-ds eval {path} --root TRAIN --test_root TEST"
    if knn is None:
        reason = "no labeled images were held out (--eval.val_share 0.1, of class folders)"
        return "odd", f"Whether it has learned is not known: {reason}. {remedy}."
    about = run.evaluations.get("knn", {})
    if (shared := about.get(SHARED, 0)) >= MOST_SHARED:
        reason = f"{shared:.0%} of the test images looked at are training images too (--eval.root)"
        return "odd", f"Whether it has learned is not known: {reason}. {remedy}, with other images."
    newest = f"{percent(knn['teacher'])} at step {knn['step']:,}"
    start = knn.get("untrained", knn.get("start"))
    known = {"at the start": start, "of raw pixels": knn.get("raw_pixels"), "by chance": knn.get("chance")}
    bar, name = max(((value, name) for name, value in known.items() if value is not None), default=(0.0, "before"))
    tests = about.get("test_images", 0)
    noise = max(_NOISE, evaluation.margin_of_chance(tests) if tests > 0 else 0.0)
    if bar > 100 - noise:
        remedy = "Ask about classes that are harder to tell apart (--eval.root)."
        return "odd", f"Whether it has learned can't be told: k-NN is {newest}, beside {percent(bar)} {name}. {remedy}"
    if knn["best"] <= bar + noise:
        chance = f" (differences below {noise:.0f} points may be chance)" if noise > 2 * _NOISE else ""
        return "odd", f"Not yet learned: k-NN is {newest}, beside {percent(bar)} {name}{chance}. Train longer."
    if knn["teacher"] < knn["best"] - max(noise, _FALL * (knn["best"] - bar)):
        remedy = "next time keep the best: --eval.keep_best knn"
        if run.best:
            remedy = f"take that teacher: dino-ds embed {path}/best_teacher.safetensors --out features.npy"
        falls = f"Falls since step {knn['best_step']:,}: k-NN was {percent(knn['best'])}, and is {newest}"
        return "odd", f"{falls}; {remedy}, and end earlier."
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


def training_seconds(metrics: html.Metrics) -> float | None:
    """Seconds in the run's own steps, without evaluations and pauses: the sum of images / rate over metrics' lines."""
    images, rate = metrics.images, metrics["images_per_second"]
    if not len(images) or len(images) != len(rate):
        return None
    with np.errstate(divide="ignore", invalid="ignore"):
        seconds = np.diff(images.y, prepend=0) / rate.y
    return float(seconds[np.isfinite(seconds)].sum())


def _last(curve: html.Curve) -> float | None:
    """The last value, or None if there is none or it is not finite."""
    return curve.last if math.isfinite(curve.last) else None


def _count(curve: html.Curve) -> int | None:
    value = _last(curve)
    return None if value is None else int(value)


def draw_run(run: RunFiles) -> str:
    facts = summarize(run)
    level, verdict = judge_run(run, facts["knn"])
    step, planned, state, events = facts["step"], facts["planned_steps"], facts["state"], run.events
    at = f" at {number(step)} of {number(planned)}" if planned and step < planned else ""
    newest = {kind: (line, time) for kind, time, line in events.incidents if LEVELS[kind] == "bad"}
    times = {kind: f", {number(n)} times" if n > 1 else "" for kind, n in events.counts.items()}
    names = {"start": "start", "untrained": "start: untrained"}  # of the bars of k-NN
    if (knn := facts["knn"] or {}).get("best") != knn.get("teacher"):
        names["best"] = f"best, step {knn['best_step']:,}"
    if "teacher" in knn:
        names["teacher"] = f"newest, step {knn['step']:,}"
    names |= {"raw_pixels": "raw pixels", "chance": "chance"}
    bars = [(name, knn[key], 3 if key in ("teacher", "best") else 8) for key, name in names.items() if key in knn]
    return html.render(
        "run.html",
        run=run,
        facts=facts,
        state=html.Tag(f"{_STATES.get(state, state)}{at}", f"state {state}"),
        images=_images(run),
        level=level,
        verdict=verdict,
        bars_of_knn=[(name, percent(value), [(color, value)]) for name, value, color in bars],
        alarms=[f"{line} ({time}{times[kind]})" for kind, (line, time) in newest.items()],
        cards=_cards(facts, run.environment.get("devices") == "cpu"),
        **_charts(run.metrics),
        pictures=_load_pictures(run),
        evaluations=_evaluations(run.evaluations),
        settings=changed_settings(run),
        incidents=[
            (time, html.Tag(kind, f"incident {LEVELS[kind]}"), line.removeprefix(kind).lstrip())
            for kind, time, line in events.incidents
        ],
        counts="; ".join(f"{name} {number(count)}" for name, count in events.counts.items()),
        is_shortened=max(events.counts.values(), default=0) > MOST_OF_A_KIND,
        most_of_a_kind=MOST_OF_A_KIND,
        environment=environment_rows(run),
        ds=json.dumps(run.ds, indent=2) if run.ds else "",
        again=reproduction(run),
    )


def _images(run: RunFiles) -> str:
    """Describe the images in words, such as "2,880 images of photos"."""
    count, root = run.events.fact("images", "images", int), run.events.fact("images", "place", str)
    if count is None or root is None:
        return "images whose number is not known"
    words = f"{count:,} images {'of' if run.recipe and root == run.recipe.data.source else 'in'} {root}"
    shares = {key: curve.y for key, curve in run.metrics.curves.items() if key.startswith(html.SHARE)}
    parts = [f"{key.removeprefix(html.SHARE)} {percent(100 * float(np.nanmean(y)))}" for key, y in shares.items()]
    return words + (f" (drawn: {', '.join(parts)})" if parts else "")


def _cards(facts: dict[str, Any], on_cpu: bool) -> list[tuple[str, str, str]]:
    """Title, value and explanation of six figures, which fill the page's rows of six, three or two cards."""
    of = f"of {number(facts['planned_steps'])}; " if facts["planned_steps"] else ""
    since = f" since step {number(facts['first_step'])}" if facts["first_step"] else ""
    epochs = f", epoch {number(facts['epoch'])}" if facts["epoch"] is not None else ""
    wait, entropy = facts["data_wait_fraction"], facts["teacher_entropy"]
    parts = "" if entropy is None else f"entropy {nats(entropy)} + KL {nats(facts['kl'])}"
    # On a CPU the peak is of the whole process, evaluations too, which the prediction leaves out.
    without = ", without evaluations" if on_cpu else ""
    return [
        ("steps", number(facts["step"]), f"{of}{number(facts['images'])} images{since}{epochs}"),
        ("time in steps", duration(facts["training_seconds"]), "without evaluations and pauses"),
        ("loss", nats(facts["loss"]), parts),
        ("speed", number(facts["images_per_second"], 3), "images per second, the mean"),
        ("waiting for data", "–" if wait is None else f"{100 * wait:.0f} %", "of the time"),
        ("peak memory", gib(facts["memory_gib"]), f"predicted {gib(facts['memory_predicted_gib'])}{without}"),
    ]


def _charts(metrics: html.Metrics) -> dict[str, Any]:
    """The charts in the order of the page; a small chart is left out if its curve is constant."""
    charts = {
        "learning": html.learning_charts(metrics),
        "speed": [series.chart(metrics, small=False) for series in html.SPEED],
        "others": [each.chart(metrics) for each in html.find_series(metrics) if not metrics[each.key].constant],
    }
    return {name: [svg for chart in drawn if (svg := html.draw_chart(chart))] for name, drawn in charts.items()}


def _load_pictures(run: RunFiles) -> dict[str, Any]:
    """The first and newest pictures of each kind, to be shown side by side; then those of no training step."""
    folder, order = run.path / "pictures", list(_PICTURES)
    steps, others = dict[str, list[Path]](), [path for path in run.pictures if path.parent == folder]
    for path in run.pictures:
        if path.parent != folder:
            steps.setdefault(path.stem, []).append(path)
    groups = list[dict[str, Any]]()
    for kind in sorted(steps, key=lambda kind: (order.index(kind) if kind in order else len(order), kind))[:_MOST]:
        ends = dict.fromkeys((steps[kind][0], steps[kind][-1]))
        shown = [_picture(path, _step_of(path, folder)) for path in ends]
        groups.append({"title": _PICTURES.get(kind, kind), "open": kind in ("map", "neighbors"), "shown": shown})
    if shown := [_picture(path, _PICTURES.get(path.stem, path.stem)) for path in others[:_MOST]]:
        groups.append({"title": "Pictures of dino-ds pictures", "open": not groups, "shown": shown})
    more = len(others) > _MOST or any(len(paths) > 2 for paths in steps.values())
    return {"folder": folder, "groups": groups, "more": more}


def _step_of(path: Path, folder: Path) -> str:
    """A picture's step by the name of its folder: "step_00000500" -> "step 500"."""
    name = str(path.parent.relative_to(folder))
    word, _, digits = name.rpartition("_")
    if not (word and digits.isascii() and digits.isdigit()):
        return name
    return f"{word} {int(digits):,}" + (", before training" if int(digits) == 0 else "")


def _picture(path: Path, caption: str) -> dict[str, Any]:
    """A PNG file as a data: URL of WebP, at most 1000 pixels wide; an `error` instead for what is no picture."""
    try:
        with Image.open(path, formats=["PNG"]) as image:
            if image.width * image.height > 100_000_000:
                raise ValueError(f"{image.width} x {image.height} pixels")
            small = image.convert("RGBA" if "A" in image.getbands() or "transparency" in image.info else "RGB")
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        return {"error": f"{path.name} can't be shown: {getattr(error, 'strerror', None) or error}"}
    if small.width > 1000:
        small = small.resize((1000, max(1, round(small.height * 1000 / small.width))), Image.Resampling.LANCZOS)
    stream, kind = io.BytesIO(), "webp" if features.check("webp") else "png"
    small.save(stream, kind.upper(), quality=84, method=5)
    address = f"data:image/{kind};base64,{base64.b64encode(stream.getvalue()).decode()}"
    wide, high = small.size  # those that are `wide` span both columns
    about = {"caption": caption, "address": address, "width": wide, "height": high, "wide": wide > 2.2 * high}
    return {"error": "", **about}


def _evaluations(evaluations: Mapping[str, dict[str, Any]]) -> list[tuple[str, ...]]:
    """Rows of the table; facts about an evaluation are in its first row."""
    rows = list[tuple[str, ...]]()
    for name, about in evaluations.items():
        images = [about["data"]] if isinstance(about.get("data"), str) else []
        counts = {"training": about.get("train_images"), "test": about.get("test_images")}
        images += [f"{number(count)} {which}" for which, count in counts.items() if isinstance(count, float)]
        step = number(about["step"]) if isinstance(about.get("step"), float) else ""
        facts = name, step, ", ".join(images)
        for metric, value in about["results"].items():
            rows.append((facts[0], metric, number(value), *facts[1:]))
            facts = "", "", ""
    return rows


def changed_settings(run: RunFiles) -> list[tuple[html.Tag, str, str, str]]:
    """Key, value, default and description of every setting that differs from the default."""
    values, defaults = flat_values(run.recipe or recipe.Recipe()), flat_values(recipe.Recipe())
    return [
        (html.Tag(each.name, tag="code"), _plain(values[each.name]), _plain(defaults[each.name]), each.description)
        for each in loading.recipe_options()
        if values[each.name] != defaults[each.name]
    ]


def _plain(value: Any) -> str:
    return show_value(tuple(value) if isinstance(value, list) else value)


def environment_rows(run: RunFiles) -> list[tuple[str, str]]:
    versions, skipped = run.environment.get("versions"), ("versions", "starts", ORIGIN)
    rows = [(key, _plain(value)) for key, value in run.environment.items() if key not in skipped]
    if origin := Origin.read(run.path):
        rows.insert(0, ("began with", f"{origin.run}, step {origin.step} ({origin.stage_start}), run {origin.run_id}"))
    lines = {kind: event["line"] for kind, event in run.events.newest.items() if kind in ("engine", "kernels")}
    rows += [(kind, lines[kind].partition(" ")[2].strip()) for kind in sorted(lines)]
    return rows + ([(key, _plain(value)) for key, value in versions.items()] if isinstance(versions, dict) else [])


def reproduction(run: RunFiles) -> str:
    """The command that repeats the training from the files of the run."""
    files = ["--config", f"{run.path}/config.yaml", "--ds_config", f"{run.path}/ds_config.json"]
    if origin := Origin.read(run.path):
        files += ["--from", f"{origin.run}/checkpoints/{step_name(origin.step)}"]
    last = run.events.fact("length", "last_step", int)
    files += ["--max_steps", str(last)] if last and run.planned_steps and last < run.planned_steps else []
    ranks, program = run.environment.get("ranks"), ["dino-ds", "train"]
    if isinstance(ranks, int) and ranks > 1:
        program = ["torchrun", "--nproc_per_node", str(ranks), "dino_ds/train.py"]
    code = ", ".join(loading.code_of(run.recipe)) if run.recipe else ""
    warning = f"  # imports {code}, which config.yaml names: look at it first" if code else ""
    return shlex.join([*program, *files, "--run_dir", "NEW"]) + warning
