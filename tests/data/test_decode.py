"""Decoding: every kind of file becomes the right pixels, and a bad one is named before it costs memory."""

from __future__ import annotations

import io
import struct
import zlib

import numpy as np
import pytest
import tifffile
from PIL import Image

from dino_ds.data import decode
from dino_ds.data.decode import EncodedImage
from dino_ds.data.images import PILLOW, UnreadableImage
from dino_ds.data.multicrop import largest_shrink, resize_crop, shrunk_box
from tests.data.files import ORANGE, decode_rgb, encoded, photo, png_chunk

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
        "premultiplied gray and alpha": (stream.getvalue(), (200,) * 3),
    }


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


@pytest.mark.parametrize("form", ["JPEG", "PNG", "GIF", "WEBP", "TIFF", "BMP"])
def test_files_that_are_cut_are_unreadable(form):
    """Other damage: tests/hostile."""
    data = encoded(photo(61, 45), form)
    for cut in (1, 4, 20, 200, len(data) // 2):
        with pytest.raises(UnreadableImage) as caught:
            decode_rgb(data[:cut], "file", LIMIT)
        assert str(caught.value).startswith("file (") and "\n" not in str(caught.value)


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
    monkeypatch.setattr(decode, "to_rgb", fail)
    with pytest.raises(UnreadableImage, match="too large for the memory"):
        decode_rgb(data, "file", LIMIT)
    monkeypatch.setattr(decode, "_LITTLE", 2**62)
    with pytest.raises(MemoryError):
        decode_rgb(data, "file", LIMIT)


PHOTO = photo(48, 32)
BAD_EXIF = b"Exif\0\0\xff\xff" + bytes(range(200))
LARGE = bytes(3 << 20)


def png_with(*chunks: bytes, late: bool = False) -> bytes:
    data = encoded(PHOTO, "PNG")
    begin = len(data) - 12 if late else 33
    return data[:begin] + b"".join(chunks) + data[begin:]


def jpeg_with(body: bytes) -> bytes:
    data = encoded(PHOTO, "JPEG")
    return data[:20] + struct.pack(">BBH", 0xFF, 0xE1, len(body) + 2) + body + data[20:]


def text(kind: bytes, content: bytes) -> bytes:
    head = {b"zTXt": b"k\0\0", b"iTXt": b"k\0\1\0\0\0", b"iCCP": b"k\0\0"}[kind]
    return png_chunk(kind, head + zlib.compress(content))


METADATA = {
    **{f"PNG {kind.decode()}": png_with(text(kind, LARGE)) for kind in (b"zTXt", b"iTXt", b"iCCP")},
    "PNG zTXt after the pixels": png_with(text(b"zTXt", LARGE), late=True),
    "PNG EXIF": png_with(png_chunk(b"eXIf", BAD_EXIF[6:])),
    "JPEG EXIF": jpeg_with(BAD_EXIF),
    "JPEG EXIF, cut off": jpeg_with(BAD_EXIF[:9]),
    "WebP EXIF": encoded(PHOTO, "WEBP", lossless=True, exif=BAD_EXIF),
}


@pytest.mark.parametrize("case", METADATA)
def test_pixels_are_those_of_the_plain_file(case):
    form = case.split()[0]
    plain = encoded(PHOTO, form, **({"lossless": True} if form == "WebP" else {}))
    image = EncodedImage(METADATA[case], "file", 10**6)
    assert (image.width, image.height) == PHOTO.size
    np.testing.assert_array_equal(image.decode(), EncodedImage(plain, "file", 10**6).decode())


def test_the_orientation_outlives_other_metadata():
    exif = Image.Exif()
    exif[0x0112] = 6
    data = encoded(PHOTO, "PNG", exif=exif)
    expected = EncodedImage(data, "file", 10**6).decode()
    assert expected.shape[:2] == PHOTO.size
    data = data[:33] + text(b"iCCP", LARGE) + data[33:]
    np.testing.assert_array_equal(EncodedImage(data, "file", 10**6).decode(), expected)
