"""`dino-ds curate`: near-duplicates, clusters and balanced lists of images, from their features, in a new folder."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from dino_ds.basics.durable import replacing_folder, why_not_writable
from dino_ds.errors import ConfigError, unwritable
from dino_ds.options.definition import Result
from dino_ds.options.model import CurateOptions

if TYPE_CHECKING:
    import numpy as np

    from dino_ds.commands.embedded import Embedded


_MANY_ALIKE = 0.05
"""A group of near-duplicates with more than this part of the images is suspicious."""


class Curated(NamedTuple):
    """`folder` with the files, and for each image: `duplicate_of`, the image that is kept in its place, or -1;
    `clusters` (images, levels), -1 without a cluster; `listed`, whether the written list has it."""

    folder: Path
    duplicate_of: np.ndarray
    clusters: np.ndarray
    listed: np.ndarray
    notes: list[str]


def check(options: CurateOptions) -> None:
    """Refuse options that are wrong whatever the features are. Raises ConfigError."""
    if options.duplicates is None and options.clusters is None:
        raise ConfigError("say what for: --duplicates 0.95, --clusters 1000, or both")
    if options.draw is not None and options.clusters is None:
        raise ConfigError(f"--draw {options.draw} is balanced over clusters: give --clusters 1000 too")
    if options.clusters and list(options.clusters) != sorted(options.clusters, reverse=True):
        raise ConfigError(
            f"--clusters {','.join(map(str, options.clusters))}: each level has fewer than the one before"
        )
    if os.path.lexists(folder := _folder(options)):
        raise ConfigError(f"{folder} is there already: remove it, or name another with --out")
    if reason := why_not_writable(folder):
        raise ConfigError(f"{folder} can't be written: {reason}; fix --out")


def _folder(options: CurateOptions) -> Path:
    features = Path(os.path.expanduser(options.features))
    what = "drawn" if options.draw else "clusters" if options.clusters else "duplicates"
    return Path(os.path.expanduser(options.out)) if options.out else features.with_name(f"{features.stem}-{what}")


def run(options: CurateOptions) -> Result:
    """Write the folder, whole or not at all, and return what is in it. Raises UserError."""
    import numpy as np

    from dino_ds.commands.embedded import open_embedded

    check(options)
    embedded, folder = open_embedded(options), _folder(options)
    rows, total = embedded.vectors.chosen, len(embedded.rows)
    found = Curated(folder, np.full(total, -1), np.empty((total, 0), np.int64), np.isin(np.arange(total), rows), [])
    found.notes.extend(embedded.notes)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with replacing_folder(folder) as place:
            if options.duplicates is not None:
                _separate(embedded, found, options.duplicates, place)
            if options.clusters is not None:
                found = _cluster(embedded, found, options, place)
            if options.duplicates is not None or options.draw is not None:
                ending, content = embedded.listed(np.flatnonzero(found.listed))
                (place / f"images{ending}").write_bytes(content)
                use = "--data.root" if ending == ".txt" else "--data.balance clusters:"
                note = f"{found.listed.sum()} of {total} images: dino-ds train {use}{' ' * (ending == '.txt')}"
                found.notes.append(f"{note}{folder / f'images{ending}'}")
    except OSError as error:
        raise unwritable(folder, error, "out") from None
    facts = {"out": str(folder), "images": total, "listed": int(found.listed.sum()), "notes": found.notes}
    return Result(facts, "\n".join(found.notes), value=found)


def _separate(embedded: Embedded, found: Curated, threshold: float, place: Path) -> None:
    """Find near-duplicates and keep the largest image of each group, or the first by name among equally large ones."""
    import numpy as np

    from dino_ds.commands.embedded import table
    from dino_ds.evals.curation import near_duplicates

    rows = embedded.vectors.chosen
    groups = near_duplicates(embedded.vectors, threshold)
    lines, sheet = list[tuple[object, ...]](), list[list[tuple[int, str]]]()
    order = np.argsort(groups, kind="stable")
    for members in np.split(order, np.flatnonzero(np.diff(groups[order])) + 1):
        if len(members) == 1:
            continue
        sides = {int(rows[one]): embedded.side(int(rows[one])) for one in members}
        ordered = sorted(sides, key=lambda row: (-sides[row], embedded.source.name(row)))
        kept, others = ordered[0], ordered[1:]
        found.duplicate_of[others], found.listed[others] = kept, False
        near = embedded.vectors.take(members)
        cosines = dict(zip(sides, (near @ near[list(sides).index(kept)]).tolist(), strict=True))
        named = [(row, f"{cosines[row]:.4f}", embedded.source.name(row), sides[row]) for row in ordered]
        lines += [(len(sheet), "yes" if row == kept else "no", *rest) for row, *rest in named]
        sheet.append([(row, f"kept, {sides[row]} px" if row == kept else text) for row, text, *_ in named])
    columns = ("group", "kept", "cosine", "name", "side")
    (place / "duplicates.csv").write_bytes(table(columns, lines))
    if sheet:
        sheet.sort(key=len, reverse=True)
        (place / "duplicates.png").write_bytes(embedded.sheet(sheet))
    gone = len(lines) - len(sheet)
    found.notes.append(f"{found.folder}: {gone} near-duplicates of {len(sheet)} images, which are kept")
    if sheet and len(sheet[0]) > max(10, _MANY_ALIKE * len(rows)):
        alike = f"{len(sheet[0])} of {len(rows)} images are one group: these features lie close together"
        found.notes.append(f"warning: {alike}; look at duplicates.png, and raise --duplicates")


def _cluster(embedded: Embedded, found: Curated, options: CurateOptions, place: Path) -> Curated:
    """Cluster the images that are still listed, and draw from them."""
    import numpy as np

    from dino_ds.commands.embedded import COLUMNS, LINES, table
    from dino_ds.data.images import evenly_spaced_indices
    from dino_ds.evals.curation import cluster_levels, draw

    kept, sizes = np.flatnonzero(found.listed), options.clusters or ()
    if (most := max(sizes[0], options.draw or 0)) > len(kept):
        raise ConfigError(f"{most} are more than the {len(kept)} images that there are: give a smaller number")
    vectors = replace(embedded.vectors, chosen=kept)
    levels, distances = cluster_levels(vectors, sizes, options.seed)
    clusters = np.full((len(embedded.rows), len(levels)), -1)
    clusters[kept] = np.stack(levels, axis=1)
    columns = ("name", "cluster", *(f"level_{number}" for number in range(2, len(levels) + 1)))
    texts = (
        (embedded.source.name(i), *("" if one < 0 else one for one in row)) for i, row in enumerate(clusters.tolist())
    )
    (place / "clusters.csv").write_bytes(table(columns, texts))
    counts = np.bincount(levels[0])
    nearest = np.lexsort((distances, levels[0]))
    first = np.concatenate(([0], np.cumsum(counts)[:-1]))
    by_size = np.argsort(-counts, kind="stable")
    shown = by_size[evenly_spaced_indices(len(by_size), LINES)]
    members = [(kept[nearest[first[one] : first[one] + counts[one]]], counts[one]) for one in shown]
    sheet = [[(row, f"{size} images") for row in some[:COLUMNS].tolist()] for some, size in members]
    (place / "clusters.png").write_bytes(embedded.sheet(sheet))
    spread = f"{counts.max()} to {counts.min()} images each: dino-ds train --data.balance"
    found.notes.append(f"{len(counts)} clusters of {spread} clusters:{found.folder / 'clusters.csv'}")
    if options.draw is not None:
        found.listed[:] = False
        found.listed[kept[draw(levels, options.draw, options.seed)]] = True
    return found._replace(clusters=clusters)
