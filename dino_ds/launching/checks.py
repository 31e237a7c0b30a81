"""Checks every machine before a launch for what would make it fail or hang: one line per problem, with its remedy.

`python -m dino_ds.launching.checks` examines one machine: it reads a question and prints an answer. Both are JSON, on
stdin and stdout: nothing of the question passes through a remote shell.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import zlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from dino_ds.basics.ports import port_is_free
from dino_ds.config.ds_config import CHECKOUT
from dino_ds.errors import ConfigError, UserError
from dino_ds.launching.hostfile import Host
from dino_ds.launching.plan import LaunchPlan

_MARK = "dino_ds answers "
_CONNECT_SECONDS = 15
_ANSWER_SECONDS = 180
"""Python and torch from a cold network disk."""
_MOST_ENTRIES = 1000
_SAME_PACKAGES = ("python", "torch", "deepspeed", "dino_ds")


@dataclass(frozen=True)
class Problem:
    """One line about a machine; `stops`: training could not start or would not be one run."""

    text: str
    stops: bool = True


@dataclass(frozen=True)
class Question:
    """A question to one machine. files: configs to compare by content; images: data.root, or None to look for none;
    seen: a file that must be visible; port: to listen on, or 0. Paths are relative to the working folder."""

    files: tuple[str, ...]
    images: str | None
    seen: str
    port: int


@dataclass(frozen=True)
class Answer:
    """One machine. gpus: as planning.measure.machine.Gpu; memory_gib: all and free; files: the CRC-32 of each, or None
    if it is missing; images: files of a pattern, or entries of a folder, counted to 1000."""

    versions: dict[str, str]
    code: str
    gpus: list[dict[str, Any]]
    memory_gib: tuple[float, float]
    files: dict[str, int | None]
    images: int | None
    sees: bool
    port_free: bool


@dataclass(frozen=True)
class Reply:
    """The answer of a machine of the hostfile, or why there is none."""

    host: Host
    answer: Answer | None
    failure: str = ""

    def __str__(self) -> str:
        name, there = f"{self.host.name}: {len(self.host.slots)} ranks", self.answer
        if there is None:
            return f"{name}, no answer"
        gpus = [f"{gpu['name']} {gpu['memory_gib']:.0f} GiB" for gpu in there.gpus]
        kinds = ", ".join(f"{gpus.count(kind)} x {kind}" for kind in dict.fromkeys(gpus)) or "no GPU"
        memory = "{1:.0f} of {0:.0f} GiB of memory free".format(*there.memory_gib)
        return f"{name}, {kinds}, {memory}, torch {there.versions['torch']}"


def check_machines(
    plan: LaunchPlan, files: tuple[str, ...], images: str | None, run_dir: Path
) -> tuple[list[Reply], list[Problem]]:
    """Ask this machine, and over ssh those of the hostfile. files: configs that must be the same everywhere.

    Raises ConfigError if the run folder can't be made here.
    """
    packages = {"ssh": "openssh-client", "pdsh": "pdsh"} if plan.uses_ssh else {}
    if missing := [name for name in packages if shutil.which(name) is None]:
        cure = "or start every machine by itself with --no_ssh"
        return [], [Problem(f"{name} is not installed: apt-get install {packages[name]}, {cure}") for name in missing]
    place = next(path for path in (run_dir, *run_dir.absolute().parents) if path.is_dir())
    try:
        seen = tempfile.NamedTemporaryFile(prefix=".dino_ds_launch_", dir=place.absolute())  # noqa: SIM115
    except OSError as error:
        raise ConfigError(f"run folder {run_dir} can't be made: {place}: {error.strerror}; fix --run_dir") from None
    with seen:
        question = Question(files, images, seen.name, 0)
        slots = plan.hosts[plan.options.node_rank or 0].slots if plan.hosts else tuple(range(plan.ranks))
        # Another process: one that has looked at the GPUs keeps memory on them.
        command = [sys.executable, "-m", "dino_ds.launching.checks"]
        local = _ask(Host("this machine", slots), command, _with_port(plan, question, 0))
        if local.answer is None:
            return [local], [Problem(f"this machine: {local.failure}")]
        replies = _ask_all(plan, question) if plan.uses_ssh else [local]
    problems = [Problem(f"{reply.host.name}: {reply.failure}") for reply in replies if reply.answer is None]
    answers = {reply.host: reply.answer for reply in replies if reply.answer is not None}
    for host, answer in answers.items():
        texts = _differences(answer, local.answer, run_dir, plan.master_port)
        problems += [Problem(f"{host.name}: {text}") for text in texts]
    return replies, [*problems, *_images_seen(answers, images), *_gpus(answers)]


def _with_port(plan: LaunchPlan, question: Question, node: int) -> Question:
    """The question, for the first machine with the port that it is to listen on."""
    mine = plan.options.node_rank if plan.options.no_ssh else node
    elsewhere = plan.options.launcher == "torchrun" and plan.nodes[1] > 1  # whoever comes first listens
    return dataclasses.replace(question, port=plan.master_port if mine == 0 and not elsewhere else 0)


def _ask_all(plan: LaunchPlan, question: Question) -> list[Reply]:
    """Ask all machines at once; the replies in the order of the hostfile."""
    words = f"PYTHONPATH={shlex.quote(str(CHECKOUT))} {shlex.quote(sys.executable)} -m dino_ds.launching.checks"
    ssh = ["ssh", "-o", "BatchMode=yes", "-o", f"ConnectTimeout={_CONNECT_SECONDS}", "--"]
    remote = f"cd {shlex.quote(os.getcwd())} && {words}"
    with ThreadPoolExecutor(min(64, len(plan.hosts))) as pool:
        asked = {
            pool.submit(_ask, host, [*ssh, host.name, remote], _with_port(plan, question, node)): node
            for node, host in enumerate(plan.hosts)
        }
        bar = tqdm(as_completed(asked), "machines", total=len(asked), leave=False, disable=None)
        replies = {asked[done]: done.result() for done in bar}
    return [replies[node] for node in sorted(replies)]


def _ask(host: Host, command: list[str], question: Question) -> Reply:
    text = json.dumps(dataclasses.asdict(question))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(CHECKOUT), os.environ.get("PYTHONPATH", "")])}
    try:
        done = subprocess.run(
            command, input=text, capture_output=True, text=True, env=environment, timeout=_ANSWER_SECONDS
        )
    except subprocess.TimeoutExpired:
        return Reply(host, None, f"no answer within {_ANSWER_SECONDS} s: look at its load and its disks")
    line = next((line for line in done.stdout.splitlines() if line.startswith(_MARK)), None)
    if line is None:
        return Reply(host, None, _why_silent(done, host))
    return Reply(host, Answer(**json.loads(line.removeprefix(_MARK))))


def _why_silent(done: subprocess.CompletedProcess[str], host: Host) -> str:
    """Why there was no answer, by the last error line of ssh, the remote shell or Python."""
    lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    last = lines[-1][:200] if lines else f"exit code {done.returncode}"
    if done.returncode == 255:
        return f"not reachable by ssh ({last}); `ssh -o BatchMode=yes {host.name} true` must work without a password"
    if done.returncode == 127:
        return f"has no {sys.executable} ({last}): make the same environment at the same path on every machine"
    if "No module named" in last or "cd:" in last or "can't cd" in last:
        return f"{last}: put this checkout and its environment at the same paths on every machine ({CHECKOUT})"
    return f"can't run this environment ({last}): `dino-ds doctor` on that machine says more"


def _differences(there: Answer, here: Answer, run_dir: Path, port: int) -> list[str]:
    """What stops a machine: other software or configs than here, an unseen run folder, a port in use."""
    problems = [
        f"{name} {there.versions[name]}, and {here.versions[name]} on this machine: install the same everywhere"
        for name in _SAME_PACKAGES
        if there.versions[name] != here.versions[name]
    ]
    if there.code != here.code:
        problems.append(f"the code in {CHECKOUT} is {there.code}, and {here.code} on this machine: update one of them")
    for path, crc in there.files.items():
        if crc is None:
            problems.append(f"does not see {path}: copy it there, at the same path")
        elif crc != here.files[path]:
            problems.append(f"{path} is another file than on this machine: copy it there")
    if not there.sees:
        problems.append(f"does not see {run_dir} of this machine: put --run_dir on a disk that all machines share")
    if not there.port_free:
        problems.append(f"port {port} is in use; pass --master_port with another")
    return problems


def _images_seen(answers: dict[Host, Answer], images: str | None) -> list[Problem]:
    """Machines that see no images, or fewer than another one."""
    counts = {host.name: answer.images or 0 for host, answer in answers.items() if images is not None}
    most = max(counts.values(), default=0)
    problems = []
    for name, count in counts.items():
        if not count:
            problems.append(Problem(f"{name}: nothing is at data.root {images}: mount it there, at the same path"))
        elif count != most:
            problems.append(Problem(f"{name}: {count} entries at data.root {images}, {most} elsewhere: copy them all"))
    return problems


def _gpus(answers: dict[Host, Answer]) -> Sequence[Problem]:
    """Problems with GPUs: on machines that have some each slot needs one; a run on CPUs asks for none."""
    problems = []
    if os.environ.get("DS_ACCELERATOR") == "cpu" or not any(answer.gpus for answer in answers.values()):
        return []
    for host, answer in answers.items():
        if len(answer.gpus) <= max(host.slots):
            cure = "fix the hostfile or --ranks, or ask nvidia-smi what the driver misses"
            problems.append(
                Problem(f"{host.name}: {len(answer.gpus)} GPUs are found for slot {max(host.slots)}: {cure}")
            )
            continue
        for slot in host.slots:
            free, total = answer.gpus[slot]["free_gib"], answer.gpus[slot]["memory_gib"]
            if free < 0.9 * total:
                text = f"{host.name}: GPU {slot} has {free:.1f} of {total:.1f} GiB free: others use it (nvidia-smi)"
                problems.append(Problem(text, stops=False))
    return problems


def answer(question: Question) -> Answer:
    """Examine this machine. Imports torch."""
    from dino_ds.basics.host_memory import host_memory_gib
    from dino_ds.planning.measure.machine import find_gpus, hash_code
    from dino_ds.run.environment import versions

    return Answer(
        versions=versions(),
        code=hash_code(),
        gpus=[dataclasses.asdict(gpu) for gpu in find_gpus()],
        memory_gib=host_memory_gib(),
        files={path: _crc(Path(path)) for path in question.files},
        images=None if question.images is None else _count_images(question.images),
        sees=Path(question.seen).exists(),
        port_free=question.port == 0 or port_is_free(question.port),
    )


def _crc(path: Path) -> int | None:
    try:
        return zlib.crc32(path.read_bytes())
    except OSError:
        return None


def _count_images(root: str) -> int:
    """Number of entries of the folder `root` (data.root), or of files of a pattern; 0 if there is nothing."""
    from dino_ds.data.formats import split_part
    from dino_ds.data.root import expand

    path, _ = split_part(os.path.expanduser(root))
    try:
        if os.path.isdir(path):
            with os.scandir(path) as entries:
                return sum(1 for _ in itertools.islice(entries, _MOST_ENTRIES))
        return len(expand(path))
    except (OSError, UserError):
        return 0


def main() -> None:
    """Answer the question on stdin."""
    asked = json.loads(sys.stdin.read())
    try:
        found = answer(Question(**{**asked, "files": tuple(asked["files"])}))
    except UserError as error:
        sys.exit(str(error))
    print(_MARK + json.dumps(dataclasses.asdict(found)), flush=True)


if __name__ == "__main__":
    main()
