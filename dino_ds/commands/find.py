"""`dino-ds find`: the nearest images of files, or of rows of features."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from dino_ds.basics.durable import free_stem, replace_file
from dino_ds.commands import embed
from dino_ds.commands.embedded import Embedded, open_embedded
from dino_ds.data.base import UnreadableImage
from dino_ds.errors import ConfigError, DataError, unwritable
from dino_ds.evals.curation import nearest_rows
from dino_ds.options.definition import Result
from dino_ds.options.model import FindOptions
from dino_ds.weights.load import load


class Found(NamedTuple):
    """An image near to `query`: its row of the features and its name."""

    query: str
    cosine: float
    row: int
    name: str


def run(options: FindOptions) -> Result:
    """Write a list and a picture of the nearest images of each in `images`, nearest first; their table. An image that
    is a row of features is not its own neighbor. Raises UserError, also for an `out` whose files exist."""
    features = Path(os.path.expanduser(options.features))
    stem = free_stem(options.out, features.with_name(f"{features.stem}-found"), (".txt", ".csv", ".png"))
    embedded = open_embedded(options)
    bank = embedded.vectors
    queries = [_row_of(embedded, image) for image in options.images]
    described = iter(_features(embedded, [image for image in queries if isinstance(image, str)], options.model))
    rows = [next(described) if isinstance(i, str) else bank.take(bank.chosen.searchsorted([i])) for i in queries]
    cosines, places = nearest_rows(torch.cat(rows), bank, options.top + 1)
    neighbors, sheet = list[Found](), []
    for image, query, near, values in zip(queries, options.images, bank.chosen[places], cosines, strict=True):
        pairs = [pair for pair in zip(near.tolist(), values.tolist(), strict=True) if pair[0] != image][: options.top]
        neighbors += [Found(query, cosine, row, embedded.source.name(row)) for row, cosine in pairs]
        sheet.append([(image, "query"), *((row, f"{cosine:.4f}") for row, cosine in pairs)])
    ending, content = embedded.listed({image.row for image in neighbors})
    try:
        replace_file(Path(f"{stem}{ending}"), content)
        replace_file(Path(f"{stem}.png"), embedded.sheet(sheet))
    except OSError as error:
        raise unwritable(stem, error, "out") from None
    files = [f"{stem}{ending}", f"{stem}.png"]
    table = ["\t".join((near.query, f"{near.cosine:.4f}", near.name)) for near in neighbors]
    facts = {"found": [near._asdict() for near in neighbors], "files": files, "notes": embedded.notes}
    return Result(facts, "\n".join([*table, ", ".join(files)]), embedded.notes, neighbors)


def _row_of(embedded: Embedded, image: str) -> int | str:
    """A file itself, else the row of this number or name. Raises ConfigError."""
    file, source = os.path.expanduser(image), embedded.source
    if os.path.isfile(file):
        return file
    is_number = image.isdecimal() and int(image) < len(source)
    row = int(image) if is_number else next((i for i in range(len(source)) if source.name(i) == image), None)
    if row is None:
        raise ConfigError(
            f"{image} is no file, nor the name or the number (0 to {len(source) - 1}) of a row of features"
        )
    if row not in embedded.vectors.chosen:
        raise ConfigError(f"{source.name(row)} could not be read when it was embedded: ask for another image")
    return row


def _features(embedded: Embedded, files: list[str], weights: str | None) -> list[Tensor]:
    """Features of length 1 (1, d), in FP64, of image files, by what made the others. Raises ConfigError where that is
    another network now, DataError."""
    if not files:
        return []
    about, device = embedded.about, embedded.vectors.device
    model = load(weights or about["origin"]["model"], device)
    made_by = embed.facts_of_network(model, about["what"], about["size"], about["value_range"])
    if differ := [name for name, value in json.loads(json.dumps(made_by)).items() if value != about[name]]:
        raise ConfigError(
            f"{model.source} is not what made these features ({', '.join(differ)} differ): give that with --model, "
            "such as RUN/checkpoints/step_N, or embed again"
        )
    describe = embed.describing(model, about["what"])
    try:
        images = (embedded.pixels(file, about["size"])[None].to(device) for file in files)
        return [torch.nn.functional.normalize(describe(image).double()) for image in images]
    except UnreadableImage as error:
        raise DataError(str(error)) from None
