"""The PNG files of a run's `pictures` folder, put into the page: those of training steps as strips through time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from markupsafe import Markup

from dino_ds.report.folder import RunFiles
from dino_ds.report.html import embedded_file, join, note
from dino_ds.report.text import number

_WIDTH, _STRIP_WIDTH = 1300, 800
_MOST, _MOST_IN_STRIP = 24, 6
_WIDE_FROM = 2.2
"""Times its height: over both columns."""
_WIDE, _NARROW = Markup('<figure class="picture wide">'), Markup('<figure class="picture">')
_TITLES = {
    "attention": "Self-attention of the CLS token, head by head",
    "pca": "First three principal components of the patches, as colours",
    "similarity": "Cosine of a chosen patch (cross) with every patch",
    "neighbours": "Nearest neighbours, with their cosines",
    "map": "Map of the features",
    "curves": "Curves",
    "crops": "Crops that the network sees",
}


def show_pictures(run: RunFiles) -> Markup:
    """Pictures of the folder itself, wide ones last, then of its folders (training steps), six of a kind at most."""
    folder = run.path / "pictures"
    # Drawn anew above, from all lines.
    own = [path for path in run.pictures if path.parent == folder and path.stem != "curves"]
    strips: dict[str, list[Path]] = {}
    for path in run.pictures:
        if path.parent != folder:
            strips.setdefault(path.stem, []).append(path)
    drawn = sorted((_picture(path, _title(path.stem), _WIDTH) for path in own[:_MOST]), key=_is_wide)
    parts = [Markup('<div class="strip">{}</div>').format(join(drawn))]
    for kind, paths in list(strips.items())[:_MOST]:
        chosen = _spread(paths)
        of = f": {len(chosen)} of {len(paths)}" if len(chosen) < len(paths) else ""
        shown = join(_picture(path, _step_of(path, folder), _STRIP_WIDTH) for path in chosen)
        parts.append(
            Markup('<h3>{}, while it trained{}</h3><div class="strip three">{}</div>').format(_title(kind), of, shown)
        )
    if not own and not strips:
        parts.append(note("There are no pictures yet: dino-ds pictures RUN makes them."))
    elif len(own) > _MOST:
        parts.append(note(f"{number(len(own) - _MOST)} pictures more lie in {folder}."))
    return join(parts)


def _title(stem: str) -> str:
    return _TITLES.get(stem, stem)


def _step_of(path: Path, folder: Path) -> str:
    """The name of its folder: "step_00000500" -> "step 500"."""
    name = str(path.parent.relative_to(folder))
    word, _, digits = name.rpartition("_")
    return f"{word} {int(digits):,}" if word and digits.isascii() and digits.isdigit() else name


def _spread(paths: Sequence[Path]) -> list[Path]:
    chosen = np.unique(np.linspace(0, len(paths) - 1, min(len(paths), _MOST_IN_STRIP)).round().astype(int))
    return [paths[i] for i in chosen]


def _picture(path: Path, caption: str, width: int) -> Markup:
    try:
        address, (wide, high) = embedded_file(path, width)
    except (OSError, ValueError) as error:
        return note(f"{path.name} can't be shown: {getattr(error, 'strerror', None) or error}")
    kind = _WIDE if width == _WIDTH and wide > _WIDE_FROM * high else _NARROW
    return kind + Markup(
        '<figcaption><b>{}</b></figcaption><img src="{}" width="{}" height="{}" alt="{}"></figure>\n'
    ).format(caption, address, wide, high, caption)


def _is_wide(picture: Markup) -> bool:
    return picture.startswith(_WIDE)
