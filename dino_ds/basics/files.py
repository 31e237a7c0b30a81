"""Reads files safely, whatever is at their path, and writes them whole or not at all; the folder for caches."""

from __future__ import annotations

import glob
import hashlib
import json
import os
import re
import secrets
import shutil
import stat
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from dino_ds.errors import CheckpointError, ConfigError

FORMAT = 1  # the number under the key "format": it rises when files change so that this code could not read them
MAX_BYTES = 1 << 18
MAX_JSON_BYTES = 64 << 20
MAX_LINES_BYTES, MAX_LINE_BYTES = 4 << 30, 1 << 20  # of a file that a run appends to for years, and of one line of it


def read_text(path: str, kind: str) -> str:
    """The UTF-8 text of a regular file of at most 256 KiB; `kind`: what the file should be, for the ConfigError."""
    try:
        return read_bytes(path, MAX_BYTES).decode("utf-8")
    except UnicodeDecodeError:
        raise ConfigError(f"{path} cannot be read as {kind}: it is not UTF-8 text") from None
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        raise ConfigError(f"{path} cannot be read as {kind}: {getattr(error, 'strerror', None) or error}") from None


def read_bytes(path: str | Path, most: int) -> bytes:
    """The content of a regular file of at most `most` bytes. Raises OSError, ValueError."""
    with opened(path, most) as file:
        return file.read(most)


def read_object(path: str | Path) -> dict[str, Any]:
    """The JSON object in a regular file of at most 64 MiB. Raises OSError, and ValueError for any other content."""
    try:
        content = json.loads(read_bytes(path, MAX_JSON_BYTES))
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if not isinstance(content, dict):
        raise ValueError("it is not a JSON object")
    return content


def read_lines(path: str | Path) -> Iterator[bytes]:
    """Yield the lines of a regular file, each cut after 1 MiB. Raises OSError; ConfigError for a pipe or over 4 GiB."""
    try:
        with opened(path, MAX_LINES_BYTES) as file:
            while line := file.readline(MAX_LINE_BYTES):
                yield line
                while len(line) == MAX_LINE_BYTES and not line.endswith(b"\n"):
                    line = file.readline(MAX_LINE_BYTES)
    except ValueError as error:
        raise ConfigError(f"{path} cannot be read: {error}") from None


@contextmanager
def opened(path: str | bytes | Path, most: int) -> Iterator[BinaryIO]:
    """Open a file without waiting for a pipe's writer. Raises ValueError if it is not regular, or over `most` bytes."""
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        state = os.fstat(file.fileno())
        if not stat.S_ISREG(state.st_mode):
            raise ValueError("it is not a regular file")
        if state.st_size > most:
            size = f"{state.st_size / 2**30:.1f} GiB, {most >> 30}" if most >> 30 else f"{state.st_size} bytes, {most}"
            raise ValueError(f"{size} are allowed")
        yield file


def is_file(path: str) -> bool:
    """Whether a regular file is at the path; False for text that cannot be a path."""
    try:
        return Path(path).is_file()
    except (OSError, ValueError):
        return False


def is_url(text: str) -> bool:
    """Whether `text` is a URL, such as s3://bucket/file, and not a path."""
    return re.match(r"[a-z][a-z0-9+.-]*://", text, re.IGNORECASE) is not None


def unusable_text(text: str) -> str:
    """Why `text` cannot be a path, for a message; "" if it can. A URL, which logs repeat, must hold no password."""
    if is_url(text) and re.search(r"://[^/]*@|[?#]", text):
        why = "which would be written into logs and checkpoints: leave it out; drivers find credentials by themselves"
        return f"an address of {text.partition(':')[0]}:// has a password, a query or a fragment (@ ? #), {why}"
    start, raw = f"{text[:40]!r}{'...' if len(text) > 40 else ''}", text.encode("utf-8", "surrogatepass")
    if re.search("[\ud800-\udfff]", text):
        return f"{start} holds bytes that are not UTF-8: rename the file or folder"
    if b"\0" in raw:
        return f"{start} holds a NUL character"
    longest = max(len(name) for name in re.split(rb"[/,\s]", raw))
    is_long = len(raw) > 4096 or longest > 255
    return f"{start} is too long: {len(raw)} bytes; a path has at most 4096, a name in it 255" if is_long else ""


def replace_file(path: Path, content: str | bytes) -> None:
    """Write `content` to a temporary file, sync it to the disk, and rename it to `path`. Raises OSError."""
    with replacing(path) as temporary:
        temporary.write_bytes(content.encode() if isinstance(content, str) else content)


@contextmanager
def replacing(path: Path, on_disk: bool = True) -> Iterator[Path]:
    """Yield a temporary path for a file that then replaces `path`, or is removed after an error. Raises OSError.
    Without `on_disk` the file is not synced: safe if the process dies, not if the machine does."""
    temporary = path.with_name(f".{path.name[-200:]}.{secrets.token_hex(4)}.tmp")  # NAME.tmp may be the user's
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


@contextmanager
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


def append_whole(descriptor: int, content: bytes | memoryview) -> None:
    """Append all of `content` to a file that is open for appending, or nothing of it. Raises OSError."""
    size, written = os.fstat(descriptor).st_size, 0
    try:
        while written < len(content):  # a disk that fills up takes only a part
            written += os.write(descriptor, content[written:])
    except OSError:
        with suppress(OSError):
            if os.fstat(descriptor).st_size == size + written:  # nobody else has appended since
                os.ftruncate(descriptor, size)
        raise


def left_over(path: Path) -> list[Path]:
    """The temporary files of `replacing` beside `path`, which a killed process has left."""
    return [*path.parent.glob(f".{glob.escape(path.name[-200:])}.????????.tmp")]


def discard_left_over(path: Path) -> None:
    for file in left_over(path):
        discard(file)


def discard(path: Path) -> None:
    """Remove a file, a link, or a folder with its content. Raises nothing."""
    with suppress(OSError):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def is_gone(path: Path) -> bool:
    """Whether the path does not exist; False if the disk fails to answer."""
    try:
        path.stat()
    except OSError as error:
        return isinstance(error, FileNotFoundError | NotADirectoryError)
    return False


def check_absent(path: Path, how: str = "name another with --out") -> None:
    """Raises ConfigError if there is anything at `path`, where an output is to be written."""
    if os.path.lexists(path):
        raise ConfigError(f"{path} is there already: remove it, or {how}")


def free_stem(named: str | None, default: Path, endings: Sequence[str]) -> str:
    """`named`, else `default` with a number if its files exist. Raises ConfigError if files of `named` exist."""
    stem, number = os.path.expanduser(named or default), 1
    while named is None and any(os.path.lexists(f"{stem}{ending}") for ending in endings):
        number += 1
        stem = f"{default}-{number}"
    for ending in endings:
        check_absent(Path(f"{stem}{ending}"))
    return stem


def why_not_writable(path: Path) -> str:
    """Why a new file or folder can't be made at `path`; "" if it can."""
    folder = next(parent for parent in path.absolute().parents if os.path.exists(parent))
    return "" if folder.is_dir() and os.access(folder, os.W_OK | os.X_OK) else f"{folder} is not a writable folder"


def cache_folder() -> Path:
    """The folder for files that can be made again: DINO_DS_CACHE, else dino_ds in XDG_CACHE_HOME or ~/.cache. For a
    user without a home, as in a container: dino_ds-UID in the temporary folder, or a new one if that is another's."""
    if named := os.environ.get("DINO_DS_CACHE"):
        return Path(os.path.expanduser(named))
    if cache := os.environ.get("XDG_CACHE_HOME"):
        return Path(cache) / "dino_ds"
    with suppress(RuntimeError):
        return Path.home() / ".cache/dino_ds"
    folder = Path(tempfile.gettempdir(), f"dino_ds-{os.getuid()}")
    return folder if not folder.exists() or folder.lstat().st_uid == os.getuid() else Path(tempfile.mkdtemp())


def hash_code() -> str:
    """A short SHA-256 of the package's files on this machine: equal on machines that run the same code."""
    digest, package = hashlib.sha256(), Path(__file__).resolve().parents[1]
    for path in sorted(package.rglob("*")):
        if path.suffix in (".py", ".yaml", ".json"):
            content = path.read_bytes()
            digest.update(f"{path.relative_to(package)} {len(content)}\n".encode() + content)
    return digest.hexdigest()[:12]


def check_format(number: object, file: object, remedy: str) -> None:
    """Raises CheckpointError, which says `remedy`, unless `number`, the "format" that `file` states, is FORMAT."""
    if str(number) != str(FORMAT):
        says = "has no format number" if number is None else f"is of format {str(number)[:20]}"
        raise CheckpointError(f"{file} {says}, and this dino_ds reads format {FORMAT} alone: {remedy}")
