"""The doctor's look at software: versions and whether they fit together, compilers, DeepSpeed's operators."""

from __future__ import annotations

import importlib
import os
import platform
import shutil
import sys
import warnings
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

from packaging.requirements import Requirement

from dino_ds.config.ds_config import DsConfig
from dino_ds.engine.deepspeed_import import import_deepspeed
from dino_ds.tools.doctor_finding import Finding, failure, fine, warning

_SHOWN = ("torch", "torchvision", "deepspeed", "timm", "numpy", "pillow")
_PYTHONS = ((3, 10), (3, 13))
_INSTALL = "pip install -e . in the checkout"


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
    found = [fine("compilers", text)]
    if config.performance.compile != "off" and not here["g++"]:
        found = [failure("compilers", text, "dino_ds.compile needs a compiler: apt-get install g++")]
    return [*found, *_ops(config)]


def _needed_ops(config: DsConfig) -> dict[str, str]:
    """Operator -> how it comes to be built. Most configs need none: AdamW is torch's."""
    zero, needed = config.raw["zero_optimization"], dict[str, str]()
    if zero.get("zero_quantized_weights") or zero.get("zero_quantized_gradients"):
        needed["quantizer"] = "quantized ZeRO++ needs it: install the CUDA toolkit (nvcc), g++ and ninja"
    return needed


def _ops(config: DsConfig) -> Iterator[Finding]:
    """DeepSpeed's operators: which are built, can be built, and are needed."""
    from deepspeed.git_version_info import installed_ops
    from deepspeed.ops.op_builder.all_ops import ALL_OPS

    fits = {name: _compatible(builder) for name, builder in ALL_OPS.items() if "not_implemented" not in name}
    built = [name for name in fits if installed_ops.get(name)] + [f"{name} (cached)" for name in _cached()]
    able = [name for name, good in fits.items() if good]
    text = f"built: {', '.join(built) or 'none'}; can be built: {', '.join(able) or 'none'}"
    lacking = [name for name, good in fits.items() if not good]
    text += f"; lacking: {', '.join(lacking)}" if lacking else ""
    needed = _needed_ops(config)
    yield fine("ops", f"{text}; needed: {', '.join(needed) or 'none'}")
    for name in needed.keys() - {name for name, good in fits.items() if good}:
        yield failure("ops", f"{name} can't be built", needed[name])


def _compatible(builder: object) -> bool:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return bool(builder.is_compatible(verbose=False))  # type: ignore[attr-defined]
    except Exception:  # each operator asks other tools
        return False


def _cached() -> list[str]:
    """Operators compiled before, in torch's cache."""
    root = os.environ.get("TORCH_EXTENSIONS_DIR") or os.path.expanduser("~/.cache/torch_extensions")
    return sorted({path.parent.name for path in Path(root).glob("**/*.so")})
