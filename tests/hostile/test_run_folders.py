"""A run folder whose files were cut, emptied, changed, swapped with another run's or replaced by something else: every
command that reads them says so in a line, or gives what it gives of the whole folder. Never a traceback."""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
from pathlib import Path

import pytest

from tests.hostile.guard import run_command
from tests.run.harness import image_folder, losses_of, train_alone
from tests.sample import sampled

pytestmark = pytest.mark.faults

WATCHED = {"head.prototypes": "4", "model.depth": "1", "length": "4 steps", "save_every": "2 steps"}
WATCHED |= {"eval.every": "2 steps", "eval.k": "3"}


def _train(place: Path, run: str, resume: bool = False, **changes: str) -> str | None:
    changes = WATCHED | {"eval.root": str(place / "images")} | changes
    return train_alone(place / "images", place / run, max_steps=None if resume else 2, resume=resume, changes=changes)


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """Two steps of `run` and of `other`, and the four that `run` comes to."""
    place = tmp_path_factory.mktemp("folders")
    image_folder(place / "images", 24, 3)
    assert _train(place, "run") is None and _train(place, "other", seed="7") is None
    shutil.copytree(place / "run", place / "straight")
    assert _train(place, "straight", resume=True) is None
    return place


@pytest.fixture
def place(made, tmp_path):
    for name in ("run", "other"):
        shutil.copytree(made / name, tmp_path / name)
    (tmp_path / "images").symlink_to(made / "images")
    return tmp_path


def _flip(path: Path, other: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 8
    path.write_bytes(data)


def _replaced(make):
    def damage(path: Path, other: Path) -> None:
        path.unlink(missing_ok=True)
        make(path)

    return damage


DAMAGES = {
    "cut": lambda path, other: os.truncate(path, path.stat().st_size // 2),
    "empty": lambda path, other: os.truncate(path, 0),
    "a bit flipped": _flip,
    "gone": _replaced(lambda path: None),
    "of another run": lambda path, other: shutil.copy(other, path),
    "a folder": _replaced(Path.mkdir),
    "a pipe": _replaced(os.mkfifo),
    "odd values": _replaced(lambda path: path.write_text('{"run_id": 5, "from": 3, "knn": {"results": {"a": "x"}}}\n')),
    "nested": _replaced(lambda path: path.write_text("[" * 100_000)),
    "code": _replaced(lambda path: path.write_text(f"!!python/object/apply:os.system ['touch {path}.was_run']")),
}
FILES = (
    "config.yaml", "ds_config.json", "environment.json", "metrics.jsonl", "evaluations.json", "events.jsonl", "log.txt",
    "checkpoints/latest",
)  # fmt: skip
READERS = {
    "report": lambda place: ["report", place / "run", "--out", place / "page.html"],
    "eval": lambda place: ["eval", place / "run", "--evals", "statistics", "--workers", "0"],
    "embed": lambda place: ["embed", place / "run", "--workers", "0", "--out", place / "x.npy"],
    "export": lambda place: ["export", place / "run", "--format", "timm", "--out", place / "timm"],
}


@pytest.mark.parametrize(("reader", "file", "damage"), sampled(itertools.product(READERS, FILES, DAMAGES)))
def test_what_reads_a_damaged_run_says_so_or_works(place, reader, file, damage):
    DAMAGES[damage](place / "run" / file, place / "other" / file)
    code, lines = run_command(READERS[reader](place))
    assert code in (0, 2, 3), lines
    assert not any("Traceback" in line for line in lines) and not list(place.rglob("*.was_run"))
    if code:
        assert [line for line in lines if line.startswith("dino_ds: error: ")] and len(lines) <= 12, lines


@pytest.mark.parametrize(("file", "damage"), sampled(itertools.product(FILES, DAMAGES)))
def test_a_damaged_run_is_resumed_as_the_whole_one_or_refused(place, made, file, damage):
    """The settings come with the command, all else that is learned from the checkpoint."""
    DAMAGES[damage](place / "run" / file, place / "other" / file)
    told = _train(place, "run", resume=True)
    assert not list(place.rglob("*.was_run"))
    if told is None:
        assert losses_of_steps(place / "run")[-2:] == losses_of_steps(made / "straight")[-2:]
    else:
        assert str(place / "run" / file) in told or "is of another run" in told
        assert "Traceback" not in told and told.count("\n") < 10


def losses_of_steps(run: Path) -> list[tuple[int, float]]:
    with contextlib.suppress(ValueError):
        return losses_of(run)
    whole = [line for line in (run / "metrics.jsonl").read_text(errors="replace").splitlines() if line.endswith("}")]
    (run / "metrics.jsonl").write_text("\n".join(whole[-4:]) + "\n")
    return losses_of(run)
