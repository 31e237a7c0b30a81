"""Every kind of file in every orientation becomes the same upright pixels for whatever reads it; a bad one is named."""

from __future__ import annotations

import io
import itertools
import struct
import zlib
from collections.abc import Callable

import numpy as np
import pytest
import tifffile
import torch
from PIL import Image, ImageOps

from dino_ds.commands.look_data import FactsOf
from dino_ds.config.crops import dino_groups
from dino_ds.data import decode
from dino_ds.data.batches import LoaderOptions, MultiCropDataset
from dino_ds.data.decode import DecodedImage, EncodedImage, load_image, open_image
from dino_ds.data.encoded import EncodedImages
from dino_ds.data.images import PILLOW, UnreadableImage, to_unit
from dino_ds.data.multicrop import (
    CropParameters,
    EvalCrop,
    MultiCrop,
    cut_crops,
    largest_shrink,
    resize_crop,
    shrunk_box,
)
from dino_ds.data.normalization import Normalization
from dino_ds.evals.features import LabeledImages, Reading
from tests.data.files import ORANGE, PILLOW_READS_MORE, Arrays, Files, decode_rgb, encoded, photo, png16, png_chunk
from tests.sample import sampled

WIDTH, HEIGHT = 44, 28
RANGE = (0.0, 65535.0)
PHOTO = photo(WIDTH, HEIGHT)
RGB, GRAY = np.asarray(PHOTO), np.asarray(PHOTO.convert("L"))
DEEP, DEEP_GRAY = (values.astype(np.uint16) * 257 + 13 for values in (RGB, GRAY))
SIX = np.dstack([DEEP, DEEP[::-1]])
STORED: dict[int, Callable[[np.ndarray], np.ndarray]] = {
    1: lambda a: a, 2: lambda a: a[:, ::-1], 3: lambda a: a[::-1, ::-1], 4: lambda a: a[::-1],
    5: lambda a: a.swapaxes(0, 1), 6: lambda a: np.rot90(a), 7: lambda a: a[::-1, ::-1].swapaxes(0, 1),
    8: lambda a: np.rot90(a, -1),
}  # fmt: skip
"""How an upright picture lies in a file, by the EXIF tag's value."""


def exif(orientation: int) -> Image.Exif:
    tags = Image.Exif()
    tags[0x0112] = orientation
    return tags


def by_pillow(form: str, mode: str, **options: object) -> Callable[[int], bytes]:
    picture = np.asarray(PHOTO.convert("L").convert(mode) if mode in ("1", "LA") else PHOTO.convert(mode))
    palette = PHOTO.convert(mode).getpalette() if mode == "P" else None

    def write(orientation: int) -> bytes:
        lies = np.ascontiguousarray(STORED[orientation](picture))
        image = Image.fromarray(lies) if mode in ("1", "L", "P", "RGB", "RGBA", "LA") else Image.fromarray(lies, mode)
        if palette:
            image.putpalette(palette)
        how = {"tiffinfo": {0x0112: orientation}} if form == "TIFF" else {"exif": exif(orientation)}
        return encoded(image, form, **how, **options)

    return write


def by_tifffile(picture: np.ndarray, **options: object) -> Callable[[int], bytes]:
    def write(orientation: int) -> bytes:
        stream = io.BytesIO()
        tag = [(0x0112, "H", 1, orientation, True)]
        tifffile.imwrite(stream, np.ascontiguousarray(STORED[orientation](picture)), extratags=tag, **options)
        return stream.getvalue()

    return write


def deep_png(picture: np.ndarray) -> Callable[[int], bytes]:
    def write(orientation: int) -> bytes:
        data = png16(np.ascontiguousarray(STORED[orientation](picture)))
        return data[:33] + png_chunk(b"eXIf", exif(orientation).tobytes().removeprefix(b"Exif\0\0")) + data[33:]

    return write


def white_first(picture: np.ndarray) -> Callable[[int], bytes]:
    return by_tifffile(np.iinfo(picture.dtype).max - picture, photometric="miniswhite")


INTERLEAVED = {"planarconfig": "contig", "photometric": "minisblack"}
KINDS: dict[str, Callable[[int], bytes]] = {
    **{f"TIFF {mode}": by_pillow("TIFF", mode) for mode in ("1", "L", "P", "RGB", "RGBA", "LA", "CMYK")},
    **{f"TIFF {mode} LZW": by_pillow("TIFF", mode, compression="tiff_lzw") for mode in ("L", "RGB")},
    "TIFF JPEG": by_pillow("TIFF", "RGB", compression="jpeg"),
    "TIFF of 16 bits": by_tifffile(DEEP_GRAY),
    "TIFF of 16 bits, LZW": by_tifffile(DEEP_GRAY, compression="lzw"),
    "TIFF of 16 bits, RGB": by_tifffile(DEEP, photometric="rgb"),
    "TIFF, white first": white_first(GRAY),
    "TIFF of 16 bits, white first": white_first(DEEP_GRAY),
    "TIFF of 6 bands": by_tifffile(SIX, **INTERLEAVED),
    **{f"PNG {mode}": by_pillow("PNG", mode) for mode in ("1", "L", "P", "RGB", "RGBA", "LA")},
    "PNG of 16 bits": deep_png(DEEP_GRAY),
    "PNG of 16 bits, RGB": deep_png(DEEP),
    **{f"JPEG {mode}": by_pillow("JPEG", mode) for mode in ("L", "RGB", "CMYK")},
    "JPEG, progressive, 4:4:4": by_pillow("JPEG", "RGB", progressive=True, subsampling=0),
    **{f"WebP {mode}": by_pillow("WEBP", mode, lossless=True) for mode in ("RGB", "RGBA")},
    "AVIF": by_pillow("AVIF", "RGB"),
}


def reference(kind: str, data: bytes) -> np.ndarray:
    """(h, w, c) of the upright picture, by Pillow, or of deep files as they were written."""
    if "6 bands" in kind:
        return SIX
    if "16 bits" in kind:
        return DEEP if "RGB" in kind else DEEP_GRAY[:, :, None].repeat(3, 2)
    return np.asarray(ImageOps.exif_transpose(Image.open(io.BytesIO(data))).convert("RGB"))


def twin_of(pixels: np.ndarray) -> Files | Arrays:
    """The same picture, upright and without loss."""
    if pixels.shape[2] == 6:
        return Arrays(pixels)
    return Files(png16(pixels) if pixels.dtype == np.uint16 else encoded(Image.fromarray(pixels), "PNG"))


def trained(source: Files | Arrays, deep: bool, channels: int) -> list[torch.Tensor]:
    options = LoaderOptions(augment="device", value_range=RANGE if deep else None, channels=channels)
    groups = dino_groups(16, (0.4, 1.0), 8, (0.05, 0.4), 2)
    normalization = Normalization.usual(channels)
    dataset = MultiCropDataset(source, MultiCrop(groups, "dino", normalization=normalization), options)
    batches = [dataset.__getitems__([(epoch, 0)]) for epoch in range(2)]
    assert not any(batch.bad for batch in batches)
    return [crop for batch in batches for crop in batch.crops.values()]


@pytest.mark.parametrize(("kind", "orientation"), sampled(itertools.product(KINDS, STORED)))
def test_every_reader_gets_the_same_upright_pixels(kind, orientation):
    channels, deep = 6 if "6 bands" in kind else 3, "16 bits" in kind or "6 bands" in kind
    value_range = RANGE if deep else None
    data = KINDS[kind](orientation)
    source, pixels = Files(data), reference(kind, data)
    twin, shown = twin_of(pixels), to_unit(pixels, RANGE, "") if deep else pixels
    assert pixels.shape == (HEIGHT, WIDTH, channels)

    image = EncodedImage(data, "file", None, value_range, channels)
    assert (image.width, image.height) == (WIDTH, HEIGHT)
    np.testing.assert_array_equal(image.decode(), shown)
    [crop] = cut_crops(image, [CropParameters((7, 5, 23, 21), False)], [16])
    np.testing.assert_array_equal(crop.numpy(), shown[5:21, 7:23])
    for ours, theirs in zip(*(trained(one, deep, channels) for one in (source, twin)), strict=True):
        assert torch.equal(ours, theirs)

    cut = EvalCrop(HEIGHT, Normalization.usual(channels))
    expected = cut(shown if deep else Image.fromarray(pixels))
    reading = Reading(cut, value_range=value_range, channels=channels)
    for found in (cut(load_image(source, 0, value_range, channels)), LabeledImages(source, [0], reading)[0][0]):
        assert torch.equal(found, expected)

    seen = FactsOf(source, 10**6, channels)[0]
    assert (seen.width, seen.height) == (WIDTH, HEIGHT)
    np.testing.assert_allclose(np.broadcast_to(seen.values.mean, channels), pixels.mean((0, 1)))
    if channels == 3:
        np.testing.assert_array_equal(np.asarray(EncodedImages.load(source, 0)), pixels)


@pytest.mark.parametrize("orientation", STORED)
def test_jpegs_decoded_smaller_are_turned_as_whole_ones(orientation):
    upright = photo(40, 25).resize((320, 200), Image.Resampling.BICUBIC)
    stored = Image.fromarray(np.ascontiguousarray(STORED[orientation](np.asarray(upright))))
    data, plain = (encoded(stored, "JPEG", quality=95, **how) for how in ({"exif": exif(orientation)}, {}))
    image, untold = EncodedImage(data, "file", None), EncodedImage(plain, "file", None)
    assert (image.width, image.height) == (320, 200)
    for shrink in (1, 2, 4, 8):
        np.testing.assert_array_equal(STORED[orientation](image.decode(shrink)), untold.decode(shrink))
    boxes = [(0, 0, 320, 200), (240, 20, 320, 84)]
    [whole, small], [theirs, other] = (
        cut_crops(one, [CropParameters(box, False) for box in boxes], [32, 32])
        for one in (image, DecodedImage(np.array(upright), "file", None, None))
    )
    for ours, expected in ((whole, theirs), (small, other)):
        assert (ours.float() - expected.float()).abs().mean() <= 3


def test_other_numbers_of_which_zero_is_white_are_refused():
    for values in (GRAY.astype(np.float32), GRAY.astype(np.int16)):
        data = by_tifffile(values, photometric="miniswhite")(1)
        with pytest.raises(UnreadableImage, match=f"{values.dtype} values of which 0 is white: save them so that 0"):
            EncodedImage(data, "file", None).values()


def of_mode(mode: str) -> Image.Image:
    return PHOTO.convert("L").convert(mode) if mode == "LA" else PHOTO.convert(mode)


@pytest.mark.parametrize("mode", ["RGB", "YCbCr", "HSV", "P", "L", "1", "RGBA", "LA", "CMYK"])
def test_pillow_s_images_of_a_class_are_read_as_files_of_their_mode(mode):
    source, expected = Arrays(of_mode(mode)), np.asarray(of_mode(mode).convert("RGB"))
    for found in (open_image(source, 0, None).decode(), load_image(source, 0, None)):
        np.testing.assert_array_equal(np.asarray(found), expected)
    for ours, theirs in zip(*(trained(one, False, 3) for one in (source, twin_of(expected))), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize(("mode", "channels"), [("L", 1), ("1", 1), ("LA", 2), ("RGBA", 4), ("CMYK", 4)])
def test_so_many_channels_as_pillow_s_image_stores_are_taken_as_they_are(mode, channels):
    stored = np.asarray(of_mode(mode).convert("L") if mode == "1" else of_mode(mode)).reshape(HEIGHT, WIDTH, channels)
    for found in (open_image(Arrays(of_mode(mode)), 0, None, channels=channels).decode(),
                  load_image(Arrays(of_mode(mode)), 0, None, channels)):  # fmt: skip
        np.testing.assert_array_equal(found, stored)


LIMIT = 10**7


def images_with_alpha() -> dict[str, tuple[bytes, tuple[int, int, int]]]:
    """Name -> (file of 8 bits a channel or less, its color as RGB)."""
    color = Image.new("RGB", (8, 8), ORANGE)
    palette = color.quantize(4)
    see_through = Image.new("RGBA", (8, 8), (*ORANGE, 0))
    half = Image.new("LA", (8, 8), (0, 128))
    hole = palette.copy()
    hole.info["transparency"] = palette.getpixel((0, 0))
    opaque, stream = np.full((8, 8, 2), (200, 255), np.uint8), io.BytesIO()
    tifffile.imwrite(stream, opaque, photometric="minisblack", extrasamples=["assocalpha"])
    return {
        "palette with transparency": (encoded(hole, "PNG", transparency=palette.getpixel((0, 0))), (255,) * 3),
        "alpha": (encoded(see_through, "PNG"), (255,) * 3),
        "gray and alpha": (encoded(half, "PNG"), (127,) * 3),
    } | ({"premultiplied gray and alpha": (stream.getvalue(), (200,) * 3)} if PILLOW_READS_MORE else {})


@pytest.mark.parametrize("kind", sorted(images_with_alpha()))
def test_transparency_lies_on_white(kind):
    data, expected = images_with_alpha()[kind]
    image = decode_rgb(data, "file", LIMIT)
    assert image.dtype == np.uint8 and image.shape == (8, 8, 3)
    np.testing.assert_allclose(image[4, 4], expected, atol=2)


@pytest.mark.parametrize("size", [(61, 45), (1, 1), (17, 9)])
@pytest.mark.parametrize("options", [{"subsampling": s, "progressive": s % 2} for s in (0, 1, 2)])
def test_jpegs_are_decoded_as_pillow_does(size, options):
    """To the last bit: `data.augment worker` is the reference's pipeline."""
    for image in (photo(*size), photo(*size).convert("L"), photo(*size).convert("CMYK")):
        data = encoded(image, "JPEG", **options)
        np.testing.assert_array_equal(decode_rgb(data, "file", LIMIT), Image.open(io.BytesIO(data)).convert("RGB"))


def test_an_animation_gives_its_first_frame():
    frames = [Image.new("RGB", (8, 8), color) for color in ("red", "blue")]
    for form in ("GIF", "WEBP", "PNG"):
        data = encoded(frames[0], form, save_all=True, append_images=frames[1:])
        np.testing.assert_allclose(decode_rgb(data, "file", LIMIT)[4, 4], (255, 0, 0), atol=2)


def test_content_of_other_formats_reaches_no_decoder():
    header = b"8BPS" + struct.pack(">H6xHIIHH", 1, 3, 8, 8, 8, 3) + bytes(12) + struct.pack(">H", 0)
    assert Image.open(io.BytesIO(header + bytes(192))).format == "PSD"
    with pytest.raises(UnreadableImage, match="not an image"):
        decode_rgb(header + bytes(192), "photo.jpg", LIMIT)
    for form in PILLOW:
        data = encoded(Image.new("RGB", (16, 16), "red"), form)
        np.testing.assert_allclose(decode_rgb(data, "file", LIMIT)[8, 8], (255, 0, 0), atol=4)


@pytest.mark.parametrize("box,size", [((0, 0, 300, 200), 96), ((13, 7, 113, 90), 32), ((100, 50, 140, 95), 64)])
@pytest.mark.parametrize("channels", [1, 3, 5])
def test_crops_are_resized_as_pillow_does(box, size, channels):
    """Rounding differs by a level, and by a few at hard edges, where Pillow clips between its two passes."""
    image = np.array(photo(300, 200))[:, :, [0, 1, 2, 0, 1][:channels]]
    crop = resize_crop(image, box, size).numpy()
    assert crop.shape == (size, size, channels) and crop.dtype == np.uint8
    for channel in range(channels):
        reference = Image.fromarray(image[:, :, channel]).crop(box).resize((size, size), Image.Resampling.BICUBIC)
        difference = np.abs(crop[:, :, channel].astype(int) - np.asarray(reference))
        assert difference.max() <= 4 and difference.mean() <= 0.1


def test_a_shrunk_photo_gives_the_same_crops():
    """Of a big JPEG no crop needs every pixel. Compared in the box that whole pixels of the small image allow."""
    data = encoded(photo(400, 300).resize((3000, 2250), Image.Resampling.BICUBIC), "JPEG", quality=95)
    boxes, sizes = [(0, 0, 3000, 2250), (500, 333, 1500, 1333), (1001, 77, 1901, 977)], [224, 224, 96]
    assert largest_shrink(boxes, sizes) == 4
    image = EncodedImage(data, "file", LIMIT)
    whole, small = np.array(image.decode()), np.array(EncodedImage(data, "file", LIMIT).decode(4))
    assert small.shape == (563, 750, 3)
    for box, size in zip(boxes, sizes, strict=True):
        there = shrunk_box(box, 750 / 3000, 563 / 2250)
        back = tuple(min(round(edge * 4), limit) for edge, limit in zip(there, (3000, 2250) * 2, strict=True))
        difference = resize_crop(small, there, size).float() - resize_crop(whole, back, size).float()
        assert difference.abs().mean() <= 1


def test_an_image_too_large_for_its_decoder_is_named_and_too_little_memory_for_any_is_not(monkeypatch):
    """A damaged file may claim any size; where even 64 MiB are not there, it is not the file's doing."""

    def fail(*args):
        raise MemoryError

    data = encoded(photo(8, 8), "PNG")
    monkeypatch.setattr(decode.images, "to_rgb", fail)
    with pytest.raises(UnreadableImage, match="too large for the memory"):
        decode_rgb(data, "file", LIMIT)
    monkeypatch.setattr(decode, "_LITTLE", 2**62)
    with pytest.raises(MemoryError):
        decode_rgb(data, "file", LIMIT)


SMALL_PHOTO = photo(48, 32)
BAD_EXIF = b"Exif\0\0\xff\xff" + bytes(range(200))
LARGE = bytes(3 << 20)


def png_with(chunk: bytes) -> bytes:
    data = encoded(SMALL_PHOTO, "PNG")
    return data[:33] + chunk + data[33:]


def jpeg_with(body: bytes) -> bytes:
    data = encoded(SMALL_PHOTO, "JPEG")
    return data[:20] + struct.pack(">BBH", 0xFF, 0xE1, len(body) + 2) + body + data[20:]


def text(kind: bytes, content: bytes) -> bytes:
    head = {b"zTXt": b"k\0\0", b"iTXt": b"k\0\1\0\0\0", b"iCCP": b"k\0\0"}[kind]
    return png_chunk(kind, head + zlib.compress(content))


METADATA = {
    **{f"PNG {kind.decode()}": png_with(text(kind, LARGE)) for kind in (b"zTXt", b"iTXt", b"iCCP")},
    "PNG EXIF": png_with(png_chunk(b"eXIf", BAD_EXIF[6:])),
    "JPEG EXIF": jpeg_with(BAD_EXIF),
    "WebP EXIF": encoded(SMALL_PHOTO, "WEBP", lossless=True, exif=BAD_EXIF),
}


@pytest.mark.parametrize("case", METADATA)
def test_pixels_are_those_of_the_plain_file(case):
    form = case.split()[0]
    plain = encoded(SMALL_PHOTO, form, **({"lossless": True} if form == "WebP" else {}))
    image = EncodedImage(METADATA[case], "file", 10**6)
    assert (image.width, image.height) == SMALL_PHOTO.size
    np.testing.assert_array_equal(image.decode(), EncodedImage(plain, "file", 10**6).decode())


def test_the_orientation_outlives_other_metadata():
    data = encoded(SMALL_PHOTO, "PNG", exif=exif(6))
    expected = EncodedImage(data, "file", 10**6).decode()
    assert expected.shape[:2] == SMALL_PHOTO.size
    data = data[:33] + text(b"iCCP", LARGE) + data[33:]
    np.testing.assert_array_equal(EncodedImage(data, "file", 10**6).decode(), expected)
