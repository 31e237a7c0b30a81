"""`dino-ds shard`: the images of any source as tar shards in WebDataset's layout, with checksums."""

from __future__ import annotations

import dataclasses
import json
import multiprocessing
import os
import re
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

from tqdm import tqdm

from dino_ds.basics.durable import replace_file
from dino_ds.basics.ports import shorten_socket_names
from dino_ds.commands.shard_writer import ShardRecord, Shrink, names_digest, repack, start_worker, write_shard
from dino_ds.data.base import Source, UnreadableImage
from dino_ds.data.image_set import changed_images, facts_of_images
from dino_ds.data.shards import CLASSES
from dino_ds.data.sources import build_source
from dino_ds.engine.distributed import usable_cores
from dino_ds.errors import ConfigError, DataError
from dino_ds.options.data import ShardOptions

CHECKSUMS = "checksums.sha256"
"""The file of checksums, in the form of sha256sum."""
_ABOUT = "shards.json"
_BEGUN_WITH = "begun_with"
"""Its key for `facts_of_images`."""
_RECORDS = "shards.jsonl"
"""One line for each finished shard."""
BAD = "unreadable.txt"
_UNITS = {"": 1, "images": 1, "mib": 2**20, "gib": 2**30, "mb": 10**6, "gb": 10**9}
_SAMPLED = 200
"""Images looked at to find how many make a shard of so many bytes."""
_QUALITY = 90
"""Quality of JPEGs that are made smaller, where none is given."""


def run(options: ShardOptions) -> None:
    """Write the shards into `out`; the same command after an interruption continues where it stopped.

    shard_size: "10000" images or about "256MiB". shrink: shorter side in pixels of what is larger, as JPEG of
    `quality`. Raises ConfigError for options that can't be, DataError for images or a disk that can't be used.
    """
    begin = time.monotonic()
    if options.quality and not options.shrink:
        raise ConfigError(
            f"--quality {options.quality} is of images that --shrink makes smaller: add it, or leave it out"
        )
    images = build_source(options.source, options.root, options.split, False)
    recoding = Shrink(options.shrink, options.quality or _QUALITY)
    folder = Path(os.path.expanduser(options.out))
    plan = {
        "source": options.source,
        "split": options.split,
        "shard_size": options.shard_size,
        "shrink": options.shrink,
        "quality": recoding.quality if options.shrink else None,
        "images": len(images),
        "names_sha256": names_digest(images),
    }
    try:
        per_shard = _prepare(folder, plan, images, recoding)
        records = _write_all(folder, images, recoding, per_shard, options.workers or len(usable_cores()))
        _finish(folder, images, records)
    except OSError as error:
        raise DataError(f"shards can't be written to {folder}: {error.strerror or error}; fix --out") from error
    _report(folder, records, time.monotonic() - begin, options.json)


def _prepare(folder: Path, plan: dict[str, Any], images: Source, shrink: Shrink) -> int:
    """Images per shard, from before where the folder holds part of the same shards. Raises ConfigError if others."""
    folder.mkdir(parents=True, exist_ok=True)
    about, now = folder / _ABOUT, facts_of_images(images)
    if about.is_file():
        try:
            known = json.loads(about.read_text())
            per_shard = int(known["images_per_shard"])
            images_changed = changed_images(known.get(_BEGUN_WITH, {}), now)
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
            raise ConfigError(f"{about} is damaged: give another --out, or remove {folder}") from None
        changed = [f"{key} was {known.get(key)}, is {value}" for key, value in plan.items() if known.get(key) != value]
        changed += [f"images changed: {images_changed}"] if images_changed else []
        if changed:
            raise ConfigError(f"{folder} holds other shards ({'; '.join(changed)}): give another --out, or remove it")
        return per_shard
    if any(folder.iterdir()):
        raise ConfigError(f"{folder} is not empty: give --out a new folder")
    per_shard = _images_per_shard(str(plan["shard_size"]), images, shrink)
    _write_whole(about, json.dumps({**plan, "images_per_shard": per_shard, _BEGUN_WITH: now}, indent=2) + "\n")
    return per_shard


def _images_per_shard(size: str, images: Source, shrink: Shrink) -> int:
    match = re.fullmatch(r"\s*([0-9]+)\s*([A-Za-z]*)\s*", size)
    unit = match[2].lower() if match else "?"
    if match is None or unit not in _UNITS or int(match[1]) < 1:
        raise ConfigError(f"--shard_size {size!r} is not a size: write 10000 (images) or 256MiB")
    wanted = int(match[1]) * _UNITS[unit]
    if _UNITS[unit] == 1:
        return wanted
    count = min(len(images), _SAMPLED)
    sizes = []
    for i in range(count):
        try:
            sizes.append(1024 + len(repack(images, i * len(images) // count, shrink)[1]))
        except UnreadableImage:
            continue
    if not sizes:
        raise DataError(f"none of {count} images looked at can be read: fix data.root")
    return max(1, wanted * len(sizes) // sum(sizes))


def _write_all(folder: Path, images: Source, shrink: Shrink, per_shard: int, workers: int) -> list[ShardRecord]:
    """Records of all shards, those of an earlier attempt included."""
    done = {record.name: record for record in _read_progress(folder)}
    jobs = [
        (folder / f"{number:06d}.tar", first, min(first + per_shard, len(images)))
        for number, first in enumerate(range(0, len(images), per_shard))
    ]
    missing = [job for job in jobs if job[0].name not in done]
    if missing:
        _write_whole(folder / _RECORDS, "".join(_line(record) for record in done.values()))
        todo = sum(last - first for _, first, last in missing)
        bar = tqdm(total=len(images), initial=len(images) - todo, desc="sharding", unit=" images")
        with bar, open(folder / _RECORDS, "a") as progress:
            for record, count in _write_in_parallel(missing, images, shrink, min(workers, len(missing))):
                done[record.name] = record
                progress.write(_line(record))
                progress.flush()
                bar.update(count)
    return [done[job[0].name] for job in jobs]


def _write_in_parallel(
    jobs: list[tuple[Path, int, int]], images: Source, shrink: Shrink, workers: int
) -> Iterator[tuple[ShardRecord, int]]:
    """Each shard's record and the number of images looked at for it, as they are finished."""
    shorten_socket_names()
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["dino_ds.commands.shard_writer"])
    with ProcessPoolExecutor(workers, context, start_worker, (images, shrink)) as pool:
        running = {pool.submit(write_shard, path, first, last): last - first for path, first, last in jobs}
        try:
            for future in as_completed(running):
                yield future.result(), running[future]
        except BrokenProcessPool:
            raise DataError(
                "a process that writes shards was killed, perhaps for want of memory: the same command continues; "
                "try fewer --workers"
            ) from None
        finally:
            pool.shutdown(cancel_futures=True)


def _line(record: ShardRecord) -> str:
    return json.dumps(dataclasses.asdict(record)) + "\n"


def _read_progress(folder: Path) -> Iterator[ShardRecord]:
    """Shards whose file is there in the size that was written."""
    path = folder / _RECORDS
    if not path.is_file():
        return
    for line in path.read_text().splitlines():
        try:
            record = ShardRecord(**json.loads(line))
            if (folder / record.name).stat().st_size == record.size:
                yield record
        except (ValueError, TypeError, OSError):
            continue  # the line that was being written, or a shard that was removed


def _finish(folder: Path, images: Source, records: list[ShardRecord]) -> None:
    """Write class names, unreadable images and last the checksums."""
    if images.classes is not None:
        _write_whole(folder / CLASSES, "".join(f"{' '.join(name.split())}\n" for name in images.classes))
    bad = [text for record in records for text in record.bad]
    if bad:
        _write_whole(folder / BAD, "".join(f"{text}\n" for text in bad))
    if len(bad) == len(images):
        raise DataError(f"none of {len(images)} images can be read, the first one {bad[0]}")
    _write_whole(folder / CHECKSUMS, "".join(f"{record.sha256}  {record.name}\n" for record in records))


def _write_whole(path: Path, text: str) -> None:
    replace_file(path, text.encode("utf-8", "surrogateescape"))


def _report(folder: Path, records: list[ShardRecord], seconds: float, in_json: bool) -> None:
    images, size = sum(record.images for record in records), sum(record.size for record in records)
    bad = [text for record in records for text in record.bad]
    if in_json:
        values = {"out": str(folder), "shards": len(records), "images": images, "bytes": size}
        print(json.dumps({**values, "unreadable": len(bad), "seconds": round(seconds, 3)}))
        return
    shards = "1 shard" if len(records) == 1 else f"{len(records)} shards"
    print(f"{images} images in {shards}, {size / 2**20:.1f} MiB, in {folder} ({seconds:.1f} s)")
    if bad:
        print(f"{len(bad)} images could not be read and are left out, such as {bad[0]}; all are in {folder / BAD}")
    print(f"to train on them: --data.root {folder}; to check them: cd {folder} && sha256sum -c {CHECKSUMS}")
