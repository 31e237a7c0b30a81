"""`dino-ds doctor`: what would stop a training on this machine and with this installation, and the remedies."""

from __future__ import annotations

import importlib
import logging
import os
import platform
import shutil
import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from dino_ds.config.ds_config import resolve_ds_config
from dino_ds.config.ds_values import DsConfig
from dino_ds.config.recipe import Recipe
from dino_ds.engine.deepspeed_import import import_deepspeed
from dino_ds.errors import one_line
from dino_ds.options.commands import DoctorOptions
from dino_ds.options.definition import Result
from dino_ds.planning.measure.tables import FAILURE, Finding, judge

_BATCH_KEYS = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
_PROBLEMS = 2
_SHOWN = ("dino_ds", "torch", "torchvision", "deepspeed", "timm", "numpy", "pillow")
_PYTHONS = ((3, 10), (3, 13))
_LOAD_CURES = {
    "torch": "install torch anew, from one index, in a fresh environment",
    "torchvision": "install builds of torch and torchvision that match, both from the same index",
    "deepspeed": "pip install --no-build-isolation 'deepspeed>=0.19.8,<0.20'",
}


def run(options: DoctorOptions, *, recipe: Recipe, ds: Mapping[str, Any], ds_path: str) -> Result:
    """Print each finding as soon as it is known; the result exits with code 2 if something would stop training."""
    if not options.json:
        print(f"doctor on {platform.node()}; loading torch and DeepSpeed takes some seconds", flush=True)
    findings = []
    for finding in _findings(options, recipe, ds, ds_path):
        findings.append(finding)
        if not options.json:
            print(f"{finding.level:<5} {finding.topic:<11}{finding.text}", flush=True)
            if finding.remedy:
                print(f"{'':<17}-> {finding.remedy}")
    failures = sum(finding.level == FAILURE for finding in findings)
    warned = sum(bool(finding.remedy) for finding in findings) - failures
    verdict = "training would stop" if failures else "training can start"
    facts = {"host": platform.node(), "trains": not failures, "findings": [vars(finding) for finding in findings]}
    page = f"{verdict}: {failures} problems, {warned} warnings"
    return Result(facts, page, error=SystemExit(_PROBLEMS) if failures else None)


def _findings(options: DoctorOptions, recipe: Recipe, ds: Mapping[str, Any], ds_path: str) -> Iterator[Finding]:
    loads = True
    for finding in look_at_software():
        loads = loads and finding.level != FAILURE
        yield finding
    if loads:  # the rest needs torch
        from dino_ds.planning.doctor_machine import look_at_machine

        logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
        # Batch sizes depend on the other machines of the run, which are not known here.
        kept = {key: value for key, value in ds.items() if key not in _BATCH_KEYS}
        config = resolve_ds_config(kept, ds_path, recipe.data.global_batch, 1)
        yield from look_at_compiler(config)
        yield from look_at_machine(config, recipe, options.run_dir)


def look_at_software() -> Iterator[Finding]:
    """Check Python's version, list those of packages (`pip check` compares them), and try the imports of training."""
    least, most = (".".join(map(str, pair)) for pair in _PYTHONS)
    cure = f"Python {least} to {most} is needed: make PYTHON=python{most} setup"
    fits = _PYTHONS[0] <= sys.version_info[:2] <= _PYTHONS[1]
    yield judge("python", f"{platform.python_version()} ({sys.executable})", cure, not fits, FAILURE)
    yield judge("software", ", ".join(f"{name} {_version(name) or 'absent'}" for name in _SHOWN))
    # Report only the first one that does not load: the later ones need it.
    for name, cure in _LOAD_CURES.items():
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                module = import_deepspeed() if name == "deepspeed" else importlib.import_module(name)
            if name == "torch" and not module.accelerator.is_available():
                os.environ.setdefault("DS_ACCELERATOR", "cpu")  # DeepSpeed would find it too, but warn
        except Exception as error:
            text = f"{name} {_version(name) or 'absent'} does not load ({one_line(error)})"
            yield judge("software", text, cure, level=FAILURE)
            return


def _version(name: str) -> str:
    """The version of an installed package, or ""."""
    with suppress(PackageNotFoundError):
        return version(name)
    return ""


def look_at_compiler(config: DsConfig) -> Iterator[Finding]:
    """Check for the compiler that a compiled step needs."""
    if config.performance.compile != "off":
        path = shutil.which("g++")
        cure = "dino_ds.compile needs a compiler: apt-get install g++"
        yield judge("compilers", f"g++ {path or 'absent'}", cure, not path, FAILURE)
