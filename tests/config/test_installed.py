"""An installed copy has what a checkout has beside the package; a checkout that is not installed works too."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import dino_ds

REPOSITORY = Path(__file__).parents[2]
_AS_ON_AN_IMAGE_FOR_GPUS = """
import importlib.metadata
from importlib.machinery import PathFinder

ABSENT = {"faiss", "h5py", "hypothesis", "nbformat", "pyarrow", "transformers"}

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


@pytest.fixture(scope="module")
def away(tmp_path_factory):
    """Runs a command in a folder away from the checkout, where the wheel is installed and nothing else of ours."""
    pytest.importorskip("build")
    folder = tmp_path_factory.mktemp("wheel")
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE", "NOTICE", "dino_ds", "ds_configs"):
        there, here = REPOSITORY / name, folder / "checkout" / name
        if there.is_dir():  # and nothing that a user keeps beside: his images may be a terabyte
            shutil.copytree(there, here, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            here.parent.mkdir(exist_ok=True)
            shutil.copy(there, here)
    pip = ["pip", "install", "-q", "--no-deps", "--no-compile", "--disable-pip-version-check", "--target"]
    build = ["build", "--no-isolation", "--outdir", folder / "dist", folder / "checkout"]  # the wheel from the sdist
    for words in (build, [*pip, folder / "lib", folder / "dist" / f"dino_ds-{dino_ds.__version__}-py3-none-any.whl"]):
        command = [sys.executable, "-m", *words]
        subprocess.run(command, cwd=folder, check=True, capture_output=True, timeout=300)
    shutil.rmtree(folder / "checkout")

    def run(*words):
        environment = {**os.environ, "PYTHONPATH": str(folder / "lib"), "CUDA_VISIBLE_DEVICES": ""}
        (folder / "work").mkdir(exist_ok=True)
        command = [sys.executable, folder / "lib/bin/dino-ds", *words]
        done = subprocess.run(
            command, cwd=folder / "work", env=environment, capture_output=True, text=True, timeout=300
        )
        assert done.returncode == 0, done.stderr
        return done.stdout + done.stderr

    run.lib, run.work = folder / "lib/dino_ds", folder / "work"
    return run


@pytest.mark.slow
def test_the_wheel_has_what_the_program_reads(away):
    patterns = "basics/*.yaml recipes/* ds_configs/**/*.json data/photos/* report/templates/*"
    for pattern in patterns.split():
        there = [path for path in (REPOSITORY / "dino_ds").glob(pattern) if path.is_file()]
        assert there, pattern
        for path in there:
            assert (away.lib / path.relative_to(REPOSITORY / "dino_ds")).read_bytes() == path.read_bytes()


@pytest.mark.slow
def test_the_wheel_trains(away):
    off = ("--eval.every", "0 steps", "--eval.pictures_every", "0 steps")
    assert "step 1/" in away("train", "--config", "quickstart", "--max_steps", "1", *off)
    assert (away.work / "runs/quickstart/teacher.safetensors").is_file()
    assert "mine.yaml" in away("train", "--config", "cifar10", "--print", "mine.yaml")


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
    done = not_installed("dino_ds", "doctor", "--json")
    assert done.returncode == 0, done.stderr
    software = [found["text"] for found in json.loads(done.stdout)["findings"] if found["topic"] == "software"]
    assert software[0].startswith("dino_ds absent") and "no CUDA toolkit" in done.stderr
