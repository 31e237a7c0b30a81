"""The pictures of the sweep and of the simulated scaling."""

from __future__ import annotations

from typing import Any

from dino_ds.plan.sweep import PLACES, cell_text

_GREEN, _AMBER, _GREY = "#2f7d4f", "#c98a3a", "#d9d9d9"
_COLOURS = {1: "#3b6ea5", 2: "#2f7d4f", 3: "#b3483a"}


def draw_sweep(result: dict[str, Any]) -> Any:
    """A matplotlib Figure: models down, cards and stages across, largest micro-batches written into the cells."""
    import numpy as np
    from matplotlib.colors import LinearSegmentedColormap, LogNorm
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    cells = result["cells"]
    models = list(dict.fromkeys((cell["backbone"], cell["weights"]) for cell in cells))
    boxes = list(dict.fromkeys(cell["card_gb"] for cell in cells))
    columns = [(box, place) for box in boxes for place in PLACES]
    found = {(cell["backbone"], cell["card_gb"], cell["place"]): cell for cell in cells}
    figure = Figure(figsize=(0.36 * len(columns) + 2.6, 0.46 * len(models) + 2.1), layout="constrained")
    axes = figure.subplots()
    maps = {"plain": ("#cfe8d5", _GREEN), "checked": ("#f6e3c4", _AMBER)}
    norm = LogNorm(1, 2048)
    image = np.ones((len(models), len(columns), 3))
    for row, (name, _) in enumerate(models):
        for column, (box, place) in enumerate(columns):
            cell = found[name, box, place]
            kind = "plain" if cell["largest"] else "checked"
            size = cell["largest"] or cell["largest_with_checkpointing"]
            ramp = LinearSegmentedColormap.from_list(kind, maps[kind])
            colour = ramp(float(norm(min(size, 2048))))[:3] if size else (0.85, 0.85, 0.85)
            image[row, column] = colour
            dark = size > 300
            text = cell_text(cell).removeprefix("c")
            axes.text(column, row, text, ha="center", va="center", fontsize=9, color="white" if dark else "#222222")
    axes.imshow(image, aspect="auto", interpolation="nearest")
    axes.set_yticks(range(len(models)), [f"{name}\n{weights / 1e6:,.0f} M" for name, weights in models], fontsize=9)
    axes.set_xticks(range(len(columns)), [place for _, place in columns], fontsize=8, rotation=90)
    for i, box in enumerate(boxes):
        middle = i * len(PLACES) + (len(PLACES) - 1) / 2
        axes.text(middle, -0.75, f"{box} GB", ha="center", va="bottom", fontsize=11, fontweight="bold")
        if i:
            axes.axvline(i * len(PLACES) - 0.5, color="white", linewidth=3)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    axes.set_xlabel("ZeRO stage; 3+host: optimizer and weights in host memory", fontsize=10)
    axes.set_title(
        f"Largest micro-batch on each of {result['gpus']} GPU(s), crops {result['crops']}, predicted",
        pad=26,
        fontsize=11,
    )
    legend = [
        Patch(color=_GREEN, label="fits"),
        Patch(color=_AMBER, label="fits with activation checkpointing"),
        Patch(color=_GREY, label="does not fit"),
    ]
    figure.legend(handles=legend, loc="outside lower center", ncols=3, fontsize=10, frameon=False)
    return figure


def draw_scaling(result: dict[str, Any]) -> Any:
    """A matplotlib Figure: our simulation, and published runs beside theirs."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 4.8), layout="constrained")
    left, right = figure.subplots(1, 2)
    _draw_ours(left, result)
    _draw_published(right, result["published"])
    ours = {row["gpus"] for row in result["rows"]}
    theirs = {world for run in result["published"] for world in run["measured"]}
    for axes, worlds in ((left, ours), (right, theirs)):
        axes.set_xscale("log", base=2)
        axes.set_xticks(sorted(worlds), [str(world) for world in sorted(worlds)])
        axes.set_xlabel("GPUs")
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    return figure


def _draw_ours(axes: Any, result: dict[str, Any]) -> None:
    for stage, colour in _COLOURS.items():
        rows = [row for row in result["rows"] if row["stage"] == stage]
        worlds = [row["gpus"] for row in rows]
        networks = {"as_sold": ("-", f"{result['network_gbit']:.0f}"), "ethernet": ("--", "100")}
        for name, (line, gbit) in networks.items():
            shares = [100 * row[name]["efficiency"] for row in rows]
            axes.plot(worlds, shares, line, color=colour, label=f"ZeRO {stage}, {gbit} Gbit/s a node")
        full = [(row["gpus"], 100 * row["as_sold"]["efficiency"]) for row in rows if row["fits"]]
        axes.plot(*zip(*full, strict=True), "o", color=colour, markersize=4) if full else None
    axes.set_ylim(0, 102)
    axes.set_ylabel("part of the step that computes, %")
    axes.set_title(
        f"Simulated: {result['backbone']}, {result['micro_batch']} images on each {result['gpu']}\n"
        "weak scaling; dots: fits its memory",
        fontsize=10,
    )
    axes.legend(fontsize=8)


def _draw_published(axes: Any, runs: list[dict[str, Any]]) -> None:
    for i, run in enumerate(runs):
        colour = f"C{i}"
        worlds = list(run["measured"])
        axes.plot(
            worlds, [100 * run["measured"][w] for w in worlds], "o-", color=colour, label=run["name"], markersize=4
        )
        axes.plot(worlds, [100 * run["simulated"][w] for w in worlds], ":", color=colour)
    axes.set_ylim(90, 101)
    axes.set_ylabel("rate of a GPU, % of that on the fewest")
    axes.set_title("Published FSDP runs (lines) and the same model's simulation (dotted)", fontsize=10)
    axes.legend(fontsize=8)
