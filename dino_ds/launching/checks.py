"""Checks every machine before a launch for what would make it fail or hang: one line per problem, with its remedy.

`python -m dino_ds.launching.checks` examines one machine: it reads a question and prints an answer. Both are JSON, on
stdin and stdout: no part of the question passes through a remote shell.
"""

from __future__ import annotations

import itertools
import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import zlib
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dino_ds.basics.ports import port_is_free
from dino_ds.basics.text_file import is_url
from dino_ds.config.ds_config import CHECKOUT
from dino_ds.errors import ConfigError, UserError
from dino_ds.launching.plan import Host, LaunchPlan

_CONNECT_SECONDS = 15
_ANSWER_SECONDS = 180
"""Enough to import torch from a cold network disk."""
_MOST_ENTRIES = 1000
_SAME_PACKAGES = ("python", "torch", "deepspeed", "dino_ds")


@dataclass(frozen=True)
class Question:
    """A question to one machine. files: configs to compare by content; images: data.root, or None not to count them;
    seen: a file that must be visible; port: must be free, or 0. Paths are relative to the working folder."""

    files: tuple[str, ...]
    images: str | None
    seen: str
    port: int


@dataclass(frozen=True)
class Answer:
    """One machine's answer. same: values that must be equal on all machines, by name; gpus: as
    planning.measure.machine.Gpu; images: number of files of a pattern, or of entries of a folder, at most 1000."""

    same: dict[str, str]
    gpus: list[dict[str, Any]]
    images: int
    sees: bool
    port_free: bool


def check_machines(
    plan: LaunchPlan, files: tuple[str, ...], images: str | None, run_dir: Path
) -> tuple[list[str], list[str]]:
    """Check this machine, and over ssh those of the hostfile; returns a line about each, and all problems found.

    files: configs that must be the same everywhere. Raises ConfigError if the run folder can't be made here.
    """
    packages = {"ssh": "openssh-client", "pdsh": "pdsh"} if plan.uses_ssh else {}
    if missing := [name for name in packages if shutil.which(name) is None]:
        cure = "or start every machine by itself with --launcher torchrun"
        return [], [f"{name} is not installed: apt-get install {packages[name]}, {cure}" for name in missing]
    parent = next(path for path in (run_dir, *run_dir.absolute().parents) if path.is_dir())
    try:
        seen = tempfile.NamedTemporaryFile(prefix=".dino_ds_launch_", dir=parent.absolute())  # noqa: SIM115
    except OSError as error:
        raise ConfigError(f"run folder {run_dir} can't be made: {parent}: {error.strerror}; fix --run_dir") from None
    slots = plan.hosts[0].slots if plan.hosts else tuple(range(plan.ranks))
    elsewhere = plan.options.nodes > 1  # the machine of --master_addr listens, and may do so already
    port = 0 if elsewhere else plan.master_port
    here = Host("this machine", slots)
    with seen:
        # In another process: one that has looked at the GPUs keeps memory on them.
        question = Question(files, images, seen.name, port)
        answers: dict[Host, Answer | str] = {here: _ask([sys.executable, "-m", __spec__.name], question)}
        local = answers[here]
        if plan.uses_ssh and isinstance(local, Answer):
            answers = _ask_all(plan.hosts, question)
    problems = [f"{host.name}: {silent}" for host, silent in answers.items() if isinstance(silent, str)]
    heard = {host: answer for host, answer in answers.items() if isinstance(answer, Answer)}
    if isinstance(local, Answer):
        for host, answer in heard.items():
            problems += [f"{host.name}: {text}" for text in _differences(answer, local, run_dir, port)]
    return [_line(host, answer) for host, answer in heard.items()], [*problems, *_lacking(heard, images)]


def _line(host: Host, answer: Answer) -> str:
    gpus = [f"{gpu['name']} with {gpu['free_gib']:.0f} of {gpu['memory_gib']:.0f} GiB free" for gpu in answer.gpus]
    kinds = ", ".join(f"{gpus.count(kind)} x {kind}" for kind in dict.fromkeys(gpus)) or "no GPU"
    return f"{host.name}: {len(host.slots)} ranks, {kinds}, torch {answer.same['torch']}"


def _ask_all(hosts: tuple[Host, ...], question: Question) -> dict[Host, Answer | str]:
    """Ask all machines at once over ssh, and the first one about the port, to which all ranks will connect."""
    words = f"PYTHONPATH={shlex.quote(str(CHECKOUT))} {shlex.quote(sys.executable)} -m {__spec__.name}"
    ssh = ["ssh", "-o", "BatchMode=yes", "-o", f"ConnectTimeout={_CONNECT_SECONDS}", "--"]
    asked = [
        Question(question.files, question.images, question.seen, 0 if n else question.port) for n in range(len(hosts))
    ]
    commands = [[*ssh, host.name, f"cd {shlex.quote(os.getcwd())} && {words}"] for host in hosts]
    with ThreadPoolExecutor(min(64, len(hosts))) as pool:
        return dict(zip(hosts, pool.map(_ask, commands, asked), strict=True))


def _ask(command: list[str], question: Question) -> Answer | str:
    """The answer of a machine, or why there is none."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(CHECKOUT), os.environ.get("PYTHONPATH", "")])}
    text = json.dumps(asdict(question))
    try:
        done = subprocess.run(
            command, input=text, capture_output=True, text=True, env=environment, timeout=_ANSWER_SECONDS
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


def _differences(there: Answer, here: Answer, run_dir: Path, port: int) -> list[str]:
    """Problems of a machine: other software or configs than here, an invisible run folder, a port in use."""
    problems = [
        f"{name} is {there.same.get(name)}, and {value} on this machine: make it the same everywhere"
        for name, value in here.same.items()
        if there.same.get(name) != value
    ]
    if not there.sees:
        problems.append(f"does not see {run_dir} of this machine: put --run_dir on a disk that all machines share")
    if not there.port_free:
        problems.append(f"port {port} is in use; pass --master_port with another")
    return problems


def _lacking(answers: dict[Host, Answer], images: str | None) -> list[str]:
    """Problems of machines that see fewer images than others, or, if any machine has GPUs, fewer GPUs than slots."""
    problems = []
    most = max((answer.images for answer in answers.values()), default=0)
    on_gpus = os.environ.get("DS_ACCELERATOR") != "cpu" and any(answer.gpus for answer in answers.values())
    for host, answer in answers.items():
        if images is not None and not answer.images:
            problems.append(f"{host.name}: nothing is at data.root {images}: mount it there, at the same path")
        elif answer.images != most:
            problems.append(f"{host.name}: {answer.images} entries at data.root {images}, {most} elsewhere: copy them")
        if on_gpus and len(answer.gpus) <= max(host.slots):
            cure = "fix the hostfile or --ranks, or ask nvidia-smi what the driver misses"
            problems.append(f"{host.name}: {len(answer.gpus)} GPUs are found for slot {max(host.slots)}: {cure}")
    return problems


def answer(question: Question) -> Answer:
    """Examine this machine. Imports torch."""
    from dino_ds.costs.kept import hash_code
    from dino_ds.planning.measure.machine import find_gpus
    from dino_ds.run.environment import versions

    packages, code = versions(), {f"the code in {CHECKOUT}": hash_code()}
    return Answer(
        same={name: packages[name] for name in _SAME_PACKAGES} | code | {path: _crc(path) for path in question.files},
        gpus=[asdict(gpu) for gpu in find_gpus()],
        images=0 if question.images is None else _count_images(question.images),
        sees=Path(question.seen).exists(),
        port_free=question.port == 0 or port_is_free(question.port),
    )


def _crc(path: str) -> str:
    try:
        return f"CRC {zlib.crc32(Path(path).read_bytes()):08x}"
    except OSError as error:
        return f"not readable ({error.strerror})"


def _count_images(root: str) -> int:
    """Number of entries of the folder `root` (data.root), or of files of a pattern; 0 if there is nothing."""
    from dino_ds.data.formats import split_part
    from dino_ds.data.root import expand

    path, _ = split_part(os.path.expanduser(root))
    if is_url(path):
        return 1  # the ranks check it
    try:
        if not os.path.isdir(path):
            return min(_MOST_ENTRIES, len(expand(path)))
        with os.scandir(path) as entries:  # a list of millions would take too long
            return sum(1 for _ in itertools.islice(entries, _MOST_ENTRIES))
    except (OSError, UserError):
        return 0


if __name__ == "__main__":
    asked = json.loads(sys.stdin.read())
    try:
        print(json.dumps(asdict(answer(Question(**asked)))), flush=True)
    except UserError as error:
        sys.exit(str(error))
