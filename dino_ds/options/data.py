"""Options of the commands about images: look at them, measure their loading, pack and unpack them."""

from __future__ import annotations

from typing import Annotated, Literal

from dino_ds.options.definition import Help, Json, command


@command("find-workers", "dino_ds.planning.find_workers:run", takes_recipe=True, needs_images=True)
class FindWorkersOptions:
    """images/s for 0, 1, 2, 4, ... loader processes, the costliest stage, and a recommendation"""

    seconds: Annotated[float, Help("measured for each number of processes, in 3 interleaved rounds")] = 15.0
    max_workers: Annotated[int | None, Help("largest number of processes", "the cores, shared over the GPUs")] = None
    step_images_per_second: Annotated[
        float | None, Help("of one rank's training step: would it wait?", "not compared")
    ] = None
    json: Json = False


@command("look-data", "dino_ds.commands.look_data:run", takes_recipe=True, needs_images=True)
class LookDataOptions:
    """a sheet of images with all their crops, and what the data set is like"""

    images: Annotated[int, Help("images on the sheet, 200 at most")] = 8
    sample: Annotated[int, Help("images that the statistics are made of, drawn at random; 0 = all", zero=True)] = 10000
    out: Annotated[str, Help("the sheet; a page with more goes beside it (.html)")] = "look-data.png"
    json: Json = False


@command("advise", "dino_ds.planning.advise:run")
class AdviseOptions:
    """which settings for your images and GPUs: each with its reason, the command to type, and predicted hours"""

    root: Annotated[str | None, Help("as data.root: folder, list, shards, Parquet", "none", bare=True)] = None
    source: Annotated[str, Help("as data.source of a recipe")] = "folder"
    gpu: Annotated[str | None, Help("kind of GPU, such as rtx4090-24g (see plan)", "this machine's")] = None
    gpus: Annotated[int | None, Help("GPUs of a node", "this machine's, or 1 of --gpu")] = None
    nodes: Annotated[int, Help("nodes")] = 1
    memory_gib: Annotated[float | None, Help("memory of a GPU", "as its kind has")] = None
    sample: Annotated[int, Help("images that are looked at, drawn at random")] = 500
    workers: Annotated[int | None, Help("data loading processes", "by the cores", zero=True)] = None
    json: Json = False


@command("shard", "dino_ds.commands.shard:run")
class ShardOptions:
    """images of any source -> tar shards with an index and checksums; continues after an interruption"""

    source: Annotated[str, Help("as data.source of a recipe")] = "folder"
    root: Annotated[str | None, Help("as data.root: folder, list, shards, Parquet", "none")] = None
    split: Annotated[Literal["train", "test"], Help("of a torchvision data set")] = "train"
    out: Annotated[str, Help("folder of the shards")]
    shard_size: Annotated[str, Help("images of a shard (10000) or about its size (256MiB)")] = "256MiB"
    shrink: Annotated[int | None, Help("make the shorter side of larger images N pixels, as JPEG", "none")] = None
    quality: Annotated[int, Help("of shrunken JPEGs, 1 to 100")] = 90
    workers: Annotated[int | None, Help("processes", "one a core")] = None
    json: Json = False


@command("unshard", "dino_ds.commands.unshard:run")
class UnshardOptions:
    """tar shards -> a folder of images"""

    root: Annotated[str, Help("the shards: a folder or a pattern")]
    out: Annotated[str, Help("a new folder for the images")]
    skip_checksums: Annotated[bool, Help("do not check the shards first")] = False
    json: Json = False
