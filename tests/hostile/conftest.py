"""Run folders that many payloads are put into: each is made once, and copied."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.checkpoint.small_run import SmallRun
from tests.ranks import run_on_ranks
from tests.run.harness import image_folder, train_tiny

NUMEL = 50
CHANGES = {"head.prototypes": "4", "model.depth": "1"}


def _two_steps(folder: Path) -> None:
    SmallRun(folder, numel=NUMEL).train(4).save(wait=True).train(4).save(wait=True)


@pytest.fixture(scope="session")
def saved(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    run_on_ranks(_two_steps, folder, world=1)
    return folder


@pytest.fixture(scope="session")
def trained(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    images = image_folder(folder / "images")
    assert run_on_ranks(train_tiny, images, folder / "run", max_steps=1, changes=CHANGES, world=1) == [None]
    return folder
