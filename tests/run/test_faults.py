"""Bad images, bad numbers, bad batches: said in one line, nothing lost."""

from __future__ import annotations

import io
import os
import re
import tarfile

import pytest

from tests.ranks import run_on_ranks
from tests.run.harness import image_folder, read_metrics, train_tiny


def test_unreadable_images_are_named_skipped_and_counted(tmp_path):
    root, run = image_folder(tmp_path / "images"), tmp_path / "run"
    (root / "005.png").write_bytes((root / "005.png").read_bytes()[:200])
    (root / "011.png").write_bytes(b"")
    # Four passes over the images: each is named and counted once, whichever rank meets it.
    changes = {"length": "8 steps", "data.max_bad_fraction": "0.1"}
    assert run_on_ranks(train_tiny, root, run, changes=changes) == [None, None]
    named = [line for line in (run / "log.txt").read_text().splitlines() if "unreadable image skipped" in line]
    assert len(named) == 2 and "005.png" in "".join(named) and "011.png" in "".join(named)
    assert read_metrics(run)[-1]["bad_images"] == 2


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"data.global_batch": "64"}, ["20 images", "64"]),
        ({"data.root": "/nowhere/images"}, ["/nowhere/images"]),
        ({"eval.root": "/nowhere/test", "eval.every": "2 steps"}, ["/nowhere/test"]),
        ({"eval.root": "SAME", "eval.every": "2 steps"}, ["eval.evals knn: the training images have no classes"]),
        ({"eval.evals": "statistics,ridge", "eval.every": "2 steps"}, ["eval.evals ridge: there are no test images"]),
    ],
)
def test_wrong_data_leaves_no_run_folder(tmp_path, changes, parts):
    root, run = image_folder(tmp_path / "images"), tmp_path / "run"
    changes = {key: value.replace("SAME", str(root)) for key, value in changes.items()}
    message = run_on_ranks(train_tiny, root, run, changes=changes, world=1)[0]
    assert all(part in message for part in parts) and "\n" not in message
    assert not run.exists()


def test_fewer_test_images_than_ranks_is_an_error_on_all_ranks(tmp_path):
    root, test = image_folder(tmp_path / "images", 24, 3), image_folder(tmp_path / "test", 9, 3, seed=1)
    changes = {"eval.every": "2 steps", "eval.root": str(test), "eval.test_images": "1"}
    messages = run_on_ranks(train_tiny, root, tmp_path / "run", changes=changes)
    assert all("eval.test_images" in message for message in messages)


def _other_images(root, run):
    """Rank 1 has another disk."""
    return train_tiny(root / os.environ["RANK"], run)


def test_ranks_with_other_images_do_not_train_apart(tmp_path):
    for rank, images in ((0, 20), (1, 19)):
        image_folder(tmp_path / "images" / str(rank), images)
    for message in run_on_ranks(_other_images, tmp_path / "images", tmp_path / "run"):
        assert re.search(r"rank 1 on \S+ 19", message) and "same files" in message
    assert not (tmp_path / "run").exists()


def _shards(root, images):
    """Two shards of ten images; the second has lost its end, the first holds a text with an image's name."""
    root.mkdir()
    for number, part in enumerate((images[:10], images[10:])):
        with tarfile.open(root / f"{number}.tar", "w") as archive:
            for image in part:
                archive.add(image, f"../{image.name}")
            if number == 0:
                info = tarfile.TarInfo("broken.png")
                info.size = 12
                archive.addfile(info, io.BytesIO(b"not an image"))
    whole = (root / "1.tar").read_bytes()
    (root / "1.tar").write_bytes(whole[: len(whole) * 3 // 4 + 2200])
    return root


def test_damaged_shards_train_on_what_is_left_and_say_so(tmp_path):
    images = sorted(image_folder(tmp_path / "images").iterdir())
    root, run = _shards(tmp_path / "shards", images), tmp_path / "run"
    changes = {"length": "6 steps", "data.max_bad_fraction": "0.1"}
    assert run_on_ranks(train_tiny, root, run, changes=changes) == [None, None]
    log = (run / "log.txt").read_text()
    assert f"note     {root}/1.tar: cut off in ../0" in log
    assert f"unreadable image skipped: {root}/0.tar/broken.png (not an image)" in log
    assert read_metrics(run)[-1]["bad_images"] == 1
    assert not list(tmp_path.glob("*.png"))


def test_unreadable_images_of_the_evaluation_are_named_once(tmp_path):
    root, test = image_folder(tmp_path / "images", 24, 3), image_folder(tmp_path / "test", 9, 3, seed=1)
    (test / "class1/004.png").write_bytes(b"")
    changes = {"eval.every": "2 steps", "eval.root": str(test), "length": "4 steps", "optimizer.warmup": "1 steps"}
    assert run_on_ranks(train_tiny, root, tmp_path / "run", changes=changes) == [None, None]
    lines = [line for line in (tmp_path / "run/log.txt").read_text().splitlines() if "left out" in line]
    assert [line.partition(" ")[2] for line in lines] == [
        f"evals    left out, unreadable: {test}/class1/004.png (empty file)"
    ]
