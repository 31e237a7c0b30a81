"""`dino-ds find`: the nearest images of files, or of rows of a file of features that `dino-ds embed` wrote."""

from __future__ import annotations

import csv
import io
import json
import os
import tempfile
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from dino_ds.basics.files import check_format, free_stem, read_object, replace_file
from dino_ds.commands import embed
from dino_ds.commands.embed import find_features, unreadable
from dino_ds.commands.embedding_parts import DIGEST, digest_of_rows
from dino_ds.data import decode, encoded, image_set, mixture, multicrop, parquet
from dino_ds.data.images import Source, UnreadableImage
from dino_ds.data.normalization import Normalization, shown_channels
from dino_ds.errors import ConfigError, DataError, one_line, unwritable
from dino_ds.evals.curation import SIDE, Vectors, nearest_rows
from dino_ds.evals.features import LabeledImages, Reading, find_images, load_batches
from dino_ds.options.definition import CurateOptions, FindOptions, Result
from dino_ds.report.draw import Sheet, figure_pixels, picture_of, png_of
from dino_ds.weights.load import load

LINES, COLUMNS = 12, 8  # rows and columns of pictures on a sheet, at most
_THUMBNAIL, _BLOCK = 96, 4096


@dataclass(frozen=True)
class Embedded:
    """Features (n, d), their images, the facts that `embed` wrote about both, and notes for the user."""

    rows: np.ndarray
    source: Source
    about: dict[str, Any]
    memory_gib: float
    notes: list[str]

    @cached_property
    def vectors(self) -> Vectors:
        """The rows of images that could be read."""
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        return Vectors.of(self.rows, self.memory_gib, device)

    @property
    def normalization(self) -> Normalization:
        return Normalization(*(tuple(self.about["normalization"][name]) for name in ("mean", "std")))

    def pixels(self, image: int | str, size: int) -> Tensor:
        """A row's image, or a file's, as the network gets it. Raises UnreadableImage."""
        crop = multicrop.EvalCrop(size, self.normalization)
        source, index = (encoded.NamedFiles([image]), 0) if isinstance(image, str) else (self.source, image)
        return crop(decode.load_image(source, index, self.about["value_range"], crop.channels))

    def sheet(
        self, lines: Sequence[Sequence[tuple[int | str, str]]], titles: Sequence[str] = (), heading: str = ""
    ) -> bytes:
        """A PNG file of the first COLUMNS images of the first LINES lines, with words under each; titles: one for each
        column; heading: goes above all; the channels that are shown, if not gray or RGB, are added to it."""
        columns = max(len(line[:COLUMNS]) for line in lines)
        heading = "; ".join([*([heading] if heading else []), *shown_channels(len(self.normalization.mean))])
        sheet = Sheet(min(LINES, len(lines)), columns, titles[:columns], captions=True, heading=heading)
        for row, line in enumerate(lines[:LINES]):
            for column, (image, text) in enumerate(line[:COLUMNS]):
                sheet.put(row, column, self._picture(image), text)
        return png_of(figure_pixels(sheet.figure))

    def _picture(self, image: int | str) -> np.ndarray:
        """The center (h, w, 3) of a row's image or a file's; gray where it can't be read."""
        try:
            pixels = self.pixels(image, _THUMBNAIL)
        except UnreadableImage:
            return np.full((_THUMBNAIL, _THUMBNAIL, 3), 0.5)
        return picture_of(pixels[None], self.normalization.mean, self.normalization.std)[0].numpy()

    def thumbnails(self, folder: Path) -> np.ndarray:
        """(n, 32 * 32) gray pixels of the images of `vectors`, in a file in `folder` that has no name and so ends with
        the process; zeros where an image can't be read."""
        rows = self.vectors.chosen.tolist()
        reading = Reading(_thumbnail, None, self.about["value_range"], channels=len(self.normalization.mean))
        with tempfile.TemporaryFile(dir=folder) as file:
            pixels = np.memmap(file, np.float16, "w+", shape=(len(rows), SIDE * SIDE))
        labeled = LabeledImages(self.source, rows, reading)
        batches = load_batches(labeled, self.source, None, "look", batch_size=reading.batch)
        for images, places, _ in batches:
            pixels[places[:, 0].numpy()] = images.flatten(1).numpy()
        return pixels

    def side(self, index: int) -> int:
        """Pixels of an image's longer side, 0 where it can't be read."""
        with suppress(UnreadableImage):
            image = decode.open_image(self.source, index, None, channels=len(self.normalization.mean))
            return max(image.height, image.width)
        return 0

    def listed(self, rows: Iterable[int]) -> tuple[str, bytes]:
        """The ending and the content of a list of these images: a .txt that `data.root` reads, or, where images are no
        files of their own, a .csv that `data.balance clusters:` reads."""
        chosen = sorted(rows)
        paths = [_path_of(self.source, row) for row in chosen]
        if None in paths:
            kept, names = set(chosen), map(self.source.name, range(len(self.source)))
            lines = ((name, 0 if row in kept else "") for row, name in enumerate(names))
            return ".csv", table(("name", "cluster"), lines)
        if odd := next((path for path in paths if path and {10, 13, 9} & set(path)), None):
            raise DataError(f"{odd!r} has a line break or a tab in its name, which no list can hold: rename it")
        labels, classes = self.source.labels, self.source.classes or []
        ends = [b"" if labels is None or labels[row] < 0 else b"\t" + classes[labels[row]].encode() for row in chosen]
        return ".txt", b"".join(path + end + b"\n" for path, end in zip(paths, ends, strict=True) if path)


def _thumbnail(image: Image.Image | np.ndarray) -> Tensor:
    """RGB image, or (h, w, c) of uint8 or of float32 in [0, 1] -> (32, 32) in [0, 255], the whole of it."""
    values = np.asarray(image)
    gray = torch.from_numpy(values.mean(axis=2, dtype=np.float32))[None, None]
    small = F.interpolate(gray, (SIDE, SIDE), mode="bilinear", antialias=True)[0, 0]
    return small if values.dtype == np.uint8 else 255 * small


def _path_of(source: Source, index: int) -> bytes | None:
    """The absolute path, or the URL, of an image that is a file of its own."""
    if isinstance(source, mixture.Mixture):
        part, index = source.part_of(index)
        source = source.sources[part]
    return os.fsencode(source.path(index)) if isinstance(source, encoded.ListedFiles) else None


def table(columns: Iterable[str], rows: Iterable[Iterable[object]]) -> bytes:
    """A .csv file."""
    text = io.StringIO(newline="")
    lines = csv.writer(text)
    lines.writerow(columns)
    lines.writerows(rows)
    return text.getvalue().encode()


def open_embedded(options: FindOptions | CurateOptions) -> Embedded:
    """Open features as `embed` has written them, and the images that they are of, unchanged."""
    path, beside = find_features(options.features)
    try:
        about = read_object(beside)
        check_format(about.get("format"), beside, "embed again")
        kind, shape = about["what"], (about["rows"], *about["shape"])
        _ = [about[name] for name in ("size", "weights", "network", "normalization", "value_range", "images")]
        images = [about["origin"][name] for name in ("model", "source", "root")]
        if kind == "patches":
            raise ConfigError(f"{path} has maps of patches: embed with --what cls or mean, a vector an image")
        rows = _read_rows(path, shape, options.memory_gib)
    except OSError as error:
        raise unreadable(path, error) from None
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise DataError(f"{path} and {beside.name} are not as embed writes them: {one_line(error)}") from None
    notes, blocks = list[str](), (rows[start : start + _BLOCK] for start in range(0, len(rows), _BLOCK))
    if DIGEST not in about:
        notes.append(f"{beside} has no {DIGEST}: whether the rows are in the order of the images is not known")
    elif about[DIGEST] != digest_of_rows(blocks):
        problem = f"{path} has other rows than {beside.name} describes, or in another order"
        raise DataError(f"{problem}: bring back both files of one dino-ds embed, or embed again")
    source = find_images(images[0], images[1], options.root or images[2])
    notes += getattr(source, "notes", ())
    if changes := image_set.changed_images(about, image_set.facts_of_images(source)):
        raise DataError(f"the images have changed since {path} was made ({changes}): embed again")
    embedded = Embedded(rows, source, about, options.memory_gib, notes)
    if not len(embedded.vectors):
        raise DataError(f"{path} has no row of numbers but zero: its images could not be read, or its network is dead")
    if unread := len(rows) - len(embedded.vectors):
        notes.append(f"{unread} of {len(rows)} rows are NaN or zero, as of images that can't be read: left out")
    return embedded


def _read_rows(path: Path, shape: tuple[int, ...], memory_gib: float) -> np.ndarray:
    """The features (n, d): memory-mapped from an .npy, else read. Raises OSError, ValueError, ConfigError."""
    if path.suffix == ".npy":
        rows = np.load(path, mmap_mode="r", allow_pickle=False)
        if rows.shape != shape or rows.dtype not in (np.float16, np.float32):
            raise ValueError(f"it has {rows.dtype} {list(rows.shape)}, and {list(shape)} are described")
        return rows
    if 4 * shape[0] * shape[1] > memory_gib * 2**30:
        raise ConfigError(f"{path} has more than --memory_gib {memory_gib:g}: embed as .npy, or give more")
    column = parquet.import_parquet().read_table(path, columns=["features"])["features"].combine_chunks()
    rows = column.flatten().to_numpy(zero_copy_only=False)
    return rows.reshape(shape)


class Found(NamedTuple):
    """An image near to `query`: its row of the features and its name."""

    query: str
    cosine: float
    row: int
    name: str


def run(options: FindOptions) -> Result:
    """Write a list and a picture of the images nearest to each of `images`; return their table, nearest first. An
    image that is a row of features is not its own neighbor. Raises UserError, also for an `out` whose files exist."""
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
        name = image if isinstance(image, str) else embedded.source.name(image)
        sheet.append([(image, Path(name).name), *((row, f"{cosine:.4f}") for row, cosine in pairs)])
    ending, content = embedded.listed({image.row for image in neighbors})
    asked, most = f"{len(sheet)} image{'s' * (len(sheet) > 1)}", max(map(len, sheet)) - 1
    asked = f"{LINES} of {asked}" if len(sheet) > LINES else asked
    few = f"{COLUMNS - 1} of the {most}" if most >= COLUMNS else f"the {most}"
    heading = f"{asked}, and {few} nearest of {len(bank):,}, with the cosines of their features"
    try:
        replace_file(Path(f"{stem}{ending}"), content)
        replace_file(Path(f"{stem}.png"), embedded.sheet(sheet, heading=heading))
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
        known = f"the name or the number (0 to {len(source) - 1}) of a row of features"
        raise ConfigError(f"{image} is no file, nor {known}")
    if row not in embedded.vectors.chosen:
        raise ConfigError(f"{source.name(row)} could not be read when it was embedded: ask for another image")
    return row


def _features(embedded: Embedded, files: list[str], weights: str | None) -> list[Tensor]:
    """L2-normalized FP64 features (1, d) of each image file, by the network that made the features file. Raises
    ConfigError if the network has changed since, DataError for a file that can't be read."""
    if not files:
        return []
    about, device = embedded.about, embedded.vectors.device
    model = load(weights or about["origin"]["model"], device)
    made_by = embed.facts_of_network(model, about["what"], about["size"], about["value_range"])
    if differ := [name for name, value in json.loads(json.dumps(made_by)).items() if value != about[name]]:
        problem = f"{model.source} is not what made these features ({', '.join(differ)} differ)"
        raise ConfigError(f"{problem}: give that with --model, such as RUN/checkpoints/step_N, or embed again")
    describe = embed.describing(model, about["what"])
    try:
        images = (embedded.pixels(file, about["size"])[None].to(device) for file in files)
        return [torch.nn.functional.normalize(describe(image).double()) for image in images]
    except UnreadableImage as error:
        raise DataError(str(error)) from None
