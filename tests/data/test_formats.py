"""A kind of file is one file of this room and one line of a list: nothing else of the package knows it."""

from __future__ import annotations

from pathlib import Path

import numpy as np

import dino_ds
from dino_ds.basics.own_code import by_name
from dino_ds.data import formats
from dino_ds.data.decode import EncodedImage
from dino_ds.data.encoded import EncodedImages
from dino_ds.data.raster import Format, Raster
from dino_ds.data.root import ARCHIVES

PACKAGE = Path(dino_ds.__file__).parent


def test_archives_are_sources_of_encoded_images():
    assert all(issubclass(by_name(source), EncodedImages) for source in ARCHIVES.values())


def test_a_format_of_one_s_own_is_read_after_one_line(monkeypatch):
    """Its file has a mark, a width, and as many bytes as pixels."""

    def open_toy(data: bytes, wanted: int | None) -> Raster:
        pixels = np.frombuffer(data, np.uint8, offset=5).reshape(-1, data[4])
        return Raster("TOY", data[4], len(pixels), 1, False, lambda: pixels)

    toy = Format("TOY", (".toy",), lambda data: data.startswith(b"TOY!"), open_toy)
    monkeypatch.setattr(formats, "_OWN", (*formats._OWN, toy))
    image = EncodedImage(b"TOY!\x03" + bytes(range(6)), "a.toy", None, channels=1)
    assert (image.width, image.height, image.format) == (3, 2, "TOY")
    assert image.decode()[:, :, 0].tolist() == [[0, 1, 2], [3, 4, 5]]
