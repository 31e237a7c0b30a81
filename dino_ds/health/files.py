"""Small files that several processes fight for: exactly one creates them, and nobody reads half of one."""

from __future__ import annotations

import contextlib
import os
import socket
from pathlib import Path


def create_exclusively(path: Path, text: str) -> bool:
    """Whether this call, of all processes and hosts, has created `path`; it appears with its whole text.

    Raises OSError where the folder can't be written to.
    """
    temporary = path.with_name(f".{path.name}.{socket.gethostname()}.{os.getpid()}")
    temporary.write_text(text)
    try:
        os.link(temporary, path)
    except FileExistsError:
        return False
    except OSError:
        return _create_without_links(path, text)
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()
    return True


def _create_without_links(path: Path, text: str) -> bool:
    """Some network and FUSE disks know no hard links; a reader may then see an empty file for a moment."""
    try:
        descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
    except FileExistsError:
        return False
    with os.fdopen(descriptor, "w") as file:
        file.write(text)
    return True


def append_line(path: Path, text: str) -> None:
    """One write, so that lines of several processes don't mix; nothing where the folder is gone."""
    with contextlib.suppress(OSError), path.open("a") as file:
        file.write(text + "\n")
