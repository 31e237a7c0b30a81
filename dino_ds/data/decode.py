"""Formats of image files, and the decoding of their bytes to upright pixels by the fastest decoder, within a limit."""

from __future__ import annotations

import io
import itertools
import os
import re
import struct
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
import simplejpeg
from PIL import Image, ImageFile, PngImagePlugin
from PIL.TiffImagePlugin import TiffImageFile

from dino_ds.basics.files import opened
from dino_ds.basics.ranges import READ, loading_range
from dino_ds.config.fields import ARCHIVES, HDF5
from dino_ds.data import images
from dino_ds.data.images import PILLOW, WITH_ALPHA, Source, UnreadableImage, ValueRange, in_channels, to_unit
from dino_ds.data.listing import printable
from dino_ds.data.scientific import DICOM, NPY, TIFF, Raster, check_nodata
from dino_ds.errors import one_line

_READERS = (NPY, DICOM, TIFF)
"""Formats that Pillow can't read, or only in part; the others are lines of `images.PILLOW`."""
ENDINGS = PILLOW | {reader.name: reader.endings for reader in _READERS}
"""Endings of the files of each format, the usual one first."""
EXTENSIONS = tuple(itertools.chain.from_iterable(ENDINGS.values()))  # endings of all image files
_SIDE_FILES = tuple(  # endings of files about images, which are ignored without a note
    b".txt .json .jsonl .csv .tsv .xml .yaml .yml .toml .ini .cfg .md .rst .html .htm .css .js .pdf .log .lst .cls "
    b".pyd .py .ipynb .sh .pkl .pth .pt .safetensors .mat .db .sha256 .md5 .lock .xmp .aae .thm .url readme license "
    b"makefile dicomdir".split()
)
_ENDING = re.compile(rb"\.[^./]*[^\d./][^./]*$")  # an ending; the names of DICOM files may end in numbers
_PILLOW_HEADS = re.compile(  # first bytes of the formats that Pillow reads, except TIFF
    rb"(?s)\xff\xd8\xff|\x89PNG\r\n\x1a\n|RIFF.{4}WEBP|BM.{4}\0{4}|GIF8[79]a|P[2356]\s+[\d#]|\0{3}\x0cjP  |"
    rb".{4}ftypavi[fs]"
)
HEAD = 132  # bytes that tell the format of a file: DICOM's mark ends there
_IMAGES = tuple(map(os.fsencode, EXTENSIONS))
_KNOWN = (*_IMAGES, *_SIDE_FILES)
_NAMED = re.compile(rf"(?s)(.+(?:{'|'.join(map(re.escape, HDF5))})):(/.*)|(.+\.tar):([^/:]+)", re.IGNORECASE)
MAX_PIXELS = 50_000_000
"""Pixels of the largest image that is read outside of training: half a gigabyte while it is decoded."""
_ORIENTATION, _WIDTH, _HEIGHT = 0x0112, 256, 257
_LITTLE = 64 * 2**20
_EXIF_TRANSFORMS: dict[int, Callable[[np.ndarray], np.ndarray]] = {
    2: lambda a: a[:, ::-1],
    3: lambda a: a[::-1, ::-1],
    4: lambda a: a[::-1],
    5: lambda a: a.swapaxes(0, 1),
    6: lambda a: np.rot90(a, -1),
    7: lambda a: a[::-1, ::-1].swapaxes(0, 1),
    8: lambda a: np.rot90(a),
}
"""Transform that turns an image upright, by EXIF orientation; 1 and unknown values need none."""


def load_image(
    source: Source, index: int, value_range: ValueRange | None, channels: int = 3
) -> Image.Image | np.ndarray:
    """Image `index` for evaluations: an RGB image of 8 bits, else an array (h, w, c) of uint8 or of float32 in [0, 1].
    The pixels equal those that training gets. Raises UnreadableImage, also for another number of channels."""
    name, limit = source.name(index), MAX_PIXELS if hasattr(source, "read") else None
    image = open_image(source, index, limit, channels=channels)
    check_channels(image, channels, name)
    return prepared(in_channels(image.values(), channels), value_range, name)


def prepared(values: np.ndarray, value_range: ValueRange | None, name: str) -> Image.Image | np.ndarray:
    """Values (h, w, c) in the form that evaluations take: RGB of 8 bits as an image, other channels of 8 bits
    unchanged, deeper values scaled by `to_unit`."""
    if values.dtype != np.uint8:
        return to_unit(values, value_range, name)
    return Image.fromarray(values) if values.shape[2] == 3 else values


def open_image(
    source: Source, index: int, max_pixels: int | None, value_range: ValueRange | None = None, channels: int | None = 3
) -> EncodedImage | DecodedImage:
    """Open image `index`: reads only the header if the source has `read`, else decodes. Raises UnreadableImage.
    channels: number that is wanted, None = all; the image may have another number."""
    read = getattr(source, "read", None)
    if read is not None:
        with loading_range(READ):
            data = read(index)
        return EncodedImage(data, source.name(index), max_pixels, value_range, channels)
    image, name = source.load(index), source.name(index)
    values = images.pillow_values(image, channels or 3, name) if isinstance(image, Image.Image) else np.array(image)
    return DecodedImage(values, name, max_pixels, value_range)


def check_channels(image: EncodedImage | DecodedImage, wanted: int, name: str) -> None:
    """Raises UnreadableImage where the image has another number of channels than `wanted`."""
    if image.channels != wanted:
        raise UnreadableImage(name, f"{image.channels} channels, {wanted} are wanted")


class EncodedImage:
    """An image file of which only the header has been read.

    Args:
        data: the file.
        name: its name in errors.
        max_pixels: limit of pixels, None = any number; every three channels count as one image.
        value_range: black and white of values deeper than 8 bits.
        channels: number that is wanted; None = those of the file, but 3 of RGBA.

    Attributes:
        width, height: size in pixels of the upright image.
        channels: number in the file; a gray file has 1 if 1 is wanted, else 3. Other files that Pillow reads have 3, or
            the number with alpha if that is wanted.
        deep: whether the file has more than 8 bits a channel.
        format, mode: Pillow's names.

    Raises:
        UnreadableImage: the file is no image or too large; found before memory is taken.
    """

    def __init__(
        self,
        data: bytes,
        name: str,
        max_pixels: int | None,
        value_range: ValueRange | None = None,
        channels: int | None = 3,
    ) -> None:
        self._data, self._name, self._range = data, name, value_range
        if not data:
            raise UnreadableImage(name, "empty file")
        with self._naming_errors():
            Image.MAX_IMAGE_PIXELS = None  # Pillow's own limit only warns, up to twice as many
            # Long texts must not cost an image.
            PngImagePlugin.MAX_TEXT_CHUNK = PngImagePlugin.MAX_TEXT_MEMORY = _LITTLE
            self._open(channels, max_pixels)

    def _open(self, wanted: int | None, max_pixels: int | None) -> None:
        image = self._image = open_file(self._data, wanted)
        self.mode, self.format = image.mode, image.format or ""
        orientation: Any = None
        if isinstance(image, Raster):
            self.deep, stored, orientation = image.deep, image.channels, image.orientation
            _check_size(image.width, image.height, self._name, max_pixels, stored)
        else:
            _check_size(image.width, image.height, self._name, max_pixels)
            self.deep, stored = images.is_deep(image, self._data), 1 if images.is_gray(image) else 3
            with suppress(SyntaxError, struct.error):  # a damaged block must not cost the image
                orientation = image.getexif().get(_ORIENTATION)  # some formats decode to find it
            if wanted == (with_alpha := WITH_ALPHA.get(image.mode)) and with_alpha:
                stored = with_alpha
        self._is_gray = stored == wanted == 1
        self.channels = 3 if stored == 1 and wanted != 1 else stored
        # The upright size, and the transform of decoded pixels, so that they are turned once, by us or Pillow.
        (width, height), self._upright = image.size, _EXIF_TRANSFORMS.get(orientation)
        is_on_its_side = self._upright is not None and orientation >= 5
        if isinstance(image, TiffImageFile):  # Pillow turns these; `size` may be from before or after that
            width, height, self._upright = image.tag_v2[_WIDTH], image.tag_v2[_HEIGHT], None
        self.width, self.height = (height, width) if is_on_its_side else (width, height)

    @property
    def is_raster(self) -> bool:
        """Whether the file is one that Pillow can't read, or only in part."""
        return isinstance(self._image, Raster)

    @property
    def pages(self) -> int:
        """Pages that may be channels or slices, as `Raster.pages`."""
        return self._image.pages if isinstance(self._image, Raster) else 1

    def decode(self, shrink: int = 1) -> np.ndarray:
        """Pixels (h, w, channels): uint8 without a value range, float32 in [0, 1] with one, also from 8 bits. shrink:
        factor 1, 2, 4 or 8 by which a JPEG is decoded smaller. Raises UnreadableImage, also for a deep file without a
        range or beyond it."""
        return in_channels(_as_trained(self.values(shrink), self._range, self._name), self.channels)

    def values(self, shrink: int = 1) -> np.ndarray:
        """Upright values: uint8 (h, w, 3); of gray, deep and other files as stored, (h, w) or (h, w, c).
        Raises UnreadableImage."""
        with self._naming_errors():
            values = self._stored(shrink)
            if self.deep:
                check_nodata(self._image, values)
            return values if self._upright is None else np.ascontiguousarray(self._upright(values))

    def _stored(self, shrink: int) -> np.ndarray:
        image = self._image
        if isinstance(image, Raster):
            return image.read()
        if self.deep:
            return images.deep_values(image, self._data, self.channels)
        if image.format == "JPEG" and image.mode in ("RGB", "L"):
            colors = "GRAY" if self._is_gray else "RGB"
            width, height = (-(-side // shrink) for side in image.size)  # as Pillow's: both are libjpeg-turbo
            with suppress(ValueError):  # a file with any fault is left to Pillow
                return simplejpeg.decode_jpeg(self._data, colors, min_width=width, min_height=height, min_factor=shrink)
        if self.channels == WITH_ALPHA.get(image.mode):
            return np.array(image)
        return np.array(image.convert("L") if self._is_gray else images.to_rgb(image))

    @contextmanager
    def _naming_errors(self) -> Iterator[None]:
        try:
            yield
        except UnreadableImage:
            raise
        except Image.UnidentifiedImageError:
            raise UnreadableImage(self._name, images.name_placeholder(self._data) or "not an image") from None
        except MemoryError:
            # The image was too large if a little memory is left; if not, this raises MemoryError again.
            bytearray(_LITTLE)
            raise UnreadableImage(self._name, "too large for the memory") from None
        except Exception as error:  # decoders raise anything from struct.error to SyntaxError on broken files
            reason = str(error).partition("\n")[0]  # the other lines may quote the pixels
            raise UnreadableImage(self._name, one_line(reason or type(error).__name__, 300)) from error


class DecodedImage:
    """Pixels (h, w) or (h, w, c) of a source that has no files, with the interface of EncodedImage."""

    def __init__(self, array: np.ndarray, name: str, max_pixels: int | None, value_range: ValueRange | None) -> None:
        self.height, self.width = array.shape[:2]
        _check_size(self.width, self.height, name, max_pixels)
        self._array, self._name, self._range = array.reshape(self.height, self.width, -1), name, value_range
        self.channels, self.deep = self._array.shape[2], array.dtype != np.uint8

    def values(self) -> np.ndarray:
        return self._array

    def decode(self, shrink: int = 1) -> np.ndarray:
        return _as_trained(self._array, self._range, self._name)


def open_file(data: bytes, channels: int | None) -> Raster | ImageFile.ImageFile:
    """Open an image by its header: as Pillow's image, or as a Raster where Pillow can't read all of the file. Raises
    any Exception for damaged files."""
    reader = next((reader for reader in _READERS if reader.is_kind_of(data)), None)
    return reader.open(data, channels) if reader else Image.open(io.BytesIO(data), formats=[*PILLOW])


def _as_trained(values: np.ndarray, value_range: ValueRange | None, name: str) -> np.ndarray:
    return values if value_range is None and values.dtype == np.uint8 else to_unit(values, value_range, name)


def _check_size(width: int, height: int, name: str, max_pixels: int | None, channels: int = 3) -> None:
    if max_pixels is not None and width * height * max(1, channels / 3) > max_pixels:
        more = f" of {channels} channels" if channels > 3 else ""
        less = f" of 3: {3 * max_pixels // channels} of {channels}" if more else ""
        limit = f"at most {max_pixels}{less} are read (in training data.max_pixels)"
        raise UnreadableImage(name, f"{width} x {height} pixels{more}, {limit}")


def is_image_file(folder: str | bytes, name: str | bytes) -> bool:
    """Whether `is_image` holds for a file on a disk; False for an unreadable one without an ending."""

    def read_head() -> bytes:
        with opened(os.path.join(os.fsencode(folder), os.fsencode(name)), 1 << 62) as file:
            return file.read(HEAD)

    try:
        return is_image(os.fsencode(name), read_head)
    except (OSError, ValueError):  # ValueError: no regular file
        return False


def is_image(name: bytes, read_head: Callable[[], bytes]) -> bool:
    """Whether a file is an image: by its ending, or else its first HEAD bytes. Raises what `read_head` does."""
    if name.lower().endswith(_IMAGES):
        return True
    if name.lower().endswith(_SIDE_FILES) or _ENDING.search(name):
        return False
    head = read_head()
    return bool(_PILLOW_HEADS.match(head)) or any(reader.is_kind_of(head) for reader in _READERS)


def split_part(root: str) -> tuple[str, str | None]:
    """`file.h5:/images` or `file.tar:input.png` -> the file or pattern, and the part that is read, or None."""
    match = _NAMED.fullmatch(root)
    return (match[1] or match[3], match[2] or match[4]) if match else (root, None)


def archives_in(folder: str) -> tuple[list[str], list[bytes]]:
    """ARCHIVES in `folder` and its folders KEY=VALUE, and files left out; [], [] if it has images or other folders."""
    archives, others = list[str](), list[bytes]()
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                if entry.name.startswith("."):
                    continue
                if "=" in entry.name and entry.is_dir(follow_symlinks=False):  # a partition, such as label=cat
                    inside, more = archives_in(entry.path)
                    if not inside:
                        return [], []
                    archives, others = archives + inside, others + more
                elif entry.name.lower().endswith(EXTENSIONS) or entry.is_dir():
                    return [], []
                elif entry.name.lower().endswith(ARCHIVES):
                    archives.append(entry.path)
                elif is_left_out(os.fsencode(entry.name)):
                    others.append(os.fsencode(entry.name))
    except OSError:
        return [], []  # the folder source reports why
    return sorted(archives), others


def is_left_out(name: bytes) -> bool:
    """Whether a file, no image that we read, may be one of another format: it is left out with a note."""
    return not name.lower().endswith(_KNOWN)


def note_left_out(files: Iterable[bytes]) -> list[str]:
    if not (names := sorted(files)):
        return []
    return [
        f"{len(names)} files that can't be read are left out, such as {printable(os.fsdecode(names[0]))}: convert "
        f"images to JPEG, PNG or TIFF, unpack archives ({' '.join(ARCHIVES)} are read if data.root names them); a .txt "
        "list may name images of any ending"
    ]
