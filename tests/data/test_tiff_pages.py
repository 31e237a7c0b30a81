"""TIFFs of every layout of pages, color model, number of bits and further channels: the pixels of the image itself, or
a line that names what is not supported."""

from __future__ import annotations

import io
import itertools
import re

import numpy as np
import pytest
import tifffile
from PIL import Image

from dino_ds.config.loading import load_recipe
from dino_ds.data.decode import EncodedImage
from dino_ds.data.images import UnreadableImage, in_channels
from dino_ds.data.normalization import with_image_settings
from dino_ds.errors import DataError
from tests.data.files import PILLOW_READS_MORE, Files, encoded, photo, png16, tif
from tests.data.test_rasters import with_tags
from tests.sample import sampled

RGB = np.asarray(photo(64, 48))
CMYK = np.asarray(photo(64, 48).convert("CMYK"))
GRAY = RGB[..., 0].copy()
PALETTE = np.random.default_rng(0).integers(0, 65536, (3, 256), dtype=np.uint16)
NOT_CONVERTED = r"colors as \w+ of \d+ bits are not converted: write RGB or gray"


def expected_of(bits: int, pixels: np.ndarray) -> np.ndarray:
    return pixels if bits == 8 else pixels.astype(np.uint16) * 257


COLORS = {
    "minisblack": GRAY, "miniswhite": GRAY, "rgb": RGB, "palette": GRAY, "separated": CMYK, "icclab": RGB, "cfa": GRAY,
}  # fmt: skip
"""What is stored, by tifffile's names of the colors."""
STORED = ("minisblack", "miniswhite", "rgb")
SMALL = {"small": True, "subfiletype": 1}
LAYOUTS = {
    "alone": [{}],
    "reduced first": [SMALL, {}],
    "mask first": [SMALL, {}],
    "reduced last": [{}, SMALL],
    "SubIFDs": [{"subifds": 1}, SMALL],
    "tiles, reduced first": [SMALL, {"tile": (16, 16)}],
}
REFUSED = [
    ([{"small": True}, {}], "2 pages, the first of 16 x 12 pixels: of a volume or film write one image"),
    ([{**SMALL, "subifds": 1}, {}], "a TIFF without an image"),
]


def written(color: str, bits: int, layout: str, pages: list[dict]) -> bytes:
    stream, values = io.BytesIO(), expected_of(bits, COLORS[color])
    how = {"photometric": color, "metadata": None} | ({"colormap": PALETTE} if color == "palette" else {})
    with tifffile.TiffWriter(stream) as file:
        for page in pages:
            options = {key: value for key, value in page.items() if key != "small"}
            file.write(np.ascontiguousarray(values[::4, ::4] if "small" in page else values), **how, **options)
    return with_tags(stream.getvalue(), NewSubfileType=4) if layout == "mask first" else stream.getvalue()


def read(data: bytes, channels: int = 3) -> np.ndarray | str:
    try:
        return EncodedImage(data, "file", 10**6, channels=channels).values()
    except UnreadableImage as error:
        return error.reason


@pytest.mark.parametrize(("color", "bits"), [*((color, 8) for color in COLORS), *((color, 16) for color in STORED)])
def test_the_whole_page_is_read_in_every_color(color, bits):
    """Colors that Pillow converts, of 8 bits, it reads from any page."""
    by_pillow = color in ("palette", "separated")
    alone = read(written(color, bits, "alone", [{}]))
    for layout, pages in LAYOUTS.items():
        found = read(written(color, bits, layout, pages))
        if color not in STORED and not by_pillow:
            assert re.fullmatch(NOT_CONVERTED, str(found)), layout
            continue
        if color == "separated":
            np.testing.assert_array_equal(read(written(color, bits, layout, pages), 4), CMYK, layout)
        np.testing.assert_array_equal(in_channels(found, 3), in_channels(alone, 3), layout)
        if color in STORED:
            white = np.iinfo(found.dtype).max
            stored = white - found if color == "miniswhite" else found
            np.testing.assert_array_equal(in_channels(stored, 3)[..., 0], expected_of(bits, GRAY))


@pytest.mark.parametrize(("pages", "said"), REFUSED)
@pytest.mark.parametrize("color", ["rgb", "palette", "minisblack"])
def test_a_page_that_may_be_a_thumbnail_is_not_taken_for_the_image(color, pages, said):
    assert re.match(said, str(read(written(color, 8, "", pages))))


@pytest.mark.parametrize("kind", [{"imagej": True}, {"ome": True}, {"shaped": True}])
@pytest.mark.parametrize("axes", ["ZYX", "TYX", "CYX"])
def test_slices_and_frames_are_no_bands(kind, axes):
    found = read(tif(np.stack([GRAY] * 3), photometric="minisblack", metadata={"axes": axes}, **kind))
    assert isinstance(found, np.ndarray) if axes == "CYX" else "of a volume or film write one image" in found


def test_ycbcr_is_read_unless_it_is_subsampled_and_not_compressed():
    """Of such files Pillow takes subsampled colors for pixels."""
    ycbcr = photo(64, 48).convert("YCbCr")
    assert read(encoded(ycbcr, "TIFF", compression="jpeg")).shape == (48, 64, 3)
    if PILLOW_READS_MORE:
        np.testing.assert_array_equal(read(encoded(ycbcr, "TIFF")), ycbcr.convert("RGB"))
    half = tif(np.zeros((48, 32, 3), np.uint8), photometric="ycbcr", extratags=[(530, "H", 2, (2, 2), True)])
    assert re.fullmatch(NOT_CONVERTED, read(with_tags(half, ImageWidth=64)))  # half as many bytes as three a pixel


@pytest.mark.parametrize(("metadata", "said"), [(None, True), ({"axes": "CYX"}, False)])
def test_three_gray_pages_are_not_taken_for_colors_without_a_word(metadata, said):
    """Unless the file calls them channels."""
    data = tif(np.stack([GRAY] * 3), photometric="minisblack", metadata=metadata)
    notes = with_image_settings(load_recipe(None, {}), Files(data))[1]
    note = "1 images looked at have three gray pages, which are taken as three channels, such as files/0.png: slices"
    assert [text[: len(note)] for text in notes] == [note] * said


VARIED = np.random.default_rng(1).integers(0, 256, (48, 64), dtype=np.uint8)
EDGES = np.where(VARIED < 20, VARIED, np.where(VARIED < 120, 0, 255)).astype(np.uint8)
ALPHAS = {
    "like an image": (VARIED, "its last channel is called alpha and varies like an image"),
    "like an image in a frame of nothing": (np.where(VARIED < 160, 0, VARIED), "its last channel is called alpha"),
    "opaque": (np.full_like(VARIED, 255), None),
    "cut out": (EDGES, None),
    "one glass": (np.full_like(VARIED, 100), None),
}


def with_alpha(form: str, alpha: np.ndarray, base: np.ndarray) -> bytes:
    pixels = np.dstack([base, alpha])
    if form in ("TIFF", "TIFF of 16 bits", "TIFF, premultiplied"):
        kind = "assocalpha" if "pre" in form else "unassalpha"
        how = {"photometric": "rgb" if pixels.shape[2] == 4 else "minisblack", "extrasamples": [kind]}
        return tif(expected_of(16 if "16" in form else 8, pixels), planarconfig="contig", **how)
    if form == "PNG of 16 bits":
        return png16(expected_of(16, pixels))
    return encoded(Image.fromarray(pixels), form, **({"lossless": True, "exact": True} if form == "WEBP" else {}))


FORMS = ["TIFF", "TIFF of 16 bits", "TIFF, premultiplied", "PNG", "PNG of 16 bits", "WEBP", "JPEG2000"]


@pytest.mark.parametrize(("form", "alpha"), sampled(itertools.product(FORMS, ALPHAS)))
def test_a_channel_that_is_called_alpha_is_asked_about_where_it_looks_like_an_image(form, alpha):
    values, said = ALPHAS[alpha]
    data, white = with_alpha(form, values, RGB), 65535 if "16" in form else 255
    found = read(data)
    if said:
        assert str(found).startswith(said)
        with pytest.raises(DataError, match=r"none of the images .* can be read; .*--model\.in_chans 4"):
            with_image_settings(load_recipe(None, {}), Files(data))
    elif "pre" not in form:
        opacity = values[..., None] / 255
        np.testing.assert_allclose(found / white, RGB / 255 * opacity + 1 - opacity, atol=1.5 / 255)
    if (form, alpha) == ("WEBP", "opaque"):  # has no alpha
        return
    with_image_settings(load_recipe(None, {"model.in_chans": "4"}), Files(data))
    np.testing.assert_array_equal(read(data, 4), expected_of(16 if "16" in form else 8, np.dstack([RGB, values])))


@pytest.mark.parametrize(
    ("base", "photometric", "kind"),
    [(RGB, "rgb", "unassalpha"), (GRAY, "minisblack", "unassalpha"), (GRAY, "minisblack", "assocalpha")],
)
def test_alpha_in_a_plane_of_its_own_is_read(base, photometric, kind):
    """Pillow gives one plane of gray and alpha twice."""
    pixels = np.dstack([base, EDGES])
    how = {"planarconfig": "separate", "extrasamples": [kind], "compression": "lzw"}
    data = tif(np.moveaxis(pixels, -1, 0), photometric=photometric, **how)
    np.testing.assert_array_equal(read(data, pixels.shape[2]), pixels)
    found, plain = read(data), read(with_alpha("PNG", EDGES, base))
    np.testing.assert_array_equal(found, plain if photometric == "rgb" else pixels)


LEAST = -3.4028234663852886e38


@pytest.mark.parametrize(
    ("kind", "number", "tile"),
    [("f4", LEAST, {"tile": (16, 16)}), ("i2", -32768, {"compression": "zlib"}), ("u2", 65535, {})],
)
def test_pixels_without_data_are_said(kind, number, tile):
    """GDAL's tag; not where its number is black, or one that the type can't hold."""
    values = (RGB[..., 0].astype(kind) * 3).astype(kind)
    values[:5] = number
    for nodata, bands in itertools.product((number, 0, -12345, 1e300), (1, 5)):
        tag = [(42113, "s", 0, f"{nodata:.17g}", True)]
        pixels = values if bands == 1 else np.dstack([values] * bands)
        found = read(tif(pixels, photometric="minisblack", planarconfig="contig", extratags=tag, **tile), bands)
        if nodata == number:
            assert str(found).startswith(f"{320 * bands} values without data (GDAL's nodata {number:g})")
        else:
            np.testing.assert_array_equal(np.squeeze(found), pixels)
