"""Stages of training; `--resume --run_dir RUN` alone continues a run with its recipe, images and ds config."""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
from pathlib import Path

import pytest
import torch
import yaml

from dino_ds.config.recipe import Recipe
from dino_ds.engine import distributed
from dino_ds.errors import CheckpointError, UserError
from dino_ds.options.commands import TRAIN
from dino_ds.options.flags import parse_flags, read
from dino_ds.report.folder import read_run
from dino_ds.report.single_run import environment_rows
from dino_ds.train import train
from tests.ranks import run_on_ranks
from tests.run import harness, test_resume
from tests.run.harness import REPOSITORY, TINY, image_folder, log_of, losses_of, read_manifest, whole_tensors

CONTINUE, RESTART = {"stage_start": "continue"}, {"stage_start": "restart"}


def train_words(words: list[str]) -> str | None:
    """`dino-ds train WORDS` in this process; the message of a UserError, "stopped" for exit code 75, else None."""
    with contextlib.redirect_stderr(io.StringIO()), harness.unpredicted():
        try:
            options, files = read(TRAIN, parse_flags(TRAIN, words))
            train(options, **files)
        except UserError as error:
            return str(error)
        except SystemExit as stop:
            return "stopped" if stop.code == 75 else f"exit code {stop.code}"
    return None


def read_words(words: list[str]) -> Recipe:
    return read(TRAIN, parse_flags(TRAIN, words))[1]["recipe"]


def words_of(run_dir: Path, *more: str, ds: str = "zero0_fp32.json", **options: str) -> list[str]:
    return ["--run_dir", str(run_dir), "--ds_config", str(REPOSITORY / "ds_configs" / ds), *flags(options), *more]


def run(words: list[str], world: int = 1, folder: Path | None = None) -> str | None:
    answers = run_on_ranks(_train_in, words, folder, world=world)
    assert len(set(answers)) == 1
    return answers[0]


def _train_in(words: list[str], folder: Path | None) -> str | None:
    if folder:
        os.chdir(folder)
    return train_words(words)


def flags(options: dict[str, str]) -> list[str]:
    return [word for key, value in options.items() for word in (f"--{key}", value)]


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return image_folder(tmp_path_factory.mktemp("images"))


@pytest.fixture(scope="module")
def base(images: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """5 of 12 steps of DINOv2's objective, 2 steps an epoch, on one rank."""
    path = tmp_path_factory.mktemp("runs") / "base"
    assert run(words_of(path, *flags(TINY | test_resume.DINOV2 | {"data.root": str(images)}), max_steps="5")) is None
    return path


def test_a_stage_that_sets_nothing_is_the_straight_run(images, tmp_path):
    """3 + 3 = 6 steps to the last bit: weights, moments, teacher, centers, position, schedules; inside an epoch."""
    straight, first, second = (tmp_path / name for name in ("straight", "first", "second"))
    ds = "zero3_fp32.json"
    recipe = flags(TINY | test_resume.DINOV2 | {"data.root": str(images), "ds.gradient_accumulation_steps": "2"})
    assert run(words_of(straight, *recipe, ds=ds, max_steps="6"), world=2) is None
    assert run(words_of(first, *recipe, ds=ds, max_steps="3"), world=2) is None
    stage = ["--from", str(first), "--stage_start", "continue", "--ds.gradient_accumulation_steps", "2"]
    assert run(words_of(second, *stage, ds=ds, max_steps="3"), world=2) is None
    assert losses_of(first) + losses_of(second) == losses_of(straight)
    for path in (straight, second):  # what differs: how it began
        manifest = path / "checkpoints/step_00000006/manifest.json"
        body = json.loads(manifest.read_text())
        body["recipe"].pop("stage_start")
        manifest.write_text(json.dumps(body))
    test_resume.assert_same_checkpoint(second, straight, 6)


def test_what_a_stage_sets_counts_from_its_beginning(base, tmp_path):
    """Length and ramps; what it takes over goes on. On another number of ranks, ZeRO stage and precision."""
    path = tmp_path / "stage"
    more = ["--length", "3 steps", "--objective.ibot_weight", "1..2 over 3 steps", "--optimizer.lr", "0.01"]
    words = words_of(path, "--from", str(base), "--stage_start", "continue", *more, ds="zero2_bf16.json")
    assert run(words, world=2) is None
    assert [step for step, _ in losses_of(path)] == [6, 7, 8]
    recipe = yaml.safe_load((path / "config.yaml").read_text())
    assert recipe["length"] == "3 steps from step 5"
    assert recipe["objective"]["ibot_weight"] == "1..2 over 3 steps from step 5"
    assert recipe["objective"]["koleo_weight"] == "0..0.1 over 6 steps"
    run_id = read_manifest(base, 5)["run_id"]
    assert ("began with", f"{base}, step 5 (continue), run {run_id}") in environment_rows(read_run(path))
    log = log_of(path)
    assert "optimizer.lr 0.02 -> 0.01" in log and "length 12 steps -> 3 steps from step 5" in log


def test_a_stage_resumes_without_the_run_before(base, tmp_path):
    moved, straight, parts = tmp_path / "moved", tmp_path / "straight", tmp_path / "parts"
    shutil.copytree(base, moved)
    stage = ["--from", str(moved), "--stage_start", "continue", "--length", "4 steps", "--optimizer.lr", "0.01"]
    assert run(words_of(straight, *stage)) is None
    assert run(words_of(parts, *stage, max_steps="1")) is None
    assert f"{parts} already holds a run; add --resume" in str(run(words_of(parts, *stage)))
    shutil.rmtree(moved / "checkpoints")
    assert run(words_of(parts, "--resume", max_steps="2")) is None
    assert "optimizer.lr 0.01 -> 0.03" in str(run(words_of(parts, "--resume", "--optimizer.lr", "0.03")))
    assert run(words_of(parts, *stage, "--resume", "auto")) is None
    assert losses_of(parts) == losses_of(straight)
    test_resume.assert_same_checkpoint(parts, straight, 9)
    assert json.loads((parts / "environment.json").read_text())["from"]["step"] == 5


def other_id(path: Path) -> None:
    environment = json.loads((path / "environment.json").read_text())
    (path / "environment.json").write_text(json.dumps(environment | {"run_id": "0123456789abcdef"}))


ORIGINS = {
    "the same": (lambda path: None, "", None),
    "moved": (lambda path: path.rename(path.with_name("other")), "../other", None),
    "gone": (shutil.rmtree, "", None),
    "another step": (lambda path: None, "checkpoints/step_00000004", "before, step 4 (run "),
    "another run in its place": (other_id, "", "before (run 0123456789abcdef), and this stage began with "),
    "another name": (lambda path: None, "../none", "none (which can't be read), and this stage began with "),
}


@pytest.mark.parametrize("case", ORIGINS)
def test_a_stage_is_continued_with_the_run_that_it_began_with_alone(base, tmp_path, case):
    """--from of a resume is compared with what is recorded, by the id of the run and the step if one is named."""
    change, place, refused = ORIGINS[case]
    shutil.copytree(base, tmp_path / "before")
    stage = tmp_path / "stage"
    stage.mkdir()
    recipe = yaml.safe_load((base / "config.yaml").read_text())
    (stage / "config.yaml").write_text(yaml.dump(recipe | {"stage_start": "continue"}))
    origin = {"run": str(tmp_path / "before"), "run_id": read_manifest(base, 5)["run_id"], "step": 5}
    (stage / "environment.json").write_text(json.dumps({"from": origin | {"stage_start": "continue"}}))
    change(tmp_path / "before")
    words = words_of(stage, "--resume", "--from", os.path.normpath(tmp_path / "before" / place))
    if refused is None:
        assert read_words(words).stage_start == "continue"
        return
    with pytest.raises(CheckpointError) as caught:
        read_words(words)
    assert refused in str(caught.value)
    assert "leave --from out to continue it, or begin another stage in another --run_dir" in str(caught.value)
    (stage / "environment.json").write_text("{}")
    with pytest.raises(CheckpointError, match="it alone says which run this stage began with: bring it back"):
        read_words(words_of(stage, "--resume"))


def test_a_restart_is_a_run_from_the_teacher_s_weights(base, tmp_path):
    """The teacher of step 0 is that of the run before, heads and centers too; positions of another size are resized."""
    path = tmp_path / "stage"
    more = ["--length", "3 steps", "--crops.global_size", "48", "--optimizer.kind", "sgd", "--optimizer.lr", "1e-6"]
    more += ["--stage_start", "restart", "--teacher.momentum", "1"]
    assert run(words_of(path, "--from", str(base), *more)) is None
    assert [step for step, _ in losses_of(path)] == [1, 2, 3]
    before, after = whole_tensors(base, 5), whole_tensors(path, 3)
    assert before.keys() <= after.keys()
    teacher = [n for n in before if n.startswith("teacher.") and n != "teacher.backbone.pos_embed"]
    assert teacher and all(torch.equal(before[name], after[name]) for name in teacher)
    assert after["teacher.backbone.pos_embed"].shape[1] == 37
    assert run(words_of(path, "--resume")) is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "no stage_start says what is taken over from the run before"),
        (CONTINUE | {"model.depth": "3"}, "is of another backbone: depth 2 there, 3 here"),
        (RESTART | {"head.prototypes": "64"}, "has another head: prototypes 48 there, 64 here"),
        (CONTINUE | {"optimizer.kind": "sgd"}, "optimizer.kind adamw there, sgd here"),
        (CONTINUE | {"crops.global_size": "48"}, "its positions are learned ones; set crops.resolutions"),
        (RESTART | {"model.init_from": "weights.pth"}, "model.init_from weights.pth: a run begins with one of them"),
    ],
)
def test_refused_before_anything_is_written(base, tmp_path, options, message):
    path = tmp_path / "stage"
    answer = run(words_of(path, "--from", str(base), *flags(options)))
    assert answer and message in answer and len(answer.splitlines()) == 1
    assert not path.exists()


def test_places_that_are_no_run_are_refused(base, images, tmp_path):
    path = tmp_path / "stage"
    stage = flags(CONTINUE)
    assert "it is not a run (no config.yaml)" in str(run(words_of(path, "--from", str(images), *stage)))
    assert "is the run folder itself: --resume continues it" in str(run(words_of(base, "--from", str(base), *stage)))
    named = str(run(words_of(path, "--from", f"{base}/checkpoints/step_00000004", *stage)))
    assert "checkpoint of step 4 not found" in named and "found: 5" in named
    empty = tmp_path / "empty"
    empty.mkdir()
    shutil.copy(base / "config.yaml", empty)
    assert "it has no checkpoint yet" in str(run(words_of(path, "--from", str(empty), *stage)))
    said = run(words_of(path, *flags(TINY | CONTINUE | {"data.root": str(images)})))
    assert "the recipe is a stage, which begins with another run: add --from RUN" in str(said)
    assert not path.exists()


@pytest.fixture(scope="module")
def short(images, tmp_path_factory):
    path, length = tmp_path_factory.mktemp("short"), {"length": "2 steps", "objective.freeze_prototypes": "1 steps"}
    assert run(words_of(path / "run", *flags(TINY | length | {"data.root": str(images)}))) is None
    return path / "run"


def test_a_head_that_was_not_trained_is_refused(short, tmp_path):
    first, path = short, tmp_path / "stage"
    masks = {"crops.mask": "dinov2", "objective.ibot_weight": "1"}
    stage = words_of(path, "--from", str(first), max_steps="1")
    assert "has no ibot_head: a stage can't begin" in str(run([*stage, *flags(RESTART | masks)]))
    shared = masks | {"objective.ibot_head": "shared"}
    assert "crops.mask none there, dinov2 here" in str(run([*stage, *flags(CONTINUE | shared)]))
    assert not path.exists()
    assert run([*stage, *flags(RESTART | shared)]) is None
    assert "it has no ibot_center: as at the beginning of a run" in log_of(path)


def test_a_run_that_is_over_needs_a_length_of_the_stage(short, tmp_path):
    first, path = short, tmp_path / "stage"
    stage = words_of(path, "--from", str(first), *flags(CONTINUE))
    assert f"{first} has done 2 steps, and length 2 steps ends at step 2: give the stage a length" in str(run(stage))
    assert not path.exists()
    assert run([*stage, "--length", "1 steps"]) is None
    assert [step for step, _ in losses_of(path)] == [3]


GRAM = {"gram.weight": "0..2 over 3 steps", "gram.crop_size": "48", "length": "4 steps", "teacher.momentum": "0.5"}


def test_a_gram_stage_takes_its_teacher_when_it_begins(base, tmp_path):
    """Its snapshot is the EMA teacher of the run before, also after a resume."""
    parts = tmp_path / "parts"
    assert run(words_of(parts, "--from", str(base), *flags(CONTINUE | GRAM), max_steps="2")) is None
    assert run(words_of(parts, "--resume")) is None
    gram_losses = [record["gram_loss"] for record in harness.read_metrics(parts)]
    assert gram_losses[0] == 0 < min(gram_losses[1:])  # the ramp begins at 0
    before, after = whole_tensors(base, 5), whole_tensors(parts, 9)
    gram = [name for name in after if name.startswith("teachers.gram.")]
    assert len(gram) > 20
    assert all(torch.equal(after[name], before[name.replace("teachers.gram.", "teacher.")]) for name in gram)


def test_other_images_begin_a_new_epoch(base, tmp_path):
    """A place in the order of the old images means nothing in the new ones."""
    path, other = tmp_path / "stage", image_folder(tmp_path / "other", images=9, seed=1)
    stage = ["--from", str(base), *flags(CONTINUE), "--data.root", str(other), "--length", "2 steps"]
    assert run(words_of(path, *stage)) is None
    assert "images changed since step 5: 20 -> 9 images" in log_of(path)
    assert read_manifest(base, 5)["state"]["position"] == {"epoch": 2, "samples": 8}
    assert read_manifest(path, 7)["state"]["position"] == {"epoch": 5, "samples": 0}


CHANGED = {"optimizer.lr": "0.01", "head.prototypes": "32", "length": "6 steps", "model.drop_path": "0"}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """place/images, and runs of 3 and of 6 steps that name them from there; place/elsewhere to go to."""
    place = tmp_path_factory.mktemp("place")
    image_folder(place / "images")
    (place / "elsewhere").mkdir()
    settings = flags(TINY | CHANGED | {"data.root": "images"})
    ds = ["--ds_config", str(REPOSITORY / "ds_configs/zero1_bf16.json")]
    assert run(["--run_dir", "runs/cut", "--max_steps", "3", *settings, *ds], folder=place) is None
    assert run(["--run_dir", "runs/whole", *settings, *ds], folder=place) is None
    return place


@pytest.fixture
def cut(place: Path, tmp_path: Path) -> Path:
    return shutil.copytree(place / "runs/cut", tmp_path / "moved")


def test_a_run_goes_on_by_its_own_files_from_any_folder(place: Path, cut: Path):
    assert run(["--run_dir", str(cut), "--resume=3"], folder=place / "elsewhere") is None
    assert losses_of(cut) == losses_of(place / "runs/whole")
    assert f"note     data.root images is {place}/images: {cut} was started in {place}" in log_of(cut)
    assert "engine   ZeRO 1, bf16" in log_of(cut).rpartition("images   ")[2]


def test_images_that_are_nowhere_are_said_with_both_places(place: Path, cut: Path, tmp_path: Path):
    path = cut / "environment.json"
    about = json.loads(path.read_text())
    about["starts"][-1]["folder"] = str(place / "elsewhere")
    path.write_text(json.dumps(about))
    words = ["--run_dir", str(cut), "--resume"]
    said = f"which is not in {place}/elsewhere, where it was started, nor in {tmp_path}: name it with --data.root"
    assert said in str(run(words, folder=tmp_path))
    assert run(words, folder=place) is None  # as it always was: from the folder of the first start


@pytest.mark.parametrize("resume", ["--resume", "--resume=auto"])
def test_a_run_whose_recipe_is_lost_is_said_by_its_file(cut: Path, resume: str):
    (cut / "config.yaml").unlink()
    said = f"{cut}/config.yaml is missing, and it alone says what this run"
    assert str(train_words(["--run_dir", str(cut), resume])).startswith(said)


def test_ranks_that_have_chosen_different_folders_end(place: Path):
    """Each rank of a machine takes the first free folder by itself; another run may begin in between."""
    answers = run_on_ranks(_train_by_rank, place, world=2)
    assert len(set(answers)) == 1 and "the run folder's name is r-1 for rank 1 on" in str(answers[0])
    assert not list(place.glob("r-?/config.yaml"))


def _train_by_rank(folder: Path) -> str | None:
    os.chdir(folder)
    return train_words(["--run_dir", f"r-{distributed.rank()}", *flags(TINY | {"data.root": "images"})])


def test_resume_without_a_folder_lists_the_runs_newest_first(tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert f"nothing to resume: {tmp_path}/runs holds no run" in str(train_words(["--resume"]))
    for time, name in enumerate(("b", "new one", "a")):
        (tmp_path / "runs" / name).mkdir(parents=True)
        (tmp_path / "runs" / name / "config.yaml").touch()
        os.utime(tmp_path / "runs" / name, (time, time))
    said = "--resume 7 --run_dir runs/a; --resume 7 --run_dir 'runs/new one'; --resume 7 --run_dir runs/b"
    assert said in str(train_words(["--resume", "7"]))
