"""Malformed images, archives, lists, recipes, command lines and weights: read, or refused by one kind of error."""

from __future__ import annotations

import contextlib
import itertools
import json
import lzma
import os
import re
import shutil
import string
import struct
import tarfile
import tracemalloc
import zlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

import dino_ds
from dino_ds.config.ds_config import CHECKOUT
from dino_ds.config.loading import RECIPES, recipe_options
from dino_ds.config.recipe import Recipe
from dino_ds.data.decode import EncodedImage
from dino_ds.data.images import UnreadableImage
from dino_ds.data.sources import build_source
from dino_ds.errors import CheckpointError, ConfigError, UserError
from dino_ds.options.commands import COMMANDS
from dino_ds.planning.doctor import read_hostfile
from dino_ds.weights.sidecar import read_sidecar
from tests.data.files import decode_rgb, encoded, npy, png_chunk, png_of, tar, tif
from tests.data.test_parquet import write
from tests.data.test_rasters import BANDS, CONTIG, GRAY, LAYOUTS, dicom, with_tags
from tests.hostile.guard import bounded, command, examples, raised_by
from tests.run.harness import image_folder, train_alone
from tests.sample import sampled

pytestmark = pytest.mark.faults

NASTY = [
    "\0", "\x1b[2J", "\u202e", "\u2028", "\ud7ff", "﻿", "\t", "\r", "\n", " ", '"', "'", "{", "}", "[", "]", ":", ",",
    "#", "&a ", "*a", "!!python/object/apply:os.system ['true']", "<<: *a", "---\n", "...", "%", "|", ">", "../", "~",
    "-", "--", "=", "$(touch canary)", "`touch canary`", ";", "1e999", "-1", "0", "NaN", "Infinity", "null", "none",
    "true", "9" * 5000, "0x", "1_000", "é" * 50, "x" * 5000, "[" * 3000, "{a: " * 300,
]  # fmt: skip
"""Pieces that have troubled parsers."""


def encode(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


nasty = st.one_of(st.sampled_from(NASTY), st.text(max_size=20))


@st.composite
def broken_text(draw: st.DrawFn, whole: str) -> str:
    """`whole` with one to three faults."""
    text = whole
    for _ in range(draw(st.integers(1, 3))):
        begin = draw(st.integers(0, len(text)))
        part = text[begin : begin + draw(st.integers(0, 12))]
        new = draw(st.one_of(st.sampled_from(["", part * 2, part[::-1]]), nasty))
        text = text[:begin] + new + text[begin + len(part) :]
    return text


@st.composite
def broken_bytes(draw: st.DrawFn, whole: bytes) -> bytes:
    """`whole` with one to three faults: cut off, bits flipped, parts overwritten, doubled or taken out."""
    data = bytearray(whole)
    for _ in range(draw(st.integers(1, 3))):
        if not data:
            break
        # The beginning holds what a parser believes.
        near = min(len(data) - 1, draw(st.sampled_from([16, 64, 600, len(data) - 1])))
        begin, length = draw(st.integers(0, near)), draw(st.integers(1, 16))
        part = data[begin : begin + length]
        flipped = bytes([part[0] ^ 1 << draw(st.integers(0, 7))]) + part[1:]
        random = draw(st.binary(min_size=1, max_size=16))
        new = draw(st.sampled_from([None, flipped, random, part * 2, b"", b"\xff" * length, b"\0" * length]))
        data[begin : len(data) if new is None else begin + length] = new or b""
    return bytes(data)


MAX_PIXELS = Recipe().data.max_pixels
_EXIF = b"Exif\0\0MM\0*\0\0\0\x08\0\1\1\x12\0\3\0\0\0\1\0\6\0\0"
_PICTURE = Image.fromarray(np.random.default_rng(0).integers(0, 256, (12, 16, 3), dtype=np.uint8))
IMAGES = {
    **{form: encoded(_PICTURE, form) for form in ("JPEG", "PNG", "WEBP", "GIF", "BMP", "PPM")},
    "TIFF": encoded(_PICTURE, "TIFF", compression="tiff_lzw"),
    "progressive JPEG": encoded(_PICTURE, "JPEG", progressive=True, exif=_EXIF),
    "oriented TIFF": encoded(_PICTURE, "TIFF", tiffinfo={0x0112: 6}),
}


def decode(data: bytes, channels: int = 3) -> np.ndarray | None:
    with bounded():
        try:
            if channels == 3:
                return decode_rgb(data, "x", MAX_PIXELS)
            return EncodedImage(data, "x", MAX_PIXELS, (-1e9, 1e9), channels).decode()
        except UnreadableImage:
            return None


RLE = "1.2.840.10008.1.2.5"
RASTERS = {
    **{name: LAYOUTS[name] for name in ("interleaved LZW tiles", "bands of deflate", "ImageJ", "NumPy, bands last")},
    "pages": LAYOUTS["a page a band, by tifffile"],
    "oriented TIFF of 16 bits": tif(GRAY, photometric="miniswhite", extratags=[(0x0112, "H", 1, 6, True)]),
    "DICOM": dicom(GRAY, RescaleSlope=1, RescaleIntercept=-9),
    "DICOM of run lengths": dicom(GRAY, RLE),
}


@pytest.mark.parametrize("form", [*IMAGES, *RASTERS])
def test_broken_images(form):
    whole = IMAGES.get(form) or RASTERS[form]
    channels = 3 if form in IMAGES else 1 if "DICOM" in form or "oriented" in form else 6

    @examples(8)
    @given(data=broken_bytes(whole))
    def check(data):
        pixels = decode(data, channels)
        assert pixels is None or (pixels.dtype == (np.uint8 if form in IMAGES else np.float32) and pixels.ndim == 3)

    turned = form in ("progressive JPEG", "oriented TIFF", "oriented TIFF of 16 bits")
    height, width = (12, 16) if form in IMAGES else (40, 48)
    assert decode(whole, channels).shape == ((width, height) if turned else (height, width)) + (channels,)
    check()


def png(width: int, height: int, bits: int = 1, color: int = 0, rows: bytes | None = None) -> bytes:
    """A PNG of zeros, or one that only says that it is so large."""
    if rows is None:
        rows = zlib.compress(bytes((width * bits + 7) // 8 + 1) * height, 9)
    return png_of(width, height, bits, color, rows)


def _text_bomb() -> bytes:
    """A PNG whose compressed comment unpacks to 20 MB."""
    comment = b"c\0\0" + zlib.compress(bytes(20 << 20), 9)
    whole = png(4, 4)
    return whole[:33] + png_chunk(b"zTXt", comment) + whole[33:]


BOMBS = {
    "PNG of 100 megapixels in 12 kB": lambda: png(10_000, 10_000),
    "PNG of 900 megapixels": lambda: png(30_000, 30_000, rows=zlib.compress(bytes(30_000))),
    "PNG of 2^31 x 2^31": lambda: png(2**31 - 1, 2**31 - 1, rows=b""),
    "PNG with a comment of 20 MB": _text_bomb,
    "PNG that is all header": lambda: png(64, 64, rows=b""),
    "PNG whose data go on": lambda: png(4, 4, rows=zlib.compress(bytes(20 << 20), 9)),
    "JPEG of 65,500 x 65,500": lambda: IMAGES["JPEG"].replace(b"\0\x0c\0\x10\3", b"\xff\xdc\xff\xdc\3", 1),
    "GIF of 65,535 x 65,535": lambda: b"GIF89a\xff\xff\xff\xff" + IMAGES["GIF"][10:],
    "BMP of negative size": lambda: IMAGES["BMP"][:18] + struct.pack("<ii", -(2**31), 2**31 - 1) + IMAGES["BMP"][26:],
    "PPM of 10^9 x 10^9": lambda: b"P6 1000000000 1000000000 255\n",
    "EPS, which Pillow gives to Ghostscript": lambda: b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n",
    "an archive": lambda: b"PK\3\4" + bytes(100),
    "SVG": lambda: b'<svg xmlns="http://www.w3.org/2000/svg"><script>alert(1)</script></svg>',
    "a picture format that names another file": lambda: b"\nP7\n#FILE:/etc/passwd\n",
}  # fmt: skip


RASTER_BOMBS = {
    "NumPy of 10^9 x 10^9": lambda: npy(BANDS)[:128].replace(b"(40, 48, 6), ", b"(10**9,10**9)"),
    "TIFF of 2^32 x 2^32": lambda: with_tags(tif(BANDS, **CONTIG), ImageWidth=2**32 - 1, ImageLength=2**32 - 1),
    "TIFF of 65,535 bands": lambda: with_tags(tif(BANDS, **CONTIG), SamplesPerPixel=2**16 - 1),
    "TIFF of tiles of 2^31 x 2^31": lambda: with_tags(
        tif(BANDS, tile=(16, 16), compression="lzw", **CONTIG), TileWidth=2**31, TileLength=2**31
    ),
    "TIFF of a million pages": lambda: tif(BANDS[..., 0], imagej=True).replace(b"images=1", b"images=9" * 9),
    "TIFF whose pages lie in a circle": lambda: b"II*\0\x08\0\0\0" + struct.pack("<HI", 0, 8),
    "TIFF of a million pages of nothing": lambda: (
        b"II*\0\x08\0\0\0" + b"".join(struct.pack("<HI", 0, 14 + 6 * page) for page in range(10**6))
    ),
    "DICOM of 65,535 x 65,535": lambda: dicom(GRAY, Rows=65535, Columns=65535),
    "DICOM that inflates": lambda: dicom(GRAY).replace(b"1.2.840.10008.1.2.1\0", b"1.2.840.10008.1.2.1.99\0"),
}


@pytest.mark.parametrize("name", [*BOMBS, *RASTER_BOMBS])
def test_bombs(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    pixels = decode(BOMBS[name]()) if name in BOMBS else decode(RASTER_BOMBS[name](), channels=6)
    assert pixels is None or pixels.size < 1 << 22
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("kind", ["lzw", "packbits", "lzma"])
def test_a_strip_of_zeros_that_goes_on_takes_no_more_memory_than_the_image(kind):
    more, codecs = 32 << 20, pytest.importorskip("imagecodecs")
    zeros = {"lzw": codecs.lzw_encode, "lzma": lzma.compress, "packbits": lambda data: b"\x81\0" * (len(data) // 128)}
    whole, strip = tif(BANDS, compression=kind, rowsperstrip=40, **CONTIG), zeros[kind](bytes(more))
    data = with_tags(whole + strip, StripOffsets=len(whole), StripByteCounts=len(strip))
    tracemalloc.start()
    decode(data, channels=6)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < more / 4


def read_all(root: Path) -> str | None:
    def work() -> None:
        source = build_source("folder", str(root), "train", False)
        assert source.labels is None or len(source.labels) == len(source)
        for index in range(min(len(source), 50)):
            assert source.name(index).isprintable()
            with contextlib.suppress(UnreadableImage):
                source.load(index)

    return raised_by(work, UserError)


def tar_of(folder: Path) -> bytes:
    images = ((form[-4:].strip().lower(), data) for form, data in IMAGES.items())
    files = ({f"a/{i}.{ending}": data, f"a/{i}.cls": b"%d" % (i % 2)} for i, (ending, data) in enumerate(images))
    return tar(folder / "x.tar", *files).read_bytes()


ROOTS = [
    "{0..9999999}", "{a,b}" * 30, "{a," * 400 + "}" * 400, "[" * 500, "**/**/**/*.tar", "/dev/zero", "/proc/self/mem",
    "/dev", "file:///etc", "pipe:touch canary", "s3://x", "~nobody/x", "~" * 300, "\0", "a\0b", "x" * 5000, "{1..2",
    "/etc/passwd", "/proc/self/fd", "$(touch canary)", "`touch canary`.tar", "|touch canary", "", " ", ".", "*",
]  # fmt: skip


@pytest.mark.parametrize("root", ROOTS, ids=lambda root: ascii(root)[:20])
def test_strange_roots(root, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("dino_ds.data.remote._OPEN_SECONDS", 1.0)
    assert read_all(root) is not None
    assert not list(tmp_path.iterdir())


def list_of(folder: Path) -> bytes:
    for number, data in enumerate(IMAGES.values()):
        (folder / f"{number}.png").write_bytes(data)
    return "".join(f"{i}.png\tclass {i % 2}\n" for i in range(8)).encode()


def parquet_of(folder: Path) -> bytes:
    rows = [{"bytes": data, "path": None} for data in IMAGES.values()]
    return write(folder / "x.parquet", {"image": rows, "label": [i % 2 for i in range(len(rows))]}).read_bytes()


def hdf5_of(folder: Path) -> bytes:
    h5py = pytest.importorskip("h5py")
    with h5py.File(folder / "x.h5", "w") as file:
        images = np.arange(2 * 8 * 8 * 3, dtype=np.uint8).reshape(2, 8, 8, 3)
        file.create_dataset("images", data=images, chunks=(1, 8, 8, 3), compression="gzip", fletcher32=True)
    return (folder / "x.h5").read_bytes()


def _bomb_in_a_tar(path: Path) -> None:
    """A name of a gibibyte, in a file with holes."""
    info = tarfile.TarInfo("././@LongLink")
    info.type, info.size = tarfile.GNUTYPE_LONGNAME, 1 << 30
    path.write_bytes(info.tobuf(tarfile.GNU_FORMAT))
    os.truncate(path, (1 << 30) + 10240)


def _bomb_in_parquet(path: Path) -> None:
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    rows = 1 << 20
    table = pyarrow.table({"image": pyarrow.nulls(rows, pyarrow.binary()), "label": np.zeros(rows, np.int64)})
    with parquet.ParquetWriter(path, table.schema) as writer:
        for _ in range(128):
            writer.write_table(table)


def _bomb_in_hdf5(path: Path) -> None:
    h5py, packer = pytest.importorskip("h5py"), zlib.compressobj(9)
    first, more = (packer.compress(bytes(1 << 20)) + packer.flush(zlib.Z_FULL_FLUSH) for _ in range(2))
    with h5py.File(path, "w") as file:
        images = file.create_dataset("images", (1, 8, 8, 3), np.uint8, chunks=(1, 8, 8, 3), compression="gzip")
        images.id.write_direct_chunk((0, 0, 0, 0), first + more * 1000)


BOMBS_OF = {"x.tar": _bomb_in_a_tar, "x.parquet": _bomb_in_parquet, "x.h5": _bomb_in_hdf5}
SETS = {"x.tar": tar_of, "x.txt": list_of, "x.parquet": parquet_of, "x.h5": hdf5_of}


@pytest.mark.parametrize("name", BOMBS_OF)
def test_sets_that_are_bombs(name, tmp_path):
    BOMBS_OF[name](tmp_path / name)
    read_all(tmp_path / name)


@pytest.mark.parametrize("name", SETS)
def test_broken_sets(tmp_path, name):
    path, whole = tmp_path / name, SETS[name](tmp_path)

    @examples(8)
    @given(data=broken_bytes(whole))
    def check(data):
        path.unlink(missing_ok=True)
        path.write_bytes(data)
        read_all(path)

    path.write_bytes(whole)
    assert read_all(path) is None
    check()


RECIPE = (RECIPES / "quickstart.yaml").read_text()
DS = (CHECKOUT / "ds_configs/zero2_fp16.json").read_text()
OPTIONS = [option.name for option in recipe_options()]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder, before = tmp_path_factory.mktemp("fuzz"), Path.cwd()
    (folder / "empty").mkdir()
    os.chdir(folder / "empty")
    yield folder
    os.chdir(before)
    assert not list((folder / "empty").iterdir())


def _read(folder: Path, name: str, text: bytes) -> None:
    """Start with this text as the recipe, or with the shipped recipe and this ds JSON."""
    path = folder / name
    path.write_bytes(text)
    command("train", "--config", *([str(path)] if name == "recipe.yaml" else ["quickstart", "--ds_config", str(path)]))


@pytest.mark.parametrize(("name", "whole"), [("recipe.yaml", RECIPE), ("ds.json", DS)])
def test_broken_files(folder, name, whole):
    @examples(8)
    @given(text=broken_text(whole))
    def check(text):
        _read(folder, name, encode(text))

    check()


WORDS = st.one_of(
    nasty,
    st.sampled_from(["--", "-", "--config", "--ds_config", "--ds", "--ds.", "--resume", "--debug=no", "--run_dir"]),
    st.builds("--{}={}".format, st.sampled_from(OPTIONS), nasty),
    st.builds("--ds.{}={}".format, st.sampled_from(["fp16.enabled", "zero_optimization.stage", "x.y"]), nasty),
    st.builds("--{}".format, st.text(string.ascii_lowercase + "._-", max_size=12)),
)


@examples(8)
@given(words=st.lists(WORDS, max_size=4), name=st.one_of(st.sampled_from([*COMMANDS]), nasty))
def test_command_lines(folder, name, words):
    command(*name.split(), *words)


HAND_MADE = {
    "empty": b"",
    "UTF-16": "length: 5 steps".encode("utf-16"),
    "ELF": b"\x7fELF" + bytes(range(256)) * 8,
    "20,000 unknown keys": b"".join(b"k%d: 1\n" % i for i in range(20_000)),
    "a flow mapping 20,000 deep": b"{a: " * 20_000,
    "a number of 5,000 digits": b"seed: " + b"9" * 5_000,
    "a number of 5,000 digits in JSON": b'{"train_batch_size": ' + b"9" * 5_000 + b"}",
    "closed JSON objects 900 deep": b'{"a":' * 900 + b"1" + b"}" * 900,
    "5,000 times the same key": b"{" + b'"bf16": 1,' * 5_000 + b"}",
    "anchors that multiply": b"a: &a [x,x,x,x,x,x,x,x,x]\n"
    + b"".join(b"%c: &%c [%s]\n" % (98 + i, 98 + i, b",".join([b"*%c" % (97 + i)] * 9)) for i in range(9)),
    "an anchor that holds itself": b"data: &a {root: *a}",
    "a Python tag": b"!!python/object/apply:os.system ['touch canary']",
    "a YAML directive": b"%YAML 9.9\n---\nlength: 5 steps",
    "binary": b"seed: !!binary aGVsbG8=",
    "NaN": b'{"gradient_clipping": NaN}',
    "a control character": b"\x1b]0;title\x07: 1",
}


@pytest.mark.parametrize(("content", "name"), sampled(itertools.product(HAND_MADE, ("recipe.yaml", "ds.json"))))
def test_hand_made_files(folder, name, content):
    _read(folder, name, HAND_MADE[content])


@pytest.mark.parametrize("path", ["/dev/zero", "/dev/stdin", "/proc/self/mem", "/", "\0", "a" * 300 + ".yaml", "pipe"])
def test_paths_that_are_no_files(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    os.mkfifo("pipe")
    assert raised_by(lambda: read_hostfile(path), ConfigError)
    for flag in ("--config", "--ds_config"):
        assert command("train", "--data.root", "x", flag, path)[0] == 2


HOSTS = "worker-1 slots=4\nworker-2.cluster slots=4  # the new one\n10.0.0.3 slots=2\n"


TEXTS = st.one_of(broken_text(HOSTS), nasty, st.builds("{} slots={}".format, nasty, nasty))


@examples(20)
@given(text=st.one_of(TEXTS.map(encode), broken_bytes(HOSTS.encode()), st.binary()))
def test_broken_hostfiles(tmp_path_factory, text):
    path = tmp_path_factory.getbasetemp() / "hosts"
    path.write_bytes(text)

    def work() -> None:
        for name, slots in read_hostfile(str(path)).items():
            assert re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,252}", name)
            assert 1 <= slots <= 1024

    raised_by(work, ConfigError)


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    images, changes = image_folder(folder / "images"), {"head.prototypes": "4", "model.depth": "1"}
    assert train_alone(images, folder / "run", max_steps=1, changes=changes) is None
    return folder


@pytest.fixture
def run(trained, tmp_path):
    return Path(shutil.copytree(trained / "run", tmp_path / "run"))


@pytest.mark.parametrize("names", ["teacher.safetensors", "teacher.json", "checkpoints/step_00000001/[mw]*"])
def test_broken_weights(run, names):
    """What is broken in a checkpoint, where the heads lie, is named, and never used."""

    @examples(8)
    @given(data=st.data())
    def check(data):
        path = data.draw(st.sampled_from(sorted(run.glob(names))))
        whole = path.read_bytes()
        broken = data.draw(broken_text(whole.decode()).map(encode) if ".json" in names else broken_bytes(whole))
        path.write_bytes(broken)
        message = raised_by(lambda: dino_ds.load(run), CheckpointError)
        path.write_bytes(whole)
        assert "teacher" in names or (message is None) == (broken == whole)

    check()


def test_descriptions_of_other_networks_are_refused(run):
    body = read_sidecar(run / "teacher.safetensors")
    for key, value in (
        ("architecture", {"depth": 10**9}),
        ("architecture", {"heads": "2"}),
        ("timm_arguments", {"img_size": "__import__('os').system('touch canary')"}),
        ("architecture", 5),
        ("pos_embed_interpolation", "../x"),
    ):
        changed = {**body[key], **value} if isinstance(value, dict) else value
        (run / "teacher.json").write_text(json.dumps(body | {key: changed}))
        assert raised_by(lambda: dino_ds.load(run), CheckpointError), value
