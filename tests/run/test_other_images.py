"""A resume with other images than before: refused where the schedules move, else said with numbers, by source."""

from __future__ import annotations

import shutil

import pytest

from dino_ds.report.folder import read_run
from dino_ds.report.single_run import draw_run
from tests.ranks import run_on_ranks
from tests.run.harness import copy_until, image_folder, log_of, losses_of, read_manifest, read_metrics, train_tiny
from tests.run.test_resume import ACCUMULATE, assert_same_checkpoint

EPOCHS = {"length": "6 epochs", "optimizer.warmup": "2 epochs"}
STEPS = {"objective.freeze_prototypes": "2 steps"}


@pytest.fixture(scope="module")
def begun(tmp_path_factory):
    place = tmp_path_factory.mktemp("begun")
    root = image_folder(place / "root")
    lengths = {"steps": STEPS, "epochs": EPOCHS}
    for unit, changes in lengths.items():
        assert run_on_ranks(train_tiny, root, place / unit, max_steps=3, changes=changes) == [None, None]
    return place, lengths


def _resume(begun, tmp_path, unit, change, **more):
    place, lengths = begun
    root = shutil.copytree(place / "root", tmp_path / "images")
    shutil.copytree(place / unit, tmp_path / "run")
    change(root)
    options = {"max_steps": 5, "resume": True, "changes": lengths[unit], **more}
    return run_on_ranks(train_tiny, root, tmp_path / "run", **options)


def _add(root):
    image_folder(root / "more", 20, seed=1)


def test_schedules_that_would_move_are_refused(begun, tmp_path):
    before = (begun[0] / "epochs/log.txt").read_text()
    one, two = _resume(begun, tmp_path, "epochs", _add)
    assert one == two
    assert one.startswith(
        "images changed since step 3 (20 -> 40 images: 20 added, 0 removed, 0 of another size), and lengths in epochs "
        "with them: length 12 -> 30 steps; schedules differ from step 3 on; accept with --allow_change images"
    )
    assert log_of(tmp_path / "run") == before


def test_schedules_move_where_that_is_allowed(begun, tmp_path):
    assert _resume(begun, tmp_path, "epochs", _add, allow_change="images") == [None, None]
    assert "note     images changed since step 3: 20 -> 40 images: 20 added" in log_of(tmp_path / "run")
    assert "length   5 steps of the schedules' 30," in log_of(tmp_path / "run")
    assert [record["step"] for record in read_metrics(tmp_path / "run")] == [1, 2, 3, 4, 5]
    assert read_manifest(tmp_path / "run", 5)["images"]["count"] == 40


def _rewrite(root):
    """Other contents of the same sizes: the checksum at the end, which no decoder looks at."""
    for path in root.iterdir():
        content = path.read_bytes()
        path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))


@pytest.mark.parametrize(
    ("unit", "change", "said"),
    [
        ("epochs", lambda root: image_folder(root / "more", 1), "20 -> 21 images: 1 added, 0 removed, 0 of another"),
        ("steps", _rewrite, "20 images as before: 0 added, 0 removed, 0 of another size, 20 of 20 that were read of"),
    ],
)
def test_what_moves_no_schedule_is_said_in_one_line(begun, tmp_path, unit, change, said):
    assert _resume(begun, tmp_path, unit, change) == [None, None]
    lines = [line for line in log_of(tmp_path / "run").splitlines() if "images changed" in line]
    assert len(lines) == 1 and f"note     images changed since step 3: {said}" in lines[0]


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
    lines = [record for record in read_metrics(parts) if "loss" in record]
    mine = [record["share/mine"] for record in lines]
    assert mine == [record["share/mine"] for record in read_metrics(straight) if "loss" in record]
    assert [mine[i] + mine[i + 1] for i in (0, 2, 4)] == [1.5] * 3
    assert all(record["share/mine"] + record["share/theirs"] == 1 for record in lines)
    assert "images   16 in mine=0.75, theirs=0.25" in log_of(parts)
    assert "(drawn: mine 75.0 %, theirs 25.0 %)" in draw_run(read_run(parts))

    (root / "theirs/class0/000.png").write_bytes((root / "mine/class0/000.png").read_bytes())
    assert run_on_ranks(train_tiny, root, parts, "zero2_bf16.json", 7, True, MIXTURE, ACCUMULATE) == [None] * 2
    changed = (
        "theirs: 12 images as before: 0 added, 0 removed, 0 of another size, 1 of 12 that were read of other content"
    )
    assert f"note     images changed since step 6: {changed}\n" in log_of(parts)
