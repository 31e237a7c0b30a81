"""`dino-ds doctor`: what would stop a training on this machine, or on the machines of a hostfile, and the remedies. Run
as a program it examines its own machine: question and answer are JSON on its pipes, which no remote shell reads."""

from __future__ import annotations

import importlib
import itertools
import json
import logging
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import warnings
import zlib
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from importlib.metadata import distributions
from pathlib import Path
from typing import Any, NamedTuple

from dino_ds.basics.files import hash_code, read_text
from dino_ds.config.ds_config import CHECKOUT, resolve_ds_config
from dino_ds.config.loading import RECIPES, read_recipe_files
from dino_ds.config.recipe import Recipe
from dino_ds.config.stages import Request
from dino_ds.data.mixture import roots_of
from dino_ds.data.root import check_root
from dino_ds.errors import ConfigError, DataError, UserError, one_line
from dino_ds.options.commands import DoctorOptions
from dino_ds.options.definition import Result

FINE, WARNING, FAILURE = "ok", "warn", "FAIL"
_DRIVER = "/proc/driver/nvidia/version"
_LOAD_CURES = {
    "torch": "install torch anew, from one index, in a fresh environment",
    "torchvision": "install builds of torch and torchvision that match, both from the same index",
    "deepspeed": "pip install --no-build-isolation 'deepspeed>=0.19.8,<0.20'",
}
_ANSWER_SECONDS = 180  # enough to import torch from a cold network disk
_FORM = "a name of letters, digits, '.', '-' and '_', and 1 to 1024 slots without spaces, as in node1 slots=8; users, "
_FORM += "ports and IPv6 addresses belong into ~/.ssh/config"
_LINE = re.compile(r"([A-Za-z0-9_][A-Za-z0-9_.-]{0,252})[ \t]+slots=([0-9]{1,4})[ \t]*(#.*)?", re.ASCII)


class Finding(NamedTuple):
    """level: FINE, WARNING (training works, but ...) or FAILURE (training stops); remedy: what to do about it."""

    topic: str
    level: str
    text: str
    remedy: str = ""


def make_finding(topic: str, text: str, remedy: str = "", bad: bool = True, level: str = WARNING) -> Finding:
    """A finding of `level` if it is `bad` and has a remedy, else FINE."""
    return Finding(topic, level, text, remedy) if bad and remedy else Finding(topic, FINE, text)


def run(options: DoctorOptions, *, recipe: Recipe, request: Request, ds: Mapping[str, Any], ds_path: str) -> Result:
    """Print each finding as soon as it is known; the result exits with code 2 if something would stop training."""
    if not options.json:
        print(f"doctor on {platform.node()}; loading torch and DeepSpeed takes some seconds", flush=True)
    findings, hosts = [], {} if options.hostfile is None else read_hostfile(options.hostfile)
    on_machines = look_at_machines(options, hosts, recipe, request, ds_path) if hosts else ()
    for finding in itertools.chain(_findings(options, recipe, ds, ds_path), on_machines):
        findings.append(finding)
        if not options.json:
            print(f"{finding.level:<5} {finding.topic:<11}{finding.text}", flush=True)
            if finding.remedy:
                print(f"{'':<17}-> {finding.remedy}")
    failures = sum(finding.level == FAILURE for finding in findings)
    warned = sum(bool(finding.remedy) for finding in findings) - failures
    facts = {"host": platform.node(), "trains": not failures, "findings": [finding._asdict() for finding in findings]}
    page = f"training {'would stop' if failures else 'can start'}: {failures} problems, {warned} warnings"
    return Result(facts, page, error=SystemExit(2) if failures else None)


def _findings(options: DoctorOptions, recipe: Recipe, ds: Mapping[str, Any], ds_path: str) -> Iterator[Finding]:
    software = list(look_at_software())
    yield from software
    if software[-1].level == FAILURE:  # the rest needs torch
        return
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    # Batch sizes depend on the other machines of the run, which are not known here.
    sizes = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    kept = {key: value for key, value in ds.items() if key not in sizes}
    config = resolve_ds_config(kept, ds_path, recipe.data.global_batch, 1)
    if config.performance.compile != "off":
        path, cure = shutil.which("g++"), "dino_ds.compile needs a compiler: apt-get install g++"
        yield make_finding("compilers", f"g++ {path or 'absent'}", cure, not path, FAILURE)
    yield from look_at_gpus(config.precision)
    import torch

    from dino_ds.data.batches import automatic_workers, check_shared_memory

    data, ranks = recipe.data, torch.cuda.device_count() or 1  # a run on this machine alone, with a rank on each GPU
    workers = automatic_workers(ranks) if data.workers is None else data.workers
    try:
        check_shared_memory(ranks * recipe.batch_bytes(max(1, data.global_batch // ranks)), workers)
        yield make_finding("shm", f"enough shared memory for {ranks} ranks with {workers} loader processes each")
    except DataError as error:
        yield make_finding("shm", "too little shared memory", str(error), level=FAILURE)
    here = _existing_folder(options.run_dir)
    if os.access(here, os.W_OK | os.X_OK):
        free = shutil.disk_usage(here).free / 2**30
        yield make_finding("disk", f"{free:.1f} GiB free in {here}", "remove old runs, or take another disk", free < 20)
    else:
        cure = "fix its rights, or name another --run_dir"
        yield make_finding("disk", f"{here} can't be written to", cure, level=FAILURE)


def look_at_software() -> Iterator[Finding]:
    """List the versions, and try the imports of training, up to the first that fails."""
    shown = ("dino_ds", "torch", "torchvision", "deepspeed", "timm", "numpy", "pillow")
    packages = {name: next((package.version for package in distributions(name=name)), "absent") for name in shown}
    versions = ", ".join(f"{name} {version}" for name, version in packages.items())
    yield make_finding("software", f"{versions}; Python {platform.python_version()} ({sys.executable})")
    for name, cure in _LOAD_CURES.items():
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                if name == "deepspeed":
                    from dino_ds.engine.process import import_deepspeed  # which needs a torch that loads

                    import_deepspeed()
                    continue
                module = importlib.import_module(name)
            if name == "torch" and not module.accelerator.is_available():
                os.environ.setdefault("DS_ACCELERATOR", "cpu")  # DeepSpeed would find it too, but warn
        except Exception as error:
            text = f"{name} {packages[name]} does not load ({one_line(error)})"
            yield make_finding("software", text, cure, level=FAILURE)
            return


def look_at_gpus(precision: str) -> Iterator[Finding]:
    import torch

    from dino_ds.planning.measure import find_gpus

    gpus = find_gpus()
    for number, gpu in enumerate(gpus):
        text = f"{number}: {gpu.name}, capability {gpu.capability}, {gpu.free_gib:.1f} of {gpu.memory_gib:.1f} GiB free"
        taken = gpu.free_gib < 0.9 * gpu.memory_gib
        yield make_finding("gpu", text, "other processes hold memory: nvidia-smi lists them", taken)
    if gpus and not torch.distributed.is_nccl_available():
        yield make_finding("network", "no NCCL", "several GPUs need it: install a torch built with it")
    elif not gpus and not os.path.exists(_DRIVER) and shutil.which("nvidia-smi") is None:
        cure = "with a GPU in this machine: install its driver; in a container: docker run --gpus all"
        yield make_finding("gpu", "no GPU: training runs on the CPU, with gloo", cure)
    elif not gpus:
        with warnings.catch_warnings(record=True) as caught:  # torch's warning about a driver that it can't use
            warnings.simplefilter("always")
            torch.cuda.is_available()
        complaint = f": {one_line(caught[0].message, 200)}" if caught else ""
        text = f"a driver is here, and torch (CUDA {torch.version.cuda}) finds no GPU{complaint}"
        cure = "install torch with CUDA; nvidia-smi must list the GPUs, "
        cure += "and the driver may not be older than torch's CUDA"
        yield make_finding("gpu", text, cure, level=FAILURE)
    bf16 = torch.cuda.is_bf16_supported(including_emulation=False) if gpus else True
    fp16 = True if gpus else bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
    able = {"fp32": True, "bf16": bf16, "fp16": fp16}
    cure = f"the ds config wants {precision}: take another --ds_config"
    text = ", ".join(name if has else f"no {name}" for name, has in able.items())
    yield make_finding("precision", text, cure, not able[precision], FAILURE)


def _existing_folder(path: str) -> Path:
    return next(folder for folder in (Path(path).absolute(), *Path(path).absolute().parents) if folder.is_dir())


def read_hostfile(path: str) -> dict[str, int]:
    """The slots of each machine, in order. Raises ConfigError that names the line. Stricter than DeepSpeed, which
    passes any text to ssh and remote shells: a host "-oProxyCommand=..." runs a command on the launching machine."""
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


def look_at_machines(
    options: DoctorOptions, hosts: Mapping[str, int], recipe: Recipe, request: Request, ds_path: str
) -> Iterator[Finding]:
    """Examine all machines over ssh: software, code and files must be equal, images, run folder and GPUs be there."""
    for name, package in {"ssh": "openssh-client", "pdsh": "pdsh"}.items():
        if shutil.which(name) is None:
            cure = f"apt-get install {package}, or start every machine by itself with torchrun (docs/launch.md)"
            yield make_finding("machines", f"{name} is not installed", cure, level=FAILURE)
            return
    recipes = [] if request.config is None else [path for path, _ in read_recipe_files(request.config)]
    files = dict.fromkeys([ds_path, *(path for path in recipes if Path(path).parent != RECIPES)])
    question: dict[str, Any] = {"files": [os.path.abspath(path) for path in files]}
    question["images"] = [] if recipe.data.download else [*filter(None, roots_of(recipe.data))]
    words = f"PYTHONPATH={shlex.quote(str(CHECKOUT))} {shlex.quote(sys.executable)} -m {__spec__.name}"
    there = f"cd {shlex.quote(os.getcwd())} && {words}"
    ssh = ["ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=15", "--"]
    parent = _existing_folder(options.run_dir)
    try:
        with tempfile.NamedTemporaryFile(prefix=".dino_ds_doctor_", dir=parent) as seen, ThreadPoolExecutor(64) as pool:
            ask = partial(_ask, question=json.dumps(question | {"seen": seen.name}))
            answers = dict(zip(hosts, pool.map(ask, [[*ssh, host, there] for host in hosts]), strict=True))
    except OSError as error:
        yield make_finding("machines", f"{parent}: {error.strerror}", "name another --run_dir", level=FAILURE)
        return
    yield from judge_answers(hosts, answers, Path(options.run_dir))


def _ask(command: list[str], question: str) -> dict[str, Any] | str:
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
    """Yield a machine's problems, or that it is ready. answers: what `examine` returned there, or why none came."""
    heard = {host: answer for host, answer in answers.items() if isinstance(answer, dict)}
    on_gpus = os.environ.get("DS_ACCELERATOR") != "cpu" and any(answer["gpus"] for answer in heard.values())
    first, expected = next(((host, answer["same"]) for host, answer in heard.items()), ("", {}))
    for host, slots in hosts.items():
        answer, problems = answers[host], dict[str, str]()
        if isinstance(answer, str):
            problems = dict([answer.split(": ", 1)])
        else:
            for key, value in expected.items():
                if (other := answer["same"].get(key)) != value:
                    problems[f"{key} is {other}, and {value} on {first}"] = "make it the same everywhere"
            if not answer["sees"]:
                problems[f"does not see {run_dir} of this machine"] = "put --run_dir on a disk that all share"
            if answer["images"]:
                problems[answer["images"]] = "mount the images there, at the same path"
            if on_gpus and (count := len(answer["gpus"])) < slots:
                cure = "fix the hostfile, or ask nvidia-smi what the driver misses"
                problems[f"{count} GPUs are found for {slots} slots"] = cure
        yield from (make_finding("machines", f"{host}: {text}", cure, level=FAILURE) for text, cure in problems.items())
        if isinstance(answer, dict) and not problems:
            yield make_finding("machines", f"{host}: {slots} slots, GPUs: {', '.join(answer['gpus']) or 'none'}")


def examine(files: list[str], images: list[str], seen: str) -> dict[str, Any]:
    """Examine this machine. Returns `same`: what must be equal on all machines, such as the content of `files`; `gpus`:
    names; `images`: why one of these values of data.root has none, or ""; `sees`: whether the file `seen` is there."""
    from dino_ds.planning.measure import find_gpus
    from dino_ds.run.run_folder import versions

    same = {name: versions()[name] for name in ("python", "torch", "deepspeed", "dino_ds")}
    same[f"the code in {CHECKOUT}"] = hash_code()
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
