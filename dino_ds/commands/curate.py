"""`dino-ds curate`: near-duplicates, clusters and balanced lists of images, from their features, in a new folder."""

from __future__ import annotations

import os
import shlex
from collections import Counter
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from dino_ds.basics.files import check_absent, replacing_folder, why_not_writable
from dino_ds.commands.embed import find_features
from dino_ds.config.loading import code_of, recorded_recipe
from dino_ds.config.stages import find_model_folder
from dino_ds.errors import ConfigError, unwritable
from dino_ds.options.definition import CurateOptions, Result

if TYPE_CHECKING:
    from dino_ds.commands.find import Embedded


def run(options: CurateOptions) -> Result:
    """Write the folder, whole or not at all, and return what is in it. Raises UserError."""
    from dino_ds.commands.find import open_embedded

    check(options)
    embedded, folder = open_embedded(options), _folder(options)
    count = len(embedded.rows)
    listed = np.isin(np.arange(count), embedded.vectors.chosen)
    curated = Curated(folder, np.full(count, -1), np.empty((count, 0), np.int64), listed, embedded.notes)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with replacing_folder(folder) as unfinished:
            if options.duplicates is not None:
                _separate(embedded, curated, options.duplicates, unfinished)
            if options.clusters is not None:
                curated = _cluster(embedded, curated, options, unfinished)
            if options.duplicates is not None or options.draw is not None:
                ending, content = embedded.listed(np.flatnonzero(listed))
                (unfinished / f"images{ending}").write_bytes(content)
                key = "data.root" if ending == ".txt" else "data.balance"
                command = "none is left out" if listed.all() else _train(embedded, key, folder / f"images{ending}")
                curated.notes.append(f"{listed.sum()} of {count} images: {command}")
    except OSError as error:
        raise unwritable(folder, error, "out") from None
    facts = {"out": str(folder), "images": count, "listed": int(listed.sum()), "notes": curated.notes}
    return Result(facts, "\n".join(curated.notes), value=curated)


def check(options: CurateOptions) -> None:
    """Refuse options that are wrong whatever the features are. Raises ConfigError."""
    if options.duplicates is None and options.clusters is None:
        raise ConfigError("nothing to look for is given: --duplicates auto, --clusters 1000, or both")
    if options.draw is not None and options.clusters is None:
        raise ConfigError(f"--draw {options.draw} is balanced over clusters: give --clusters 1000 too")
    if options.clusters and list(options.clusters) != sorted(options.clusters, reverse=True):
        sizes = ",".join(map(str, options.clusters))
        raise ConfigError(f"--clusters {sizes}: each level has fewer than the one before")
    check_absent(folder := _folder(options))
    if reason := why_not_writable(folder):
        raise ConfigError(f"{folder} can't be written: {reason}; fix --out")
    find_features(options.features)


def _folder(options: CurateOptions) -> Path:
    features = Path(os.path.expanduser(options.features))
    kind = "drawn" if options.draw else "clusters" if options.clusters else "duplicates"
    return Path(os.path.expanduser(options.out)) if options.out else features.with_name(f"{features.stem}-{kind}")


class Curated(NamedTuple):
    """`folder` with the files, and for each image: `duplicate_of`, the image that is kept in its place, or -1;
    `clusters` (images, levels), -1 without a cluster; `listed`, whether the written list has it."""

    folder: Path
    duplicate_of: np.ndarray
    clusters: np.ndarray
    listed: np.ndarray
    notes: list[str]


def _separate(embedded: Embedded, curated: Curated, duplicates: float | str, folder: Path) -> None:
    """Find near-duplicates and keep the largest image of each group, or the first by name among equally large ones."""
    from dino_ds.commands.find import LINES, table
    from dino_ds.evals.curation import groups, pairs_of_cosine, pairs_of_pictures

    vectors = embedded.vectors
    if isinstance(duplicates, float):
        pairs = pairs_of_cosine(vectors, duplicates)
    else:
        pairs = pairs_of_pictures(vectors, embedded.thumbnails(folder))
    labels = groups(len(vectors), pairs)
    lines, sheet = list[tuple[object, ...]](), list[list[tuple[int, str]]]()
    order = np.argsort(labels, kind="stable")
    for members in np.split(order, np.flatnonzero(np.diff(labels[order])) + 1):
        if len(members) > 1:
            rows, near = vectors.chosen[members].tolist(), vectors.take(members)
            sides, names = list(map(embedded.side, rows)), list(map(embedded.source.name, rows))
            ranks = sorted(range(len(rows)), key=lambda i: (-sides[i], names[i]))
            cosines, kept = (near @ near[ranks[0]]).tolist(), rows[ranks[0]]
            lines += [(len(sheet), "no", f"{cosines[i]:.4f}", names[i], sides[i]) for i in ranks]
            lines[-len(rows)] = (len(sheet), "yes", *lines[-len(rows)][2:])
            sheet.append([(rows[i], f"{cosines[i]:.4f}") for i in ranks])
            sheet[-1][0] = (kept, f"kept, {sides[ranks[0]]} px")
            others = [rows[i] for i in ranks[1:]]
            curated.duplicate_of[others], curated.listed[others] = kept, False
    (folder / "duplicates.csv").write_bytes(table(("group", "kept", "cosine", "name", "side"), lines))
    sheet.sort(key=len, reverse=True)
    if sheet:
        shown = f"{min(LINES, len(sheet))} of {len(sheet)} groups"
        heading = f"{shown}: the kept image, then the others and their cosines to it"
        (folder / "duplicates.png").write_bytes(embedded.sheet(sheet, heading=heading))
    removed = len(lines) - len(sheet)
    said = f"{removed} near-duplicates of {len(sheet)} images, which are kept" if sheet else "no near-duplicates"
    curated.notes.append(f"{curated.folder}: {said}")
    if sheet and len(sheet[0]) > max(10, 0.05 * len(vectors)):
        alike = f"{len(sheet[0])} of {len(vectors)} images are one group; look at duplicates.png"
        cure = "use auto, or raise --duplicates" if isinstance(duplicates, float) else "try --duplicates 0.98"
        curated.notes.append(f"warning: {alike}, and {cure}")


def _cluster(embedded: Embedded, curated: Curated, options: CurateOptions, folder: Path) -> Curated:
    """Cluster the images that are still listed, and draw from them."""
    from dino_ds.commands.find import COLUMNS, LINES, table
    from dino_ds.data.images import evenly_spaced_indices
    from dino_ds.evals.curation import cluster_levels, draw

    kept, sizes = np.flatnonzero(curated.listed), options.clusters or ()
    if (most := max(sizes[0], options.draw or 0)) > len(kept):
        raise ConfigError(f"{most} are more than the {len(kept)} images left: lower --clusters or --draw")
    levels, distances = cluster_levels(replace(embedded.vectors, chosen=kept), sizes, options.seed)
    clusters = np.full((len(embedded.rows), len(levels)), -1)
    clusters[kept] = np.stack(levels, axis=1)
    columns = ("name", "cluster", *(f"level_{number}" for number in range(2, len(levels) + 1)))
    named = ([label if label >= 0 else "" for label in row] for row in clusters.tolist())
    texts = ((embedded.source.name(i), *row) for i, row in enumerate(named))
    (folder / "clusters.csv").write_bytes(table(columns, texts))
    counts = np.bincount(levels[0])
    members = np.split(kept[np.lexsort((distances, levels[0]))], np.cumsum(counts)[:-1])
    by_size = np.argsort(-counts, kind="stable")
    shown = by_size[evenly_spaced_indices(len(by_size), LINES)]
    titles = [f"{len(shown)} of {len(counts)} clusters", "nearest"] + [""] * (COLUMNS - 4) + ["most distant"] * 2
    sheet = [_line_of_cluster(embedded, i, members[i], COLUMNS) for i in shown]
    (folder / "clusters.png").write_bytes(embedded.sheet(sheet, titles))
    how = _train(embedded, "data.balance", curated.folder / "clusters.csv")
    sizes_said = f"{len(counts)} clusters of {counts.max()} to {counts.min()} images each"
    curated.notes.append(f"{sizes_said}, drawn in {curated.folder / 'clusters.png'}: {how}")
    if options.draw is not None:
        curated.listed[:] = False
        curated.listed[kept[draw(levels, options.draw, options.seed)]] = True
    return curated._replace(clusters=clusters)


def _line_of_cluster(embedded: Embedded, number: int, members: np.ndarray, columns: int) -> list[tuple[int | str, str]]:
    """The nearest and the two most distant of the sorted `members`, with the cluster's number, size and main class."""
    rows, labels, classes = members.tolist(), embedded.source.labels, embedded.source.classes
    known = [] if labels is None or not classes else [labels[row] for row in rows if labels[row] >= 0]
    words = [f"cluster {number}", f"{len(rows)} images"]
    if known and classes:
        label, count = Counter(known).most_common(1)[0]
        words.append(f"{count / len(rows):.0%} class {classes[label]}")
    chosen = rows if len(rows) <= columns else rows[: columns - 2] + rows[-2:]
    return [(row, words[i] if i < len(words) else "") for i, row in enumerate(chosen)]


def _train(embedded: Embedded, key: str, file: Path) -> str:
    """The command that trains on `file`, given as --KEY, by the recipe of the run that made the features, unless that
    is a stage or imports a user's code. For data.balance it also names the images, and holds none of them out."""
    words, origin = [f"--{key}", f"{'' if key == 'data.root' else 'clusters:'}{file}"], embedded.about["origin"]
    images = {"data.source": origin["source"], "data.root": None if key == "data.root" else origin["root"]}
    words[:0] = [word for name, value in images.items() if value is not None for word in (f"--{name}", value)]
    config = find_model_folder(origin["model"]).folder / "config.yaml"
    with suppress(ConfigError):
        if config.is_file() and (recipe := recorded_recipe(config)).stage_start is None and not code_of(recipe):
            words += ["--eval.val_share", "0"] if key != "data.root" and recipe.eval.val_share else []
            words[:0] = ["--config", str(config)]
    return shlex.join(["dino-ds", "train", *words])
