"""Checks the machines of a hostfile before a launch for what would make it fail or hang: one line per problem.

`python -m dino_ds.launching.checks` examines one machine: it reads a question and prints an answer. Both are JSON, on
stdin and stdout: no part of the question passes through a remote shell.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import zlib
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from dino_ds.config.ds_config import CHECKOUT
from dino_ds.errors import ConfigError, UserError
from dino_ds.launching.plan import Host, LaunchPlan

_CONNECT_SECONDS = 15
_ANSWER_SECONDS = 180
"""Enough to import torch from a cold network disk."""
_SAME_PACKAGES = ("python", "torch", "deepspeed", "dino_ds")


@dataclass(frozen=True)
class Answer:
    """One machine's answer. same: values that must be equal on all machines, by name; gpus: their names; images: why
    there are none, or ""."""

    same: dict[str, str]
    gpus: list[str]
    images: str
    sees: bool


def check_machines(
    plan: LaunchPlan, files: tuple[str, ...], images: str | None, run_dir: Path
) -> tuple[list[str], list[str]]:
    """Check all machines of the hostfile over ssh; returns a line about each, and all problems found.

    files: configs that must be the same everywhere. Raises ConfigError if the run folder can't be made here.
    """
    packages = {"ssh": "openssh-client", "pdsh": "pdsh"}
    if missing := [name for name in packages if shutil.which(name) is None]:
        cure = "or start every machine by itself with torchrun (docs/launch.md)"
        return [], [f"{name} is not installed: apt-get install {packages[name]}, {cure}" for name in missing]
    parent = next(path for path in (run_dir, *run_dir.absolute().parents) if path.is_dir())
    try:
        seen = tempfile.NamedTemporaryFile(prefix=".dino_ds_launch_", dir=parent.absolute())  # noqa: SIM115
    except OSError as error:
        raise ConfigError(f"run folder {run_dir} can't be made: {parent}: {error.strerror}; fix --run_dir") from None
    with seen, ThreadPoolExecutor(min(64, len(plan.hosts))) as pool:
        ask = partial(_ask, question={"files": files, "images": images, "seen": seen.name})
        answers = dict(zip(plan.hosts, pool.map(ask, map(_over_ssh, plan.hosts)), strict=True))
    heard = {host: answer for host, answer in answers.items() if isinstance(answer, Answer)}
    problems = [f"{host.name}: {silent}" for host, silent in answers.items() if isinstance(silent, str)]
    lines = [
        f"{host.name}: {host.slots} ranks, GPUs: {', '.join(answer.gpus) or 'none'}" for host, answer in heard.items()
    ]
    return lines, [*problems, *find_problems(heard, run_dir)]


def _over_ssh(host: Host) -> list[str]:
    """The command that examines a machine from here."""
    words = f"PYTHONPATH={shlex.quote(str(CHECKOUT))} {shlex.quote(sys.executable)} -m {__spec__.name}"
    ssh = ["ssh", "-o", "BatchMode=yes", "-o", f"ConnectTimeout={_CONNECT_SECONDS}", "--"]
    return [*ssh, host.name, f"cd {shlex.quote(os.getcwd())} && {words}"]


def _ask(command: list[str], question: Mapping[str, Any]) -> Answer | str:
    """The answer of a machine, or why there is none."""
    try:
        done = subprocess.run(
            command, input=json.dumps(question), capture_output=True, text=True, timeout=_ANSWER_SECONDS
        )
    except subprocess.TimeoutExpired:
        return f"no answer within {_ANSWER_SECONDS} s: look at its load and its disks"
    lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    last = lines[-1][:200] if lines else f"exit code {done.returncode}"
    if done.returncode == 255:
        return f"not reachable by ssh ({last}); `ssh -o BatchMode=yes HOST true` must work without a password"
    if done.returncode == 0:
        # A shell may print lines before and after; another version of this module prints another answer, or none.
        for line in reversed(done.stdout.splitlines()):
            with suppress(ValueError, TypeError):
                return Answer(**json.loads(line))
        last = "its dino_ds is of another version, which does not answer"
    return f"{last}: this checkout ({CHECKOUT}) and its environment ({sys.executable}) must work on every machine"


def find_problems(answers: dict[Host, Answer], run_dir: Path) -> list[str]:
    """Problems of machines: software or configs other than on the first one, no run folder, no images, and, if any
    machine has GPUs, fewer GPUs than slots."""
    problems = list[str]()
    on_gpus = os.environ.get("DS_ACCELERATOR") != "cpu" and any(answer.gpus for answer in answers.values())
    first, expected = next(((host.name, answer.same) for host, answer in answers.items()), ("", {}))
    for host, answer in answers.items():
        name = host.name
        problems += [
            f"{name}: {key} is {answer.same.get(key)}, and {value} on {first}: make it the same everywhere"
            for key, value in expected.items()
            if answer.same.get(key) != value
        ]
        if not answer.sees:
            problems.append(f"{name}: does not see {run_dir} of this machine: put --run_dir on a disk that all share")
        if answer.images:
            problems.append(f"{name}: {answer.images}: mount the images there, at the same path")
        if on_gpus and len(answer.gpus) < host.slots:
            cure = "fix the hostfile, or ask nvidia-smi what the driver misses"
            problems.append(f"{name}: {len(answer.gpus)} GPUs are found for {host.slots} slots: {cure}")
    return problems


def answer(files: list[str], images: str | None, seen: str) -> Answer:
    """Examine this machine. Imports torch.

    files: configs to compare by content. images: data.root, or None for no check. seen: a file that must be visible.
    Paths are relative to the working folder.
    """
    from dino_ds.costs.kept import hash_code
    from dino_ds.planning.measure.machine import find_gpus
    from dino_ds.run.environment import versions

    packages, code = versions(), {f"the code in {CHECKOUT}": hash_code()}
    return Answer(
        same={name: packages[name] for name in _SAME_PACKAGES} | code | {path: _crc(path) for path in files},
        gpus=[gpu.name for gpu in find_gpus()],
        images="" if images is None else _why_no_images(images),
        sees=Path(seen).exists(),
    )


def _crc(path: str) -> str:
    try:
        return f"CRC {zlib.crc32(Path(path).read_bytes()):08x}"
    except OSError as error:
        return f"not readable ({error.strerror})"


def _why_no_images(root: str) -> str:
    from dino_ds.data.root import check_root

    try:
        check_root(root)
    except UserError as error:
        return str(error)
    return ""


if __name__ == "__main__":
    try:
        print(json.dumps(asdict(answer(**json.loads(sys.stdin.read())))), flush=True)
    except UserError as error:
        sys.exit(str(error))
