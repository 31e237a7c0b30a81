"""Files that change after they were listed or indexed: they are read anew or refused, never as what they were."""

from __future__ import annotations

import contextlib
import os
import pickle
import shutil

import numpy as np
import pytest

from dino_ds.data.images import UnreadableImage
from dino_ds.data.root import open_files
from dino_ds.errors import DataError
from tests.data.files import png, read
from tests.data.servers import serving
from tests.data.test_remote import contents, write_index
from tests.data.test_shards import pack

FIRST = {f"{n}.png": png(n) for n in range(3)}


def _tar(path, images):
    pack(path, images)


def _parquet(path, images):
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.table({"image": [*images.values()]}), path, compression=None)


def _hdf5(path, images):
    import h5py

    with h5py.File(path, "w") as file:
        rows = file.create_dataset("images", len(images), h5py.vlen_dtype(np.uint8))
        for number, data in enumerate(images.values()):
            rows[number] = np.frombuffer(data, np.uint8)


WRITERS = {"0.tar": _tar, "0.parquet": _parquet, "0.h5": _hdf5}


def _append(path, write, count):
    more = {f"more{n}.png": png(100 + n) for n in range(count)}
    if write is _tar:
        pack(path, more, mode="a")
    else:
        write(path, FIRST | more)


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


@pytest.mark.parametrize("validators", [("ETag", "Last-Modified"), ("Last-Modified",), ()], ids=["ETag", "time", "no"])
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("name", ["0.tar", "index.jsonl", "0.parquet"])
def test_a_changed_file_on_a_server(tmp_path, monkeypatch, name, change, validators):
    """Where neither the server nor an index can tell, this is said at the start, and the next start reads all anew."""
    monkeypatch.setenv("DINO_DS_CACHE", str(tmp_path / "cache"))
    indexed, name = name == "index.jsonl", name.replace("index.jsonl", "0.tar")
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
