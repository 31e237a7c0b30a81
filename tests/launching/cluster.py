"""Two machines on one: `ssh` to them is a script that hands its words to a shell here, as sshd does."""

from __future__ import annotations

import os
import shutil
import sys
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

REPOSITORY = Path(__file__).parent.parent.parent
HOSTS = ("127.0.0.1", "127.0.0.2")


def environment(**more: str) -> dict[str, str]:
    """The environment of a command that starts ranks: no rank itself, on the CPU, one thread each."""
    kept = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_SIZE")}
    path = f"{Path(sys.executable).parent}:{kept['PATH']}"
    return {**kept, "PATH": path, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", **more}


def dino_ds(*words: object) -> list[str]:
    """`dino-ds WORDS` of this checkout, whichever is installed."""
    code = f"import sys; sys.path.insert(0, {str(REPOSITORY)!r}); from dino_ds.cli.main import main; main()"
    return [sys.executable, "-c", code, *map(str, words)]


def started_by(supervisor: int) -> list[psutil.Process]:
    """Living processes of a supervised run, orphans too."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.environ().get("DINO_DS_SUPERVISOR", "").startswith(f"{supervisor}."):
                found.append(process)
    return found


def two_machines(folder: Path) -> dict[str, str]:
    """The environment in which `ssh` and `pdsh` reach both machines; skips the test without pdsh."""
    if shutil.which("pdsh") is None:
        pytest.skip("needs pdsh")
    script = folder / "bin/ssh"
    script.parent.mkdir()
    script.write_text('#!/bin/sh\nuntil [ "${1#127.0.0.}" != "$1" ]; do shift; done\nshift\nexec sh -c "$*"\n')
    script.chmod(0o755)
    return environment(PATH=f"{script.parent}:{environment()['PATH']}")
