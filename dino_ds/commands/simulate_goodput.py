"""`dino-ds simulate-goodput`: what failures, saves and restarts cost a run, and how often to save. Needs no torch."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import asdict, replace
from json import loads
from pathlib import Path
from statistics import median
from typing import Any

from dino_ds.basics.digits import short
from dino_ds.basics.goodput import Costs, expected_goodput, simulate_goodput
from dino_ds.basics.text_file import read_lines
from dino_ds.config.loading import load_recipe
from dino_ds.errors import ConfigError
from dino_ds.options.run import SimulateGoodputOptions
from dino_ds.planning.measure.tables import markdown_table, print_result
from dino_ds.run.intervals import young_interval

_DEFAULTS = {"mtbf_hours": 24.0, "save_seconds": 10.0, "restart_seconds": 120.0, "detect_seconds": 60.0}
_SHOWN_MINUTES = (1, 5, 15, 30, 60, 180, 360)


def run(options: SimulateGoodputOptions) -> None:
    """Print the table of intervals; write the curve as PNG if --out is given. Raises ConfigError."""
    measured = _read_run(Path(options.run)) if options.run else {}
    given = {name: getattr(options, name) for name in (*_DEFAULTS, "save_stall_seconds")}
    values = {**_DEFAULTS, **measured, **{name: value for name, value in given.items() if value is not None}}
    stall = values.setdefault("save_stall_seconds", values["save_seconds"])
    costs = Costs(
        mtbf=values["mtbf_hours"] * 3600 / options.nodes,
        stall=stall,
        save=max(stall, values["save_seconds"]),
        detect=values["detect_seconds"],
        restart=values["restart_seconds"],
    )
    best = young_interval(costs.stall, costs.mtbf)
    rows = [_row(seconds, costs, values) for seconds in _intervals(costs, best, options.save_every_minutes)]
    if options.out:
        _draw(Path(options.out), costs, best, options.save_every_minutes)
    origins = {name: _origin(name, given, measured, options.run) for name in values}
    result = {"seconds": asdict(costs), "origins": origins, "best_interval_seconds": best, "intervals": rows}
    if options.save_every_minutes:
        result["save_every"] = next(row for row in rows if row["seconds"] == options.save_every_minutes * 60)
    print_result(_page(result, values, options.save_every_minutes, options.nodes), result, options.json)


def _read_run(folder: Path) -> dict[str, float]:
    """What a run's own files say: save cost, restart time, step time, the failures it expects."""
    if not (folder / "config.yaml").is_file():
        raise ConfigError(f"{folder} holds no run: there is no config.yaml in it; fix --run")
    recipe = load_recipe(str(folder / "config.yaml"), {})
    found = {"mtbf_hours": recipe.expected_hours_between_failures}
    metrics = _read_lines(folder / "metrics.jsonl")
    rates = [line["images_per_second"] for line in metrics if "images_per_second" in line]
    if rates:
        found["step_seconds"] = recipe.data.global_batch / median(rates)
    for name in ("save_seconds", "save_stall_seconds"):
        seconds = [line[name] for line in metrics if line.get(name)]
        if seconds:
            found[name] = median(seconds)
    restarts = [line["restart_seconds"] for line in _read_lines(folder / "restarts.jsonl") if "restart_seconds" in line]
    if restarts:
        found["restart_seconds"] = median(restarts)
    return found


def _read_lines(path: Path) -> list[dict[str, Any]]:
    """The objects of a file that may be missing or be written at this moment."""
    lines: list[Any] = []
    for text in read_lines(path) if path.is_file() else ():
        with suppress(ValueError, RecursionError):
            lines.append(loads(text))
    return [line for line in lines if isinstance(line, dict)]


def _origin(name: str, given: dict[str, float | None], measured: dict[str, float], run: str | None) -> str:
    if given.get(name) is not None:
        return "given"
    if name in measured:
        return f"{'recipe' if name == 'mtbf_hours' else 'measured'} of {run}"
    return "the save's" if name == "save_stall_seconds" else "default"


def _intervals(costs: Costs, best: float, minutes: float | None) -> list[float]:
    shown = {60.0 * m for m in _SHOWN_MINUTES if m * 60 < 5 * costs.mtbf} | {best}
    return sorted(shown | ({minutes * 60} if minutes else set()))


def _row(seconds: float, costs: Costs, values: dict[str, float]) -> dict[str, Any]:
    exact, drawn = expected_goodput(seconds, costs), simulate_goodput(seconds, costs)
    row = {
        "seconds": seconds,
        "goodput": exact.fraction,
        "goodput_simulated": drawn.fraction,
        "lost_seconds_per_failure": exact.lost,
        "lost_seconds_per_failure_simulated": drawn.lost,
        "saving_fraction": costs.stall / (seconds + costs.stall),
    }
    if "step_seconds" in values:
        row["steps"] = max(1, round(seconds / values["step_seconds"]))
    return row


def _page(result: dict[str, Any], values: dict[str, float], minutes: float | None, nodes: int) -> str:
    costs, origins, best = result["seconds"], result["origins"], result["best_interval_seconds"]
    shared = f" = {values['mtbf_hours']:g} h / {nodes} nodes" if nodes > 1 else ""
    lines = [
        f"failures  every {short(costs['mtbf'] / 3600)} h{shared} ({origins['mtbf_hours']})",
        f"save      {short(costs['save'])} s ({origins['save_seconds']}); training stands still for "
        f"{short(costs['stall'])} s of it ({origins['save_stall_seconds']})",
        f"failure   noticed after {costs['detect']:g} s ({origins['detect_seconds']}), first new step "
        f"{short(costs['restart'])} s later ({origins['restart_seconds']})",
    ]
    steps = "step_seconds" in values
    table = []
    for row in result["intervals"]:
        seconds = row["seconds"]
        note = "best" if seconds == best else "given" if minutes and seconds == minutes * 60 else ""
        cells = [
            f"{short(seconds / 60)} min",
            f"{100 * row['goodput']:.1f} %",
            f"{100 * row['goodput_simulated']:.1f} %",
        ]
        cells += [f"{row['lost_seconds_per_failure']:.0f} s", f"{100 * row['saving_fraction']:.1f} %", note]
        table.append([cells[0], str(row["steps"]), *cells[1:]] if steps else cells)
    header = ["save every", "goodput", "simulated", "lost per failure", "spent saving", ""]
    return "\n".join([*lines, "", markdown_table([header[0], "steps", *header[1:]] if steps else header, table)])


def _draw(path: Path, costs: Costs, best: float, minutes: float | None) -> None:
    """Goodput over the interval, for this mean time between failures, a quarter and four times of it."""
    import numpy as np
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    intervals = np.geomspace(max(5.0, best / 30), min(best * 30, 3 * costs.mtbf), 120)
    for factor in (4, 1, 0.25):
        other = replace(costs, mtbf=costs.mtbf * factor)
        values = [100 * expected_goodput(seconds, other).fraction for seconds in intervals]
        axes.plot(intervals / 60, values, label=f"a failure every {short(other.mtbf / 3600)} h")
    axes.axvline(best / 60, linestyle=":", color="grey", label=f"best: {short(best / 60)} min")
    if minutes:
        axes.axvline(minutes, linestyle="--", color="grey", label=f"given: {minutes:g} min")
    axes.set(xscale="log", xlabel="minutes between saves", ylabel="goodput, %")
    axes.grid(alpha=0.3)
    axes.legend()
    try:
        figure.savefig(path, format="png", dpi=120)
    except OSError as error:
        raise ConfigError(
            f"--out {path} can't be written: {error.strerror}; name a file in a folder of yours"
        ) from None
