"""`dino-ds embed`: writes the features of all images to one file, a row each; goes on after an interruption."""

from __future__ import annotations

import csv
import os
import shutil
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

from dino_ds.basics.files import check_absent, is_url, why_not_writable
from dino_ds.errors import ConfigError, DataError
from dino_ds.options.definition import EmbedOptions, Result

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    from dino_ds.data.images import ValueRange
    from dino_ds.weights.load import Backbone


def run(options: EmbedOptions) -> Result:
    """Write the file and return its description, on all ranks. Raises UserError. Rows are in the order of the source's
    images; one that can't be read has a row of NaN, and a note names it."""
    from dino_ds.commands.embedding_parts import Parts, put_together
    from dino_ds.data.image_set import facts_of_images
    from dino_ds.data.multicrop import EvalCrop
    from dino_ds.engine import distributed
    from dino_ds.engine.process import device, init_distributed
    from dino_ds.evals.features import Reading, find_images, range_for
    from dino_ds.weights.load import load

    init_distributed()
    check(options)
    with distributed.raise_on_all_ranks():
        model = load(options.model, device())
        size = options.size or model.image_size
        model.network.check_image(size, size)
        source = find_images(options.model, options.source, options.root)
        shape = _shape(model, options.what, size)
    value_range, notes = range_for(model, [source])
    path = Path(os.path.expanduser(options.out))
    parts = Parts(_parts_of(path), len(source), shape, "float16" if options.half else "float32")
    with distributed.raise_on_all_ranks():
        if distributed.rank() == 0:
            facts = facts_of_network(model, options.what, size, value_range)
            parts.begin({**facts, **facts_of_images(source)})
    distributed.barrier()
    crop = EvalCrop(size, model.normalization)
    reading = Reading(crop, options.workers, value_range, options.batch, progress="embed", channels=crop.channels)
    with distributed.raise_on_all_ranks():
        mine = parts.write(describing(model, options.what), source, reading)
    bad = [text for texts in distributed.gather_objects(mine) for text in texts]
    weights, root = os.path.expanduser(options.model), options.root
    is_path = root is not None and ":" not in (options.source or "") and not is_url(root)
    origin = {  # paths are made absolute, for commands that start in another folder
        "model": os.path.abspath(weights) if os.path.exists(weights) else options.model,
        "source": options.source,
        "root": os.path.abspath(os.path.expanduser(root)) if root is not None and is_path else root,
    }
    with distributed.raise_on_all_ranks():
        if distributed.rank() == 0:
            if len(bad) == len(source):
                shutil.rmtree(parts.folder, ignore_errors=True)
                raise DataError(f"none of {len(source)} images can be read, such as {bad[0]}")
            put_together(path, parts, source, origin)
    unread = f"{len(bad)} images can't be read, their rows are NaN: {', '.join(bad[:5])}"
    unread += f" and {len(bad) - 5} more" if len(bad) > 5 else ""
    notes = [*getattr(source, "notes", ()), *notes, *([unread] if bad else [])]
    facts = {"out": str(path), "shape": [parts.images, *parts.shape], "dtype": parts.dtype, "first": source.name(0)}
    page = f"{path}: {' x '.join(map(str, facts['shape']))} {parts.dtype}; rows as {facts['first']}, ..."
    return Result({**facts, "notes": notes}, page, notes)


def check(options: EmbedOptions) -> None:
    """Refuse options that are wrong whatever the images and weights are. Raises ConfigError."""
    path = Path(os.path.expanduser(options.out))
    if path.suffix not in (".npy", ".parquet"):
        raise ConfigError(f"--out {path} must end in .npy (a .csv beside it names the rows) or .parquet")
    names = [path.with_suffix(".csv")] if path.suffix == ".npy" else []
    for file in (path, path.with_name(f"{path.name}.json"), *names):
        if not _parts_of(path).is_dir():
            check_absent(file)
    if reason := why_not_writable(path):
        raise ConfigError(f"{path} can't be written: {reason}; fix --out")
    if path.suffix == ".parquet":
        from dino_ds.data.parquet import import_parquet

        import_parquet()


def _parts_of(path: Path) -> Path:
    """The folder of parts, which exists until the embedding is complete: the same command continues with them."""
    return path.with_name(f"{path.name}.parts")


def facts_of_network(model: Backbone, kind: str, size: int, value_range: ValueRange | None) -> dict[str, Any]:
    """The settings that an embedding depends on, as JSON: the network and how its input is made, without the images."""
    from dino_ds.weights.frozen import digest

    network = model.network
    return {
        "what": kind,
        "size": size,
        "weights": digest(network.state_dict()),
        "network": {**vars(network.spec), **vars(getattr(network, "options", SimpleNamespace()))},
        "normalization": vars(model.normalization),
        "value_range": value_range,
    }


def _shape(model: Backbone, kind: str, size: int) -> tuple[int, ...]:
    """The shape of one row. Raises ConfigError for patches of a network without features of patches."""
    if kind == "cls":
        return (model.width,)
    if not model.has_patches:
        raise ConfigError(f"--what {kind}: {model.source} gives no features of patches; take --what cls")
    import torch

    device = next(model.network.parameters()).device
    channels = model.network.spec.in_chans
    grid = tuple(model.patch_tokens(torch.zeros(1, channels, size, size, device=device)).shape[1:])
    return grid if kind == "patches" else grid[-1:]


def describing(model: Backbone, kind: str) -> Callable[[Tensor], Tensor]:
    """The function from images (b, c, h, w) to features (b, *shape)."""
    if kind == "cls":
        return model.features
    if kind == "patches":
        return model.patch_tokens
    return lambda images: model.patch_tokens(images).mean(dim=(1, 2))


class Embeddings(NamedTuple):
    """`features` (images, ...); for each row the image's name and its label, an index into `classes` or -1."""

    features: np.ndarray
    names: list[str]
    labels: np.ndarray
    classes: list[str]


def find_features(features: str) -> tuple[Path, Path]:
    """The paths of a file of features and of its description. Raises ConfigError, and DataError if one is missing."""
    path = Path(os.path.expanduser(features))
    if path.suffix not in (".npy", ".parquet"):
        made = f": dino-ds embed {path} --out features.npy" if (path / "config.yaml").is_file() else ""
        raise ConfigError(f"{path} is not .npy or .parquet: give a file of dino-ds embed{made}")
    beside = path.with_name(f"{path.name}.json")
    try:
        beside.stat(), path.stat()
    except OSError as error:
        raise unreadable(path, error) from None
    return path, beside


def check_queries(features: str, images: Sequence[str]) -> None:
    """Raises ConfigError for an image that is not a file, a number, or a name in the .csv beside the features, if
    there is one; DataError where files of `features` are missing."""
    path, _ = find_features(features)
    names = {image for image in images if not image.isdecimal() and not os.path.isfile(os.path.expanduser(image))}
    if not names or path.suffix != ".npy":
        return
    beside = path.with_suffix(".csv")
    with suppress(OSError, csv.Error), beside.open(newline="", encoding="utf-8", errors="surrogateescape") as file:
        if missing := sorted(names - {row[0] for row in csv.reader(file) if row}):
            raise ConfigError(f"{missing[0]} is no file, nor the name or the number of a row of features")


def unreadable(path: Path, error: OSError) -> DataError:
    problem = f"{error.filename or path} can't be read: {error.strerror or error}"
    wanted = f"features are known by the files of dino-ds embed, {path.name} and {path.name}.json among them"
    return DataError(f"{problem}; {wanted}: bring them, or embed again")
