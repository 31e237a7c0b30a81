"""`dino-ds bench tune`: the fastest settings of this machine by measuring, as a command and a page with charts."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from dino_ds.basics.files import replace_file
from dino_ds.basics.formatting import gib, markdown_table, number, percent
from dino_ds.basics.ranges import PARTS
from dino_ds.config.loading import dump_recipe, load_recipe, recipe_names
from dino_ds.config.recipe import Recipe
from dino_ds.config.schema import flatten, show_value
from dino_ds.engine.distributed import usable_cores
from dino_ds.engine.process import init_distributed
from dino_ds.errors import ConfigError, OutOfMemory, one_line
from dino_ds.options.commands import BenchTuneOptions
from dino_ds.options.definition import Result
from dino_ds.planning.bench.trials import Measurement, Setting, Trials, beats
from dino_ds.planning.bench.tune import ENOUGH_WAIT, Findings, Search
from dino_ds.planning.fit import FILLED, check_new, write_ds
from dino_ds.planning.host import find_machine
from dino_ds.planning.measure import describe_host, host_line
from dino_ds.report.charts import Chart, Curve, Line
from dino_ds.report.html import build_document, draw_chart, render

_BUSY = 0.15
"""Cores that other programs may keep busy before the page says so."""
_COLORS = {"as given": 8, "tuned": 1}


class Table(NamedTuple):
    """A part of the page: a table with a note below it."""

    title: str
    header: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
    note: str = ""


def run(options: BenchTuneOptions, *, recipe: Recipe, ds: dict[str, Any], ds_path: str) -> Result:
    """Measure, and write the page and its JSON, also where Ctrl-C ends the search early.

    Raises ConfigError for a page or folder that can't be written, OutOfMemory if no micro-batch runs.
    """
    import torch

    page, data = Path(options.out), Path(options.out).with_suffix(".json")
    _check_files(page, data, options)
    init_distributed()
    ranks, machine = options.ranks or torch.cuda.device_count() or 1, find_machine()
    limit = machine.host_gib / ranks if machine.card_gib is None else FILLED * machine.card_gib
    limit = min(limit, options.memory_gib or limit)
    threads = options.threads or max(1, len(usable_cores()) // ranks)
    trials = Trials(data, options.minutes, threads, ranks, limit, options.resume)
    search, error = Search(recipe, ds, ds_path, trials), None
    try:
        search.run()
        if options.profile and search.findings.best:
            trials.step(search.findings.best, 1.0, profile=options.profile)
    except (KeyboardInterrupt, OutOfMemory) as reason:  # what is known so far is shown
        error = reason
    findings = search.findings
    command = _command(findings, recipe, ranks, Path(options.write) if options.write else None)
    tables, verdict = list(_tables(findings, trials)), _verdict(findings)
    heading = f"{recipe.model.backbone}, global batch {recipe.data.global_batch}, {ranks} process(es), {ds_path}"
    remarks = _remarks(trials, recipe)
    lines = [heading, host_line(describe_host()), "", *remarks, verdict, command]
    facts = {
        "verdict": verdict,
        "command": command,
        **asdict(replace(findings, best=None, settings={})),
        "others_cores": trials.others_cores,
    }
    body = render("tune.html", lines=lines[:2], remarks=remarks, verdict=verdict, command=command, tables=tables,
                  charts_drawn=[*filter(None, map(draw_chart, _charts(findings)))], parts=(parts := _parts(findings)),
                  most=max((length for _, _, [(_, length)] in parts), default=1.0))  # fmt: skip
    replace_file(page, build_document("bench tune", body))
    replace_file(data, json.dumps({"kept": trials.kept, "result": facts}, indent=1))
    for table in tables:
        lines += ["", table.title, markdown_table(table.header, table.rows), *([table.note] if table.note else [])]
    return Result(facts, "\n".join([*lines, "", f"page     {page}, {data}"]), error=error)


def _check_files(page: Path, data: Path, options: BenchTuneOptions) -> None:
    if page.suffix != ".html" or not page.absolute().parent.is_dir():
        raise ConfigError(f"--out {page} must be an .html file in a folder that exists")
    if not options.resume and (taken := next((path for path in (page, data) if path.exists()), None)):
        raise ConfigError(f"{taken} exists: --resume goes on with its trials, --out NAME.html takes another name")
    if options.write:
        check_new(Path(options.write))


def _remarks(trials: Trials, recipe: Recipe) -> list[str]:
    """Remarks on the figures: made-up images, and other programs that kept cores busy."""
    made_up = recipe.data.source == "folder" and not recipe.data.root and not recipe.data.mixture
    busy = trials.others_cores
    return [
        *["images   made up, since none are named: the loader was not measured (--data.root FOLDER)"] * made_up,
        *[f"noise    other programs kept {busy:.1f} cores busy: repeat it on a quiet machine"] * (busy > _BUSY),
    ]


def _verdict(findings: Findings) -> str:
    """The result of the search in a sentence."""
    if "tuned" not in findings.pair or not findings.pair["tuned"].rates:
        return "not finished: the reasons are below"
    shipped, tuned = findings.pair["as given"], findings.pair["tuned"]
    if shipped.failed:
        return (
            f"{number(tuned.images_per_second, 3)} images/s; as given, it does not run here: {one_line(shipped.failed)}"
        )
    ratio, spread = tuned.images_per_second / shipped.images_per_second, max(shipped.spread, tuned.spread)
    gain = f"{ratio:.2f} times the images/s of the settings as given (spread {100 * spread:.0f} %)"
    learned = "; what is learned is equal up to rounding"
    return f"{gain}{learned}" if beats(tuned, shipped) else f"no faster than as given, within the spread: {gain}"


def _command(findings: Findings, recipe: Recipe, ranks: int, folder: Path | None) -> str:
    """The command that trains with what was found, or "" if nothing was; also written to `folder`, if given."""
    if findings.best is None:
        return ""
    workers = {} if findings.workers is None else {"data.workers": str(findings.workers)}
    ds = {**findings.best.ds, "train_micro_batch_size_per_gpu": findings.best.config.micro_batch}
    ds["gradient_accumulation_steps"] = findings.best.config.accumulation
    if folder is not None:
        folder.mkdir()
        (folder / "recipe.yaml").write_text(dump_recipe(findings.best.recipe), encoding="utf-8")
        write_ds(ds, folder / "ds_config.json")
        words = ["--config", f"{folder}/recipe.yaml", "--ds_config", f"{folder}/ds_config.json"]
        words += [word for key, value in workers.items() for word in (f"--{key}", value)]
    else:
        words = [*_recipe_words(recipe, workers), "--ds_config", findings.best.path, *_ds_words(findings.best)]
    program = ["deepspeed", "--num_gpus", str(ranks), "dino_ds/train.py"] if ranks > 1 else ["dino-ds", "train"]
    return shlex.join([*program, *words])


def _recipe_words(recipe: Recipe, changes: dict[str, str]) -> list[str]:
    """The options of `train` that give this recipe, changed: those that the nearest shipped recipe does not set."""
    wanted, fewest = {key: show_value(value) for key, value in _flat(recipe).items()} | changes, None
    for name in (None, *recipe_names()):
        try:
            shipped = {key: show_value(value) for key, value in _flat(load_recipe(name, {})).items()}
        except ConfigError:  # a recipe that is one only with weights to start from
            continue
        others = {key: value for key, value in wanted.items() if shipped.get(key) != value}
        if fewest is None or len(others) < len(fewest[1]):
            fewest = name, others
    assert fewest is not None
    named = [] if fewest[0] is None else ["--config", fewest[0]]
    return [*named, *(word for key, value in fewest[1].items() for word in (f"--{key}", value))]


def _flat(recipe: Recipe) -> dict[str, Any]:
    return flatten(recipe.model_dump())


def _ds_words(best: Setting) -> list[str]:
    """The options of `train` that make the ds JSON at `best.path` the measured one."""
    sizes = {
        "train_micro_batch_size_per_gpu": best.config.micro_batch,
        "gradient_accumulation_steps": best.config.accumulation,
    }
    return [word for key, value in {**best.changes, **sizes}.items() for word in (f"--ds.{key}", str(value))]


def _figures(result: Measurement) -> tuple[str, ...]:
    spread = f"{100 * result.spread:.0f} %"
    return number(result.images_per_second, 3), spread, gib(result.peak_mib / 1024)


def _tables(findings: Findings, trials: Trials) -> list[Table]:
    """The parts of the page that have rows."""
    sizes = [
        (str(size), gib(findings.predicted_gib[size]), *(("–", "–", "–") if result.failed else _figures(result)))
        for size, result in findings.sizes.items()
    ]
    loaders = [
        (
            str(n),
            number(speed["images_per_second"]),
            percent(100 * speed["wait"]),
            number(speed["step_images_per_second"]),
        )
        for n, speed in findings.loaders.items()
    ]
    levers = {name: result for name, result in findings.levers.items() if not result.failed}
    fastest = sorted(levers, key=lambda name: -levers[name].images_per_second)
    measured = ("images/s", "spread", "peak of a rank")
    limit = f"A rank may take {gib(trials.limit_gib)}. {findings.limited_by or 'The largest is the whole batch'}."
    pair = [(name, *_figures(result)) for name, result in findings.pair.items() if result.rates]
    enough = (
        f"Taken: {findings.workers}, the fewest with a wait below {100 * ENOUGH_WAIT:.0f} %, or the fastest step's."
    )
    tables = [
        Table("As given and tuned", ("", *measured), pair),
        Table("Micro-batches", ("images", "predicted", *measured), sizes, limit),
        Table("Loader processes", ("", "alone, images/s", "wait in the step", "step, images/s"), loaders, enough),
        Table("Loading an image", ("stage", "ms"), [(name, f"{ms:.2f}") for name, ms in findings.stages.items()]),
        Table("Levers, each changed alone", ("", *measured, "what is learned"),
              [(name, *_figures(levers[name]), findings.settings[name].learned) for name in fastest]),
        Table("Not measured", ("", "why"), [(name, one_line(reason)) for name, reason in findings.skipped.items()]),
    ]  # fmt: skip
    return [table for table in tables if table.rows]


def _charts(findings: Findings) -> list[Chart]:
    """Throughput and memory over the micro-batch, and the wait over the loader processes."""
    ran = {size: result for size, result in findings.sizes.items() if not result.failed}
    rates = _curve({size: result.images_per_second for size, result in ran.items()})
    measured = _curve({size: result.peak_mib / 1024 for size, result in ran.items()})
    predicted = _curve({size: gib for size, gib in findings.predicted_gib.items() if gib is not None})
    wait, waits = "Wait for images", _curve({n: 100 * loader["wait"] for n, loader in findings.loaders.items()})
    memory = [Line("measured", measured, 1, "dots"), Line("predicted", predicted, 2, "dots")]
    images, loaders = "images of a micro-batch", "loader processes"
    return [
        Chart("Throughput", "images/s", [Line("Throughput", rates, 1, "dots")], {}, zero=True, x=images),
        Chart("Memory of a rank", "GiB", memory, {}, zero=True, x=images),
        Chart(wait, "% of the step", [Line(wait, waits, 3, "dots")], {}, zero=True, x=loaders),
    ]  # fmt: skip


def _curve(points: Mapping[int, float]) -> Curve:
    return Curve(np.array([*points], float), np.array([*points.values()], float))


def _parts(findings: Findings) -> list[tuple[str, str, list[tuple[int, float]]]]:
    """Bars of the parts of a step, as given and tuned, in seconds."""
    return [
        (f"{part}, {name}", f"{result.parts[part]:.3g} s", [(_COLORS[name], result.parts[part])])
        for part in PARTS
        for name, result in findings.pair.items()
        if part in result.parts
    ]
