"""`dino-ds launch` as a child of a Python program, which gets its output, its metrics, and how it ends."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any

from dino_ds.basics.text_file import read_lines
from dino_ds.errors import STOPPED, Stopped, UserError
from dino_ds.launching.launch import PARENT
from dino_ds.run.caller import Callback, Caller

_TICK_SECONDS = 0.2


def launch_from_python(words: list[str], folders: Iterable[Path], callbacks: Iterable[Callback]) -> None:
    """Run `dino-ds` with these words, print what it prints, and call `callbacks` for new lines of metrics in `folders`.

    Raises the UserError of its exit code, RuntimeError for a bug, KeyboardInterrupt after a second Ctrl-C (the first
    asks the ranks to save and stop) or one before there is anything to save, and what a callback has raised, after
    which the ranks save and stop, too.
    """
    caller, new_lines = Caller(callbacks), [NewLines(folder / "metrics.jsonl") for folder in folders]
    paths = [str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
    with tempfile.TemporaryFile() as file:  # not a pipe: it would break, with the ranks, when this program dies
        process = subprocess.Popen(
            [sys.executable, "-m", "dino_ds", *words],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), PARENT: str(os.getpid())},
            start_new_session=True,  # a terminal's Ctrl-C is for this process, which passes it on
        )
        output, asked, ended, interrupted = Output(file), False, False, False
        try:
            while not ended:
                try:
                    ended = process.poll() is not None
                    output.show()
                    for lines in new_lines:
                        for line in lines:
                            caller.tell(line)
                    if caller.error is not None and not asked:
                        asked = True
                        process.terminate()
                    time.sleep(0 if ended else _TICK_SECONDS)
                except KeyboardInterrupt:
                    interrupted = True
                    process.send_signal(signal.SIGINT)
        finally:
            process.terminate()
            process.wait()
    if caller.error is not None:
        raise caller.error
    if process.returncode:
        raise output.error(process.returncode, interrupted)


class Output:
    """The file that the child prints into; its error lines say why the child has ended."""

    def __init__(self, file: IO[bytes]) -> None:
        self._descriptor, self._place, self._rest = file.fileno(), 0, b""
        self._errors, self._stopped = list[str](), ""

    def show(self) -> None:
        """Print the new lines."""
        while data := os.pread(self._descriptor, 1 << 16, self._place):  # the child writes at the file's own place
            self._place += len(data)
            *lines, self._rest = (self._rest + data).split(b"\n")
            for line in (line.decode(errors="replace") for line in lines):
                print(line, file=sys.stderr, flush=True)
                if found := re.match(r"dino_ds: (?:\S+: )?error: (.*)", line):
                    self._errors.append(found[1])
                elif line.startswith("stopped "):
                    self._stopped = line.removeprefix("stopped ").partition(". To continue")[0].strip()

    def error(self, code: int, interrupted: bool = False) -> BaseException:
        """The exception that stands for exit code `code`."""
        nothing_saved = code == STOPPED and not self._stopped
        if code == 128 + signal.SIGINT or (interrupted and nothing_saved):
            return KeyboardInterrupt()
        if nothing_saved:
            return Stopped("stopped on request, before this start had anything to save")
        if code == STOPPED:
            return Stopped(f"stopped {self._stopped}; the same with resume=True continues it")
        text = "\n".join(dict.fromkeys(self._errors)) or f"dino-ds launch has ended with code {code}"
        kinds = {kind.exit_code: kind for kind in reversed(UserError.__subclasses__()) if kind.exit_code > 1}
        return kinds[code](text) if code in kinds else RuntimeError(f"{text} (exit code {code})")


class NewLines:
    """Iterates over the lines of metrics that a start writes into a new file, but for those that it keeps of an earlier
    start."""

    def __init__(self, path: Path) -> None:
        self._path, self._before, self._place = path, _inode(path), 0
        self._earlier = set(read_lines(path)) if self._before else set()

    def __iter__(self) -> Iterator[dict[str, Any]]:
        if _inode(self._path) in (0, self._before):
            return
        with self._path.open("rb") as file:
            file.seek(self._place)
            for line in file:
                if not line.endswith(b"\n"):  # it is being written
                    return
                self._place += len(line)
                if line not in self._earlier:
                    yield json.loads(line)


def _inode(path: Path) -> int:
    """0 if there is none, or the disk does not answer at this moment: the run goes on."""
    with contextlib.suppress(OSError):
        return path.stat().st_ino
    return 0
