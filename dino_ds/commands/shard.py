"""`dino-ds shard`: writes image files as tar shards in WebDataset's layout, with checksums."""

from __future__ import annotations

import hashlib
import io
import json
import os
import tarfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from PIL import Image
from torch.utils.data import DataLoader, Dataset
from tqdm import tqdm

from dino_ds.basics.files import discard_left_over, is_url, replace_file, replacing
from dino_ds.data import batches, image_set, sources, tar_members
from dino_ds.data.decode import ENDINGS, EXTENSIONS, EncodedImage
from dino_ds.data.encoded import EncodedImages
from dino_ds.data.images import UnreadableImage
from dino_ds.data.shards import CLASSES, INDEX
from dino_ds.engine.distributed import usable_cores
from dino_ds.errors import ConfigError, DataError
from dino_ds.options import commands, definition

_CHECKSUMS, _BAD = "checksums.sha256", "unreadable.txt"
"""Files beside the shards: a line for each finished shard, and for each unreadable image."""
_MAX_PIXELS = 178956970  # Pillow's own limit, not the recipe's: shrinking is a way to bring images below the recipe's
_MOST_PARTS = 64  # most parts of a path in a shard: not every file system takes deeper folders
_ENDINGS = {"MPO": ".jpg"} | {name: endings[0] for name, endings in ENDINGS.items()}


def run(options: commands.ShardOptions) -> definition.Result:
    """Write the shards into `out`; the same command after an interruption continues where it stopped. Raises
    ConfigError for impossible options, DataError for images or a disk that can't be used."""
    begin = time.monotonic()
    if is_url(options.out):
        raise ConfigError(f"--out {options.out} is not a folder: write the shards to a disk, then copy them there")
    images = sources.build_source("folder", options.root, "train", False)
    assert isinstance(images, EncodedImages)  # all forms of data.root are
    folder = Path(os.path.expanduser(options.out))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        plan = {"shard_size": options.shard_size, "shrink": options.shrink, **image_set.facts_of_images(images)}
        path, content = folder / "shards.json", json.dumps(plan, indent=1)
        if not path.is_file() and any(folder.iterdir()):
            raise ConfigError(f"{folder} is not empty: give --out a new folder")
        if not path.is_file():
            replace_file(path, content)
        elif path.read_text() != content:
            others = f"{folder} holds other shards, of other images, --shard_size or --shrink than now"
            raise ConfigError(f"{others}: give another --out, or remove it")
        shards = _Shards(folder, images, options.shrink, options.shard_size)
        _write_missing(shards, options.workers)
        bad = [*dict.fromkeys(_lines(folder / _BAD))]
        if images.classes is not None:
            _write_text(folder / CLASSES, [" ".join(name.split()) for name in images.classes])
        size = sum((folder / name).stat().st_size for name in shards.names)
    except OSError as error:
        raise DataError(f"shards can't be written to {folder}: {error.strerror or error}; fix --out") from error
    if len(bad) == len(images):
        raise DataError(f"none of {len(images)} images can be read, the first one {bad[0]}")
    count, seconds = len(images) - len(bad), time.monotonic() - begin
    facts = {"out": str(folder), "shards": len(shards.names), "images": count, "bytes": size}
    facts |= {"unreadable": len(bad), "seconds": round(seconds, 3)}
    number = f"{len(shards.names)} shard{'s' * (len(shards.names) > 1)}"
    lines = [f"{count} images in {number}, {size / 2**20:.1f} MiB, in {folder} ({seconds:.1f} s)"]
    if bad:
        left_out = f"{len(bad)} images could not be read and are left out, such as {bad[0]}"
        lines.append(f"{left_out}; all are in {folder / _BAD}")
    lines += [f"note: {note}" for note in getattr(images, "notes", ())]
    lines.append(f"to train on them: --data.root {folder}; to check them: cd {folder} && sha256sum -c {_CHECKSUMS}")
    return definition.Result(facts, "\n".join(lines))


class _Shards(Dataset[tuple[str, list[str], str]]):
    """Writes a shard when its item is requested, whole or not at all; the item is the shard's SHA-256, texts that name
    its unreadable images, and its line of the index, or ("", [why the shard can't be written], "")."""

    def __init__(self, folder: Path, images: EncodedImages, shrink: int | None, per_shard: int) -> None:
        self.folder, self.images, self._shrink, self._per_shard = folder, images, shrink, per_shard
        self.names = [f"{number:06d}.tar" for number in range(-(-len(images) // per_shard))]

    def range_of(self, number: int) -> range:
        first = number * self._per_shard
        return range(first, min(first + self._per_shard, len(self.images)))

    def __getitem__(self, number: int) -> tuple[str, list[str], str]:
        try:
            path = self.folder / self.names[number]
            discard_left_over(path)
            with replacing(path) as part:
                bad = self._write(part, self.range_of(number))
                digest = hashlib.sha256()
                with part.open("rb") as file:
                    while block := file.read(2**20):
                        digest.update(block)
                line = tar_members.index_line(part, self.names[number])
            return digest.hexdigest(), bad, line
        except OSError as error:  # from a worker, torch would raise it with a traceback as its text
            return "", [f"{self.folder}: {error.strerror or error}"], ""

    def _write(self, path: Path, indices: range) -> list[str]:
        bad, taken, keys = list[str](), set[str](), dict[str, int]()
        with tarfile.open(path, "w", format=tarfile.GNU_FORMAT, encoding="utf-8", errors="surrogateescape") as archive:
            for index in indices:
                try:
                    name, data = repack(self.images, index, self._shrink)
                except UnreadableImage as error:
                    bad.append(str(error))
                    continue
                (stem, ending), again = os.path.splitext(name), 1
                while name in taken:  # a list may name an image twice
                    again += 1
                    name = f"{stem}~{again}{ending}"
                taken.add(name)
                _add(archive, name, data)
                folder, slash, base = name.rpartition("/")
                key = folder + slash + base.partition(".")[0]
                labels = self.images.labels
                label = -1 if labels is None else int(labels[index])
                if label >= 0 and keys.get(key) != label:  # a.1.jpg and a.2.jpg have one key, and perhaps two classes
                    owner = os.path.splitext(name)[0] if key in keys else key
                    keys.setdefault(key, label)
                    _add(archive, f"{owner}.cls", str(label).encode())
        return bad


def _write_missing(shards: _Shards, workers: int | None) -> None:
    """Write the shards that have no line in the checksums or the index yet, or no file. Raises DataError."""
    path, index = shards.folder / _CHECKSUMS, shards.folder / INDEX
    indexed = {line.split('"')[3]: line for line in _lines(index) if line.endswith("]}")}
    done = {name: line for line in _lines(path) if (shards.folder / (name := line.partition("  ")[2])).is_file()}
    missing = [number for number, name in enumerate(shards.names) if name not in done or name not in indexed]
    for file, lines in ((path, done), (index, indexed)):
        _write_text(file, [lines[name] for name in done if name in indexed])
    options = batches.worker_options(min(workers or len(usable_cores()), max(1, len(missing))))
    loader: DataLoader[Any] = DataLoader(shards, batch_size=1, sampler=missing, collate_fn=list, **options)
    todo = sum(len(shards.range_of(number)) for number in missing)
    bar = tqdm(total=len(shards.images), initial=len(shards.images) - todo, desc="sharding", unit=" images")
    with batches.started(loader, shards.images) as records, bar:
        for number in missing:
            try:
                [(digest, unreadable, line)] = next(records)
            except RuntimeError as error:
                if "DataLoader worker" not in str(error):
                    raise
                problem = "a process that writes shards was killed, perhaps for want of memory"
                raise DataError(f"{problem}: the same command continues; try fewer --workers") from None
            if not digest:
                raise DataError(unreadable[0])
            _append(shards.folder / _BAD, unreadable)
            _append(index, [line])
            _append(path, [f"{digest}  {shards.names[number]}"])
            bar.update(len(shards.range_of(number)))


def _add(archive: tarfile.TarFile, name: str, data: bytes) -> None:
    info = tarfile.TarInfo(name)
    info.size = len(data)
    archive.addfile(info, io.BytesIO(data))


def _lines(path: Path) -> list[str]:
    return path.read_text("utf-8", "surrogateescape").splitlines() if path.is_file() else []


def _append(path: Path, lines: list[str]) -> None:
    if lines:
        with path.open("a", encoding="utf-8", errors="surrogateescape") as file:
            file.writelines(f"{line}\n" for line in lines)


def _write_text(path: Path, lines: Iterable[str]) -> None:
    replace_file(path, "".join(f"{line}\n" for line in lines).encode("utf-8", "surrogateescape"))


def repack(source: EncodedImages, index: int, shrink: int | None) -> tuple[str, bytes]:
    """The name and bytes of an image in a shard: its file, or, if the shorter side has more than `shrink` pixels, a
    JPEG of that size. Raises UnreadableImage."""
    text = source.member(index)
    parts = [part for part in text.replace("\0", "?").split("/") if part not in ("", ".", "..")] or [str(index)]
    # A safe relative path: never absolute, no .. and nothing hidden.
    name = "/".join([*parts[-_MOST_PARTS:-1], f"_{parts[-1]}" if parts[-1].startswith(".") else parts[-1]])
    data = source.read(index)
    smaller = None if shrink is None else _shrunk(data, shrink, source.name(index))
    if smaller is not None:
        data = smaller
        stem, ending = os.path.splitext(name)
        name = f"{stem if ending.lower() in EXTENSIONS else name}.jpg"
    if not name.lower().endswith(EXTENSIONS):
        try:
            name += _ENDINGS[EncodedImage(data, name, None, channels=None).format]
        except Exception:
            raise UnreadableImage(source.name(index), "not an image of a known format") from None
    return name, data


def _shrunk(data: bytes, side: int, name: str) -> bytes | None:
    """A JPEG whose shorter side is `side`, upright, or None if the file stays as it is. Raises UnreadableImage."""
    image = EncodedImage(data, name, None, channels=None)
    shorter = min(image.width, image.height)
    if shorter <= side or image.deep or image.is_raster:  # a JPEG has 8 bits
        return None
    if image.width * image.height > _MAX_PIXELS:
        raise UnreadableImage(name, f"{image.width} x {image.height} pixels are more than {_MAX_PIXELS}")
    # Decoded to at least twice the wanted side, so that LANCZOS, not the decoder, decides what is seen.
    upright = Image.fromarray(image.decode(max((n for n in (2, 4, 8) if shorter >= 2 * side * n), default=1)))
    factor = side / min(upright.size)
    size = (max(side, round(upright.width * factor)), max(side, round(upright.height * factor)))
    stream = io.BytesIO()
    upright.resize(size, Image.Resampling.LANCZOS).save(stream, "JPEG", quality=90)
    return stream.getvalue()
