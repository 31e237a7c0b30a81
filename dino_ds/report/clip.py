"""Clips, frame by frame. Read: a video file, an animated GIF or WebP, images. Written: mp4, animated GIF, PNGs."""

from __future__ import annotations

import contextlib
import glob
import itertools
import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
from PIL import GifImagePlugin, Image, ImageSequence

from dino_ds.basics.durable import discard
from dino_ds.data.base import UnreadableImage
from dino_ds.data.decode import load_image
from dino_ds.data.encoded import NamedFiles
from dino_ds.data.formats import EXTENSIONS
from dino_ds.data.images import PILLOW, to_rgb
from dino_ds.errors import ConfigError, DataError, one_line

IMAGES_FPS = 25.0
"""Rate of a folder of images, which doesn't tell its own."""
_ANIMATED = (".gif", ".webp", ".png", ".apng")
_CONTAINERS = "mov matroska avi mpeg mpegts mpegvideo h264 hevc m4v ivf av1 obu mjpeg flv asf ogg mxf dv yuv4mpegpipe"
"""FFmpeg's names of what is read: others draw text files, or are lists of further files and addresses to open."""

AddFrame = Callable[[np.ndarray], None]
"""Adds the next frame, uint8 (h, w, 3); all have one size."""


@dataclass(frozen=True)
class Clip:
    """`frames()` starts at the first one each time: uint8 (h, w, 3), upright, one in memory at a time. It raises
    DataError where one can't be read; so does `open_clip` where there is none."""

    name: str
    fps: float
    frames: Callable[[], Iterator[np.ndarray]]


def open_clip(path: str) -> Clip:
    """`path` is a file, a folder or a pattern with * ? [. Raises DataError; ConfigError where PyAV is missing."""
    place = os.path.expanduser(path)
    if os.path.isdir(place):
        return _images([entry.path for entry in os.scandir(place)], place)
    if not os.path.lexists(place) and re.search(r"[*?\[]", place):
        return _images(glob.glob(place), place)
    if not os.path.isfile(place):
        raise DataError(f"{path}: there is no such clip; give a video file, a folder or a pattern of images")
    if place.lower().endswith(_ANIMATED):
        return _animation(place)
    if place.lower().endswith(EXTENSIONS):
        return _images([place], place)
    return _video(place)


def survey(clip: Clip, wanted: int) -> tuple[int, list[np.ndarray]]:
    """Number of frames, and `wanted` to twice as many of them, evenly spread (fewer of a shorter clip).

    Raises DataError where there is no frame.
    """
    kept: list[np.ndarray] = []
    count, stride = 0, 1
    for frame in clip.frames():
        if count % stride == 0:
            kept.append(frame)
        count += 1
        if len(kept) > 2 * wanted:
            kept, stride = kept[::2], 2 * stride
    if not count:
        raise DataError(f"{clip.name} has no frames")
    return count, kept


def has_av() -> bool:
    try:
        import_av()
    except ConfigError:
        return False
    return True


def import_av() -> Any:
    """PyAV, which brings FFmpeg along. Raises ConfigError."""
    try:
        import av
    except ImportError:
        raise ConfigError(
            "videos need PyAV: pip install 'dino_ds[video]'; without it there are folders of images and GIF or WebP "
            "in, --format gif and png out"
        ) from None
    av.logging.set_level(av.logging.PANIC)  # what it would print of a broken file, our error says in one line
    return av


def _images(paths: Sequence[str], name: str) -> Clip:
    """A clip of images in the order of their names, in which numbers count as numbers."""
    found = sorted((path for path in paths if path.lower().endswith(EXTENSIONS)), key=_natural)
    if not found:
        raise DataError(f"{name} has no frames: looked for {' '.join(EXTENSIONS)} in {len(paths)} files")

    def frames() -> Iterator[np.ndarray]:
        source, size = NamedFiles(found), None
        for index in range(len(found)):
            try:
                frame = np.asarray(load_image(source, index, None))
            except UnreadableImage as error:
                raise DataError(f"frame {error} can't be read: fix or remove it; frames have 8 bits") from None
            size = size or frame.shape[:2]
            if frame.shape[:2] != size:
                here, first = (f"{wide} x {high}" for high, wide in (frame.shape[:2], size))
                raise DataError(
                    f"frame {found[index]} has {here} pixels, the first one {first}: frames of a clip have one size"
                )
            yield frame

    return Clip(name, IMAGES_FPS, frames)


def _natural(path: str) -> list[Any]:
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"([0-9]+)", path)]


def _animation(path: str) -> Clip:
    """An animated image, read by Pillow."""

    def frames() -> Iterator[np.ndarray]:
        with Image.open(path, formats=[*PILLOW]) as image:
            for frame in ImageSequence.Iterator(image):
                yield np.asarray(to_rgb(frame.copy()))

    try:
        with Image.open(path, formats=[*PILLOW]) as image:
            milliseconds = float(image.info.get("duration") or 0)
    except Exception as error:  # decoders raise anything on broken files
        raise _broken(path, 0, error) from None
    return Clip(path, 1000 / milliseconds if milliseconds else IMAGES_FPS, lambda: _counted(path, frames(), Exception))


def _video(path: str) -> Clip:
    av = import_av()
    allowed = {"format_whitelist": _CONTAINERS.replace(" ", ","), "protocol_whitelist": "file"}

    def frames() -> Iterator[np.ndarray]:
        with av.open(path, options=allowed) as container:
            if not container.streams.video:
                raise DataError(f"{path} has no video in it")
            container.streams.video[0].thread_type = "AUTO"
            for frame in container.decode(video=0):
                # Phones write what they see and how they were held.
                yield np.ascontiguousarray(np.rot90(frame.to_ndarray(format="rgb24"), frame.rotation // 90))

    try:
        with av.open(path, options=allowed) as container:
            rate = container.streams.video[0].average_rate if container.streams.video else None
    except av.ArgumentError:
        raise DataError(f"{path} is not a video: it must be one of FFmpeg's {_CONTAINERS}") from None
    except av.FFmpegError as error:
        raise _broken(path, 0, error) from None
    return Clip(path, float(rate) if rate else IMAGES_FPS, lambda: _counted(path, frames(), av.FFmpegError))


def _counted(path: str, frames: Iterator[np.ndarray], errors: type[Exception]) -> Iterator[np.ndarray]:
    """The frames; one of the errors becomes a DataError with the frame's number."""
    index = 0
    try:
        for frame in frames:
            yield frame
            index += 1
    except errors as error:
        raise _broken(path, index, error) from None


def _broken(path: str, index: int, error: Exception) -> DataError:
    return DataError(f"{path} can't be read at frame {index}: {getattr(error, 'strerror', None) or one_line(error)}")


@contextlib.contextmanager
def clip_writer(path: Path, form: str, fps: float) -> Iterator[AddFrame]:
    """A writer of frames; `form` is a key of FORMS. An unfinished file is removed after an error.

    Raises OSError, or ConfigError without PyAV.
    """
    partial = path.with_name(f".{path.stem}.partial{path.suffix}")
    try:
        with FORMS[form](partial, fps) as add:
            yield add
        os.replace(partial, path)
    finally:
        discard(partial)


@contextlib.contextmanager
def _mp4(path: Path, fps: float) -> Iterator[AddFrame]:
    """H.264 as everything plays it, MPEG-4 where FFmpeg was built without."""
    av = import_av()
    codec, options = ("libx264", {"crf": "18"}) if "libx264" in av.codecs_available else ("mpeg4", {"qscale": "3"})
    with av.open(str(path), "w") as container:
        stream = container.add_stream(codec, rate=Fraction(fps).limit_denominator(1001))
        stream.pix_fmt, stream.options = "yuv420p", options

        def add(frame: np.ndarray) -> None:
            # Colors are at half the resolution: odd sides get their last row or column twice.
            even = np.pad(frame, ((0, frame.shape[0] % 2), (0, frame.shape[1] % 2), (0, 0)), mode="edge")
            if not stream.is_open:
                stream.height, stream.width = even.shape[:2]
            container.mux(stream.encode(av.VideoFrame.from_ndarray(np.ascontiguousarray(even), format="rgb24")))

        yield add
        container.mux(stream.encode(None))


@contextlib.contextmanager
def _gif(path: Path, fps: float) -> Iterator[AddFrame]:
    """256 colors a frame, for ever. Pillow's own writer keeps all frames until the last one is there."""
    numbers = itertools.count()
    with path.open("wb") as file:

        def add(frame: np.ndarray) -> None:
            image, number = Image.fromarray(frame).quantize(256), next(numbers)
            if not number:
                blocks, _ = GifImagePlugin.getheader(image.copy(), info={"loop": 0, "optimize": False})
                file.writelines(blocks)
            # A frame lasts hundredths of a second: rounded so that the clip as a whole keeps its time.
            begin, end = (round(100 * frames / fps) for frames in (number, number + 1))
            duration = 10 * max(end - begin, 1)
            file.writelines(GifImagePlugin.getdata(image, duration=duration, include_color_table=True))

        yield add
        file.write(b";")


@contextlib.contextmanager
def _pngs(path: Path, fps: float) -> Iterator[AddFrame]:
    numbers = itertools.count()
    path.mkdir()
    yield lambda frame: Image.fromarray(frame).save(path / f"{next(numbers):06d}.png")


FORMS = {"mp4": _mp4, "gif": _gif, "png": _pngs}
