"""Findings of `doctor` about software: versions and whether they fit together, compilers, the libraries' reports."""

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

from dino_ds.config.ds_values import DsConfig
from dino_ds.engine.deepspeed_import import import_deepspeed
from dino_ds.errors import one_line

_SHOWN = ("dino_ds", "torch", "torchvision", "deepspeed", "timm", "numpy", "pillow")
_PYTHONS = ((3, 10), (3, 13))
_LOAD_CURES = {
    "torch": "install torch anew, from one index, in a fresh environment",
    "torchvision": "install builds of torch and torchvision that match, both from the same index",
    "deepspeed": "pip install --no-build-isolation 'deepspeed>=0.19.8,<0.20'",
}
FINE, WARNING, FAILURE = "ok", "warn", "FAIL"


@dataclass(frozen=True)
class Finding:
    """level: FINE, WARNING (training works, but ...) or FAILURE (training stops); remedy: what to do about it."""

    topic: str
    level: str
    text: str
    remedy: str = ""


def judge(topic: str, text: str, remedy: str = "", bad: bool = True, level: str = WARNING) -> Finding:
    """A finding of `level` with its remedy if it is `bad` and has one, else a fine one."""
    return Finding(topic, level, text, remedy) if bad and remedy else Finding(topic, FINE, text)


def look_at_software() -> Iterator[Finding]:
    """Python and the packages, against what the installed package asks for; the imports that training does."""
    least, most = (".".join(map(str, pair)) for pair in _PYTHONS)
    cure = f"Python {least} to {most} is needed: make PYTHON=python{most} setup"
    fits = _PYTHONS[0] <= sys.version_info[:2] <= _PYTHONS[1]
    yield judge("python", f"{platform.python_version()} ({sys.executable})", cure, not fits, FAILURE)
    yield from _versions()
    yield from _imports()


def _versions() -> Iterator[Finding]:
    try:
        asked = [Requirement(text) for text in requires("dino_ds") or ()]
    except PackageNotFoundError:
        text = "dino_ds is not installed, so its requirements can't be compared"
        yield judge("software", text, "pip install -e . in the checkout")
        return
    wanted = [one for one in asked if one.marker is None or one.marker.evaluate({"extra": ""})]
    found = {one: _version(one.name) for one in wanted}
    wrong = {one: here for one, here in found.items() if not here or not one.specifier.contains(here, prereleases=True)}
    for one, here in wrong.items():
        text = f"{one.name} {here}, and {one.name}{one.specifier} is needed" if here else f"{one.name} is not installed"
        yield judge("software", text, f"pip install '{one}'", level=FAILURE)
    if not wrong:
        yield judge("software", ", ".join(f"{name} {_version(name) or 'absent'}" for name in _SHOWN))


def _version(name: str) -> str:
    """The version of an installed package, or ""."""
    with suppress(PackageNotFoundError):
        return version(name)
    return ""


def _imports() -> Iterator[Finding]:
    """The first of the libraries whose parts must fit together that does not load: the others need it."""
    for name, cure in _LOAD_CURES.items():
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                module = import_deepspeed() if name == "deepspeed" else importlib.import_module(name)
            if name == "torch" and not module.accelerator.is_available():
                os.environ.setdefault("DS_ACCELERATOR", "cpu")  # found by DeepSpeed too, with a warning
        except Exception as error:
            text = f"{name} {_version(name) or 'absent'} does not load ({one_line(error)})"
            yield judge("software", text, cure, level=FAILURE)
            return


def look_at_compilers(config: DsConfig) -> Iterator[Finding]:
    """Compilers for torch.compile, and the operators of DeepSpeed that the ds config needs; most need none."""
    here = {name: shutil.which(name) for name in ("g++", "nvcc", "ninja")}
    text = ", ".join(f"{name} {path or 'absent'}" for name, path in here.items())
    lacking = config.performance.compile != "off" and not here["g++"]
    yield judge("compilers", text, "dino_ds.compile needs a compiler: apt-get install g++", lacking, FAILURE)
    zero, able = config.raw["zero_optimization"], False
    if zero.get("zero_quantized_weights") or zero.get("zero_quantized_gradients"):
        from deepspeed.ops.op_builder.all_ops import ALL_OPS

        with warnings.catch_warnings(), suppress(Exception):  # an operator asks other tools, which may raise anything
            warnings.simplefilter("ignore")
            able = bool(ALL_OPS["quantizer"].is_compatible(verbose=False))
        cure = "quantized ZeRO++ needs it: install the CUDA toolkit (nvcc), g++ and ninja"
        yield judge("ops", f"quantizer {'can' if able else 'cannot'} be built", cure, not able, FAILURE)


def library_reports() -> dict[str, str]:
    """The libraries' own reports, as `ds_report` and `python -m torch.utils.collect_env` print them."""
    from deepspeed import env_report
    from torch.utils.collect_env import get_pretty_env_info

    with redirect_stdout(io.StringIO()) as text, redirect_stderr(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        env_report.main(hide_errors_and_warnings=True)
    deepspeed = re.sub(r"\x1b\[[0-9;]*m", "", text.getvalue()).strip()
    return {"deepspeed": deepspeed, "torch": str(get_pretty_env_info()).strip()}
