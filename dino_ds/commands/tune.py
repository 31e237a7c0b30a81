"""`dino-ds bench tune`: the fastest settings of this machine by measuring, as a command and a page with charts."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from dino_ds.basics.files import replace_file
from dino_ds.basics.formatting import gib, markdown_table, number, percent
from dino_ds.basics.ranges import AUGMENTATION, COPY, PARTS
from dino_ds.config.loading import dump_recipe
from dino_ds.config.recipe import Recipe
from dino_ds.config.schema import show_value
from dino_ds.config.stages import Request
from dino_ds.costs.memory import GIB
from dino_ds.data.mixture import roots_of
from dino_ds.data.root import check_root
from dino_ds.engine.process import init_distributed
from dino_ds.errors import ConfigError, OutOfMemory, one_line
from dino_ds.options.commands import BenchTuneOptions
from dino_ds.options.definition import Result
from dino_ds.planning import fit, measure
from dino_ds.planning.bench.tune import ENOUGH_WAIT, Measurement, Search, Trials
from dino_ds.report.html import Chart, Curve, Line, build_document, draw_chart, render

_MADE_UP = "images are made up, since none are named, and the loader was not measured: name yours by --data.root FOLDER"
_COLORS = {"as given": 8, "tuned": 1}
_COLUMNS: dict[str, tuple[str, Callable[[Any], str]]] = {
    "images_per_second": ("images/s", lambda value: number(value, 3)),
    "spread": ("spread", lambda value: f"{100 * value:.0f} %"),
    "predicted_gib": ("memory of a rank, predicted", gib),
    "peak_gib": ("measured", gib),
    "loader": ("loader alone, images/s", lambda value: number(value, 3)),
    "wait": ("wait in the step", lambda value: percent(100 * value)),
}  # titles and formats of the figures of `Measurement.facts` that tables show; empty columns are left out
_PARTS = {"data": "wait for images", COPY: "copy"} | {part: part for part in (AUGMENTATION, *PARTS[1:])}
"""Titles of the parts of a step."""
Table = tuple[str, tuple[str, ...], list[tuple[str, ...]], str]  # a title, a header, rows, and a note or ""


def run(options: BenchTuneOptions, *, recipe: Recipe, ds: dict[str, Any], ds_path: str, request: Request) -> Result:
    """Measure, and write the page and its JSON, also where Ctrl-C ends the search early. Raises ConfigError for a page
    or folder that can't be written, DataError without the images that are named, OutOfMemory if no micro-batch runs."""
    import torch

    page = Path(options.out)
    if page.suffix != ".html" or not page.absolute().parent.is_dir():
        raise ConfigError(f"--out {page} must be an .html file in a folder that exists")
    if taken := [path for path in (page, page.with_suffix(".json")) if path.exists() and not options.resume]:
        raise ConfigError(f"{taken[0]} exists: --resume goes on with its trials, --out NAME.html takes another name")
    if options.write:
        fit.check_new(Path(options.write))
    for root in filter(None, roots_of(recipe.data)):
        check_root(root)
    init_distributed()
    ranks, machine = options.ranks or torch.cuda.device_count() or 1, fit.find_machine()
    limit = machine.host_gib / ranks if machine.card_gib is None else fit.FILLED * machine.card_gib
    trials = Trials(options, ranks, min(limit, options.memory_gib or limit))
    search, error = Search(recipe, ds_path, request.ds, trials), None
    try:
        search.run()
        if options.profile and search.best:
            trials.step(search.best, profile=options.profile)
    except (KeyboardInterrupt, OutOfMemory) as reason:  # what is known so far is shown
        error = reason
    noise = trials.others_cores if trials.others_cores > 0.15 else 0.0
    if noise and (given := search.pair.get("as given")) and given.rounds:
        search.best = given.setting  # a noisy measurement is no reason to change settings
    command, verdict, tables = _command(search, request, ranks, options.write), _verdict(search, noise), _tables(search)
    lead = [f"{recipe.model.backbone}, global batch {recipe.data.global_batch}, {ranks} process(es), {ds_path}"]
    lead += [measure.host_line(measure.describe_host())]
    remarks = [] if search.has_images else [_MADE_UP]
    facts = {"verdict": verdict, "command": command, "limited_by": search.limited_by, "skipped": search.skipped}
    for name in ("sizes", "levers", "loaders", "pair"):
        facts[name] = {key: result.facts() for key, result in getattr(search, name).items()}
    trials.write(result=facts | {"others_cores": trials.others_cores})
    body = render("tune.html", lines=lead, remarks=remarks, verdict=verdict, command=command, tables=tables,
                  charts_drawn=[*filter(None, map(draw_chart, _charts(search)))], bars_drawn=_bars(search))  # fmt: skip
    replace_file(page, build_document("bench tune", body))
    lines = [*lead, "", *remarks, verdict, command]
    for title, header, rows, note in tables:
        lines += ["", title, markdown_table(header, rows) if header else "\n".join(map("".join, rows)), note]
    return Result(facts, "\n".join([*lines, f"page     {page}, {page.with_suffix('.json')}"]), error=error)


def _verdict(search: Search, noise: float) -> str:
    """The result of the search in a sentence. noise: cores that other programs kept busy, 0 if hardly any."""
    given, tuned = (search.pair.get(name) for name in _COLORS)
    if given is None or tuned is None or not tuned.rounds:
        return "not finished: the reasons are below"
    if not given.rounds:
        return f"{number(tuned.images_per_second, 3)} images/s; as given, it does not run: {one_line(given.failed)}"
    ratio, spread = tuned.images_per_second / given.images_per_second, max(given.spread, tuned.spread)
    gain = f"{ratio:.2f} times the images/s of the settings as given (spread {100 * spread:.0f} %)"
    if noise:
        return f"not reliable, as other programs kept {noise:.1f} cores busy: {gain}. Repeat it on a quiet machine"
    if tuned.beats(given):
        return f"{gain}; what is learned is equal up to rounding"
    return f"no setting is faster than those given by more than the spread: the best one has {gain}"


def _command(search: Search, request: Request, ranks: int, folder: str | None) -> str:
    """The command that trains with what was found, or "" if nothing was; also written to `folder`, if given."""
    best = search.best
    if best is None:
        return ""
    sizes = {"train_micro_batch_size_per_gpu": best.config.micro_batch}
    sizes["gradient_accumulation_steps"] = best.config.accumulation
    words = dict[str, Any]() if request.config is None else {"config": request.config}
    workers = {} if best.recipe.data.workers is None else {"data.workers": best.recipe.data.workers}
    words |= request.recipe | workers | {"ds_config": best.path}
    words |= {f"ds.{key}": value for key, value in {**best.changes, **sizes}.items()}
    if folder is not None:
        words = {name: Path(folder, file) for name, file in (("config", "recipe.yaml"), ("ds_config", "ds.json"))}
        Path(folder).mkdir()
        words["config"].write_text(dump_recipe(best.recipe), encoding="utf-8")
        words["ds_config"].write_text(json.dumps({**best.ds, **sizes}, indent=2) + "\n", encoding="utf-8")
    program = ["deepspeed", "--num_gpus", str(ranks), "dino_ds/train.py"] if ranks > 1 else ["dino-ds", "train"]
    return shlex.join([*program, *(word for key, value in words.items() for word in (f"--{key}", show_value(value)))])


def _tables(search: Search) -> list[Table]:
    """The tables of the page that have rows."""
    ran = [item for item in search.levers.items() if item[1].rounds]
    levers = dict(sorted(ran, key=lambda item: -item[1].images_per_second))
    front = ", ".join(name for name, lever in levers.items() if not any(map(lever.is_worse, levers.values())))
    but = "".join(f", but for {name}: {lever.setting.learned}" for name, lever in ran if lever.setting.learned)
    sizes = dict(sorted(search.sizes.items(), key=lambda item: item[1].setting.config.micro_batch))
    loaders = {name: loader for name, loader in search.loaders.items() if loader.rounds}
    stages = next((loader.stages for loader in loaders.values()), {})  # with no loader process, all stages are measured
    skipped = dict[str, list[str]]()
    for name, reason in search.skipped.items():
        skipped.setdefault(one_line(reason), []).append(name)
    tables: list[Table] = [
        _table("As given and tuned", search.pair),
        _table("Micro-batches", sizes, f"Largest: {search.limited_by or 'the whole batch'}."),
        _table("Loader processes", loaders, "Taken: of those as fast as the fastest, the fewest that wait below "
               f"{ENOUGH_WAIT:.0%} of the step, or else the fewest."),
        ("Loading an image", ("stage", "ms"), [(name, f"{ms:.2f}") for name, ms in stages.items()], ""),
        _table("Levers, each changed alone", levers, f"None is faster and takes less memory than {front} (Pareto). "
               f"What is learned is equal up to rounding{but}."),
        ("Not measured", (), [(f"{', '.join(names)}: {reason}",) for reason, names in skipped.items()], ""),
    ]  # fmt: skip
    return [table for table in tables if table[2]]


def _table(title: str, measured: Mapping[str, Measurement], note: str = "") -> Table:
    rows = {name: one.facts() for name, one in measured.items()}
    shown = [key for key in _COLUMNS if any(row.get(key) is not None for row in rows.values())]
    cells = [
        (name, *("–" if row.get(key) is None else _COLUMNS[key][1](row[key]) for key in shown))
        for name, row in rows.items()
    ]
    return title, ("", *(_COLUMNS[key][0] for key in shown)), cells, note


def _charts(search: Search) -> Iterator[Chart]:
    """Yield throughput and memory over micro-batches, and the wait over loader processes, where two were measured."""
    of_sizes = ("images of a micro-batch", {one.setting.config.micro_batch: one for one in search.sizes.values()})
    of_loaders = ("loader processes", {one.setting.recipe.data.workers or 0: one for one in search.loaders.values()})
    for title, unit, (x, measured), keys in (
        ("Throughput", "images/s", of_sizes, ("images_per_second",)),
        ("Memory of a rank", "GiB", of_sizes, ("peak_gib", "predicted_gib")),
        ("Wait for images", "part of the step", of_loaders, ("wait",)),
    ):
        facts = {at: measured[at].facts() for at in sorted(measured)}
        points = {key: [(at, row[key]) for at, row in facts.items() if row.get(key) is not None] for key in keys}
        curves = {key: Curve(*np.array(pairs, float).T) for key, pairs in points.items() if len(pairs) > 1}
        lines = [Line(_COLUMNS[key][0], curve, color, "dots") for color, (key, curve) in enumerate(curves.items(), 1)]
        yield Chart(title, unit, lines, {}, zero=True, x=x)


def _bars(search: Search) -> Iterator[tuple[str, list[tuple[str, str, list[tuple[int, float]]]], float]]:
    """Yield title, rows and longest bar of the parts of a step's time and of a rank's memory, as given and tuned."""
    seconds, gibs = dict[str, dict[str, float]](), dict[str, dict[str, float]]()
    for name, measured in search.pair.items():
        seconds[name] = {title: measured.parts[part] for part, title in _PARTS.items() if part in measured.parts}
        memory = measured.setting.memory
        gibs[name] = {part: size / GIB for part, size in memory.parts.items()} if memory else {}
    for title, values, show in (
        ("Parts of a step", seconds, lambda value: f"{1000 * value:.1f} ms"),
        ("Memory of a rank, predicted", gibs, gib),
    ):
        most = max((value for parts in values.values() for value in parts.values()), default=1.0)
        shown = dict.fromkeys(part for parts in values.values() for part in parts if parts[part] >= 0.01 * most)
        bars = [(part, name, parts[part]) for part in shown for name, parts in values.items() if part in parts]
        yield title, [(f"{part}, {name}", show(size), [(_COLORS[name], size)]) for part, name, size in bars], most
