"""`dino-ds shard`: the images of any source as tar shards in WebDataset's layout, with checksums."""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import tarfile
import time
from pathlib import Path
from typing import Any

from torch.utils.data import DataLoader, Dataset
from tqdm import tqdm

from dino_ds.basics.durable import replace_file, replacing
from dino_ds.commands.shard_images import Shrink, repack
from dino_ds.data.base import Source, UnreadableImage
from dino_ds.data.image_set import changed_images, facts_of_images
from dino_ds.data.shards import CLASSES
from dino_ds.data.sources import build_source
from dino_ds.data.workers import started, worker_options
from dino_ds.engine.distributed import usable_cores
from dino_ds.errors import ConfigError, DataError
from dino_ds.options.data import ShardOptions

_CHECKSUMS, _BAD = "checksums.sha256", "unreadable.txt"
_PLAN, _FINISHED = "shards.json", "shards.jsonl"
"""Files by which the same command continues: the images and options, and a line for each finished shard."""
_BEGUN_WITH = "begun_with"
"""The plan's key for `facts_of_images`."""
_UNITS = {"": 1, "images": 1, "mib": 2**20, "gib": 2**30, "mb": 10**6, "gb": 10**9}
_SAMPLED = 200
"""Images looked at to find how many make a shard of so many bytes."""


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
    shrink = Shrink(options.shrink, options.quality or Shrink._field_defaults["quality"])
    plan = {name: getattr(options, name) for name in ("source", "split", "shard_size", "shrink")}
    plan |= {"quality": shrink.quality if options.shrink else None}
    plan |= {"images": len(images)}
    folder = Path(os.path.expanduser(options.out))
    try:
        per_shard = _begin_or_continue(folder, plan, images, shrink)
        records = _write_missing(_Shards(folder, images, shrink, per_shard), options.workers)
        bad = _finish(folder, images, records)
    except OSError as error:
        raise DataError(f"shards can't be written to {folder}: {error.strerror or error}; fix --out") from error
    count, size, seconds = (
        sum(each["images"] for each in records),
        sum(each["size"] for each in records),
        time.monotonic() - begin,
    )
    if options.json:
        values = {"out": str(folder), "shards": len(records), "images": count, "bytes": size}
        print(json.dumps({**values, "unreadable": len(bad), "seconds": round(seconds, 3)}))
        return
    shards = "1 shard" if len(records) == 1 else f"{len(records)} shards"
    print(f"{count} images in {shards}, {size / 2**20:.1f} MiB, in {folder} ({seconds:.1f} s)")
    if bad:
        print(f"{len(bad)} images could not be read and are left out, such as {bad[0]}; all are in {folder / _BAD}")
    print(f"to train on them: --data.root {folder}; to check them: cd {folder} && sha256sum -c {_CHECKSUMS}")


def _begin_or_continue(folder: Path, plan: dict[str, Any], images: Source, shrink: Shrink) -> int:
    """Images per shard, from before where the folder holds part of the same shards. Raises ConfigError if others."""
    folder.mkdir(parents=True, exist_ok=True)
    path, now = folder / _PLAN, facts_of_images(images)
    if path.is_file():
        try:
            known = json.loads(path.read_text())
            per_shard = int(known["images_per_shard"])
            images_changed = changed_images(known.get(_BEGUN_WITH, {}), now)
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
            raise ConfigError(f"{path} is damaged: give another --out, or remove {folder}") from None
        changed = [f"{key} was {known.get(key)}, is {value}" for key, value in plan.items() if known.get(key) != value]
        changed += [f"images changed: {images_changed}"] if images_changed else []
        if changed:
            raise ConfigError(f"{folder} holds other shards ({'; '.join(changed)}): give another --out, or remove it")
        return per_shard
    if any(folder.iterdir()):
        raise ConfigError(f"{folder} is not empty: give --out a new folder")
    per_shard = images_per_shard(str(plan["shard_size"]), images, shrink)
    _write_text(path, json.dumps({**plan, "images_per_shard": per_shard, _BEGUN_WITH: now}, indent=2) + "\n")
    return per_shard


def images_per_shard(size: str, images: Source, shrink: Shrink) -> int:
    """The number that "10000", or "256MiB" by the mean size of some images, says. Raises ConfigError, DataError."""
    match = re.fullmatch(r"\s*([0-9]+)\s*([A-Za-z]*)\s*", size)
    unit = match[2].lower() if match else "?"
    if match is None or unit not in _UNITS or int(match[1]) < 1:
        raise ConfigError(f"--shard_size {size!r} is not a size: write 10000 (images) or 256MiB")
    wanted = int(match[1]) * _UNITS[unit]
    if _UNITS[unit] == 1:
        return wanted
    count, sizes = min(len(images), _SAMPLED), []
    for i in range(count):
        try:
            sizes.append(1024 + len(repack(images, i * len(images) // count, shrink)[1]))
        except UnreadableImage:
            continue
    if not sizes:
        raise DataError(f"none of {count} images looked at can be read: fix data.root")
    return max(1, wanted * len(sizes) // sum(sizes))


class _Shards(Dataset[dict[str, Any]]):
    """Shards that are written as they are asked for, each whole or not at all; an item is the shard's record: name,
    images, size, sha256 and the texts of its unreadable images."""

    def __init__(self, folder: Path, images: Source, shrink: Shrink, per_shard: int) -> None:
        self.folder, self.images, self._shrink, self._per_shard = folder, images, shrink, per_shard
        self.names = [f"{number:06d}.tar" for number in range(-(-len(images) // per_shard))]

    def range_of(self, number: int) -> range:
        first = number * self._per_shard
        return range(first, min(first + self._per_shard, len(self.images)))

    def __getitem__(self, number: int) -> dict[str, Any]:
        path = self.folder / self.names[number]
        try:
            with replacing(path) as part:
                record = self._write(part, self.range_of(number))
        except (OSError, DataError) as error:  # torch would give numbers as text, and lines of code with any error
            said = error if isinstance(error, DataError) else OSError(0, error.strerror or str(error))
            return {"name": path.name, "problem": said}
        return {"name": path.name, **record}

    def _write(self, path: Path, indices: range) -> dict[str, Any]:
        bad, taken, keys = [], set[str](), dict[str, int]()
        with tarfile.open(path, "w", format=tarfile.GNU_FORMAT, encoding="utf-8", errors="surrogateescape") as archive:
            for index in indices:
                try:
                    name, data = repack(self.images, index, self._shrink)
                except UnreadableImage as error:
                    bad.append(str(error))
                    continue
                name = _unused(name, taken)
                _add(archive, name, data)
                folder, slash, base = name.rpartition("/")
                key = folder + slash + base.partition(".")[0]
                labels = self.images.labels
                label = -1 if labels is None else int(labels[index])
                if label >= 0 and keys.get(key) != label:  # a.1.jpg and a.2.jpg have one key, and perhaps two classes
                    owner = os.path.splitext(name)[0] if key in keys else key
                    keys.setdefault(key, label)
                    _add(archive, f"{owner}.cls", str(label).encode())
        digest = hashlib.sha256()
        with open(path, "rb") as file:
            while block := file.read(2**20):
                digest.update(block)
        return {"images": len(taken), "size": path.stat().st_size, "sha256": digest.hexdigest(), "bad": bad}


def _write_missing(shards: _Shards, workers: int | None) -> list[dict[str, Any]]:
    """Records of all shards, in order, those of an earlier attempt included."""
    path = shards.folder / _FINISHED
    done = {record["name"]: record for record in _finished(path)}
    missing = [number for number, name in enumerate(shards.names) if name not in done]
    if missing:
        _write_text(path, "".join(json.dumps(record) + "\n" for record in done.values()))
        options = worker_options(min(workers or len(usable_cores()), len(missing)))
        loader: DataLoader[Any] = DataLoader(shards, batch_size=1, sampler=missing, collate_fn=list, **options)
        todo = sum(len(shards.range_of(number)) for number in missing)
        bar = tqdm(total=len(shards.images), initial=len(shards.images) - todo, desc="sharding", unit=" images")
        with started(loader, shards.images) as records, bar, open(path, "a") as lines:
            for number in missing:
                [record] = _next(records)
                done[record["name"]] = record
                lines.write(json.dumps(record) + "\n")
                lines.flush()
                bar.update(len(shards.range_of(number)))
    return [done[name] for name in shards.names]


def _next(records: Any) -> list[dict[str, Any]]:
    try:
        found: list[dict[str, Any]] = next(records)
    except RuntimeError as error:
        if "DataLoader worker" not in str(error):
            raise
        raise DataError(
            "a process that writes shards was killed, perhaps for want of memory: the same command continues; "
            "try fewer --workers"
        ) from None
    if "problem" in found[0]:
        raise found[0]["problem"]
    return found


def _finished(path: Path) -> list[dict[str, Any]]:
    """Records of the shards whose file is there in the size that was written."""
    found = []
    for line in path.read_text().splitlines() if path.is_file() else ():
        try:
            record = json.loads(line)
            if (path.parent / record["name"]).stat().st_size == record["size"] and isinstance(record["bad"], list):
                found.append(record)
        except (ValueError, LookupError, TypeError, OSError):
            continue  # the line that was being written, or a shard that was removed
    return found


def _finish(folder: Path, images: Source, records: list[dict[str, Any]]) -> list[str]:
    """Write class names, unreadable images and last the checksums; returns the texts of unreadable images."""
    if images.classes is not None:
        _write_text(folder / CLASSES, "".join(f"{' '.join(name.split())}\n" for name in images.classes))
    bad = [text for record in records for text in record["bad"]]
    if bad:
        _write_text(folder / _BAD, "".join(f"{text}\n" for text in bad))
    if len(bad) == len(images):
        raise DataError(f"none of {len(images)} images can be read, the first one {bad[0]}")
    _write_text(folder / _CHECKSUMS, "".join(f"{record['sha256']}  {record['name']}\n" for record in records))
    return bad


def _unused(name: str, taken: set[str]) -> str:
    """`name`, with a number where it is taken: a list may name an image twice."""
    stem, ending = os.path.splitext(name)
    number = 1
    while name in taken:
        number += 1
        name = f"{stem}~{number}{ending}"
    taken.add(name)
    return name


def _add(archive: tarfile.TarFile, name: str, data: bytes) -> None:
    info = tarfile.TarInfo(name)
    info.size = len(data)
    archive.addfile(info, io.BytesIO(data))


def _write_text(path: Path, text: str) -> None:
    replace_file(path, text.encode("utf-8", "surrogateescape"))
