"""`dino-ds doctor`: what would stop a training on this machine and with this installation, and the remedies."""

from __future__ import annotations

import importlib
import itertools
import logging
import os
import platform
import shutil
import sys
import warnings
from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from dino_ds.basics.formatting import FAILURE, Finding, make_finding
from dino_ds.config.ds_config import resolve_ds_config
from dino_ds.config.ds_schema import DsConfig
from dino_ds.config.loading import RECIPES, read_recipe_files
from dino_ds.config.recipe import Recipe
from dino_ds.config.stages import Request
from dino_ds.data.mixture import place_of
from dino_ds.errors import DataError, one_line
from dino_ds.options.commands import DoctorOptions
from dino_ds.options.definition import Result
from dino_ds.planning.machines import look_at_machines, read_hostfile

_DRIVER = "/proc/driver/nvidia/version"
_BATCH_KEYS = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
_SHOWN = ("dino_ds", "torch", "torchvision", "deepspeed", "timm", "numpy", "pillow")
_LOAD_CURES = {
    "torch": "install torch anew, from one index, in a fresh environment",
    "torchvision": "install builds of torch and torchvision that match, both from the same index",
    "deepspeed": "pip install --no-build-isolation 'deepspeed>=0.19.8,<0.20'",
}


def run(options: DoctorOptions, *, recipe: Recipe, request: Request, ds: Mapping[str, Any], ds_path: str) -> Result:
    """Print each finding as soon as it is known; the result exits with code 2 if something would stop training."""
    if not options.json:
        print(f"doctor on {platform.node()}; loading torch and DeepSpeed takes some seconds", flush=True)
    findings, hosts = [], {} if options.hostfile is None else read_hostfile(options.hostfile)
    on_machines = _look_at_machines(options, hosts, recipe, request, ds_path) if hosts else ()
    for finding in itertools.chain(_findings(options, recipe, ds, ds_path), on_machines):
        findings.append(finding)
        if not options.json:
            print(f"{finding.level:<5} {finding.topic:<11}{finding.text}", flush=True)
            if finding.remedy:
                print(f"{'':<17}-> {finding.remedy}")
    failures = sum(finding.level == FAILURE for finding in findings)
    warned = sum(bool(finding.remedy) for finding in findings) - failures
    facts = {"host": platform.node(), "trains": not failures, "findings": [vars(finding) for finding in findings]}
    page = f"training {'would stop' if failures else 'can start'}: {failures} problems, {warned} warnings"
    return Result(facts, page, error=SystemExit(2) if failures else None)


def _findings(options: DoctorOptions, recipe: Recipe, ds: Mapping[str, Any], ds_path: str) -> Iterator[Finding]:
    software = list(look_at_software())
    yield from software
    if software[-1].level == FAILURE:  # the rest needs torch
        return
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    # Batch sizes depend on the other machines of the run, which are not known here.
    kept = {key: value for key, value in ds.items() if key not in _BATCH_KEYS}
    config = resolve_ds_config(kept, ds_path, recipe.data.global_batch, 1)
    if config.performance.compile != "off":
        path = shutil.which("g++")
        cure = "dino_ds.compile needs a compiler: apt-get install g++"
        yield make_finding("compilers", f"g++ {path or 'absent'}", cure, not path, FAILURE)
    yield from look_at_gpus(config)
    yield look_at_shared_memory(recipe)
    yield look_at_disk(Path(options.run_dir))


def _look_at_machines(
    options: DoctorOptions, hosts: Mapping[str, int], recipe: Recipe, request: Request, ds_path: str
) -> Iterator[Finding]:
    recipes = [] if request.config is None else [file.path for file in read_recipe_files(request.config)]
    files = [ds_path, *(path for path in recipes if Path(path).parent != RECIPES)]
    data = recipe.data
    roots = [place_of(part, data.root) for part in data.parts] or [data.root or ""]
    images = [] if data.source != "folder" or data.download else [*filter(None, roots)]
    yield from look_at_machines(
        hosts, [os.path.abspath(path) for path in dict.fromkeys(files)], images, Path(options.run_dir)
    )


def _load(name: str) -> Any:
    if name != "deepspeed":
        return importlib.import_module(name)
    from dino_ds.engine.process import import_deepspeed  # which needs a torch that loads

    return import_deepspeed()


def look_at_software() -> Iterator[Finding]:
    """List the versions, and try the imports of training; the last finding is the first import that fails."""
    versions = ", ".join(f"{name} {_version(name)}" for name in _SHOWN)
    yield make_finding("software", f"{versions}; Python {platform.python_version()} ({sys.executable})")
    for name, cure in _LOAD_CURES.items():
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                module = _load(name)
            if name == "torch" and not module.accelerator.is_available():
                os.environ.setdefault("DS_ACCELERATOR", "cpu")  # DeepSpeed would find it too, but warn
        except Exception as error:
            yield make_finding(
                "software", f"{name} {_version(name)} does not load ({one_line(error)})", cure, level=FAILURE
            )
            return


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "absent"


def look_at_gpus(config: DsConfig) -> Iterator[Finding]:
    """Check the GPUs, and whether the device supports the ds config's precision."""
    import torch

    from dino_ds.planning.measure import find_gpus

    gpus = find_gpus()
    for number, gpu in enumerate(gpus):
        text = f"{number}: {gpu.name}, capability {gpu.capability}, {gpu.free_gib:.1f} of {gpu.memory_gib:.1f} GiB free"
        taken = gpu.free_gib < 0.9 * gpu.memory_gib
        yield make_finding("gpu", text, "other processes hold memory: nvidia-smi lists them", taken)
    if not gpus:
        yield look_for_driver()
    elif not torch.distributed.is_nccl_available():
        yield make_finding("network", "no NCCL", "several GPUs need it: install a torch built with it")
    bf16 = torch.cuda.is_bf16_supported(including_emulation=False) if gpus else True
    fp16 = True if gpus else bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
    able = {"fp32": True, "bf16": bf16, "fp16": fp16}
    cure = f"the ds config wants {config.precision}: take another --ds_config"
    text = ", ".join(name if has else f"no {name}" for name, has in able.items())
    yield make_finding("precision", text, cure, not able[config.precision], FAILURE)


def look_for_driver() -> Finding:
    """Explain why torch finds no GPU."""
    import torch

    if not os.path.exists(_DRIVER) and shutil.which("nvidia-smi") is None:
        cure = "with a GPU in this machine: install its driver; in a container: docker run --gpus all"
        return make_finding("gpu", "no GPU: training runs on the CPU, with gloo", cure)
    with warnings.catch_warnings(record=True) as caught:  # torch's warning about a driver that it can't use
        warnings.simplefilter("always")
        torch.cuda.is_available()
    complaint = f": {one_line(caught[0].message, 200)}" if caught else ""
    text = f"a driver is here, and torch (CUDA {torch.version.cuda}) finds no GPU{complaint}"
    cure = "install torch with CUDA; nvidia-smi must list the GPUs, and the driver may not be older than torch's CUDA"
    return make_finding("gpu", text, cure, level=FAILURE)


def look_at_shared_memory(recipe: Recipe) -> Finding:
    """Check the shared memory for loader processes, for a run on this machine alone with a rank on each GPU."""
    import torch

    from dino_ds.data.batches import automatic_workers, check_shared_memory

    data, ranks = recipe.data, torch.cuda.device_count() or 1
    workers = automatic_workers(ranks) if data.workers is None else data.workers
    try:
        check_shared_memory(ranks * recipe.batch_bytes(max(1, data.global_batch // ranks)), workers)
    except DataError as error:
        return make_finding("shm", "too little shared memory", str(error), level=FAILURE)
    return make_finding("shm", f"enough shared memory for {ranks} ranks with {workers} loader processes each")


def look_at_disk(run_dir: Path) -> Finding:
    """Check the disk for runs."""
    here = next(path for path in (run_dir.absolute(), *run_dir.absolute().parents) if path.is_dir())
    free = shutil.disk_usage(here).free / 2**30
    if not os.access(here, os.W_OK | os.X_OK):
        return make_finding(
            "disk", f"{here} can't be written to", "fix its rights, or name another --run_dir", level=FAILURE
        )
    return make_finding("disk", f"{free:.1f} GiB free in {here}", "remove old runs, or take another disk", free < 20)
