"""Files that want to run something or to write somewhere: none does. A canary that each of them would make proves it.

Whoever writes such a file can also write the checksums that go with it, so payloads come with good ones.
"""

from __future__ import annotations

import io
import itertools
import os
import pickle
import shutil
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

import dino_ds
from dino_ds.data.sources import build_source
from dino_ds.errors import CheckpointError, DataError
from tests.checkpoint.small_run import SmallRun, is_that_of
from tests.data.files import put, tar, written
from tests.hostile.guard import put_with_good_sums, raised_by
from tests.hostile.test_fuzz import read_all
from tests.ranks import run_on_ranks
from tests.sample import sampled

pytestmark = pytest.mark.faults

CANARY = "canary"


@pytest.fixture(autouse=True)
def canary(tmp_path, monkeypatch):
    """Payloads run `touch canary` in the current folder; files may appear below `inside` alone."""
    (tmp_path / "inside").mkdir()
    (tmp_path / "cwd").mkdir()
    monkeypatch.chdir(tmp_path / "cwd")
    yield tmp_path / "inside"
    assert not list(tmp_path.rglob(f"{CANARY}*"))
    assert not list((tmp_path / "cwd").iterdir())
    assert {path.name for path in tmp_path.iterdir()} == {"inside", "cwd"}


class Payload:
    """Unpickled, it calls `function`."""

    def __init__(self, function: Callable, *arguments: object) -> None:
        self._call = (function, arguments)

    def __reduce__(self):
        return self._call


RUN = Payload(os.system, f"touch {CANARY}")
EVAL = Payload(eval, f"open('{CANARY}', 'w')")
PICKLED = pickle.dumps(RUN)


def _torch_file(is_new: bool) -> bytes:
    return written(lambda file: torch.save({"module": RUN}, file, _use_new_zipfile_serialization=is_new))


def _zip(file: io.BytesIO) -> None:
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("../canary", "x")
        archive.writestr("data.pkl", PICKLED)


PICKLES = {
    "pickle": PICKLED,
    "pickle, protocol 0": pickle.dumps(EVAL, protocol=0),
    "torch.save": _torch_file(True),
    "torch.save of old": _torch_file(False),
    "numpy array of objects": written(np.save, np.array([EVAL], dtype=object), allow_pickle=True),
    "zip": written(_zip),
    "safetensors whose header is a pickle": len(PICKLED).to_bytes(8, "little") + PICKLED,
}


NUMEL = 50


def _two_saves(folder: Path) -> None:
    SmallRun(folder, numel=NUMEL).train(4).save(wait=True).train(4).save(wait=True)


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    run_on_ranks(_two_saves, folder, world=1)
    return folder


@pytest.mark.parametrize(("kind", "name"), sampled(itertools.product(PICKLES, ("rank_00000", "whole_00000"))))
def test_pickles_in_place_of_tensors(canary, saved, kind, name):
    run = Path(shutil.copytree(saved, canary / "run"))
    put_with_good_sums(run / "checkpoints/step_00000008", f"{name}.safetensors", PICKLES[kind])
    found = SmallRun(run).choose().saved
    assert found.manifest.step == 8  # its sums are right
    assert raised_by(lambda: is_that_of(found, 8, NUMEL), CheckpointError)


MEMBERS = {
    "parent folders": [("../../canary.png", 1)],
    "absolute": [("/tmp/dino_ds_canary.png", 1)],
    "backslashes": [("..\\..\\canary.png", 1)],
    "a link, then a file through it": [("a", tarfile.SYMTYPE, "../.."), ("a/canary.png", 1)],
    "a link with an image's name": [("x.png", tarfile.SYMTYPE, "/etc/passwd")],
    "a hard link": [("x.png", tarfile.LNKTYPE, "/etc/passwd")],
    "a pipe": [("x.png", tarfile.FIFOTYPE, "")],
    "a shell's words": [("$(touch canary).png", 1), ("`id`.png", 1)],
    "a pickle": [("x.png", pickle.dumps(RUN)), ("x.cls", pickle.dumps(RUN))],
    "control characters": [("\x1b]0;x\x07\n.png", 1)],
    "a name of 5,000 characters": [("x" * 5000 + ".png", 1)],
    "1,000 folders": [("a/" * 1000 + "x.png", 1)],
}


@pytest.mark.parametrize("kind", MEMBERS)
def test_tar_members(canary, kind):
    """Read in place: nothing is taken out."""
    assert read_all(tar(canary / "x.tar", ("good.png", 1), *MEMBERS[kind])) is None
    assert not Path("/tmp/dino_ds_canary.png").exists()


@pytest.mark.parametrize(("kind", "ending"), sampled(itertools.product(PICKLES, (".png", ".txt", ".parquet", ".tar"))))
def test_pickles_in_place_of_data(canary, kind, ending):
    path = canary / f"x{ending}"
    path.write_bytes(PICKLES[kind])
    read_all(canary if ending == ".png" else path)


@pytest.mark.parametrize("split", ["train", "test"])
def test_data_sets_that_are_pickles_are_read_only_with_their_known_sum(canary, split):
    from torchvision.datasets import CIFAR10

    names = (*dict([*CIFAR10.train_list, *CIFAR10.test_list]), CIFAR10.meta["filename"])
    put(canary / CIFAR10.base_folder, dict.fromkeys(names, PICKLED))
    assert raised_by(lambda: build_source("cifar10", str(canary), split, False), DataError)


@pytest.mark.parametrize(
    ("kind", "name"),
    sampled(itertools.product(PICKLES, ("x.pth", "x.bin", "x.safetensors", "folder/model.safetensors"))),
)
def test_pickles_in_place_of_weights(canary, kind, name):
    path = canary / name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(PICKLES[kind])
    assert raised_by(lambda: dino_ds.load(path.parent if path.parent != canary else path), CheckpointError)
