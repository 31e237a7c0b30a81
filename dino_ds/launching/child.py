"""`dino-ds launch` as a child of a Python program, which prints what it prints and raises what it ends with."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

from dino_ds.errors import STOPPED, Stopped, UserError


def launch_from_python(words: list[str]) -> None:
    """Run `dino-ds` with these words, and print its output.

    A Ctrl-C asks the ranks to save and stop, a second one ends them; they stop, too, when this program ends.

    Raises:
        UserError: of the class that the exit code has.
        RuntimeError: for a bug.
        KeyboardInterrupt: after a second Ctrl-C, or one before there is anything to save.
    """
    paths = [str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
    process = subprocess.Popen(
        [sys.executable, "-m", "dino_ds", *words],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        start_new_session=True,  # a terminal's Ctrl-C is for this process, which passes it on
    )
    assert process.stdout is not None
    lines, interrupted, ended = list[str](), False, False
    try:
        while not ended:
            try:
                for line in process.stdout:
                    lines.append(line.decode(errors="replace").rstrip("\n"))
                    print(lines[-1], file=sys.stderr, flush=True)
                ended = True
            except KeyboardInterrupt:
                interrupted = True
                process.send_signal(signal.SIGINT)
    finally:
        process.terminate()
        process.wait()
    if process.returncode:
        raise error_of(process.returncode, lines, interrupted)


def error_of(code: int, lines: list[str], interrupted: bool = False) -> BaseException:
    """The exception that stands for an exit code of `dino-ds launch`, which has printed `lines`."""
    stopped = [line for line in lines if line.startswith("stopped ")]
    if code == 128 + signal.SIGINT or (interrupted and code == STOPPED and not stopped):
        return KeyboardInterrupt()
    if code == STOPPED and not stopped:
        return Stopped("stopped on request, before this start had anything to save")
    if code == STOPPED:
        said = stopped[-1].removeprefix("stopped ").partition(". To continue")[0].strip()
        return Stopped(f"stopped {said}; the same with resume=True continues it")
    errors = dict.fromkeys(found[1] for line in lines if (found := re.match(r"dino_ds: (?:\S+: )?error: (.*)", line)))
    text = "\n".join(errors) or f"dino-ds launch has ended with code {code}"
    kinds = {kind.exit_code: kind for kind in reversed(UserError.__subclasses__()) if kind.exit_code > 1}
    return kinds[code](text) if code in kinds else RuntimeError(f"{text} (exit code {code})")
