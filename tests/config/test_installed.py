"""An installed copy has what a checkout has beside the package; a checkout that is not installed works too."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.measure.tiny import TINY

REPOSITORY = Path(__file__).parents[2]
_AS_ON_AN_IMAGE_FOR_GPUS = """
import importlib.metadata
from importlib.machinery import PathFinder

ABSENT = {"av", "faiss", "hypothesis", "nbformat", "onnx", "pyarrow", "sklearn", "transformers"}

def find_spec(cls, name, *path, found=PathFinder.find_spec):
    if name == "deepspeed":
        print("[WARNING] no CUDA toolkit is found")
    return None if name in ABSENT else found(name, *path)

def distribution(name, found=importlib.metadata.distribution):
    if name == "dino_ds":
        raise importlib.metadata.PackageNotFoundError(name)
    return found(name)

PathFinder.find_spec, importlib.metadata.distribution = classmethod(find_spec), distribution
"""
"""Run at the start of Python: dino_ds is not installed, tests' packages are absent, DeepSpeed's import prints."""


@pytest.mark.slow
def test_a_copy_without_its_checkout_has_recipes_and_ds_configs(tmp_path):
    """As `pip install .` copies the package; the default --ds_config is found from any folder."""
    build = [
        "setup.py",
        "-q",
        "egg_info",
        "--egg-base",
        str(tmp_path),
        "build_py",
        "--build-lib",
        str(tmp_path / "lib"),
    ]
    subprocess.run([sys.executable, *build], cwd=REPOSITORY, check=True, capture_output=True, timeout=120)
    copy = tmp_path / "lib/dino_ds"
    for pattern in ("ds_configs/**/*.json", "dino_ds/recipes/*.yaml", "dino_ds/data/photos/*.jpg"):
        there = {path.relative_to(REPOSITORY) for path in REPOSITORY.glob(pattern)}
        assert there
        for path in there:
            copied = copy / path.relative_to("dino_ds") if path.parts[0] == "dino_ds" else copy / path
            assert copied.read_bytes() == (REPOSITORY / path).read_bytes()
    program = "from dino_ds.config.ds_config import find_ds_config; print(find_ds_config('ds_configs/zero0_fp32.json'))"
    found = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path / "lib")},
        check=True,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert found.stdout.strip() == str(copy / "ds_configs/zero0_fp32.json")


@pytest.fixture
def not_installed(tmp_path):
    """`python -m` in the checkout, as on an image that has the dependencies."""
    (tmp_path / "sitecustomize.py").write_text(_AS_ON_AN_IMAGE_FOR_GPUS)

    def run(*words):
        return subprocess.run(
            [sys.executable, "-m", *words],
            cwd=REPOSITORY,
            env={**os.environ, "PYTHONPATH": str(tmp_path)},
            capture_output=True,
            text=True,
            timeout=300,
        )

    return run


@pytest.mark.slow
def test_commands_run_from_a_checkout_and_print_nothing_but_json(not_installed):
    sizes = [word for key, value in TINY.items() for word in (f"--{key}", value)]
    words = ["bench", "step", *sizes, "--batch", "1", "--steps", "1", "--warmup", "0", "--json"]
    done = not_installed("dino_ds", *words)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["host"]["versions"]["dino_ds"] and "no CUDA toolkit" in done.stderr


@pytest.mark.slow
def test_tests_of_the_gpu_are_found_without_the_other_tests_packages(not_installed):
    done = not_installed("pytest", "-m", "gpu", "--collect-only", "-q", "-p", "no:hypothesispytest")
    assert done.returncode == 0 and "test_levers.py" in done.stdout, done.stdout
