"""Files of any number of bands: TIFF, NumPy, DICOM: what they store is what training gets, or a line says why not."""

from __future__ import annotations

import io
import re
import sys

import numpy as np
import pytest
import tifffile
from PIL import Image

from dino_ds.config.loading import load_recipe
from dino_ds.data import scientific
from dino_ds.data.decode import EncodedImage
from dino_ds.data.images import UnreadableImage
from dino_ds.data.normalization import with_image_settings
from dino_ds.errors import ConfigError, DataError
from tests.data.files import Files, encoded, npy, photo, tif, written

BANDS = np.random.default_rng(0).integers(0, 4000, (40, 48, 6)).astype(np.uint16)
FIRST = np.ascontiguousarray(np.moveaxis(BANDS, -1, 0))
CONTIG, PLANAR = ({"photometric": "minisblack", "planarconfig": how} for how in ("contig", "separate"))


def stored(data: bytes, wanted: int = 6) -> np.ndarray:
    return EncodedImage(data, "file", 10**6, channels=wanted).values()


def refused(data: bytes, wanted: int = 6, max_pixels: int = 10**6) -> str:
    with pytest.raises(UnreadableImage) as said:
        EncodedImage(data, "file", max_pixels, channels=wanted).values()
    assert len(str(said.value).splitlines()) == 1
    return said.value.reason


LAYOUTS = {
    "interleaved": tif(BANDS, **CONTIG),
    "band after band": tif(FIRST, **PLANAR),
    "interleaved LZW tiles": tif(BANDS, compression="lzw", tile=(16, 16), predictor=True, **CONTIG),
    "bands of deflate": tif(FIRST, compression="zlib", rowsperstrip=7, **PLANAR),
    "zstd": tif(BANDS, compression="zstd", **CONTIG),
    "big endian": tif(BANDS, byteorder=">", **CONTIG),
    "BigTIFF": tif(BANDS, bigtiff=True, **CONTIG),
    "a page a band": tif(FIRST, metadata=None, photometric="minisblack"),
    "a page a band, by tifffile": tif(FIRST),
    "ImageJ": tif(FIRST, imagej=True, metadata={"axes": "CYX"}),
    "OME": tif(FIRST, ome=True, metadata={"axes": "CYX"}),
    "NumPy, bands last": npy(BANDS),
    "NumPy, bands first": npy(FIRST),
    "NumPy by columns": npy(np.asfortranarray(BANDS)),
    "NumPy, big endian": npy(BANDS.astype(">u2")),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_gives_the_bands_last(layout):
    found = stored(LAYOUTS[layout])
    np.testing.assert_array_equal(found, BANDS)
    assert found.dtype == np.uint16 and found.dtype.isnative and found.flags.writeable


@pytest.mark.parametrize("kind", ["u1", "i1", "u2", "i2", "u4", "i4", "f2", "f4", "f8"])
def test_numbers_of_every_type_are_kept(kind):
    values = (BANDS % 120).astype(kind) - np.dtype(kind).type(60)  # unsigned ones wrap
    rgb = {"photometric": "rgb", "byteorder": ">", "compression": "lzw"}
    planes = np.ascontiguousarray(np.moveaxis(values[..., :3], -1, 0))
    for data, expected in (
        (tif(values, **CONTIG), values),
        (npy(values), values),
        (tif(values[..., :3], **rgb), values[..., :3]),
        (tif(planes, planarconfig="separate", **rgb | {"byteorder": "<", "tile": (16, 16)}), values[..., :3]),
        (tif(values[..., 0], byteorder=">", compression="zlib"), values[..., :1]),
    ):
        channels = expected.shape[2]
        found = EncodedImage(data, "file", 10**6, channels=channels)
        assert found.deep == (kind != "u1") and (found.width, found.height) == (48, 40)
        np.testing.assert_array_equal(found.values().reshape(expected.shape), expected)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (tif(BANDS), "40 pages, the first of 6 x 48 pixels: of a volume .* image a file; bands .*='contig'"),
        (tif(FIRST[:5]), "5 pages, the first of 48 x 40 pixels: .* or set model.in_chans to the number of pages"),
        (tif(BANDS.astype("c8"), **CONTIG), "values of type complex64"),
        (npy(BANDS[:6]), "6 x 48 x 6: bands must be the first or the last axis, and fewer than the pixels"),
        (npy(FIRST[None]), r"an array of shape \(1, 6, 40, 48\): an image is \(h, w\), \(h, w, c\) or \(c, h, w\)"),
        (npy(BANDS > 9), "values of type bool"),
        (npy(BANDS)[:-1], "EOF: reading array data, expected 23040 bytes got 23039"),
    ],
)  # fmt: skip
def test_what_is_not_an_image_of_bands_is_said(data, reason):
    assert re.match(reason, refused(data))


def test_pages_are_bands_only_where_so_many_are_wanted():
    """A stack of pages may as well be a volume: no run is told to take its slices as channels without more."""
    volume = Files(tif(np.repeat(FIRST, 3, 0)))
    with pytest.raises(DataError, match=r"can be read; the first is .*18 pages, the first of 48 x 40 pixels: of a"):
        with_image_settings(load_recipe(None, {}), volume)
    with_image_settings(load_recipe(None, {"model.in_chans": "18"}), volume)
    for wanted in (18, None):
        assert EncodedImage(volume.contents[0], "file", None, channels=wanted).channels == 18


def test_sizes_are_checked_before_memory_is_taken():
    """Those that no machine has: tests/hostile/test_fuzz.py."""
    said = "48 x 40 pixels of 6 channels, at most 3839 of 3: 1919 of"
    assert refused(LAYOUTS["interleaved"], max_pixels=3839).startswith(said)
    np.testing.assert_array_equal(EncodedImage(LAYOUTS["interleaved"], "file", 3840, channels=6).values(), BANDS)
    for layout in ("interleaved LZW tiles", "bands of deflate", "a page a band"):
        assert refused(LAYOUTS[layout][: len(LAYOUTS[layout]) * 2 // 3])


def with_tags(data: bytes, **values: int) -> bytes:
    changed, page = bytearray(data), tifffile.TiffFile(io.BytesIO(data)).pages[0]
    for name, value in values.items():
        tag = page.tags[name]
        size = 2 if tifffile.TIFF.DATA_FORMATS[tag.dtype].endswith("H") else 4
        changed[tag.valueoffset : tag.valueoffset + size] = value.to_bytes(size, "little")
    return bytes(changed)


def test_a_missing_codec_is_named(monkeypatch):
    monkeypatch.setattr(scientific, "find_spec", lambda name: None)
    assert refused(LAYOUTS["interleaved LZW tiles"]).endswith("pip install 'dino_ds[images]'")
    np.testing.assert_array_equal(stored(LAYOUTS["interleaved"]), BANDS)
    medical = dicom(GRAY)
    monkeypatch.setitem(sys.modules, "pydicom", None)
    assert refused(medical) == "DICOM files need pydicom: pip install 'dino_ds[images]'"
    with pytest.raises(DataError, match=r"can be read; the first is files/0.png .bands compressed by LZW need"):
        with_image_settings(load_recipe(None, {}), Files(LAYOUTS["interleaved LZW tiles"]))


GRAY = (np.arange(40 * 48).reshape(40, 48) * 2 + 1).astype(np.uint16)
SHALLOW = np.asarray(photo(48, 40))
FOUR = np.dstack([SHALLOW, SHALLOW[..., :1]])


@pytest.mark.parametrize(
    ("data", "wanted", "channels"),
    [
        (encoded(photo(48, 40), "JPEG"), 1, 3),
        (encoded(photo(48, 40).convert("L"), "JPEG"), 1, 1),
        (encoded(Image.fromarray(GRAY), "PNG"), 1, 1),
        (tif(GRAY, compression="lzw"), 3, 3),
        (npy(GRAY[None]), 1, 1),
        (tif(np.dstack([SHALLOW, 255 + 0 * SHALLOW[..., :1]]), photometric="rgb", extrasamples=["unassalpha"]), 3, 3),
        (tif(FOUR, photometric="rgb", extrasamples=["unspecified"]), 3, 4),
        (tif(np.dstack([FOUR, FOUR]), photometric="rgb"), 3, 8),
        (tif(np.moveaxis(SHALLOW.astype(np.uint16), -1, 0), photometric="rgb", planarconfig="separate"), 3, 3),
    ],
)
def test_files_have_the_channels_that_fit(data, wanted, channels):
    image = EncodedImage(data, "file", None, (0, 65535), wanted)
    assert image.channels == channels and image.decode().shape == (40, 48, channels)


def dicom(values: np.ndarray, syntax: str = "1.2.840.10008.1.2.1", **tags: object) -> bytes:
    """A file of one frame, (h, w) or (h, w, 3), by pydicom."""
    pydicom = pytest.importorskip("pydicom")
    found = pydicom.Dataset()
    found.file_meta = pydicom.dataset.FileMetaDataset()
    found.file_meta.TransferSyntaxUID = pydicom.uid.UID("1.2.840.10008.1.2.1")
    found.SOPClassUID, found.SOPInstanceUID = "1.2.840.10008.5.1.4.1.1.2", "1.2.3"
    found.Rows, found.Columns = values.shape[:2]
    found.SamplesPerPixel = values.size // (found.Rows * found.Columns)
    if found.SamplesPerPixel > 1:
        found.PlanarConfiguration = 0
    found.PhotometricInterpretation = "RGB" if found.SamplesPerPixel == 3 else "MONOCHROME2"
    found.BitsAllocated = found.BitsStored = 8 * values.dtype.itemsize
    found.HighBit, found.PixelRepresentation = found.BitsStored - 1, int(values.dtype.kind == "i")
    found.PixelData = values.tobytes()
    for name, value in tags.items():
        setattr(found, name, value)
    if syntax != "1.2.840.10008.1.2.1":
        found.compress(syntax)
    return written(found.save_as, enforce_file_format=True)


def test_dicom_gives_the_values_that_pixels_stand_for():
    ct = {"RescaleSlope": 1, "RescaleIntercept": -1024}
    for data, expected in (
        (dicom(GRAY, **ct), GRAY.astype(np.int32) - 1024),
        (dicom(GRAY.astype(np.int16), **ct), GRAY.astype(np.int32) - 1024),
        (dicom(GRAY, RescaleSlope=0.5, RescaleIntercept=3), (GRAY * 0.5 + 3).astype(np.float32)),
        (dicom(GRAY, BitsStored=12, HighBit=11, PhotometricInterpretation="MONOCHROME1"), 4095 - GRAY),
        (dicom(GRAY.astype("i2"), PhotometricInterpretation="MONOCHROME1"), -1 - GRAY.astype("i2")),
        (dicom(GRAY, "1.2.840.10008.1.2.5"), GRAY),
        (dicom(SHALLOW[..., 0].copy()), SHALLOW[..., 0]),
        (dicom(SHALLOW), SHALLOW),
    ):
        found = stored(data, 1)
        np.testing.assert_array_equal(found, expected)
        assert found.dtype == expected.dtype
    assert EncodedImage(dicom(SHALLOW[..., 0].copy()), "f", None, channels=3).decode().shape == (40, 48, 3)
    with pytest.raises(ConfigError, match=r"int32, values -1023 to 2815; .* give --data.value_range -1023,2815"):
        with_image_settings(load_recipe(None, {}), Files(dicom(GRAY, **ct)))


EMPTY = {"RescaleSlope": None, "RescaleIntercept": ""}


def in_groups(name: str, **numbers: object) -> dict[str, object]:
    """The numbers where enhanced files have them."""
    pydicom = pytest.importorskip("pydicom")
    group, inner = pydicom.Dataset(), pydicom.Dataset()
    for key, value in numbers.items():
        setattr(inner, key, value)
    group.PixelValueTransformationSequence = [inner]
    return {name: [group], "NumberOfFrames": 1}


SHARED, FRAME = "SharedFunctionalGroupsSequence", "PerFrameFunctionalGroupsSequence"
CT = {"RescaleSlope": 2, "RescaleIntercept": -1024}


RESCALED = [
    (EMPTY, 1, 0),
    ({"RescaleSlope": 3, "RescaleIntercept": ""}, 3, 0),
    ({"RescaleIntercept": 7}, 1, 7),
    (in_groups(SHARED, RescaleSlope=9, RescaleIntercept=9) | in_groups(FRAME, **CT), 2, -1024),
    (in_groups(SHARED, **CT) | EMPTY, 2, -1024),
    (in_groups(SHARED, **EMPTY) | CT, 2, -1024),
    ({SHARED: [], FRAME: None, "ModalityLUTSequence": []}, 1, 0),
    (CT | {"WindowCenter": 40, "WindowWidth": 400}, 2, -1024),
]


@pytest.mark.parametrize(("tags", "slope", "intercept"), RESCALED)
def test_rescaling_is_found_wherever_it_may_stand(tags, slope, intercept):
    np.testing.assert_array_equal(stored(dicom(GRAY, **tags), 1), GRAY.astype(np.int32) * slope + intercept)


@pytest.mark.parametrize("head", ["no preamble", "no header", "no header, implicit"])
def test_dicom_without_its_beginning_is_read(head):
    pydicom = pytest.importorskip("pydicom")
    data = dicom(GRAY, **CT)
    if head == "no preamble":
        data = data[132:]
    else:
        found = pydicom.Dataset(pydicom.dcmread(io.BytesIO(data)))
        data = written(pydicom.dcmwrite, found, implicit_vr="implicit" in head, little_endian=True)
    np.testing.assert_array_equal(stored(data, 1), GRAY.astype(np.int32) * 2 - 1024)


BITS = np.arange(40 * 48).reshape(40, 48) % 3 == 0
PACKED = np.packbits(BITS, bitorder="little").tobytes()
ONE_BIT = {"BitsAllocated": 1, "BitsStored": 1, "HighBit": 0, "PixelData": PACKED}


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (dicom(BITS.astype(np.uint8), **ONE_BIT), BITS * 255),
        (dicom(BITS.astype(np.uint8), **ONE_BIT, PhotometricInterpretation="MONOCHROME1"), ~BITS * 255),
        (dicom(SHALLOW[..., 0] >> 4, BitsStored=4, HighBit=3), (SHALLOW[..., 0] >> 4) * 17),
        (tif(FIRST.astype(np.uint8) >> 4, bitspersample=4, **PLANAR), (BANDS.astype(np.uint8) >> 4) * 17),
    ],
)
def test_fewer_bits_than_8_span_0_to_255(data, expected):
    channels = expected.size // BITS.size
    found = EncodedImage(data, "file", None, channels=channels)
    assert not found.deep
    np.testing.assert_array_equal(found.decode(), expected.reshape(40, 48, channels))


@pytest.mark.parametrize(
    ("tags", "reason"),
    [
        ({"BitsStored": 12, "HighBit": 15}, "12 bits up to bit 15 of a DICOM file: write them as its lowest bits"),
        ({"NumberOfFrames": 2, "PixelData": GRAY.tobytes() * 2}, "2 frames in one DICOM file: write one frame a file"),
        ({"PhotometricInterpretation": "PALETTE COLOR"}, "colors as PALETTE COLOR in a DICOM file"),
        ({"PixelData": GRAY.tobytes()[:-200]}, "pixel data"),
        ({"RescaleSlope": 1e9, "RescaleIntercept": 0}, "values that 32 bits can't hold"),
        ({"RescaleSlope": 0, "RescaleIntercept": 5}, "a rescale slope of 0"),
        ({"PatientID": "1.2.840.10008.1.2.1.99"}, "a deflated DICOM file"),
    ],
)
def test_dicom_that_can_not_be_taken_is_said(tags, reason):
    assert reason in refused(dicom(GRAY, **tags), 1)


def test_dicom_of_other_codecs_and_without_images_is_said():
    assert refused(dicom(GRAY).replace(b"1.2.840.10008.1.2.1\0", b"1.2.840.10008.1.2.4.70\0"[:20]), 1)
    assert "without an image" in refused(dicom(GRAY).replace(b"\xe0\x7f\x10\0OW", b"\xe0\x7f\x11\0OW"), 1)
