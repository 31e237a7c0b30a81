"""The PNG files of a run's `pictures` folder, put into the page; pictures of training steps are strips through time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from dino_ds.report.folder import RunFiles
from dino_ds.report.html import embedded_file

_WIDTH, _STRIP_WIDTH = 1300, 800
_MOST, _MOST_IN_STRIP = 24, 6
_WIDE_FROM = 2.2
"""Times its height: over both columns."""
_TITLES = {
    "attention": "Self-attention of the CLS token, head by head",
    "pca": "First three principal components of the patches, as colors",
    **dict.fromkeys(("neighbors", "neighbours"), "Nearest neighbors, with their cosines"),
    "map": "Map of the features",
    "curves": "Curves",
    "crops": "Crops that the network sees",
}


def load_pictures(run: RunFiles) -> dict[str, Any]:
    """Pictures of the folder itself, wide ones last, then of its folders (training steps), six of a kind at most."""
    folder = run.path / "pictures"
    # The report draws curves itself, from all lines of metrics.jsonl.
    own = [path for path in run.pictures if path.parent == folder and path.stem != "curves"]
    strips: dict[str, list[Path]] = {}
    for path in run.pictures:
        if path.parent != folder:
            strips.setdefault(path.stem, []).append(path)
    drawn = [_picture(path, _TITLES.get(path.stem, path.stem), _WIDTH) for path in own[:_MOST]]
    return {
        "folder": folder,
        "own": sorted(drawn, key=lambda one: one["wide"]),
        "left_out": max(0, len(own) - _MOST),
        "strips": [
            {
                "title": _TITLES.get(kind, kind),
                "count": len(paths),
                "shown": [_picture(path, _step_of(path, folder), _STRIP_WIDTH) for path in _spread(paths)],
            }
            for kind, paths in list(strips.items())[:_MOST]
        ],
    }


def _step_of(path: Path, folder: Path) -> str:
    """The name of its folder: "step_00000500" -> "step 500"."""
    name = str(path.parent.relative_to(folder))
    word, _, digits = name.rpartition("_")
    return f"{word} {int(digits):,}" if word and digits.isascii() and digits.isdigit() else name


def _spread(paths: list[Path]) -> list[Path]:
    chosen = np.unique(np.linspace(0, len(paths) - 1, min(len(paths), _MOST_IN_STRIP)).round().astype(int))
    return [paths[i] for i in chosen]


def _picture(path: Path, caption: str, width: int) -> dict[str, Any]:
    """Embed one file; one that can't be read has an `error` instead."""
    try:
        address, (wide, high) = embedded_file(path, width)
    except (OSError, ValueError) as error:
        return {"error": f"{path.name} can't be shown: {getattr(error, 'strerror', None) or error}", "wide": False}
    is_wide = width == _WIDTH and wide > _WIDE_FROM * high
    return {"error": "", "caption": caption, "address": address, "width": wide, "height": high, "wide": is_wide}
