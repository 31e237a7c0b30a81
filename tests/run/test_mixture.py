"""A run on a mixture with balanced classes: its shares, its resume, and what it says of images that have changed."""

from __future__ import annotations

from dino_ds.report.folder import read_run
from dino_ds.report.single_run import draw_run
from tests.ranks import run_on_ranks
from tests.run.harness import copy_until, image_folder, log_of, losses_of, read_metrics, train_tiny
from tests.run.test_resume import ACCUMULATE, assert_same_checkpoint

MIXTURE = {"data.mixture": "mine=0.75,theirs=0.25", "data.balance": "classes", "save_every": "3 steps"}


def test_a_mixture_resumes_to_the_bit_and_names_the_source_that_has_changed(tmp_path):
    """3 steps + resume + 3 = 6 steps, the stop inside an epoch of two; accumulation 2, 2 ranks. The shares of an epoch
    are exact, and each class of a source has as many images as another."""
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
