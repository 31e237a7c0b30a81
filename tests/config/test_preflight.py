"""Traps of the surroundings: launchers' variables, torchvision of another torch, memory, no home, installed or not."""

from __future__ import annotations

import json
import os
import pwd
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import psutil
import pytest

import dino_ds
import dino_ds.cli.main as preflight
from dino_ds.basics import machine
from dino_ds.basics.files import cache_folder
from dino_ds.engine.process import init_distributed
from dino_ds.errors import ConfigError


@pytest.mark.parametrize(
    ("given", "found"),
    [
        (dict(zip(preflight._RANK_VARIABLES["mpirun"], "3412", strict=True)), tuple("3412")),
        (dict(zip(preflight._RANK_VARIABLES["srun"], ("9", "12", "1", "8(x1),4"), strict=True)), ("9", "12", "1", "8")),
        ({"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1", "SLURM_LOCALID": "0"}, (None,) * 4),
        ({"SLURM_NTASKS": "8"}, (None,) * 4),  # a batch script, or a shell of salloc: nothing was started by srun
    ],
)
def test_ranks_of_mpirun_and_srun(given: dict[str, str], found: tuple[str | None, ...]):
    variables = {"MASTER_ADDR": "n1", **given}
    preflight.adopt_ranks(variables)
    assert tuple(variables.get(n) for n in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")) == found
    assert variables.get("MASTER_PORT") == (None if found[0] is None else "29500")
    preflight.adopt_ranks(inside := {"RANK": "1", "OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2"})
    assert inside["RANK"] == "1" and len(inside) == 3
    with pytest.raises(ConfigError, match="mpirun has started 2 processes, and MASTER_ADDR is not set"):
        preflight.adopt_ranks({"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2"})


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ("raise RuntimeError('no such operator')", "torch and torchvision do not load together (no such operator)"),
        ("import a_module_that_is_absent", "a_module_that_is_absent is not installed"),
    ],
)
def test_torchvision_of_another_torch_is_one_clear_line(body: str, says: str, tmp_path: Path, monkeypatch):
    (tmp_path / "torchvision.py").write_text(body + "\n")
    monkeypatch.syspath_prepend(tmp_path)
    for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(ConfigError) as caught:
        preflight.check_torchvision()
    assert str(caught.value).startswith(says) and "\n" not in str(caught.value)


_RANK = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({}, None),
        (dict.fromkeys(_RANK), None),
        ({"RANK": "3"}, "RANK is '3', and must be a whole number, 0 to 1 of WORLD_SIZE 2"),
        ({"LOCAL_RANK": None, "MASTER_ADDR": ""}, "without LOCAL_RANK, MASTER_ADDR:"),
        ({"MASTER_PORT": "99999"}, "MASTER_PORT is '99999', and must be a whole number, 1 to 65535"),
        ({"MASTER_ADDR": "no.such.machine.invalid"}, "MASTER_ADDR 'no.such.machine.invalid' is not a machine known to"),
    ],
)
def test_what_a_launcher_tells_a_rank_is_checked_first(changes, says, monkeypatch):
    monkeypatch.setattr(machine, "_RESOLVE_SECONDS", 0.0)
    given = {name: value for name, value in (_RANK | changes).items() if value is not None}
    if says is None:
        machine.check_ranks(given)
        return
    with pytest.raises(ConfigError) as caught:
        machine.check_ranks(given)
    assert says in str(caught.value) and len(str(caught.value).splitlines()) == 1


def test_a_pod_s_variables_are_answered_by_every_command_that_joins_a_group(monkeypatch: pytest.MonkeyPatch):
    """DeepSpeed would ask for mpi4py there."""
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: False)  # an earlier test may have joined one
    for name, value in _RANK.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("LOCAL_RANK")
    with pytest.raises(ConfigError, match="RANK is '1' without LOCAL_RANK: start the ranks with deepspeed"):
        init_distributed()


def test_a_user_without_a_home_and_a_name_has_a_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def unknown(number: int) -> None:
        raise KeyError(f"getpwuid(): uid not found: {number}")

    for name in ("HOME", "XDG_CACHE_HOME", "DINO_DS_CACHE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert cache_folder() == tmp_path / f"dino_ds-{os.getuid()}"
    cache_folder().mkdir()
    assert cache_folder() == tmp_path / f"dino_ds-{os.getuid()}"
    (tmp_path / "dino_ds-54321").mkdir()
    monkeypatch.setattr(os, "getuid", lambda: 54321)
    assert cache_folder().parent == tmp_path and cache_folder() != tmp_path / "dino_ds-54321"


LONG = """
import multiprocessing, sys
from multiprocessing.connection import Listener
sys.path.insert(0, sys.argv[1])
from dino_ds.basics.machine import shorten_socket_names
shorten_socket_names()
context = multiprocessing.get_context("forkserver")
process = context.Process(target=Listener)  # in the process, as where it hands over a tensor
process.start()
process.join()
sys.exit(process.exitcode)
"""


def test_loader_processes_start_with_a_tmpdir_of_any_length(tmp_path: Path):
    """Their sockets have names of 107 bytes at most."""
    folder = tmp_path / ("x" * 200)
    folder.mkdir()
    assert not _python("-c", LONG, REPOSITORY, cwd=tmp_path, TMPDIR=str(folder)).stderr


@pytest.mark.parametrize(("limit", "room"), [(str(2**28), (0.25, 0.125)), ("max", None)])
def test_a_container_has_what_its_limit_leaves(limit, room, monkeypatch, tmp_path):
    """Cached files of its own are free."""
    for name, text in {
        "memory.max": limit,
        "memory.current": 2**27 + 2**20,
        "memory.stat": f"anon 5\ninactive_file {2**19}\nactive_file {2**19}",
    }.items():
        (tmp_path / name).write_text(f"{text}\n")
    places = [(str(folder), *names) for folder, (_, *names) in zip((tmp_path, "/x"), machine._CONTAINERS, strict=True)]
    monkeypatch.setattr(machine, "_CONTAINERS", places)
    memory = psutil.virtual_memory()
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)
    assert machine.host_memory_gib() == (room or (memory.total / 2**30, memory.available / 2**30))


def test_the_memory_of_children_counts():
    """What a child process holds is part of the resident memory, and no longer once it has ended."""
    take = "import sys; held = bytearray(64 << 20); print(flush=True); sys.stdin.read()"
    before = machine.resident_gib()
    child = subprocess.Popen([sys.executable, "-c", take], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    child.stdout.readline()
    during = machine.resident_gib()
    child.communicate()
    assert during > before + 60 / 1024
    assert machine.resident_gib() < during - 60 / 1024


REPOSITORY = Path(__file__).parents[2]
_AS_ON_AN_IMAGE_FOR_GPUS = """
import importlib.metadata
from importlib.machinery import PathFinder

def find_spec(cls, name, *path, found=PathFinder.find_spec):
    if name == "deepspeed":
        print("[WARNING] no CUDA toolkit is found")
    return None if name in {"faiss", "h5py", "pyarrow", "transformers"} else found(name, *path)

def distributions(found=importlib.metadata.distributions, **of):
    return iter(()) if of == {"name": "dino_ds"} else found(**of)

PathFinder.find_spec, importlib.metadata.distributions = classmethod(find_spec), distributions
"""
"""Run at the start of Python: dino_ds is not installed, optional packages are absent, DeepSpeed's import prints."""


@pytest.fixture(scope="module")
def away(tmp_path_factory):
    """A folder in whose lib the wheel is installed, and nothing else of ours."""
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

    return folder


@pytest.mark.slow
def test_the_wheel_has_what_the_program_reads(away: Path):
    for pattern in ["basics/*.yaml", "recipes/*", "ds_configs/**/*.json", "data/photos/*", "report/templates/*"]:
        there = [path for path in (REPOSITORY / "dino_ds").glob(pattern) if path.is_file()]
        assert there, pattern
        for path in there:
            assert (away / "lib" / path.relative_to(REPOSITORY)).read_bytes() == path.read_bytes()


@pytest.mark.full
def test_the_wheel_trains(away: Path, tmp_path: Path):
    off = ("--eval.every", "0 steps", "--eval.pictures_every", "0 steps")
    words = [away / "lib/bin/dino-ds", "train", "--config", "quickstart", "--max_steps", "1", *off]
    done = _python(*words, cwd=tmp_path, PYTHONPATH=str(away / "lib"), CUDA_VISIBLE_DEVICES="")
    assert "step 1/" in done.stdout + done.stderr
    assert (tmp_path / "runs/quickstart/teacher.safetensors").is_file()


def _python(*words: object, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    command, variables = [sys.executable, *map(str, words)], {**os.environ, **environment}
    done = subprocess.run(command, cwd=cwd, env=variables, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done


@pytest.mark.slow
def test_commands_run_from_a_checkout_and_print_nothing_but_json(tmp_path: Path):
    (tmp_path / "sitecustomize.py").write_text(_AS_ON_AN_IMAGE_FOR_GPUS)
    done = _python("-m", "dino_ds", "doctor", "--json", cwd=REPOSITORY, PYTHONPATH=str(tmp_path))
    software = [found["text"] for found in json.loads(done.stdout)["findings"] if found["topic"] == "software"]
    assert software[0].startswith("dino_ds absent") and "no CUDA toolkit" in done.stderr
