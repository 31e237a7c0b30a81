"""Files that change after they were listed, or in a cache: read anew, refused or made anew, never as what they were."""

from __future__ import annotations

import contextlib
import itertools
import json
import multiprocessing
import os
import pickle
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import save_file

from dino_ds.costs import step_costs
from dino_ds.costs.step_costs import StudentFacts
from dino_ds.data.images import UnreadableImage
from dino_ds.data.listing import _checksums
from dino_ds.data.remote import FilePiece, RemoteCache, _opened
from dino_ds.data.root import open_files
from dino_ds.errors import DataError
from tests.data.files import members, png, read, tar
from tests.data.servers import serving
from tests.data.test_listing import tree
from tests.data.test_parquet import write
from tests.data.test_remote import contents, write_index
from tests.sample import sampled

FIRST = {f"{n}.png": png(n) for n in range(3)}


def _parquet(path, images):
    write(path, {"image": [*images.values()]})


def _hdf5(path, images):
    h5py = pytest.importorskip("h5py")
    with h5py.File(path, "w") as file:
        rows = file.create_dataset("images", len(images), h5py.vlen_dtype(np.uint8))
        for number, data in enumerate(images.values()):
            rows[number] = np.frombuffer(data, np.uint8)


WRITERS = {"0.tar": tar, "0.parquet": _parquet, "0.h5": _hdf5}


def _append(path, writer, count):
    more = {f"more{n}.png": png(100 + n) for n in range(count)}
    tar(path, more, mode="a") if writer is tar else writer(path, FIRST | more)


CHANGES = {
    "append": lambda path, write: _append(path, write, 20),
    "append within the padding": lambda path, write: _append(path, write, 1),
    "truncate": lambda path, write: write(path, dict([*FIRST.items()][:1])),
    "cut off": lambda path, write: os.truncate(path, 700),
    "equal size": lambda path, write: write(path, {name: png(50 + n) for n, name in enumerate(FIRST)}),
    "other order": lambda path, write: write(path, dict(reversed(FIRST.items()))),
}


def changed(path, name, change, in_place=True):
    """Changes the file itself, or puts another one in its place."""
    new = path if in_place else path.with_suffix(".new")
    if not in_place:
        shutil.copy(path, new)
    CHANGES[change](new, WRITERS[name])
    later = os.stat(path).st_mtime + 10  # servers say the time in seconds
    os.utime(new, (later, later))
    os.replace(new, path)


def read_or_refused(source, index):
    try:
        return source.read(index)
    except (DataError, UnreadableImage):
        return None


@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("name", WRITERS)
def test_a_changed_file_on_a_disk(tmp_path, name, change, in_place):
    if in_place and name == "0.h5":
        pytest.skip("HDF5 writes no file that is open")
    path = tmp_path / name
    WRITERS[name](path, FIRST)
    old = read(path)
    worker, seen = pickle.loads(pickle.dumps(old)), contents(old)
    changed(path, name, change, in_place)
    for source in (old, worker):
        assert all(read_or_refused(source, n) in (seen[n], None) for n in range(3))
        if in_place or name != "0.tar":
            assert read_or_refused(source, 1) is None
    with contextlib.suppress(DataError):
        assert contents(read(path)) != seen


@pytest.mark.parametrize("name", WRITERS)
def test_a_file_that_is_gone_is_unreadable_images(tmp_path, name):
    WRITERS[name](tmp_path / name, FIRST)
    source = read(tmp_path / name)
    (tmp_path / name).unlink()
    with pytest.raises(UnreadableImage, match=rf"{name}[^ ]*/1[^ ]* \((shard|Parquet|HDF5): "):
        source.load(1)


@pytest.mark.parametrize("name", ["0.tar", "0.h5"])
def test_many_processes_read_at_once(tmp_path, name):
    WRITERS[name](tmp_path / name, {f"{n:03d}.png": png(n) for n in range(100)})
    source = read(tmp_path / name)
    source.read(0)
    with multiprocessing.get_context("fork").Pool(4) as pool:
        results = pool.map_async(contents, [source] * 8, chunksize=1)
        mine = contents(source)
        assert results.get(timeout=300) == [mine] * 8 and mine == [png(n) for n in range(100)]


SERVERS = {"ETag": ("ETag", "Last-Modified"), "time": ("Last-Modified",), "no": ()}
CELLS = itertools.product(["0.tar", "index.jsonl", "0.parquet"], CHANGES, SERVERS)


@pytest.mark.parametrize(("name", "change", "tags"), sampled(CELLS))
def test_a_changed_file_on_a_server(tmp_path, name, change, tags):
    """Where neither the server nor an index can tell, this is said at the start, and the next start reads all anew."""
    indexed, name, validators = name == "index.jsonl", name.replace("index.jsonl", "0.tar"), SERVERS[tags]
    path = tmp_path / "set" / name
    path.parent.mkdir()
    WRITERS[name](path, FIRST)
    if indexed:
        write_index(path.parent)
    with serving(tmp_path) as server:
        server.validators = validators
        old = open_files(f"{server.url}/set", 1.0)
        seen, size = contents(old), path.stat().st_size
        unseen = not validators and not indexed
        assert any("neither ETag nor Last-Modified" in note for note in old.notes) == unseen
        assert bool(list((tmp_path / "cache/remote").glob("*.part"))) == (not unseen)
        changed(path, name, change)
        if not unseen or path.stat().st_size != size:
            for source in (old, pickle.loads(pickle.dumps(old))):
                assert all(read_or_refused(source, n) in (seen[n], None) for n in range(3))
        if (name, change) == ("0.parquet", "cut off"):
            with pytest.raises(DataError):
                open_files(f"{server.url}/set", 1.0)
            return
        new, local = open_files(f"{server.url}/set", 1.0), read(path.parent)
        size_or_end = change in ("append", "append within the padding", "cut off")
        assert len(new) >= len(local)
        now = {n: {None, *contents(local)[n : n + 1], *seen[n : n + 1][:indexed]} for n in range(len(new))}
        assert all(read_or_refused(new, n) in now[n] for n in now)
        assert any("index.jsonl is not of" in note for note in new.notes) == (indexed and size_or_end)


_FACTS = {"sizes": {"a": 3}, "frozen": [], "cast": ["a"], "groups": [["x", 3]], "statistics": [1], "whole_step": True,
          "matrices": []}  # fmt: skip
_PIECE = FilePiece("s3://b/a.tar", 1 << 20, 7, 512, 9000)


def _plan(images: Path):
    step_costs._known.clear()
    return step_costs.kept({}, StudentFacts, lambda: _FACTS)


def _listed(name):
    def read_facts(images: Path):
        source = read(images / name)
        return members(source), [*(source.labels or ())], source.classes, source.notes

    return read_facts


def _remote(images: Path):
    _opened.cache_clear()
    cache, data = RemoteCache(100_000), bytes(range(250)) * 36
    cache.make_room([_PIECE], 10_000)
    found = cache.get(_PIECE)
    cache.put(_PIECE, data)
    return found or data


CACHES = {
    "student": _plan,
    "folder": _listed("classes"),
    "list": _listed("list.txt"),
    "shards": _listed("shard.tar"),
    "remote": _remote,
}


def _rewrite(path: Path, change) -> None:
    """Change the JSON, or the arrays and notes of a listing, as another version of the program would write it."""
    if path.suffix == ".json":
        path.write_text(json.dumps(change(json.loads(path.read_text()))))
    elif path.suffix == ".safetensors":
        with safe_open(path, "np") as file:
            about, arrays = file.metadata(), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        if isinstance(arrays := change(arrays), dict):
            arrays = {name: value for name, value in arrays.items() if hasattr(value, "shape")}
            save_file(arrays, path, about | {"checksums": json.dumps(_checksums(arrays))})
        else:
            save_file({}, path, about | {"about": "[]"})


def _overwrite(path: Path, place: int) -> None:
    data = bytearray(path.read_bytes())
    data[place:] = os.urandom(len(data) - place)
    path.write_bytes(data)


DAMAGES = {
    "empty": lambda path: path.write_bytes(b""),
    "cut": lambda path: path.write_bytes(path.read_bytes()[:-5]),
    "junk": lambda path: _overwrite(path, 0),
    "junk at the end": lambda path: _overwrite(path, path.stat().st_size - 9),
    "nested": lambda path: path.write_text("[" * 100_000),
    "another type": lambda path: _rewrite(path, lambda content: [content]),
    "unknown field": lambda path: _rewrite(path, lambda content: content | {"other": 1}),
    "missing field": lambda path: _rewrite(path, lambda content: dict(list(content.items())[1:])),
    "a field's type": lambda path: _rewrite(path, lambda content: dict.fromkeys(content, "1")),
    "a folder": lambda path: (path.unlink(), path.mkdir()),
    "a file for its folder": lambda path: (path.parent.rename(path.parent.with_name("o")), path.parent.write_text("")),
}
CASES = [(cache, damage) for cache in CACHES for damage in DAMAGES]
CASES.remove(("remote", "a file for its folder"))  # refused: data.remote_cache_gib asks for it


@pytest.mark.parametrize(("kind", "damage"), CASES)
def test_a_file_that_cannot_be_used_is_made_anew(kind, damage, cache, tmp_path, monkeypatch):
    monkeypatch.setattr(step_costs, "_known", {})
    names = "cat/1.png", "cat/2.png", "dog/1.png"
    tree(tmp_path / "classes", *names)
    (tmp_path / "list.txt").write_text("classes/cat/1.png\tcat\nclasses/dog/1.png\tdog\n")
    tar(tmp_path / "shard.tar", *((f"classes/{name}", 1) for name in names))
    read_facts = CACHES[kind]
    wanted = read_facts(tmp_path)
    (file,) = (path for path in cache.rglob("*") if path.suffix in (".json", ".safetensors", ".part"))
    DAMAGES[damage](file)
    assert read_facts(tmp_path) == wanted and read_facts(tmp_path) == wanted
