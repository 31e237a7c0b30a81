"""What `doctor` finds about software: versions and whether they fit together, compilers, the libraries' reports."""

from __future__ import annotations

import importlib
import io
import os
import platform
import re
import shutil
import sys
import warnings
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, requires, version

from packaging.requirements import Requirement

from dino_ds.config.ds_config import DsConfig
from dino_ds.engine.deepspeed_import import import_deepspeed

_SHOWN = ("torch", "torchvision", "deepspeed", "timm", "numpy", "pillow")
_PYTHONS = ((3, 10), (3, 13))
_INSTALL = "pip install -e . in the checkout"
FINE, WARNING, FAILURE = "ok", "warn", "FAIL"


@dataclass(frozen=True)
class Finding:
    """level: FINE, WARNING (training works, but ...) or FAILURE (training stops); remedy: what to do about it."""

    topic: str
    level: str
    text: str
    remedy: str = ""


def fine(topic: str, text: str) -> Finding:
    return Finding(topic, FINE, text)


def warning(topic: str, text: str, remedy: str) -> Finding:
    return Finding(topic, WARNING, text, remedy)


def failure(topic: str, text: str, remedy: str) -> Finding:
    return Finding(topic, FAILURE, text, remedy)


def look_at_software() -> list[Finding]:
    """Python and the packages; the imports that training does."""
    return [_python(), *_versions(), *_imports()]


def _python() -> Finding:
    here, path = platform.python_version(), f"{sys.executable}"
    least, most = (".".join(map(str, pair)) for pair in _PYTHONS)
    if not _PYTHONS[0] <= sys.version_info[:2] <= _PYTHONS[1]:
        cure = f"Python {least} to {most} is needed: make PYTHON=python{most} setup"
        return failure("python", f"{here} ({path})", cure)
    return fine("python", f"{here} ({path})")


def _versions() -> list[Finding]:
    """Against what the installed package asks for."""
    try:
        asked = [Requirement(text) for text in requires("dino_ds") or ()]
    except PackageNotFoundError:
        return [warning("software", "dino_ds is not installed, so its requirements can't be compared", _INSTALL)]
    found = []
    for requirement in asked:
        if requirement.marker and not requirement.marker.evaluate({"extra": ""}):
            continue
        try:
            here = version(requirement.name)
        except PackageNotFoundError:
            found.append(failure("software", f"{requirement.name} is not installed", f"pip install '{requirement}'"))
            continue
        if not requirement.specifier.contains(here, prereleases=True):
            text = f"{requirement.name} {here}, and {requirement.name}{requirement.specifier} is needed"
            found.append(failure("software", text, f"pip install '{requirement}'"))
    shown = ", ".join(f"{name} {_version(name)}" for name in ("dino_ds", *_SHOWN))
    return found or [fine("software", shown)]


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "absent"


def _imports() -> list[Finding]:
    """The libraries whose parts must fit together; whatever they raise is the finding."""
    cures = {
        "torch": "install torch anew, from one index, in a fresh environment",
        "torchvision": "install builds of torch and torchvision that match, both from the same index",
        "deepspeed": "pip install --no-build-isolation 'deepspeed>=0.19.8,<0.20'",
    }
    found = []
    for name, cure in cures.items():
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                module = import_deepspeed() if name == "deepspeed" else importlib.import_module(name)
            if name == "torch" and not module.accelerator.is_available():
                os.environ.setdefault("DS_ACCELERATOR", "cpu")  # found by DeepSpeed too, with a warning
        except Exception as error:
            text = " ".join(str(error).split())[:160]
            found.append(failure("software", f"{name} {_version(name)} does not load ({text})", cure))
            break  # the others need it
    return found


def look_at_compilers(config: DsConfig) -> list[Finding]:
    """For the blocks of torch.compile, and for the operators of DeepSpeed that the ds config needs."""
    here = {name: shutil.which(name) for name in ("g++", "nvcc", "ninja")}
    text = ", ".join(f"{name} {path or 'absent'}" for name, path in here.items())
    lacking = config.performance.compile != "off" and not here["g++"]
    cure = "dino_ds.compile needs a compiler: apt-get install g++"
    return [failure("compilers", text, cure) if lacking else fine("compilers", text), *_ops(config)]


def _ops(config: DsConfig) -> Iterator[Finding]:
    """Operators of DeepSpeed that the ds config needs. Most need none: AdamW is torch's."""
    zero = config.raw["zero_optimization"]
    if zero.get("zero_quantized_weights") or zero.get("zero_quantized_gradients"):
        from deepspeed.ops.op_builder.all_ops import ALL_OPS

        able = False
        with warnings.catch_warnings(), suppress(Exception):  # an operator asks other tools, which may raise anything
            warnings.simplefilter("ignore")
            able = bool(ALL_OPS["quantizer"].is_compatible(verbose=False))
        cure = "quantized ZeRO++ needs it: install the CUDA toolkit (nvcc), g++ and ninja"
        yield fine("ops", "quantizer can be built") if able else failure("ops", "quantizer can't be built", cure)


def deepspeed_report() -> str:
    """DeepSpeed's own report, as `ds_report` prints it: its operators, built or to be built, and where it is."""
    from deepspeed import env_report

    with redirect_stdout(io.StringIO()) as text, redirect_stderr(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        env_report.main(hide_errors_and_warnings=True)
    return re.sub(r"\x1b\[[0-9;]*m", "", text.getvalue()).strip()


def torch_report() -> str:
    """torch's own report, as `python -m torch.utils.collect_env` prints it."""
    from torch.utils.collect_env import get_pretty_env_info

    return str(get_pretty_env_info()).strip()
