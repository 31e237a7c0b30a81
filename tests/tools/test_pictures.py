"""`dino-ds pictures` on a small folder: a file of each kind, and input that can't be shown."""

from __future__ import annotations

import json

import pytest
from PIL import Image

from dino_ds.errors import ConfigError, DataError
from dino_ds.tools.pictures import KINDS, run
from dino_ds.weights.export import FORMATS
from tests.training.harness import image_folder
from tests.weights.test_weights import _backbone


@pytest.fixture
def place(tmp_path):
    FORMATS["safetensors"][0](_backbone(), tmp_path / "teacher.safetensors", {})
    image_folder(tmp_path / "images", 12, 3)
    return tmp_path


def _run(place, **changes):
    values = {"model": str(place), "source": None, "root": str(place / "images"), "out": str(place / "out")}
    run(**{**values, "images": 3, "bank": 12, "size": None, "json": True, **changes})


def test_one_picture_of_each_kind(place, capsys):
    (place / "images/class0/000.png").write_bytes(b"broken")
    _run(place)
    written = json.loads(capsys.readouterr().out)["pictures"]
    assert written == [str(place / "out" / f"{kind}.png") for kind in KINDS]
    assert all(Image.open(path).size[0] > 200 for path in written)


def test_bad_input_is_one_line(place):
    for changes, error, words in (
        ({"size": 33}, ConfigError, "use 32"),
        ({"root": None}, ConfigError, "name images"),
        ({"root": "/nowhere"}, DataError, "/nowhere"),
        ({"images": 1}, DataError, "two or more"),
    ):
        with pytest.raises(error, match=words):
            _run(place, **changes)
    assert not (place / "out").exists()
