"""Checks every machine before a launch for what would make it fail or hang: one line per problem, with its remedy."""

from __future__ import annotations

import dataclasses
import json
import os
import secrets
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

from dino_ds.config.ds_config import CHECKOUT
from dino_ds.errors import ConfigError
from dino_ds.launching.hostfile import Host
from dino_ds.launching.plan import LaunchPlan
from dino_ds.launching.probe import MARK, Answer, Question

_CONNECT_SECONDS = 15
_ANSWER_SECONDS = 180
"""Python and torch from a cold network disk."""
_CLOCK_SECONDS = 5.0
_SAME_PACKAGES = ("python", "torch", "deepspeed", "dino_ds")


@dataclass(frozen=True)
class Problem:
    """One line about a machine; `stops`: training could not start or would not be one run."""

    text: str
    stops: bool = True


@dataclass(frozen=True)
class Reply:
    """The answer of a machine of the hostfile, or why there is none; received: our clock at its answer."""

    host: Host
    answer: Answer | None
    failure: str = ""
    received: float = 0.0


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
    with _written_file(run_dir) as token:
        question = Question(files, images, str(token), 0)
        slots = plan.hosts[plan.options.node_rank or 0].slots if plan.hosts else tuple(range(plan.ranks))
        # Another process: one that has looked at the GPUs keeps memory on them.
        command = [sys.executable, "-m", "dino_ds.launching.probe"]
        local = _ask(Host("this machine", slots), command, _with_port(plan, question, 0))
        if local.answer is None:
            return [local], [Problem(f"this machine: {local.failure}")]
        replies = _ask_all(plan, question) if plan.uses_ssh else [local]
    problems = [Problem(f"{reply.host.name}: {reply.failure}") for reply in replies if reply.answer is None]
    answers = [reply for reply in replies if reply.answer is not None]
    for reply in answers:
        problems += _machine_problems(reply, local, run_dir, plan.master_port)
    problems += _images_seen(answers, images) + _gpus(answers) + _clocks(answers)
    return replies, problems


@contextmanager
def _written_file(run_dir: Path) -> Iterator[Path]:
    """A new empty file at the place of the run folder."""
    place = next(path for path in (run_dir, *run_dir.absolute().parents) if path.is_dir())
    path = place.absolute() / f".dino_ds_launch_{secrets.token_hex(8)}"
    try:
        path.touch(exist_ok=False)
    except OSError as error:
        raise ConfigError(f"run folder {run_dir} can't be made: {place}: {error.strerror}; fix --run_dir") from None
    try:
        yield path
    finally:
        path.unlink(missing_ok=True)


def _with_port(plan: LaunchPlan, question: Question, node: int) -> Question:
    """The question, for the first machine with the port that it is to listen on."""
    mine = plan.options.node_rank if plan.options.no_ssh else node
    elsewhere = plan.options.launcher == "torchrun" and plan.nodes[1] > 1  # whoever comes first listens
    return dataclasses.replace(question, port=plan.master_port if mine == 0 and not elsewhere else 0)


def _ssh_command(host: Host) -> list[str]:
    words = f"PYTHONPATH={shlex.quote(str(CHECKOUT))} {shlex.quote(sys.executable)} -m dino_ds.launching.probe"
    options = ["-o", "BatchMode=yes", "-o", f"ConnectTimeout={_CONNECT_SECONDS}"]
    return ["ssh", *options, "--", host.name, f"cd {shlex.quote(os.getcwd())} && {words}"]


def _ask_all(plan: LaunchPlan, question: Question) -> list[Reply]:
    """Ask all machines at once; the replies in the order of the hostfile."""
    with ThreadPoolExecutor(min(64, len(plan.hosts))) as pool:
        asked = {
            pool.submit(_ask, host, _ssh_command(host), _with_port(plan, question, node)): node
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
    received = time.time()
    line = next((line for line in done.stdout.splitlines() if line.startswith(MARK)), None)
    if line is None:
        return Reply(host, None, _why_silent(done, host))
    return Reply(host, Answer(**json.loads(line.removeprefix(MARK))), received=received)


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


def _machine_problems(reply: Reply, local: Reply, run_dir: Path, port: int) -> list[Problem]:
    """Problems that stop a machine: other software or configs than here, an unseen run folder, a port in use."""
    there, here = reply.answer, local.answer
    assert there is not None and here is not None
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
    return [Problem(f"{reply.host.name}: {text}") for text in problems]


def _images_seen(replies: Sequence[Reply], images: str | None) -> list[Problem]:
    """Machines that see no images, or fewer than another one."""
    counts = {reply.host.name: reply.answer.images for reply in replies if reply.answer and images is not None}
    most = max((count or 0 for count in counts.values()), default=0)
    problems = []
    for name, count in counts.items():
        if not count:
            problems.append(Problem(f"{name}: nothing is at data.root {images}: mount it there, at the same path"))
        elif count != most:
            problems.append(Problem(f"{name}: {count} entries at data.root {images}, {most} elsewhere: copy them all"))
    return problems


def _gpus(replies: Sequence[Reply]) -> list[Problem]:
    """Problems with GPUs: on machines that have some each slot needs one; a run on CPUs asks for none."""
    by_host = {reply.host: reply.answer.gpus for reply in replies if reply.answer}
    if os.environ.get("DS_ACCELERATOR") == "cpu" or not any(by_host.values()):
        return []
    problems = []
    for host, gpus in by_host.items():
        if len(gpus) <= max(host.slots):
            cure = "fix the hostfile or --ranks, or ask nvidia-smi what the driver misses"
            problems.append(Problem(f"{host.name}: {len(gpus)} GPUs are found for slot {max(host.slots)}: {cure}"))
            continue
        for slot in host.slots:
            free, total = gpus[slot]["free_gib"], gpus[slot]["memory_gib"]
            if free < 0.9 * total:
                text = f"{host.name}: GPU {slot} has {free:.1f} of {total:.1f} GiB free: others use it (nvidia-smi)"
                problems.append(Problem(text, stops=False))
    kinds = {(gpu["name"], round(gpu["memory_gib"])) for gpus in by_host.values() for gpu in gpus}
    if len(kinds) > 1:
        names = ", ".join(f"{name} ({memory} GiB)" for name, memory in sorted(kinds))
        problems.append(Problem(f"GPUs differ: {names}: the slowest and the smallest decide", stops=False))
    return problems


def _clocks(replies: Sequence[Reply]) -> list[Problem]:
    problems = []
    for reply in replies:
        skew = reply.answer.clock - reply.received if reply.answer else 0.0
        if abs(skew) > _CLOCK_SECONDS:
            side = "ahead of" if skew > 0 else "behind"
            text = f"its clock is {abs(skew):.0f} s {side} this machine's: start chrony or ntpd there"
            problems.append(Problem(f"{reply.host.name}: {text}", stops=False))
    return problems
