"""How fast image files are read, loose and from one tar shard, with and without the page cache."""

from __future__ import annotations

import os
import tarfile
import tempfile
import time
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from statistics import median

from dino_ds.basics.formatting import markdown_table
from dino_ds.data.encoded import EncodedImages
from dino_ds.data.root import open_files


def read_rates(files: Sequence[bytes], rounds: int) -> dict[str, dict[str, float]]:
    """Images/s of wall time, {loose, shard} x {warm, cold}: copies of `files` in a temporary folder, by turns.

    "cold" is left out where the system can't be asked to forget a file's pages.
    """
    with tempfile.TemporaryDirectory(prefix="dino_ds_bench_") as folder:
        paths = _write(Path(folder), files)
        sources = {name: open_files(str(Path(folder) / name)) for name in ("loose", "shard")}
        states = ["warm", *(["cold"] if hasattr(os, "posix_fadvise") else [])]
        seconds: dict[str, dict[str, list[float]]] = {name: {state: [] for state in states} for name in sources}
        for _ in range(rounds):
            for state in states:
                for name, source in sources.items():
                    if state == "cold":
                        _forget(paths[name])
                    else:
                        _read_all(source)
                    begin = time.perf_counter()
                    _read_all(source)
                    seconds[name][state].append(time.perf_counter() - begin)
    return {name: {s: len(files) / median(times) for s, times in of.items()} for name, of in seconds.items()}


def read_table(rates: dict[str, dict[str, float]]) -> str:
    """Markdown."""
    names = {"loose": "loose files", "shard": "one tar shard"}
    rows = [[names[name], *(f"{rate:.0f}" for rate in found.values())] for name, found in rates.items()]
    return markdown_table(["reading, images/s", *(f"{state} cache" for state in rates["loose"])], rows)


def _write(folder: Path, files: Sequence[bytes]) -> dict[str, list[Path]]:
    loose = [folder / "loose" / f"{number:06d}.jpg" for number in range(len(files))]
    (folder / "loose").mkdir()
    (folder / "shard").mkdir()
    with tarfile.open(folder / "shard" / "000000.tar", "w") as tar:
        for path, data in zip(loose, files, strict=True):
            path.write_bytes(data)
            member = tarfile.TarInfo(path.name)
            member.size = len(data)
            tar.addfile(member, BytesIO(data))
    os.sync()  # pages that are still to be written are not forgotten
    return {"loose": loose, "shard": [folder / "shard" / "000000.tar"]}


def _read_all(source: EncodedImages) -> None:
    for index in range(len(source)):
        source.read(index)


def _forget(paths: Sequence[Path]) -> None:
    for path in paths:
        handle = os.open(path, os.O_RDONLY)
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(handle)
