"""Errors that a user can fix, which are printed as one line without a traceback, and all exit codes."""

from __future__ import annotations

import errno
import re
import signal
from collections.abc import Iterator
from contextlib import contextmanager

EXIT_CODES = {
    0: "done",
    1: "a bug of dino_ds: please report it, with the traceback",
    2: "usage, configuration or data",
    3: "checkpoint missing, damaged or of another run",
    4: "numbers went wrong: NaN, infinite, loss scale at its minimum",
    5: "disk full or not writable",
    6: "a rank hangs or is gone",
    7: "out of memory, of a GPU or of the host",
    75: "stopped on request (SIGTERM, SIGINT, SIGHUP, SIGUSR1, SIGUSR2, RUN/stop) and saved: continue with --resume",
    130: "interrupted by Ctrl-C, other commands than train",
}
STOPPED = 75
INTERRUPTED = 130
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
"""The signals that make a run save and stop; they often reach all of its processes at once."""
FORWARDED_SECONDS = 2.0  # a second signal this soon is the first, forwarded: terminals send Ctrl-C to all processes

_MEMORY = "out of memory|DefaultCPUAllocator|cannot allocate memory|std::bad_alloc|CUBLAS_STATUS_ALLOC_FAILED"
NO_SPACE = (errno.ENOSPC, errno.EDQUOT)  # errno of an OSError for a full disk, or an exhausted quota


class UserError(Exception):
    """An error whose message says what was given, what is allowed and what to do. `exit_code` is the process's.
    said_by_me: whether this rank prints it; None: rank 0 does, unless `Failures.settle` decides otherwise."""

    exit_code = 2

    def __init_subclass__(cls, exit_code: int | None = None) -> None:
        cls.exit_code = exit_code or cls.exit_code

    def __init__(self, *message: object, said_by_me: bool | None = None) -> None:
        super().__init__(*message)
        self.said_by_me = said_by_me


class ConfigError(UserError):
    """A recipe, a ds config or a flag is wrong (exit code 2)."""


class NotEstimated(ConfigError):
    """The memory or FLOPs of a backbone can't be estimated."""


class DataError(UserError):
    """Images are missing, unreadable or too few (exit code 2)."""


class CheckpointError(UserError, exit_code=3):
    """A checkpoint is missing, damaged or of another run (exit code 3)."""


class NumericError(UserError, exit_code=4):
    """Training stopped because its numbers went wrong: NaN/Inf loss or loss scale at its minimum (exit code 4)."""


class StorageError(UserError, exit_code=5):
    """The disk is full or can't be written to (exit code 5)."""


def unwritable(target: object, error: OSError, option: str = "run_dir") -> StorageError:
    """The StorageError for `target`, a file or folder that can't be written; --`option` chooses its place."""
    return StorageError(f"{target} can't be written: {error.strerror or error}: make room, or give another --{option}")


class PeerError(UserError, exit_code=6):
    """A rank hangs or is gone (exit code 6)."""


class OutOfMemory(UserError, exit_code=7):
    """Memory of a GPU or of the host ran out (exit code 7): a new start would only repeat it."""


class Stopped(UserError, exit_code=STOPPED):
    """A run that was started from Python by `dino_ds.train` was stopped on request and saved (exit code 75)."""


@contextmanager
def naming(subject: object) -> Iterator[None]:
    """Put `subject`, a file or folder, before the message of a CheckpointError."""
    try:
        yield
    except CheckpointError as error:
        raise CheckpointError(f"{subject}: {error}") from None


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocator (torch's, CUDA's, Python's, the system's) had no memory left, here or in a loader."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, RuntimeError) and re.search(_MEMORY, str(error), re.IGNORECASE) is not None


def one_line(error: object, most: int = 160) -> str:
    """An error's message on one line of at most `most` characters; its type's name where it has no message."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= most else f"{text[: most - 4]} ..."


def lines_for_people(message: str, all_of_them: bool = False) -> list[str]:
    """The lines of an error for a terminal: printable, of bounded length, at most ten unless `all_of_them`."""
    lines = ["".join(c if c.isprintable() else ascii(c)[1:-1] for c in line) for line in message.splitlines()]
    lines = [line if len(line) <= 1000 else f"{line[:500]} ... {line[-500:]}" for line in lines]
    if all_of_them or len(lines) <= 10:
        return lines
    return [*lines[:9], f"and {len(lines) - 9} problems more; --debug shows all"]
