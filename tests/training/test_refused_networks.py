"""Whole jobs of networks that dino_ds does not build: what their logs say, and refusals that leave nothing behind."""

from __future__ import annotations

import pytest

from tests.ranks import run_on_ranks
from tests.training.harness import image_folder, log_of, train_tiny

NOT_OURS = {f"model.{key}": "none" for key in ("patch_size", "width", "depth", "heads")}
RESNET = {
    **NOT_OURS,
    "model.backbone": "resnet18",
    "model.arguments": '{"channels": [8, 16, 16, 24], "layers": [1, 1, 1, 1]}',
    "crops.global_size": "64",
    "crops.local_size": "32",
}
OWN = "tests.models.test_families:"


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return image_folder(tmp_path_factory.mktemp("images"))


def test_the_log_says_once_how_it_runs(root, tmp_path):
    given = {"changes": RESNET, "ds_changes": {"gradient_accumulation_steps": "2"}, "max_steps": 1}
    assert run_on_ranks(train_tiny, root, tmp_path / "run", world=1, **given) == [None]
    log = log_of(tmp_path / "run")
    assert log.count("resnet18 runs by timm's own code, crops of each size in a pass of their own") == 1
    assert log.count("warning  BatchNorm sees one micro-batch at a time: 2 micro-batches are not one batch") == 1


REFUSED = [
    ({"model.backbone": f"{OWN}Raises"}, "gives no features of images: no weights here"),
    ({"model.backbone": f"{OWN}NoModule"}, "has no torch.nn.Module NoModule"),
    ({"model.backbone": f"{OWN}Sequences"}, "its features have shape [2, 12, 3136]"),
    ({"model.backbone": f"{OWN}Tied"}, "are one tensor"),
    ({"model.backbone": "levit_128s", "model.drop_path": "0"}, "levit_128s can't take images of"),
    ({"teacher.batch_norm": "frozen"}, "give model.init_from, or take reference or ema"),
]


@pytest.mark.parametrize(("changes", "message"), REFUSED)
def test_a_refused_network_leaves_no_run_folder(changes, message, root, tmp_path):
    own = {**RESNET, **changes}
    if "model.backbone" in changes:
        own = {**own, "model.arguments": "{}", "model.drop_path": "0"}
    (said,) = run_on_ranks(train_tiny, root, tmp_path / "run", world=1, changes=own)
    assert said is not None and message in said and "\n" not in said
    assert not (tmp_path / "run").exists()
