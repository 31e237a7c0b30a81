"""Options of the commands about images: look at them, measure their loading, pack them."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from dino_ds.config.fields import Amount, Count, Positive, option
from dino_ds.options.definition import Json, command


@command("look-data", "dino_ds.commands.look_data:run", "look", takes_recipe=True, needs_images=True)
class LookDataOptions:
    """a sheet of images with all their crops, and what the data set is like"""

    images: Annotated[Count, Field(le=200)] = option(8, "images on the sheet, 200 at most")
    sample: Amount = option(10000, "images that the statistics are made of, drawn at random; 0 = all")
    out: str = option("look-data.png", "the sheet")
    json: Json = False


@command("advise", "dino_ds.planning.advise:run", "train", loads_torch=False)
class AdviseOptions:
    """which settings for your images and GPUs: each with its reason, and the command to type"""

    root: str | None = option(None, "as data.root: folder, list, shards, Parquet, HDF5", bare=True)
    source: str = option("folder", "as data.source of a recipe")
    gpu: str | None = option(None, "kind of GPU, such as rtx4090-24g (see plan)", shown="this machine's")
    gpus: Count | None = option(None, "GPUs of a node", shown="this machine's, or 1 of --gpu")
    nodes: Count = option(1, "nodes")
    memory_gib: Positive | None = option(None, "memory of a GPU", shown="as its kind has")
    sample: Count = option(500, "images that are looked at, drawn at random, within 3 s")
    json: Json = False


@command("shard", "dino_ds.commands.shard:run", "cluster")
class ShardOptions:
    """images of any source -> tar shards with checksums; continues after an interruption"""

    source: str = option("folder", "as data.source of a recipe")
    root: str | None = option(None, "as data.root: folder, list, shards, Parquet, HDF5")
    split: Literal["train", "test"] = option("train", "of a torchvision data set")
    out: str = option(..., "folder of the shards")
    shard_size: str = option("256MiB", "images of a shard (10000) or about its size (256MiB)")
    shrink: Count | None = option(None, "make the shorter side of larger images N pixels, as JPEG")
    quality: Annotated[Count, Field(le=100)] | None = option(None, "of shrunken JPEGs, 1 to 100", shown="90")
    workers: Count | None = option(None, "processes", shown="one a core")
    json: Json = False
