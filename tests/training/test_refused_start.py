"""A start that is refused leaves a run as it was: its files, its log, and what a report says of its end."""

from __future__ import annotations

from pathlib import Path

import pytest

from dino_ds.report.folder import read_run
from tests.ranks import run_on_ranks
from tests.training.harness import image_folder, train_tiny


def contents(folder: Path) -> dict[str, bytes | None]:
    """Every file and folder below, with its bytes."""
    return {str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    place = tmp_path_factory.mktemp("finished")
    root = image_folder(place / "root")
    assert run_on_ranks(train_tiny, root, place / "run", max_steps=3) == [None, None]
    return root, place / "run"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, "already holds a run; add --resume"),
        ({"resume": True, "changes": {"optimizer.lr": "0.01"}}, "settings changed since step 3"),
        ({"resume": 2}, "checkpoint of step 2 not found"),
        ({"resume": True, "allow_change": "optimizer.l"}, "--allow_change optimizer.l: it is not a key of the recipe"),
        ({"resume": True, "changes": {"data.global_batch": "32"}}, "20 images < one global batch of 32"),
    ],
)
def test_no_trace_in_a_finished_run(finished, options, said):
    root, run = finished
    before = contents(run)
    one, two = run_on_ranks(train_tiny, root, run, **options)
    assert one == two and said in one
    assert contents(run) == before
    assert read_run(run).state == "finished"
