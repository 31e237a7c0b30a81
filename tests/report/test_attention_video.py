"""`dino-ds attention-video` on a made-up clip: what goes in and out, colors that stay, and bad input."""

from __future__ import annotations

import dataclasses
import json
import sys
import weakref

import numpy as np
import pytest
import torch
from PIL import Image

from dino_ds.data.multicrop import to_tensor
from dino_ds.data.normalisation import IMAGENET
from dino_ds.errors import ConfigError, DataError
from dino_ds.models.specs.base import BackboneOptions
from dino_ds.models.vit import VisionTransformer
from dino_ds.options.model import AttentionVideoOptions
from dino_ds.report.attention_video import _shown, run
from dino_ds.report.clip import FORMS, Clip, clip_writer, open_clip, survey
from dino_ds.report.pictures.draw import MASS, head_colors, heat, overlay
from dino_ds.report.pictures.maps import mass_mask
from dino_ds.weights.export import FORMATS
from dino_ds.weights.load import Backbone, load
from tests.weights.test_weights import _backbone


def _frames(count, height=48, width=64):
    """A light square that walks over a dark slope of colors."""
    slope = np.linspace(0, 120, width)[None, :, None] * np.array([1.0, 0.5, 0.2])
    frames = np.repeat(np.broadcast_to(slope, (height, width, 3))[None], count, axis=0).astype(np.uint8)
    for i, frame in enumerate(frames):
        frame[8:24, 4 * i : 4 * i + 16] = (220, 240, 200)
    return list(frames)


def _write(path, form, frames, fps=10.0):
    with clip_writer(path, form, fps) as add_frame:
        for frame in frames:
            add_frame(frame)
    return path


def _two_heads():
    plain = _backbone()
    arch = dataclasses.replace(plain.vit.arch, heads=2)
    vit = VisionTransformer(arch, plain.image_size, BackboneOptions(pos_embed_interpolation="antialias"))
    vit.load_state_dict(plain.vit.state_dict())
    return Backbone(vit, plain.image_size, "a test", {**plain.about, "architecture": dataclasses.asdict(arch)})


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Weights, and a clip as a folder of images."""
    path = tmp_path_factory.mktemp("video")
    FORMATS["safetensors"][0](_two_heads(), path / "teacher.safetensors")
    _write(path / "clip", "png", _frames(6))
    return path


def _run(place, out, **changes):
    values = {"model": str(place), "clip": str(place / "clip"), "format": None, "show": "attention", "head": None}
    run(AttentionVideoOptions(**{**values, "out": out and str(out), "fps": None, "size": 32, "json": True, **changes}))


def _read(path):
    return np.stack(list(open_clip(str(path)).frames()))


@pytest.mark.parametrize(("form", "off"), [("mp4", 4), ("gif", 4), ("png", 0)])
def test_what_is_written_is_read_back(tmp_path, form, off):
    """Odd sides too: in mp4 the last row and column are there twice. PNG is exact; the others on average."""
    frames = np.stack(_frames(7, 45, 63))
    path = _write(tmp_path / ("clip" if form == "png" else f"clip.{form}"), form, frames)
    clip, found = open_clip(str(path)), _read(path)
    assert found.shape == ((7, 46, 64, 3) if form == "mp4" else frames.shape)
    assert np.abs(found[:, :45, :63].astype(float) - frames).mean() <= off
    assert clip.fps == pytest.approx(25 if form == "png" else 10)
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


def test_a_gif_keeps_its_time(tmp_path):
    """Thirty frames a second in hundredths of a second: 3, 4, 3, ... and not always 3."""
    with Image.open(_write(tmp_path / "clip.gif", "gif", _frames(12), 30.0)) as image:
        durations = []
        for index in range(image.n_frames):
            image.seek(index)
            durations.append(image.info["duration"])
    assert sum(durations) == 400 and set(durations) == {30, 40}
    with Image.open(_write(tmp_path / "fast.gif", "gif", _frames(3), 300.0)) as image:
        assert image.info["duration"] == 10  # the shortest that there is; none would be taken for 100


def test_a_clip_that_was_filmed_upright(tmp_path):
    """What a phone writes: frames that lie, and how they are to be turned."""
    av = pytest.importorskip("av")
    frames = _frames(3)
    with av.open(str(tmp_path / "phone.mp4"), "w") as container:
        stream = container.add_stream("libx264", rate=10)
        stream.height, stream.width, stream.pix_fmt = 48, 64, "yuv420p"
        stream.set_display_rotation(90)
        for frame in frames:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        container.mux(stream.encode(None))
    found = _read(tmp_path / "phone.mp4")
    assert found.shape == (3, 64, 48, 3)
    upright = min(np.abs(found - np.rot90(np.stack(frames), k, axes=(1, 2)).astype(float)).mean() for k in (1, 3))
    with av.open(str(tmp_path / "phone.mp4")) as container:
        turn = next(container.decode(video=0)).rotation // 90
    assert np.abs(found - np.rot90(np.stack(frames), turn, axes=(1, 2)).astype(float)).mean() == upright < 6


def test_frames_are_sorted_by_their_numbers(tmp_path):
    for i in (10, 2, 1):
        Image.new("RGB", (8, 8), (i, i, i)).save(tmp_path / f"frame{i}.png")
    (tmp_path / "notes.txt").write_text("no frame")
    for clip in (tmp_path, tmp_path / "frame*.png", tmp_path / "f*"):
        assert _read(clip)[:, 0, 0, 0].tolist() == [1, 2, 10]


def test_each_frame_is_painted(place, tmp_path, capsys):
    """The mean of the heads, patch by patch, over the frame; lightest at one value for all frames."""
    _run(place, tmp_path / "out", format="png")
    said = json.loads(capsys.readouterr().out)
    assert (said["frames"], said["height"], said["width"], said["fps"]) == (6, 256, 320, 25)
    frames = [Image.fromarray(frame) for frame in _frames(6)]
    images = torch.stack([to_tensor(frame.resize((40, 32), 3), IMAGENET) for frame in frames])
    maps = load(place).attention(images).mean(dim=1)
    found = _read(tmp_path / "out")
    for frame, map_, picture in zip(frames, maps, found, strict=True):
        shown = torch.from_numpy(np.asarray(frame.resize((320, 256), 3)) / np.float32(255))
        expected = 255 * heat(shown, map_, float(maps.quantile(0.995)))
        assert np.abs(picture - expected).max() <= 1
    _run(place, tmp_path / "heads", format="png", show="heads")
    maps = load(place).attention(to_tensor(frames[0].resize((40, 32), 3), IMAGENET)[None])[0]
    expected = 255 * overlay(_shown(np.asarray(frames[0]), 256, 320), maps * mass_mask(maps, MASS), head_colors(2))
    assert np.abs(_read(tmp_path / "heads")[0] - expected).max() <= 1


def test_colors_mean_the_same_in_all_frames(place, tmp_path):
    """The same frame, at other places of the clip and among others, is painted the same."""
    frames = _frames(5)
    clip = _write(tmp_path / "clip", "png", [frames[0], *frames, frames[3], frames[0]])
    painted = {}
    for show in ("attention", "heads", "pca"):
        _run(place, tmp_path / show, clip=str(clip), format="png", show=show)
        painted[show] = _read(tmp_path / show).astype(int)
        for one, other in ((0, 1), (0, 7), (4, 6)):
            assert np.abs(painted[show][one] - painted[show][other]).max() <= 1
        assert np.abs(painted[show][0] - painted[show][3]).max() > 20
    assert (
        np.abs(painted["heads"] - painted["pca"]).mean() > 5
        and np.abs(painted["heads"] - painted["attention"]).mean() > 5
    )


@pytest.mark.slow
def test_options(place, tmp_path, monkeypatch):
    for name, changes in (("h0", {"head": 0}), ("mean", {}), ("small", {"size": 16}), ("large", {"size": None})):
        _run(place, tmp_path / f"{name}.gif", **changes)
    sizes = {path.stem: Image.open(path).size for path in tmp_path.glob("*.gif")}
    assert sizes == {"h0": (320, 256), "mean": (320, 256), "small": (360, 240), "large": (336, 256)}
    assert (_read(tmp_path / "h0.gif") != _read(tmp_path / "mean.gif")).mean() > 0.1
    monkeypatch.chdir(tmp_path)
    _run(place, None, fps=5.0)
    assert open_clip("clip_attention.mp4").fps == 5
    _run(place, None, format="gif", fps=5.0, clip="clip_attention.mp4")
    assert open_clip("clip_attention_attention.gif").fps == 5


def test_memory_does_not_grow_with_the_clip():
    """Of a long clip at most twice the sample is alive, evenly spread."""
    alive = weakref.WeakSet()

    class Frame(np.ndarray):
        __hash__ = object.__hash__

    def frames():
        for i in range(1000):
            frame = np.full((1, 1, 3), i).view(Frame)
            alive.add(frame)
            assert len(alive) <= 2 * 16 + 2
            yield frame

    count, kept = survey(Clip("long", 25, frames), 16)
    places = [int(frame[0, 0, 0]) for frame in kept]
    assert count == 1000 and 16 <= len(places) <= 32
    assert len(set(np.diff(places))) == 1 and places[0] == 0 and places[-1] > 900
    assert survey(Clip("short", 25, lambda: iter(_frames(3))), 16)[0] == 3


def test_what_was_begun_is_removed(tmp_path):
    def frames():
        yield _frames(1)[0]
        raise KeyboardInterrupt

    for form in FORMS:
        with pytest.raises(KeyboardInterrupt):
            _write(tmp_path / f"out.{form}", form, frames())
        assert not list(tmp_path.iterdir())


def test_bad_input_is_one_line(place, tmp_path):
    clip = _write(tmp_path / "clip.mp4", "mp4", _frames(4))
    (tmp_path / "half.mp4").write_bytes(clip.read_bytes()[: clip.stat().st_size // 2])
    (tmp_path / "no.mp4").write_bytes(b"nothing of the kind" * 50)
    (tmp_path / "text.txt").write_text("FFmpeg would draw it\n" * 50)
    (tmp_path / "list.mp4").write_text("ffconcat version 1.0\nfile 'clip.mp4'\n")
    (tmp_path / "no.gif").write_bytes(b"GIF89a")
    (tmp_path / "empty").mkdir()
    (tmp_path / "mixed").mkdir()
    (tmp_path / "mixed/1.png").write_bytes(b"broken")
    (tmp_path / "line").mkdir()
    Image.new("RGB", (20000, 2)).save(tmp_path / "line/1.png")
    (tmp_path / "sizes").mkdir()
    for number, size in enumerate(((64, 64), (64, 64), (128, 32))):
        Image.new("RGB", size).save(tmp_path / f"sizes/{number}.png")
    out = tmp_path / "out.mp4"
    for changes, error, words in (
        (
            {"clip": str(tmp_path / "sizes")},
            DataError,
            "2.png has 128 x 32 pixels, the first one 64 x 64",
        ),
        ({"clip": "nowhere.mp4"}, DataError, "nowhere.mp4: there is no such clip"),
        ({"clip": str(tmp_path / "empty")}, DataError, "has no frames: looked for .jpg"),
        ({"clip": str(tmp_path / "*.jpg")}, DataError, "has no frames"),
        ({"clip": str(tmp_path / "half.mp4")}, DataError, "half.mp4 can't be read at frame 0"),
        ({"clip": str(tmp_path / "no.mp4")}, DataError, "no.mp4 can't be read at frame 0: Invalid data"),
        ({"clip": str(tmp_path / "text.txt")}, DataError, "text.txt is not a video: it must be one of"),
        ({"clip": str(tmp_path / "list.mp4")}, DataError, "list.mp4 is not a video"),
        ({"clip": str(tmp_path / "no.gif")}, DataError, "no.gif can't be read at frame 0"),
        ({"clip": str(tmp_path / "mixed")}, DataError, "1.png .not an image. can't be read"),
        ({"clip": str(tmp_path / "line")}, ConfigError, "at most 65536 are painted: give a smaller --size"),
        ({"show": "pca", "head": 0}, ConfigError, "--show pca has all heads"),
        ({"head": 2}, ConfigError, "the model has 2 heads, 0 to 1"),
        ({"size": 33}, ConfigError, "use 32"),
        ({"format": "png", "out": None, "fps": 5.0}, ConfigError, "--fps 5 is for videos"),
        ({"fps": 1e-9}, ConfigError, r"frames a second can't be written: give --fps, 0\.01 to 1000"),
        ({"fps": 1e300}, ConfigError, "frames a second can't be written"),
        ({"out": str(tmp_path / "out.avi")}, ConfigError, "does not end in .mp4"),
        ({"format": "gif"}, ConfigError, "does not end in .gif"),
        ({"out": str(clip)}, ConfigError, "clip.mp4 exists already"),
        ({"out": str(tmp_path / "no.gif/x.mp4")}, ConfigError, "fix --out"),
    ):
        with pytest.raises(error, match=words):
            _run(place, **{"out": str(out), **changes})
    assert not out.exists() and not list(tmp_path.glob(".*"))


def test_without_the_extra(place, tmp_path, monkeypatch):
    """Videos say what to install; animations and folders work on."""
    clip = _write(tmp_path / "clip.mp4", "mp4", _frames(2))
    monkeypatch.setitem(sys.modules, "av", None)
    monkeypatch.chdir(tmp_path)
    for changes in ({"clip": str(clip), "format": "gif"}, {"format": "mp4"}):
        with pytest.raises(ConfigError, match=r"pip install 'dino_ds\[video\]'"):
            _run(place, None, **changes)
    _run(place, None)
    _run(place, tmp_path / "again.gif", clip="clip_attention.gif")
    assert len(_read(tmp_path / "again.gif")) == 6
