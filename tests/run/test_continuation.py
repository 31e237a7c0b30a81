"""A run is continued after each place that its recipe names was moved, spelled otherwise, replaced or removed, and
after its images have changed.

The same content goes on without a word, wherever it lies; other content is refused, or said where it may change.
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

import pytest

from dino_ds.config.loading import load_recipe
from dino_ds.config.stages import own_recipe, path_keys
from dino_ds.errors import UserError
from dino_ds.report.folder import read_run
from dino_ds.report.single_run import draw_run
from tests.ranks import run_on_ranks
from tests.run.harness import TINY, copy_until, image_folder, log_of, losses_of, read_manifest, read_metrics, train_tiny
from tests.run.test_resume import ACCUMULATE, assert_same_checkpoint

FILES = {
    "data.root": {},
    "data.balance": {"data.root": "images"},
    "data.mixture": {},
    "model.init_from": {"data.root": "images"},
    "objective.preserve_weight": {"data.root": "images"},
    "gram.teacher": {"data.root": "images", "gram.weight": "1"},
    "teacher.source": {"data.root": "images", "teacher.distill": "features"},
    "eval.root": {"data.root": "images", "eval.every": "1 steps", "eval.k": "1"},
    "eval.val_root": {"data.root": "images", "eval.every": "1 steps", "eval.keep_best": "val_loss"},
    "eval.val_share": {"eval.every": "1 steps", "eval.keep_best": "val_loss", "eval.val_share": "0.4"},
}
"""Each key that names a place, or images by a place, and what else its runs need."""
NAMES = {
    "data.balance": ("data.balance", "clusters:{}", "clusters.csv"),
    "data.mixture": ("data.mixture", "{}=0.5,images=0.5", "more"),
    "objective.preserve_weight": ("model.init_from", "{}", "start"),
    "eval.val_share": ("data.root", "{}", "list.txt"),
    "eval.root": ("eval.root", "{}", "test"),
    "eval.val_root": ("eval.val_root", "{}", "val"),
    "data.root": ("data.root", "{}", "images"),
}
"""The key that has the place, its value, and the place."""
CHANGES = ("another of that name", "absolute", "moved", "replaced")
FEW = ("moved", "replaced")
"""Changes for all keys but data.root, which sees every one of CHANGES."""
SAID = r"images changed since|sought anew|measured anew|changed since step"
REFUSED = {
    ("data.balance", "replaced"): "the clusters of data.balance .* are others than those since step 1",
    ("data.mixture", "moved"): "settings changed since step 1: data.mixture .*--allow_change data.mixture",
    ("model.init_from", "moved"): "settings changed since step 1: model.init_from .*--allow_change model.init_from",
    ("objective.preserve_weight", "moved"): "settings changed since step 1: model.init_from .*--allow_change model",
    ("objective.preserve_weight", "replaced"): "model.init_from",
    ("gram.teacher", "replaced"): "gram.teacher .* has other weights than the one that this run was trained with",
    ("teacher.source", "replaced"): "was distilled from another teacher",
}
TOLD = {
    ("data.root", "replaced"): "20 images as before: 0 added, 0 removed",
    ("data.mixture", "replaced"): "more: 20 images as before: 0 added, 0 removed",
    ("eval.root", "replaced"): "the best teacher so far.* was the best on other images",
    ("eval.val_root", "replaced"): "the best teacher so far.* was the best on other images",
    ("eval.val_share", "replaced"): "the best teacher so far.* was the best on other images",
}
"""What goes on and is said; all else goes on as if nothing had happened."""


def _name(key: str) -> tuple[str, str, str]:
    return NAMES.get(key, (key, "{}", "teacher"))


def _make(place: Path, what: str, seed: int, runs: Path) -> None:
    """The content of a place; another seed makes other content of the same size and names."""
    if what == "clusters.csv":
        files = sorted((place.parent / "images").rglob("*.png"))
        rows = [f"{file},{(i + seed * (i > 9)) % 3}" for i, file in enumerate(files)]
        place.write_text("\n".join(["name,cluster", *rows]) + "\n")
    elif what == "list.txt":
        image_folder(place.parent / "listed", 20, seed=7 + seed)
        place.write_text("".join(f"listed/{i:03d}.png\n" for i in range(20)))
    elif what in ("start", "teacher"):
        shutil.copytree(runs / str(seed), place)
    else:
        image_folder(place, 20, 2, seed={"images": 0, "test": 1, "val": 2, "more": 3}[what] + 10 * seed)


def _changed(key: str, change: str, home: Path, runs: Path) -> tuple[Path, dict[str, str] | None]:
    """Make the change. Returns the working folder of the next start, and its overrides, None for the run's recipe."""
    named, value, what = _name(key)
    place, elsewhere = home / what, home.parent / "elsewhere"
    spelled = {"absolute": str(place), "moved": f"moved/{what}"}.get(change, what)
    if change == "another of that name":
        elsewhere.mkdir()
        for one in dict.fromkeys(("images", what)):
            _make(elsewhere / one, one, 1, runs)
        return elsewhere, None
    if change == "moved":
        (home / "moved").mkdir()
        shutil.move(place, home / "moved" / what)
        if what == "list.txt":
            shutil.move(home / "listed", home / "moved/listed")
    if change == "replaced":
        shutil.rmtree(place) if place.is_dir() else place.unlink()
        shutil.rmtree(home / "listed", ignore_errors=True)
        _make(place, what, 1, runs)
    return home, {named: value.format(spelled)}


def _train(run: Path, cwd: Path, overrides: dict[str, str] | None, steps: int, resume: bool) -> str | None:
    os.chdir(cwd)
    try:
        recipe = own_recipe(run, (), []) if overrides is None else load_recipe(None, TINY | overrides)
    except UserError as error:
        return str(error)
    return train_tiny(cwd, run, max_steps=steps, resume=resume, recipe=recipe)


def _cells(key: str, changes: tuple[str, ...], place: Path, runs: Path) -> dict[str, tuple[str | None, str]]:
    """For each change: the message of the start that continues, and what it has written into the log."""
    named, value, what = _name(key)
    found, given = {}, {"length": "8 steps", **FILES[key], named: value.format(what)}
    if key == "data.mixture":
        given["data.root"] = "."
    if key == "objective.preserve_weight":
        given["objective.preserve_weight"] = "0.5"
    home, run, kept = place / "home", place / "run", place / "kept"
    home.mkdir()
    for one in dict.fromkeys(("images", what)):
        _make(home / one, one, 0, runs)
    assert _train(run, home, given, 1, False) is None
    before = len((run / "log.txt").read_text())
    for folder in (home, run):
        shutil.copytree(folder, kept / folder.name)
    for change in changes:
        for folder in (home, run):
            shutil.rmtree(folder)
            shutil.copytree(kept / folder.name, folder)
        shutil.rmtree(place / "elsewhere", ignore_errors=True)
        cwd, overrides = _changed(key, change, home, runs)
        said = _train(run, cwd, None if overrides is None else given | overrides, 2, True)
        found[change] = said, (run / "log.txt").read_text()[before:]
    return found


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    place = tmp_path_factory.mktemp("runs")
    root = image_folder(place / "images")
    for seed in (0, 1):
        how = {"max_steps": 1, "changes": {"seed": str(seed)}}
        assert run_on_ranks(train_tiny, root, place / str(seed), world=1, **how) == [None]
    return place


@pytest.mark.parametrize(("key", "changes"), [(key, CHANGES if key == "data.root" else FEW) for key in FILES])
def test_a_run_goes_on_with_the_same_content_alone(key, changes, runs, tmp_path):
    (found,) = run_on_ranks(_cells, key, changes, tmp_path, runs, world=1)
    for change, (said, log) in found.items():
        if wanted := REFUSED.get((key, change)):
            assert said is not None and re.search(wanted, said) and "\n" not in said, (key, change, said)
            continue
        assert said is None, (key, change, said)
        if wanted := TOLD.get((key, change)):
            assert re.search(wanted, log), (key, change, log)
        else:
            assert not re.search(SAID, log), (key, change, log)


def test_each_key_that_names_a_path_is_in_the_table():
    assert set(path_keys()) - {"eval.benchmark_root"} <= {*FILES, *(named for named, _, _ in NAMES.values())}


def test_added_images_are_said_and_refused_where_schedules_would_move_unless_allowed(tmp_path):
    root, run = image_folder(tmp_path / "images"), tmp_path / "run"

    def go(steps, **more):
        changes = {"length": "6 epochs", "optimizer.warmup": "2 epochs"}
        return run_on_ranks(train_tiny, root, run, max_steps=steps, changes=changes, **more)

    assert go(3) == [None, None]
    image_folder(root / "more", 1)
    assert go(4, resume=True) == [None, None]
    said = "note     images changed since step 3: 20 -> 21 images: 1 added, 0 removed, 0 of another"
    assert log_of(run).count("images changed") == log_of(run).count(said) == 1
    image_folder(root / "others", 20, seed=1)
    before = log_of(run)
    one, two = go(5, resume=True)
    assert one == two and "length 12 -> 30 steps; schedules differ from step 4 on; accept with --allow_change" in one
    assert log_of(run) == before
    assert go(5, resume=True, allow_change="images") == [None, None]
    assert "length   5 steps of the schedules' 30," in log_of(run)
    assert [record["step"] for record in read_metrics(run)] == [1, 2, 3, 4, 5]
    assert read_manifest(run, 5)["images"]["count"] == 41


MIXTURE = {"data.mixture": "mine=0.75,theirs=0.25", "data.balance": "classes", "save_every": "3 steps"}


def test_a_mixture_resumes_to_the_bit_and_names_the_source_that_has_changed(tmp_path):
    """3 + 3 = 6 steps inside an epoch, accumulation 2, 2 ranks; shares of an epoch are exact, classes equal."""
    root, straight, parts = tmp_path / "images", tmp_path / "straight", tmp_path / "parts"
    image_folder(root / "mine", 4, classes=2, seed=1)
    image_folder(root / "theirs", 12, classes=3, seed=2)
    for run, resume in ((straight, False), (parts, True)):
        if resume:
            copy_until(3, straight, parts)
        assert run_on_ranks(train_tiny, root, run, "zero2_bf16.json", 6, resume, MIXTURE, ACCUMULATE) == [None] * 2
    assert losses_of(parts) == losses_of(straight)
    assert_same_checkpoint(parts, straight, 6)
    mine, other = ([r["share/mine"] for r in read_metrics(run) if "loss" in r] for run in (parts, straight))
    assert mine == other and [mine[i] + mine[i + 1] for i in (0, 2, 4)] == [1.5] * 3
    assert "(drawn: mine 75.0 %, theirs 25.0 %)" in draw_run(read_run(parts))

    (root / "theirs/class0/000.png").write_bytes((root / "mine/class0/000.png").read_bytes())
    assert run_on_ranks(train_tiny, root, parts, "zero2_bf16.json", 7, True, MIXTURE, ACCUMULATE) == [None] * 2
    assert "images changed since step 6: theirs: 12 images as before: 0 added, 0 removed, 0 of " in log_of(parts)
    assert "1 of 12 that were read of other content\n" in log_of(parts)
