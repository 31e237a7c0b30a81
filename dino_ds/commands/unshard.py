"""`dino-ds unshard`: the images of shards, or of any source of files, back in a folder."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path

from tqdm import tqdm

from dino_ds.basics.durable import replacing
from dino_ds.commands.shard import BAD, CHECKSUMS
from dino_ds.commands.shard_writer import Shrink, member_of, names_digest, repack
from dino_ds.data.base import Source, UnreadableImage
from dino_ds.data.root import open_files
from dino_ds.data.shards import TarShards
from dino_ds.errors import ConfigError, DataError
from dino_ds.options.data import UnshardOptions

_MARK = ".unshard.json"
"""In the folder until all is written: whose images they are."""
_THREADS = 8
_AS_THEY_ARE = Shrink(None, 0)


def run(options: UnshardOptions) -> None:
    """Write each image into `out` under its name in the shards; the same command after an interruption continues.

    Names never lead out of `out`: leading / and .. are dropped. Where two shards have images of one name, each shard
    gets a folder. Raises ConfigError, DataError for a damaged shard or a disk that can't be used.
    """
    begin = time.monotonic()
    images = open_files(options.root)
    if isinstance(images, TarShards) and not options.skip_checksums:
        _check(images)
    folder = Path(options.out).expanduser()
    try:
        bad = _write_all(images, folder)
    except OSError as error:
        raise DataError(f"images can't be written to {folder}: {error.strerror or error}; fix --out") from error
    written = len(images) - len(bad)
    if options.json:
        seconds = round(time.monotonic() - begin, 3)
        print(json.dumps({"out": str(folder), "images": written, "unreadable": len(bad), "seconds": seconds}))
        return
    print(f"{written} images in {folder} ({time.monotonic() - begin:.1f} s)")
    if bad:
        print(f"{len(bad)} could not be read and are left out, such as {bad[0]}; all are in {folder / BAD}")


def _write_all(images: Source, folder: Path) -> list[str]:
    """Texts of the unreadable ones."""
    mark = folder / _MARK
    digest = names_digest(images)
    folder.mkdir(parents=True, exist_ok=True)
    if mark.is_file():
        if mark.read_text() != digest:
            raise ConfigError(f"{folder} holds other images: give another --out, or remove it")
    elif any(folder.iterdir()):
        raise ConfigError(f"{folder} is not empty: give --out a new folder")
    mark.write_text(digest)
    inside = _inside(images)

    def write(index: int) -> str | None:
        try:
            name, data = repack(images, index, _AS_THEY_ARE)
        except UnreadableImage as error:
            return str(error)
        _write_one(folder, inside(index) + name, data)
        return None

    with ThreadPoolExecutor(_THREADS) as pool:
        results = tqdm(_in_pool(pool, write, range(len(images))), total=len(images), desc="unsharding", unit=" images")
        bad = [text for text in results if text is not None]
    if bad:
        (folder / BAD).write_text("".join(f"{text}\n" for text in bad))
    mark.unlink()
    return bad


def _in_pool(pool: ThreadPoolExecutor, work: Callable[[int], str | None], items: Iterable[int]) -> Iterator[str | None]:
    """As pool.map, without a waiting task for each of millions of items."""
    todo = iter(items)
    while chunk := list(islice(todo, 1000)):
        yield from pool.map(work, chunk)


def _inside(images: Source) -> Callable[[int], str]:
    """The folder for an image: none, or its shard's where names repeat."""
    distinct = {hash(member_of(images, index)) for index in range(len(images))}
    if isinstance(images, TarShards) and len(distinct) < len(images):
        return lambda index: f"{Path(images.shard_name(index)).stem}/"
    return lambda index: ""


def _write_one(folder: Path, name: str, data: bytes) -> None:
    path = folder / name
    if path.is_file() and path.stat().st_size == len(data) and path.read_bytes() == data:
        return  # from before an interruption: files are written whole
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.parent.resolve().is_relative_to(folder.resolve()):
        raise DataError(f"{path.parent} leads out of {folder}: give --out a new folder")
    with replacing(path, on_disk=False) as part:
        part.write_bytes(data)


def _check(images: TarShards) -> None:
    """Compare each shard with its checksum where there is one. Raises DataError naming those that differ."""
    wanted: dict[Path, str] = {}
    for folder in {path.parent for path in images.shard_paths()}:
        if (folder / CHECKSUMS).is_file():
            lines = (line.split(maxsplit=1) for line in (folder / CHECKSUMS).read_text().splitlines())
            wanted |= {folder / name.strip(): digest for digest, name in lines}
    paths = [path for path in images.shard_paths() if path in wanted]
    with ThreadPoolExecutor(_THREADS) as pool:
        found = tqdm(pool.map(_sha256, paths), total=len(paths), desc="checking", unit=" shards", disable=not paths)
        wrong = [str(path) for path, digest in zip(paths, found, strict=True) if digest != wanted[path]]
    if wrong:
        raise DataError(
            f"{len(wrong)} shards are not what was written, such as {wrong[0]}: fetch them again, or add "
            "--skip_checksums to take what can be read"
        )


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
