"""Frames to a file, one at a time: mp4, animated GIF, or a folder of PNGs. It is there complete or not at all."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import IO, Any, Protocol

import numpy as np
from PIL import GifImagePlugin, Image

from dino_ds.tools.clip import import_av


class Writer(Protocol):
    """Takes frames of equal size, uint8 (h, w, 3)."""

    def add(self, frame: np.ndarray) -> None: ...


@contextlib.contextmanager
def clip_writer(path: Path, form: str, fps: float) -> Iterator[Writer]:
    """`form` is a key of FORMS. What was begun is removed after an error. Raises OSError; ConfigError without PyAV."""
    partial = path.with_name(f".{path.stem}.partial{path.suffix}")
    try:
        with FORMS[form](partial, fps) as writer:
            yield writer
        os.replace(partial, path)
    finally:
        if partial.is_dir():
            shutil.rmtree(partial, ignore_errors=True)
        partial.unlink(missing_ok=True)


class _Mp4:
    """H.264 as everything plays it, MPEG-4 where FFmpeg was built without."""

    def __init__(self, path: Path, fps: float) -> None:
        self._av = import_av()
        self._path, self._rate = path, Fraction(fps).limit_denominator(1001)
        self._stream: Any = None

    def __enter__(self) -> _Mp4:
        self._container = self._av.open(str(self._path), "w")
        return self

    def add(self, frame: np.ndarray) -> None:
        # Colours are at half the resolution: odd sides get their last row or column twice.
        even = np.pad(frame, ((0, frame.shape[0] % 2), (0, frame.shape[1] % 2), (0, 0)), mode="edge")
        if self._stream is None:
            codec = "libx264" if "libx264" in self._av.codecs_available else "mpeg4"
            self._stream = self._container.add_stream(codec, rate=self._rate)
            self._stream.height, self._stream.width = even.shape[:2]
            self._stream.pix_fmt = "yuv420p"
            self._stream.options = {"crf": "18"} if codec == "libx264" else {"qscale": "3"}
        picture = self._av.VideoFrame.from_ndarray(np.ascontiguousarray(even), format="rgb24")
        self._container.mux(self._stream.encode(picture))

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None and self._stream is not None:
            self._container.mux(self._stream.encode(None))
        self._container.close()


class _Gif:
    """256 colours a frame, for ever. Pillow's own writer keeps all frames until the last one is there."""

    def __init__(self, path: Path, fps: float) -> None:
        self._path, self._fps = path, fps
        self._frames = 0
        self._file: IO[bytes]

    def __enter__(self) -> _Gif:
        self._file = self._path.open("wb")
        return self

    def add(self, frame: np.ndarray) -> None:
        image = Image.fromarray(frame).quantize(256)
        if not self._frames:
            blocks, _ = GifImagePlugin.getheader(image.copy(), info={"loop": 0, "optimize": False})
            self._file.writelines(blocks)
        # A frame lasts hundredths of a second: rounded so that the clip as a whole keeps its time.
        begin, end = (round(100 * frames / self._fps) for frames in (self._frames, self._frames + 1))
        duration = 10 * max(end - begin, 1)
        self._file.writelines(GifImagePlugin.getdata(image, duration=duration, include_color_table=True))
        self._frames += 1

    def __exit__(self, *_: object) -> None:
        self._file.write(b";")
        self._file.close()


class _Pngs:
    def __init__(self, path: Path, fps: float) -> None:
        self._path, self._frames = path, 0

    def __enter__(self) -> _Pngs:
        self._path.mkdir()
        return self

    def add(self, frame: np.ndarray) -> None:
        Image.fromarray(frame).save(self._path / f"{self._frames:06d}.png")
        self._frames += 1

    def __exit__(self, *_: object) -> None:
        pass


FORMS: dict[str, Any] = {"mp4": _Mp4, "gif": _Gif, "png": _Pngs}
