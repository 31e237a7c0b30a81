"""Pictures of pages from docs/numbers.yaml, which each holds as text: `python -m scripts.page_pictures`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

from dino_ds.config.loading import load_recipe
from dino_ds.data.multicrop import MultiCrop
from scripts.bench_data import _both_modes, _Files
from scripts.data_picture import draw
from scripts.released_weights import picture
from scripts.results import in_ink

DOCS = Path(__file__).parent.parent / "docs"
_COLORS = ("#d0d5db", "#868e96", "#dd8a2c", "#2f6db3")


def main() -> None:
    known = yaml.safe_load((DOCS / "numbers.yaml").read_text())
    for name, groups in ((name, groups) for name, groups in known.items() if name.endswith(".png")):
        if name == "continue.png":
            figure = picture({group["group"]: group["curve"] for group in groups})
        else:
            figure = _rates(groups[0]["figures"]) if name == "data.png" else _bars(groups)
        said = {"metadata": {"figures": json.dumps(groups)}, "pil_kwargs": {"optimize": True}}
        in_ink(figure).savefig(DOCS / name, dpi=90, facecolor="none", **said)


def _bars(groups: list[dict[str, Any]]) -> Any:
    """Bars of k-NN in percent, in groups; the longest group names the colors."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 3.6), layout="constrained")
    axes = figure.subplots()
    names = max((list(group["figures"]) for group in groups), key=len)
    for i, name in enumerate(names):
        held = [g for g, group in enumerate(groups) if name in group["figures"]]
        values = [groups[g]["figures"][name] for g in held]
        bars = axes.bar(
            [g + 0.2 * (i - (len(names) - 1) / 2) for g in held], values, 0.19, label=name, color=_COLORS[i]
        )
        axes.bar_label(bars, [f"{value:.1f}" for value in values], fontsize=9)
    axes.set_xticks(range(len(groups)), [group["group"] for group in groups])
    axes.set_title("k-NN of held-out images by the teacher's features, %", fontsize=11, loc="left")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    return figure


def _rates(rates: dict[str, float]) -> Any:
    """The picture of `scripts.bench_data`, with these images/s and the crops of an embedded photograph."""
    recipe = load_recipe(None, {})
    multicrop = MultiCrop.of(recipe)
    worker, device = _both_modes(multicrop, _Files(recipe, 1), recipe)
    rates = rates | {"split_total": 1 / (1 / rates["split_worker"] + 1 / rates["device"])}
    result = {"pipelines": {name: {"images_per_second": rate} for name, rate in rates.items()}}
    return draw(result, [crop[0] for crop in worker], [crop[0] for crop in device])


if __name__ == "__main__":
    main()
