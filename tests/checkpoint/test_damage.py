"""No flipped bit, cut, missing or mixed file is loaded, an older checkpoint is; a kill tears none."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dino_ds.errors import CheckpointError
from tests.checkpoint.small_run import RUN_ID, SmallRun, is_that_of
from tests.hostile.guard import seal
from tests.ranks import fork_server, run_on_ranks

FLIPS = 40


def _two_checkpoints(run_dir: Path) -> None:
    run = SmallRun(run_dir)
    run.train(4).save(wait=True).train(4).save(wait=True)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    run_on_ranks(_two_checkpoints, place := tmp_path_factory.mktemp("saved"))
    return place


@pytest.fixture
def run(saved, tmp_path):
    return shutil.copytree(saved, tmp_path / "run")


def _newest(run_dir: Path) -> Path:
    return run_dir / "checkpoints/step_00000008"


def test_every_flipped_bit_is_caught(run):
    """In any file of the newest checkpoint, the manifest included: the older one is taken, and said why."""
    rng = random.Random(5)
    files = sorted(path for path in _newest(run).iterdir())
    assert [f.name for f in files] == [
        "manifest.json", "rank_00000.safetensors", "rank_00001.safetensors",
        "whole_00000.safetensors", "whole_00001.safetensors",
    ]  # fmt: skip
    small = SmallRun(run)
    for i in range(FLIPS):
        path = files[i % len(files)]
        whole = path.read_bytes()
        damaged = bytearray(whole)
        # A third of them in the header or the beginning, where the structure is.
        place = rng.randrange(min(len(whole), 300) if i % 3 == 0 else len(whole))
        damaged[place] ^= 1 << rng.randrange(8)
        path.write_bytes(damaged)
        choice = small.choose()
        path.write_bytes(whole)
        assert choice.saved is not None and choice.saved.manifest.step == 4, (path.name, place)
        why = choice.notes[0]  # a flipped bit in a file's header may make it look like that of another step
        assert "damaged" in why and why.endswith("using step 4"), why
    choice = small.choose()
    assert choice.saved is not None and is_that_of(choice.saved, 8) and not choice.notes


def test_every_cut_is_caught(run):
    small = SmallRun(run)
    for path in sorted(_newest(run).iterdir()):
        whole = path.read_bytes()
        for length in {0, 7, 9, len(whole) // 2, len(whole) - 1}:
            path.write_bytes(whole[:length])
            choice = small.choose()
            assert choice.saved is not None and choice.saved.manifest.step == 4, (path.name, length)
        path.write_bytes(whole + b"\0")
        assert small.choose().saved.manifest.step == 4
        path.write_bytes(whole)


@pytest.mark.parametrize("name", ["manifest.json", "rank_00001.safetensors", "whole_00000.safetensors"])
def test_a_missing_file(run, name):
    (_newest(run) / name).unlink()
    choice = SmallRun(run).choose()
    assert is_that_of(choice.saved, 4)
    assert choice.notes[0].startswith("checkpoint step 8 is incomplete") and choice.notes[0].endswith("using step 4")
    if name != "manifest.json":
        assert "(3 of 4 files)" in choice.notes[0]


def _swap_ranks(newest: Path) -> None:
    one, two = newest / "rank_00000.safetensors", newest / "rank_00001.safetensors"
    content = one.read_bytes()
    one.write_bytes(two.read_bytes())
    two.write_bytes(content)


@pytest.mark.parametrize(
    ("mix", "says"),
    [
        (_swap_ranks, "is damaged (crc"),
        (lambda newest: newest.rename(newest.with_name("step_00000012")), "is that of step 8 under another name"),
    ],
    ids=["files of two ranks swapped", "another name"],
)
def test_files_in_another_s_place(run, mix, says):
    mix(_newest(run))
    choice = SmallRun(run).choose()
    assert is_that_of(choice.saved, 4) and says in choice.notes[0]


def test_a_checkpoint_of_another_run(run):
    assert SmallRun(run).choose(run_id=None).saved.manifest.run_id == RUN_ID
    with pytest.raises(CheckpointError, match=r"checkpoint step 8 in .* is of another run than .*; .*no older"):
        SmallRun(run).choose(run_id="ff")


def test_nothing_outside_the_folder_is_followed(run, tmp_path_factory):
    outside = tmp_path_factory.mktemp("outside")
    shutil.copytree(_newest(run), outside / "step_00000012")
    os.symlink(outside / "step_00000012", run / "checkpoints/step_00000012")
    file = _newest(run) / "rank_00000.safetensors"
    shutil.move(file, outside / "file")
    file.symlink_to(outside / "file")
    (run / "checkpoints/latest").unlink()
    (run / "checkpoints/latest").symlink_to("/etc/hostname")
    choice = SmallRun(run).choose()
    assert is_that_of(choice.saved, 4)
    assert "leads out of" in choice.notes[0] and "step 8 is incomplete" in choice.notes[1]


BAD = [
    {"files": {"../../etc/passwd": {"bytes": 1, "crc32": 0}}}, {"layouts": []}, {"world_size": 3}, {"format": 3},
    {"step": "many"}, "[" * 100000, "[]", '{"crc32": 1}', "\xff",
]  # fmt: skip


@pytest.mark.parametrize("content", BAD)
def test_a_manifest_of_bad_content(run, content):
    """With a good checksum too: whoever can write the file can also compute it."""
    path = _newest(run) / "manifest.json"
    path.write_text(content if isinstance(content, str) else seal(json.loads(path.read_text()) | content))
    choice = SmallRun(run).choose()
    assert is_that_of(choice.saved, 4) and "manifest.json" in choice.notes[0]


def _choose(run_dir: Path) -> tuple[int, list[str]]:
    choice = SmallRun(run_dir).choose()
    return choice.saved.manifest.step, choice.notes


def test_ranks_share_the_reading_and_agree(run):
    path = _newest(run) / "rank_00000.safetensors"
    path.write_bytes(b"\0" * path.stat().st_size)
    one, two = run_on_ranks(_choose, run)
    assert one == two and one[0] == 4 and "rank_00000" in one[1][0]


STEPS, SAVE_EVERY = 6, 2
_CALLS = ("replace", "rename", "unlink", "rmdir", "mkdir")
_CALL_WEIGHT = 2000
"""What a call other than a write weighs, in bytes, when the point of death is drawn."""


class Death:
    """Counts what this process does to the disk, and kills it when `budget` is spent, in the middle of a write too."""

    def __init__(self, budget: float) -> None:
        self.budget, self.spent, write = budget, 0.0, os.write

        def counted_write(descriptor: int, data: Any) -> int:
            write(descriptor, data[: int(min(len(data), self.budget - self.spent))])
            self.spend(len(data))
            return len(data)

        os.write = counted_write
        for name in _CALLS:
            setattr(os, name, self._counted(getattr(os, name)))

    def _counted(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            self.spend(_CALL_WEIGHT / 2)
            result = call(*args, **kwargs)
            self.spend(_CALL_WEIGHT / 2)
            return result

        return counted

    def spend(self, weight: float) -> None:
        self.spent += weight
        if self.spent > self.budget:
            os.kill(os.getpid(), signal.SIGKILL)


def _train(folder: Path, start: int, budget: float, seed: int) -> None:
    """Go on from step `start`; each complete checkpoint is said in `complete`, and what was spent in `spent`."""
    rng, said, death = random.Random(seed), (folder / "complete").open("a"), Death(budget)
    run = SmallRun(folder, keep=2, keep_every=6, background=rng.random() < 0.7)
    if start:
        run.train(start)
        run.checkpoints.tidy(start)
    for _ in range(STEPS):
        if run.train().step % SAVE_EVERY == 0:
            run.save(wait=rng.random() < 0.3)
        time.sleep(0.001)
        said.writelines(f"{line}\n" for line in run.said)
        said.flush()
        run.said.clear()
    run.save(wait=True)
    (folder / "spent").write_text(str(death.spent))


def _live(folder: Path, start: int = 0, budget: float = float("inf"), seed: int = 1) -> int:
    folder.mkdir(exist_ok=True)
    process = fork_server().fork(_train, folder, start, budget, seed)
    while process not in (ended := fork_server().ended()):
        time.sleep(0.01)
    return ended[process][0]


@pytest.mark.slow
@pytest.mark.parametrize("kills", [12, pytest.param(200, marks=pytest.mark.full)])
def test_no_death_tears_a_checkpoint(tmp_path, kills):
    """SIGKILL at random points of writing: what was said to be complete is found whole, and the run goes on."""
    assert _live(tmp_path / "whole") == 0
    rng, spent = random.Random(11), float((tmp_path / "whole/spent").read_text())
    for number in range(kills):
        folder, seed = tmp_path / str(number), rng.randrange(2**30)
        assert _live(folder, 0, rng.uniform(0, spent), seed) in (-signal.SIGKILL, 0)
        lines = [line.split() for line in (folder / "complete").read_text().splitlines()]
        said = max((int(words[2][:-1]) for words in lines if words[0] == "save"), default=0)
        choice = SmallRun(folder).choose()
        step = choice.saved.manifest.step if choice.saved else 0
        assert step >= said and "damaged" not in str(choice.notes), (number, said, choice.notes)
        assert not choice.saved or is_that_of(choice.saved, step), number
        assert _live(folder, step, seed=seed) == 0
        left = [path.name for path in (folder / "checkpoints").iterdir() if not path.name.startswith(("step_", "lat"))]
        last = SmallRun(folder).choose().saved
        assert not left and last is not None and is_that_of(last, step + STEPS), (number, left)
