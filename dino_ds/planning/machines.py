"""`dino-ds doctor --hostfile HOSTS`: whether the machines of a hostfile can train together.

Run as a program it examines its own machine: question and answer are JSON on its pipes, which no remote shell reads.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import zlib
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from dino_ds.basics.files import hash_code, read_text
from dino_ds.basics.formatting import FAILURE, Finding, make_finding
from dino_ds.config.ds_config import CHECKOUT
from dino_ds.data.root import check_root
from dino_ds.errors import ConfigError, UserError

_PACKAGES = ("python", "torch", "deepspeed", "dino_ds")
_ANSWER_SECONDS = 180  # enough to import torch from a cold network disk
_FORM = (
    "a name of letters, digits, '.', '-' and '_', and 1 to 1024 slots without spaces, as in node1 slots=8; users, "
    "ports and IPv6 addresses belong into ~/.ssh/config"
)
_LINE = re.compile(r"([A-Za-z0-9_][A-Za-z0-9_.-]{0,252})[ \t]+slots=([0-9]{1,4})[ \t]*(#.*)?", re.ASCII)


def read_hostfile(path: str) -> dict[str, int]:
    """The slots of each machine, in the order of the file. Raises ConfigError that names the line.

    Stricter than DeepSpeed, which passes any text of the file to ssh and to remote shells: a host named
    "-oProxyCommand=..." runs a command on the launching machine.
    """
    hosts: dict[str, int] = {}
    for number, text in enumerate(read_text(path, "a hostfile, one line a machine").split("\n"), 1):
        line = text.strip()
        if not line or line.startswith("#"):
            continue
        entry, shown = _LINE.fullmatch(line), repr(line if len(line) <= 80 else f"{line[:80]}...")
        if entry is None or not 1 <= int(entry[2]) <= 1024:
            raise ConfigError(f'hostfile {path}:{number}: {shown} is not "name slots=N": {_FORM}')
        if entry[1] in hosts:
            raise ConfigError(f"hostfile {path}:{number}: {entry[1]} is named twice: write one line a machine")
        hosts[entry[1]] = int(entry[2])
    if not hosts:
        raise ConfigError(f'hostfile {path} names no machine: write a line "name slots=N" for each')
    return hosts


def look_at_machines(hosts: Mapping[str, int], files: list[str], images: list[str], run_dir: Path) -> Iterator[Finding]:
    """Examine all machines over ssh: software, code and `files` must be equal, images, run folder and GPUs be there."""
    for name, package in {"ssh": "openssh-client", "pdsh": "pdsh"}.items():
        if shutil.which(name) is None:
            cure = f"apt-get install {package}, or start every machine by itself with torchrun (docs/launch.md)"
            yield make_finding("machines", f"{name} is not installed", cure, level=FAILURE)
            return
    parent = next(path for path in (run_dir.absolute(), *run_dir.absolute().parents) if path.is_dir())
    try:
        with tempfile.NamedTemporaryFile(prefix=".dino_ds_doctor_", dir=parent) as seen, ThreadPoolExecutor(64) as pool:
            ask = partial(_ask, question=json.dumps({"files": files, "images": images, "seen": seen.name}))
            answers = dict(zip(hosts, pool.map(ask, map(_over_ssh, hosts)), strict=True))
    except OSError as error:
        yield make_finding("machines", f"{parent}: {error.strerror}", "name another --run_dir", level=FAILURE)
        return
    yield from judge_answers(hosts, answers, run_dir)


def _over_ssh(host: str) -> list[str]:
    """The command that examines a machine from here."""
    words = f"PYTHONPATH={shlex.quote(str(CHECKOUT))} {shlex.quote(sys.executable)} -m {__spec__.name}"
    there = f"cd {shlex.quote(os.getcwd())} && {words}"
    return ["ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=15", "--", host, there]


def _ask(command: list[str], question: str) -> dict[str, Any] | str:
    """The answer of a machine, or why there is none."""
    try:
        done = subprocess.run(command, input=question, capture_output=True, text=True, timeout=_ANSWER_SECONDS)
    except subprocess.TimeoutExpired:
        return f"no answer within {_ANSWER_SECONDS} s: look at its load and its disks"
    last = next((line[:200] for line in done.stderr.splitlines()[::-1] if line.strip()), f"code {done.returncode}")
    if done.returncode == 255:
        return f"not reachable by ssh ({last}): `ssh -o BatchMode=yes HOST true` must work without a password"
    for line in reversed(done.stdout.splitlines()):  # a shell may print lines before and after
        with suppress(ValueError):
            answer = json.loads(line)
            if isinstance(answer, dict) and answer.keys() == {"same", "gpus", "images", "sees"}:
                return answer
    return f"no answer ({last}): this checkout ({CHECKOUT}) and {sys.executable} must be the same on every machine"


def judge_answers(
    hosts: Mapping[str, int], answers: Mapping[str, dict[str, Any] | str], run_dir: Path
) -> Iterator[Finding]:
    """A finding for each problem of a machine, else one that it is ready; `answers`: of `examine`, or why none came."""
    heard = {host: answer for host, answer in answers.items() if isinstance(answer, dict)}
    on_gpus = os.environ.get("DS_ACCELERATOR") != "cpu" and any(answer["gpus"] for answer in heard.values())
    first, expected = next(((host, answer["same"]) for host, answer in heard.items()), ("", {}))
    for host, slots in hosts.items():
        answer, problems = answers[host], dict[str, str]()
        if isinstance(answer, str):
            problems = dict([answer.split(": ", 1)])
        else:
            for key in [key for key, value in expected.items() if answer["same"].get(key) != value]:
                text = f"{key} is {answer['same'].get(key)}, and {expected[key]} on {first}"
                problems[text] = "make it the same everywhere"
            if not answer["sees"]:
                problems[f"does not see {run_dir} of this machine"] = "put --run_dir on a disk that all share"
            if answer["images"]:
                problems[answer["images"]] = "mount the images there, at the same path"
            if on_gpus and (count := len(answer["gpus"])) < slots:
                problems[f"{count} GPUs are found for {slots} slots"] = (
                    "fix the hostfile, or ask nvidia-smi what the driver misses"
                )
        yield from (make_finding("machines", f"{host}: {text}", cure, level=FAILURE) for text, cure in problems.items())
        if isinstance(answer, dict) and not problems:
            yield make_finding("machines", f"{host}: {slots} slots, GPUs: {', '.join(answer['gpus']) or 'none'}")


def examine(files: list[str], images: list[str], seen: str) -> dict[str, Any]:
    """Examine this machine: `same`, values that must be equal on all machines, with the content of `files`; the names
    of `gpus`; `images`, why these values of data.root have none, or ""; whether it `sees` the file `seen`."""
    from dino_ds.planning.measure import find_gpus
    from dino_ds.run.environment import versions

    same = {name: versions()[name] for name in _PACKAGES} | {f"the code in {CHECKOUT}": hash_code()}
    for path in files:
        try:
            same[path] = f"CRC {zlib.crc32(Path(path).read_bytes()):08x}"
        except OSError as error:
            same[path] = f"not readable ({error.strerror})"
    missing = ""
    for root in images:
        try:
            check_root(root)
        except UserError as error:
            missing = missing or str(error)
    return {"same": same, "gpus": [gpu.name for gpu in find_gpus()], "images": missing, "sees": Path(seen).exists()}


if __name__ == "__main__":
    print(json.dumps(examine(**json.loads(sys.stdin.read()))), flush=True)
