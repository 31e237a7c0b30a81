"""Files that are old or new, never half of either, whatever happens to the process or to the power."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path


def replace_file(path: Path, content: str | bytes) -> None:
    """Write `content` beside `path`, put it on the disk, then into place. Raises OSError."""
    with replacing(path) as temporary:
        temporary.write_bytes(content.encode() if isinstance(content, str) else content)


@contextlib.contextmanager
def replacing(path: Path, on_disk: bool = True) -> Iterator[Path]:
    """A name beside `path` to write a file to, which is then put on the disk and into place. Raises OSError.

    Nothing of it stays after an error. Without `on_disk` it is safe from the death of the process, not of the machine,
    and waits for no disk.
    """
    temporary = path.with_name(f"{path.name}.tmp"[-255:])
    try:
        yield temporary
        if on_disk:
            _sync(temporary)
            put_in_place(temporary, path)
        else:
            os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


@contextlib.contextmanager
def replacing_folder(path: Path) -> Iterator[Path]:
    """As `replacing`, for a new folder of files: an empty one beside `path`, which must not be there."""
    temporary = path.with_name(f"{path.name}.tmp"[-255:])
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        yield temporary
        for file in temporary.iterdir():
            _sync(file)
        put_in_place(temporary, path)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def append_whole(descriptor: int, content: bytes) -> None:
    """All of `content` at the end of a file that is open for appending, or nothing of it. Raises OSError."""
    size, written = os.fstat(descriptor).st_size, 0
    try:
        while written < len(content):  # a disk that gets full takes a part
            written += os.write(descriptor, content[written:])
    except OSError:
        with contextlib.suppress(OSError):
            if os.fstat(descriptor).st_size == size + written:  # nobody else has appended since
                os.ftruncate(descriptor, size)
        raise


def discard(path: Path) -> None:
    """Whatever lies there goes: a file, a folder with all that is in it, a link. Raises nothing."""
    with contextlib.suppress(OSError):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def is_gone(path: Path) -> bool:
    """Whether nothing lies there; False where the disk fails to answer, which is no proof."""
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return True
    except OSError:
        pass
    return False


def why_not_writable(path: Path) -> str:
    """Why a new file or folder can't be made at `path`, before there is anything to put there; "" where it can."""
    there = next(place for place in path.absolute().parents if place.exists())
    return "" if there.is_dir() and os.access(there, os.W_OK | os.X_OK) else f"{there} is no folder one may write to"


def put_in_place(temporary: Path, path: Path) -> None:
    """Rename a file or folder that is on the disk already, and put the new name there too."""
    os.replace(temporary, path)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """The names in a folder are on the disk after this."""
    _sync(folder)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
