"""`dino-ds find`: the nearest images of files, or of rows of features."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from dino_ds.basics.durable import replace_file
from dino_ds.errors import ConfigError, DataError, unwritable
from dino_ds.options.definition import Result
from dino_ds.options.model import FindOptions

if TYPE_CHECKING:
    from torch import Tensor

    from dino_ds.commands.embedded import Embedded


class Found(NamedTuple):
    """An image near to `query`: its row of the features and its name."""

    query: str
    cosine: float
    row: int
    name: str


def run(options: FindOptions) -> Result:
    """Write a list and a picture of the nearest images of each in `images`, nearest first; their table. An image that
    is a row of features is not its own neighbor. Raises UserError."""
    import torch

    from dino_ds.commands.embedded import open_embedded
    from dino_ds.evals.curation import nearest_rows

    embedded = open_embedded(options)
    bank = embedded.vectors
    queries = [_row_of(embedded, image) for image in options.images]
    embed: Any = _embedder(embedded, options.model) if any(isinstance(image, str) for image in queries) else None
    units = [embed(one) if isinstance(one, str) else bank.take(bank.chosen.searchsorted([one])) for one in queries]
    cosines, places = nearest_rows(torch.cat(units), bank, options.top + 1)
    found, sheet = list[Found](), []
    for image, asked, near, values in zip(queries, options.images, bank.chosen[places], cosines, strict=True):
        others = [pair for pair in zip(near.tolist(), values.tolist(), strict=True) if pair[0] != image][: options.top]
        found += [Found(asked, cosine, row, embedded.source.name(row)) for row, cosine in others]
        sheet.append([(image, "query"), *((row, f"{cosine:.4f}") for row, cosine in others)])
    features = Path(os.path.expanduser(options.features))
    stem = os.path.expanduser(options.out or features.with_name(f"{features.stem}-found"))
    ending, content = embedded.listed({one.row for one in found})
    try:
        replace_file(Path(f"{stem}{ending}"), content)
        replace_file(Path(f"{stem}.png"), embedded.sheet(sheet))
    except OSError as error:
        raise unwritable(stem, error, "out") from None
    files = [f"{stem}{ending}", f"{stem}.png"]
    rows = ["\t".join((near.query, f"{near.cosine:.4f}", near.name)) for near in found]
    facts = {"found": [near._asdict() for near in found], "files": files, "notes": embedded.notes}
    return Result(facts, "\n".join([*rows, *embedded.notes, ", ".join(files)]), value=found)


def _row_of(embedded: Embedded, image: str) -> int | str:
    """A file itself, else the row of this number or name. Raises ConfigError."""
    file, names = os.path.expanduser(image), embedded.source
    if os.path.isfile(file):
        return file
    named = image.isdecimal() and int(image) < len(names)
    row = int(image) if named else next((i for i in range(len(names)) if names.name(i) == image), None)
    if row is None:
        raise ConfigError(
            f"{image} is no file, nor the name or the number (0 to {len(names) - 1}) of a row of features"
        )
    if row not in embedded.vectors.chosen:
        raise ConfigError(f"{names.name(row)} could not be read when it was embedded: ask for another image")
    return row


def _embedder(embedded: Embedded, place: str | None) -> Callable[[str], Tensor]:
    """File -> its features of length 1 (1, d), in FP64, by what made the others. Raises ConfigError where that is
    another network now."""
    from dino_ds.commands.embed import describing, facts_of_network
    from dino_ds.data.base import UnreadableImage
    from dino_ds.weights.load import load

    about, device = embedded.about, embedded.vectors.device
    model = load(place or about["origin"]["model"], device)
    made_by = facts_of_network(model, about["what"], about["size"], about["value_range"])
    if differ := [name for name, value in json.loads(json.dumps(made_by)).items() if value != about[name]]:
        raise ConfigError(
            f"{model.source} is not what made these features ({', '.join(differ)} differ): give that with --model, "
            "such as RUN/checkpoints/step_N, or embed again"
        )
    describe = describing(model, about["what"])

    def embed(file: str) -> Tensor:
        try:
            pixels = embedded.pixels(file, about["size"])
        except UnreadableImage as error:
            raise DataError(str(error)) from None
        vector = describe(pixels[None].to(device)).double()
        return vector / vector.norm()

    return embed
