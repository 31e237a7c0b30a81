"""`--resume --run_dir RUN` and nothing else continues a run: with its recipe, images and ds config, from anywhere."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from tests.ranks import run_on_ranks
from tests.run.harness import REPOSITORY, TINY, image_folder, log_of, losses_of
from tests.run.test_stages import flags, train_words

CHANGED = {"optimizer.lr": "0.01", "head.prototypes": "32", "length": "6 steps", "model.drop_path": "0"}


def train_in(folder: Path, words: list[str], world: int = 1) -> str | None:
    answers = run_on_ranks(_train_in, folder, words, world=world)
    assert len(set(answers)) == 1
    return answers[0]


def _train_in(folder: Path, words: list[str]) -> str | None:
    os.chdir(folder)
    return train_words(words)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """place/images, and runs of 3 and of 6 steps that name them from there; place/elsewhere to go to."""
    place = tmp_path_factory.mktemp("place")
    image_folder(place / "images")
    (place / "elsewhere").mkdir()
    settings = flags(TINY | CHANGED | {"data.root": "images"})
    ds = ["--ds_config", str(REPOSITORY / "ds_configs/zero1_bf16.json")]
    assert train_in(place, ["--run_dir", "runs/cut", "--max_steps", "3", *settings, *ds]) is None
    assert train_in(place, ["--run_dir", "runs/whole", *settings, *ds]) is None
    return place


@pytest.fixture
def cut(place: Path, tmp_path: Path) -> Path:
    return shutil.copytree(place / "runs/cut", tmp_path / "moved")


@pytest.mark.parametrize("resume", ["--resume", "--resume=3"])
def test_a_run_goes_on_by_its_own_files_from_any_folder(place: Path, cut: Path, resume: str):
    assert train_in(place / "elsewhere", ["--run_dir", str(cut), resume]) is None
    assert losses_of(cut) == losses_of(place / "runs/whole")
    assert f"note     data.root images is {place}/images: {cut} was started in {place}" in log_of(cut)
    assert "ds_config.json): bf16, ZeRO 1" in log_of(cut)
    assert f"recipe   this run's own, as {cut}/config.yaml has it\n" in log_of(cut)
    assert "engine   ZeRO 1, bf16" in log_of(cut).rpartition("images   ")[2]


def test_flags_go_over_the_run_s_recipe_by_the_rules_of_a_resume(place: Path, cut: Path):
    changed = train_in(place, ["--run_dir", str(cut), "--resume", "--optimizer.lr", "0.02", "--log_every", "2"])
    assert str(changed).endswith(": optimizer.lr 0.01 -> 0.02; accept with --allow_change optimizer.lr")
    assert train_in(place, ["--run_dir", str(cut), "--resume", "--log_every", "2"]) is None
    assert [step for step, _ in losses_of(cut)] == [1, 2, 3, 4, 6]


def test_images_that_are_nowhere_are_said_with_both_places(place: Path, cut: Path, tmp_path: Path):
    path = cut / "environment.json"
    about = json.loads(path.read_text())
    about["starts"][-1]["folder"] = str(place / "elsewhere")
    path.write_text(json.dumps(about))
    words = ["--run_dir", str(cut), "--resume"]
    start = f"{cut} was trained on data.root images, which is not in"
    assert train_in(tmp_path, words) == (
        f"{start} {place}/elsewhere, where it was started, nor in {tmp_path}: name it with --data.root"
    )
    assert train_in(place, words) is None  # as it always was: from the folder of the first start


def test_a_folder_without_a_run_is_said_and_not_that_images_are_missing(tmp_path: Path):
    message = train_words(["--run_dir", str(tmp_path / "none"), "--resume"])
    assert message == f"nothing to resume: {tmp_path}/none holds no run; start without --resume, or fix --run_dir"


@pytest.mark.parametrize(
    ("resume", "make", "said"),
    [("--resume", lambda path: None, "is missing"), ("--resume=auto", Path.mkdir, "is not a file")],
)
def test_a_run_whose_recipe_is_lost_is_said_by_its_file(cut: Path, resume: str, make, said: str):
    (cut / "config.yaml").unlink()
    make(cut / "config.yaml")
    message = train_words(["--run_dir", str(cut), resume])
    assert message is not None and message.startswith(f"{cut}/config.yaml {said}, and it alone says what this run")


def test_ranks_that_have_chosen_different_folders_end(place: Path):
    """Each rank of a machine takes the first free folder by itself; another run may begin in between."""
    answers = run_on_ranks(_train_by_rank, place, world=2)
    assert len(set(answers)) == 1 and "the run folder's name is r-1 for rank 1 on" in str(answers[0])
    assert not list(place.glob("r-?/config.yaml"))


def _train_by_rank(folder: Path) -> str | None:
    from dino_ds.engine import distributed

    os.chdir(folder)
    return train_words(["--run_dir", f"r-{distributed.rank()}", *flags(TINY | {"data.root": "images"})])


def test_resume_without_a_folder_takes_the_only_run_or_lists_them_newest_first(tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    message = f"nothing to resume: {tmp_path}/runs holds no run; name its folder with --run_dir"
    assert train_words(["--resume"]) == message
    for time, name in enumerate(("b", "new one", "a")):
        (tmp_path / "runs" / name).mkdir(parents=True)
        (tmp_path / "runs" / name / "config.yaml").touch()
        os.utime(tmp_path / "runs" / name, (time, time))
    assert train_words(["--resume", "7"]) == (
        "--resume 7 of which run? the newest first: --resume 7 --run_dir runs/a; --resume 7 --run_dir 'runs/new one'; "
        "--resume 7 --run_dir runs/b"
    )
    for name in ("a", "b"):
        shutil.rmtree(tmp_path / "runs" / name)
    assert "runs/new one" in str(train_words(["--resume"]))
