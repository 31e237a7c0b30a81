"""Writes files atomically: after a crash or a power failure a file is the old one or the new one."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from dino_ds.errors import ConfigError


def replace_file(path: Path, content: str | bytes) -> None:
    """Write `content` to a temporary file, sync it to the disk, and rename it to `path`. Raises OSError."""
    with replacing(path) as temporary:
        temporary.write_bytes(content.encode() if isinstance(content, str) else content)


@contextlib.contextmanager
def replacing(path: Path, on_disk: bool = True) -> Iterator[Path]:
    """Yield a temporary path for a file that then replaces `path`, or is removed after an error. Raises OSError.

    Without `on_disk` the file is not synced: safe if the process dies, not if the machine does.
    """
    temporary = path.with_name(f"{path.name}.tmp"[-255:])
    try:
        yield temporary
        if on_disk:
            sync(temporary)
            put_in_place(temporary, path)
        else:
            os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


@contextlib.contextmanager
def replacing_folder(path: Path) -> Iterator[Path]:
    """Yield a temporary folder to write files into, which is then renamed to `path`; `path` must not exist."""
    temporary = path.with_name(f".{path.name[-200:]}.tmp")  # hidden: NAME.tmp may be the user's
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        yield temporary
        for file in temporary.iterdir():
            sync(file)
        put_in_place(temporary, path)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def check_absent(path: Path, how: str = "name another with --out") -> None:
    """Raises ConfigError if there is anything at `path`, where an output is to be written."""
    if os.path.lexists(path):
        raise ConfigError(f"{path} is there already: remove it, or {how}")


def free_stem(named: str | None, default: Path, endings: Sequence[str]) -> str:
    """`named`, or else `default`, for files of these endings of which none exists; `default` gets a number from 2 where
    it is taken. Raises ConfigError for a file that exists of `named`."""
    stem, number = os.path.expanduser(named or default), 1
    while named is None and any(os.path.lexists(f"{stem}{ending}") for ending in endings):
        number += 1
        stem = f"{default}-{number}"
    for ending in endings:
        check_absent(Path(f"{stem}{ending}"))
    return stem


def append_whole(descriptor: int, content: bytes) -> None:
    """Append all of `content` to a file that is open for appending, or nothing of it. Raises OSError."""
    size, written = os.fstat(descriptor).st_size, 0
    try:
        while written < len(content):  # a disk that fills up takes only a part
            written += os.write(descriptor, content[written:])
    except OSError:
        with contextlib.suppress(OSError):
            if os.fstat(descriptor).st_size == size + written:  # nobody else has appended since
                os.ftruncate(descriptor, size)
        raise


def discard(path: Path) -> None:
    """Remove a file, a link, or a folder with its content. Raises nothing."""
    with contextlib.suppress(OSError):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def is_gone(path: Path) -> bool:
    """Whether the path does not exist; False if the disk fails to answer."""
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return True
    except OSError:
        pass
    return False


def why_not_writable(path: Path) -> str:
    """Why a new file or folder can't be made at `path`; "" if it can."""
    folder = next(parent for parent in path.absolute().parents if os.path.exists(parent))
    return "" if folder.is_dir() and os.access(folder, os.W_OK | os.X_OK) else f"{folder} is not a writable folder"


def put_in_place(temporary: Path, path: Path) -> None:
    """Rename a file or folder that is synced already, and sync the new name too."""
    os.replace(temporary, path)
    sync(path.parent)


def sync(path: Path) -> None:
    """Flush a file's content, or the names in a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def cache_folder() -> Path:
    """The folder for files that can be made again: DINO_DS_CACHE, else dino_ds in XDG_CACHE_HOME or ~/.cache. For a
    user without a home, as in a container: dino_ds-UID in the temporary folder, or a new one if that is another's."""
    if named := os.environ.get("DINO_DS_CACHE"):
        return Path(os.path.expanduser(named))
    if cache := os.environ.get("XDG_CACHE_HOME"):
        return Path(cache) / "dino_ds"
    with contextlib.suppress(RuntimeError):
        return Path.home() / ".cache/dino_ds"
    folder = Path(tempfile.gettempdir(), f"dino_ds-{os.getuid()}")
    return folder if not folder.exists() or folder.lstat().st_uid == os.getuid() else Path(tempfile.mkdtemp())
