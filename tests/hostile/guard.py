"""Bounds on any input: it may not raise another exception than ours, or take a minute or 500 MB."""

from __future__ import annotations

import contextlib
import io
import json
import resource
import signal
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import hypothesis

from dino_ds.cli import main as cli
from dino_ds.errors import lines_for_people

SECONDS = 60
MEMORY_MIB = 500


class Hang(BaseException):
    """Not an Exception: nothing may catch it."""


def examples(count: int) -> Any:
    """The same `count` examples in every run of the tests."""
    return hypothesis.settings(
        max_examples=count,
        derandomize=True,
        deadline=None,
        database=None,
        phases=[hypothesis.Phase.explicit, hypothesis.Phase.generate],
        suppress_health_check=list(hypothesis.HealthCheck),
    )


@contextlib.contextmanager
def bounded() -> Iterator[None]:
    """Raise Hang after a minute, AssertionError if the process has grown by more than 500 MB."""

    def ring(number: int, frame: Any) -> None:
        raise Hang

    before, peak = signal.signal(signal.SIGALRM, ring), _peak_mib()
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert _peak_mib() - peak < MEMORY_MIB


def run_command(words: Iterable[object]) -> tuple[int, list[str]]:
    """Exit code and lines on stderr of `dino-ds WORDS`."""
    code, errors = 0, io.StringIO()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(errors):
        try:
            cli.main(list(map(str, words)))
        except SystemExit as end:
            code = int(end.code or 0)
    return code, errors.getvalue().splitlines()


def command(*words: str) -> tuple[int, list[str]]:
    """Of `run_command`, up to the point where its work begins. Words that are refused must be so in at most ten lines,
    a problem each, of bounded length."""
    with bounded(), mock.patch.object(cli, "call", return_value=None):
        code, lines = run_command(words)
    if code:
        assert code in (2, 3), (code, lines)
        assert 1 <= len(lines) <= 10 and all(line.startswith("dino_ds: error: ") for line in lines), lines
        assert all(len(line) <= 1050 and line.isprintable() for line in lines), lines
    return code, lines


def seal(body: dict[str, Any]) -> str:
    body = {key: value for key, value in body.items() if key != "crc32"}
    text = json.dumps(body, indent=1, sort_keys=True) + "\n"
    return json.dumps(body | {"crc32": zlib.crc32(text.encode())}, indent=1, sort_keys=True) + "\n"


def put_with_good_sums(folder: Path, name: str, data: bytes) -> None:
    (folder / name).write_bytes(data)
    body = json.loads((folder / "manifest.json").read_text())
    body["files"][name] = {"bytes": len(data), "crc32": zlib.crc32(data)}
    (folder / "manifest.json").write_text(seal(body))


def raised_by(work: Callable[[], Any], kind: type[Exception]) -> str | None:
    """The message of the `kind` of error that `work` raised, one line; None if it raised nothing."""
    message = None
    try:
        with bounded():
            work()
    except kind as error:
        message = str(error)
    assert message is None or len(lines_for_people(message)) == 1, message
    return message


def _peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
