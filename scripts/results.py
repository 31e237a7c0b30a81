"""Writing of what a script has measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from dino_ds.report.draw import INK, figure_pixels, png_of


def write_result(place: Path, result: dict[str, Any], page: str, figure: Any = None) -> None:
    """Print `page`, and write `place`.json, .md and, with a matplotlib Figure, .png."""
    place.parent.mkdir(parents=True, exist_ok=True)
    place.with_suffix(".json").write_text(json.dumps(result, indent=1) + "\n")
    place.with_suffix(".md").write_text(page + "\n")
    if figure is not None:
        place.with_suffix(".png").write_bytes(png_of(figure_pixels(in_ink(figure))))
    print(page)


def in_ink(figure: Any) -> Any:
    """A matplotlib Figure, whose black words and lines get the color that is read on a light page and on a dark one."""
    from matplotlib.text import Text

    for axes in figure.axes:
        axes.patch.set_visible(False)
        axes.tick_params(colors=INK)
        axes.spines[:].set_color(INK)
    for text in figure.findobj(lambda artist: isinstance(artist, Text) and artist.get_color() == "black"):
        text.set_color(INK)
    return figure
