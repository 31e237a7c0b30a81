"""Servers that send what was not asked for: what is read stays within what was asked, and ends in one line."""

from __future__ import annotations

import contextlib
import functools
import gzip
import itertools
import json
import lzma
import time

import pytest

from dino_ds.data.images import UnreadableImage
from dino_ds.data.remote_request import _driver_of
from dino_ds.data.root import open_files
from dino_ds.errors import UserError
from tests.data.files import png, put, read, tar
from tests.data.servers import HOSTILE, serving
from tests.data.test_changed_files import WRITERS
from tests.data.test_remote import write_index
from tests.hostile.guard import command, raised_by
from tests.sample import sampled

MOST = 1 << 20
"""Bytes of a whole answer here, and of what the system's buffers take beyond it, about."""


@pytest.fixture
def server(tmp_path, monkeypatch):
    monkeypatch.setenv("DINO_DS_CACHE", str(tmp_path / "cache"))
    for name, value in {"_MOST_OF_A_FILE": MOST, "_MOST_OF_A_PAGE": MOST, "_REQUEST_SECONDS": 3.0}.items():
        monkeypatch.setattr(f"dino_ds.data.remote_request.{name}", value)
    for name in ("_OPEN_SECONDS", "_READ_SECONDS", "_LIST_SECONDS"):
        monkeypatch.setattr(f"dino_ds.data.remote.{name}", 3.0)
    for folder in ("set", "bare"):
        tar(tmp_path / folder / "0.tar", {"0.png": 0, "0.cls": b"0", "1.png": 1, "1.cls": b"1"})
    write_index(tmp_path / "set")
    WRITERS["0.parquet"](tmp_path / "0.parquet", {"0": png(0)})
    put(tmp_path, {"set/classes.txt": b"cat\ndog\n", "1.png": 1, "list.txt": b"1.png\n"})
    with serving(tmp_path) as server:
        yield server


OBJECTS = {
    "a shard": ("bare/0.tar", "bare/0.tar"),
    "an index": ("set/0.tar", "set/index.jsonl"),
    "a shard of an index": ("set/0.tar", "set/0.tar"),
    "names of classes": ("set/0.tar", "set/classes.txt"),
    "a Parquet file": ("0.parquet", "0.parquet"),
    "a list": ("list.txt", "list.txt"),
    "an image": ("list.txt", "1.png"),
    "a folder": ("bare", "bare/"),
}


@pytest.mark.parametrize(("what", "answer"), sampled(itertools.product(OBJECTS, HOSTILE)))
def test_an_answer_takes_no_more_than_was_asked(server, what, answer):
    root, path = OBJECTS[what]

    def work():
        source = open_files(f"{server.url}/{root}")
        with contextlib.suppress(UnreadableImage):
            assert [source.read(n) for n in range(len(source))] == expected

    expected = [read(server.folder / root).read(n) for n in range(len(read(server.folder / root)))]
    server.always[f"/{path}"] = HOSTILE[answer]
    begin = time.monotonic()
    message = raised_by(work, UserError)
    assert server.bytes_sent < 16 * MOST
    assert time.monotonic() - begin < 30
    assert message or answer in ("a header without end", "headers without end") or what in (
        "an index", "names of classes", "an image", "a folder",
    ), "it was read"  # fmt: skip


ENDLESS = [answer for answer in HOSTILE if "end" in answer or answer == "a bomb"]


@pytest.mark.parametrize(
    ("path", "answer"), sampled(itertools.product(["bare/0.tar", "set/index.jsonl", "bare"], ENDLESS))
)
def test_a_bucket_takes_no_more_than_was_asked(server, monkeypatch, path, answer):
    pytest.importorskip("s3fs")
    for name, value in {"ENDPOINT_URL": server.url, "ACCESS_KEY_ID": "a", "SECRET_ACCESS_KEY": "b"}.items():
        monkeypatch.setenv(f"AWS_{name}", value)
    _driver_of.cache_clear()
    server.always[f"/{path}"] = HOSTILE[answer]
    raised_by(lambda: open_files(f"s3://{'set/0.tar' if 'set' in path else path}").read(0), UserError)
    assert server.bytes_sent < 16 * MOST


@pytest.mark.parametrize("kind", ["gzip", "lzma", "zstd"])
def test_a_compressed_tar_is_refused_by_its_first_bytes(server, kind):
    """Local and remote: nothing is decompressed, whatever it would become."""
    compress = {"gzip": gzip.compress, "lzma": lzma.compress, "zstd": lambda data: b"\x28\xb5\x2f\xfd" + data[:1000]}
    (server.folder / "bomb.tar").write_bytes(compress[kind](bytes(16 << 20)))
    for place in (f"{server.folder}/bomb.tar", f"{server.url}/bomb.tar"):
        assert "compressed: unpack it" in str(raised_by(functools.partial(open_files, place), UserError))
    assert server.bytes_sent < 16 * MOST


WRONG = [512.5, -1, 2**63, 10**30, float("nan"), float("inf"), True, None, "1", [1], {}]


@pytest.mark.parametrize(("place", "value"), sampled(itertools.product(["bytes", "end", 1, 2, 3], WRONG)))
def test_numbers_of_an_index_that_are_none(server, place, value):
    index = server.folder / "set/index.jsonl"
    shard = json.loads(index.read_text())
    holder = shard if isinstance(place, str) else shard["images"][1]
    holder[place] = value
    index.write_text(f"{json.dumps(shard)}\n")
    message = raised_by(lambda: open_files(f"{server.url}/set"), UserError)
    assert message is None if (place, value) == ("end", None) else "index.jsonl is damaged" in message


MISSING, FINAL = (404, 410, 416), (400, 401, 403, 405)
DONE_WITHOUT = {"an index": (404, 410, *FINAL), "names of classes": (*MISSING, *FINAL), "an image": MISSING}


@pytest.mark.parametrize(("what", "status"), sampled(itertools.product(OBJECTS, (*MISSING, *FINAL, 429, 500, 503))))
def test_every_status_of_every_object_is_answered_in_a_line(server, what, status):
    root, path = OBJECTS[what]
    server.always[f"/{path}"] = status
    notes = list[str]()

    def work():
        source = open_files(f"{server.url}/{root}")
        notes.extend(source.notes)
        with contextlib.suppress(UnreadableImage):
            source.read(0)

    assert (raised_by(work, UserError) is None) == (status in DONE_WITHOUT.get(what, ()))
    assert any("can't be read" in note or "may not be read" in note for note in notes) == (
        what in ("an index", "names of classes") and status in FINAL
    )


@pytest.mark.parametrize("name", ["brackets[1].tar", "a{b,c}.tar", "a{0..1}.tar", "star*.tar", "[a].tar/0.tar"])
def test_a_name_that_looks_like_a_pattern_is_that_file(server, name):
    folder = server.folder / "odd"
    tar(folder / name, {"0.png": png(7)})
    for other in ("brackets1.tar", "ab.tar", "a0.tar", "a1.tar", "start.tar"):
        tar(folder / other, {"0.png": png(9)})
    for root in (f"{folder}/{name}", f"{server.url}/odd/{name}"):
        assert open_files(root).read(0) == png(7)
    for root in (tar(folder / "fold[1]/0.tar", {"0.png": png(8)}).parent, f"{server.url}/odd/fold[1]"):
        assert open_files(str(root)).read(0) == png(8)
    if "{" not in name:
        assert len(open_files(f"{server.url}/{{bare/0,odd/{name.removesuffix('.tar')}}}.tar")) == 3


@pytest.mark.parametrize("line", ["ftp://x/y.png", "file:///x/y.png", "S3://b/y.png"])
def test_a_scheme_that_nothing_reads_is_refused_at_the_start(tmp_path, line):
    root = str(put(tmp_path, {"list.txt": f"a.png\n{line}\n".encode(), "a.png": 1}))
    said = raised_by(lambda: open_files(f"{root}/list.txt"), UserError)
    assert "line 2 of" in said and "nor one of s3://" in said
    mixture = f"{line}=0.5,list.txt=0.5"
    for name, value in {"data.root": line, "data.mixture": mixture, "eval.root": line, "eval.val_root": line}.items():
        words = ["--data.root", root] * (name != "data.root")
        code, lines = command("train", "--data.source", "folder", *words, f"--{name}", value)
        assert code == 2 and "nor one of s3://" in lines[0], name
