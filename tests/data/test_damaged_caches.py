"""A file of a cache that can't be used, whatever is in it or in its place, is made anew, and is never an error."""

from __future__ import annotations

import json
import os
import tarfile
from pathlib import Path

import pytest
from PIL import Image
from safetensors import safe_open
from safetensors.numpy import save_file

from dino_ds.costs import step_costs
from dino_ds.costs.step_costs import StepCosts, StudentFacts
from dino_ds.data.folder import ImageFolder, ListFile
from dino_ds.data.listing import _checksums
from dino_ds.data.remote import FilePiece, RemoteCache, _opened
from dino_ds.data.shards import TarShards

_FACTS = {"sizes": {"a": 3}, "frozen": [], "cast": ["a"], "groups": [["x", 3]], "statistics": [1], "whole_step": True}
_PART = {"flops": 2.0, "moments": [[1, 2.5]]}
_COSTS = {"images": 2, "parts": {"student": _PART}, "saved": 1, "held": 1.5, "crops": 3, "window": 1, "teachers": {}}
_PIECE = FilePiece("s3://b/a.tar", 1 << 20, 7, 512, 9000)


def _plan(type_, plain):
    def read(images: Path):
        step_costs._found.clear()
        return step_costs.kept({}, type_, lambda: plain)

    return read


def _listed(open_source):
    def read(images: Path):
        source = open_source(images)
        return [source.member(i) for i in range(len(source))], [*(source.labels or ())], source.classes, source.notes

    return read


def _remote(images: Path):
    _opened.cache_clear()
    cache, data = RemoteCache(100_000), bytes(range(250)) * 36
    cache.make_room([_PIECE], 10_000)
    found = cache.get(_PIECE)
    cache.put(_PIECE, data)
    return found or data


CACHES = {
    "student": _plan(StudentFacts, _FACTS),
    "costs": _plan(StepCosts, _COSTS),
    "folder": _listed(lambda images: ImageFolder(str(images / "classes"))),
    "list": _listed(lambda images: ListFile(str(images / "list.txt"))),
    "shards": _listed(lambda images: TarShards([str(images / "shard.tar")])),
    "remote": _remote,
}


def _rewrite(path: Path, change) -> None:
    """Change the JSON, or the arrays and notes of a listing, as another version of the program would write it."""
    if path.suffix == ".json":
        content = json.loads(path.read_text())
        path.write_text(json.dumps(change(content)))
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
    "a file for its folder": lambda path: (
        path.unlink(),
        path.parent.rename(path.parent.with_name("o")),
        path.parent.write_text(""),
    ),
}


CASES = [(cache, damage) for cache in CACHES for damage in DAMAGES]
CASES.remove(("remote", "a file for its folder"))  # refused: data.remote_cache_gib asks for it


@pytest.mark.parametrize(("cache", "damage"), CASES)
def test_a_file_that_cannot_be_used_is_made_anew(cache, damage, tmp_path, monkeypatch):
    folder = tmp_path / "cache"
    monkeypatch.setenv("DINO_DS_CACHE", str(folder))
    monkeypatch.setattr(step_costs, "_found", {})
    for number, name in enumerate(("cat/1.png", "cat/2.png", "dog/1.png")):
        (path := tmp_path / "classes" / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (4, 4), (number, 0, 0)).save(path)
    for path in (tmp_path / "classes", *(tmp_path / "classes").iterdir()):
        os.utime(path, (1e9, 1e9))
    (tmp_path / "list.txt").write_text("classes/cat/1.png\tcat\nclasses/dog/1.png\tdog\n")
    with tarfile.open(tmp_path / "shard.tar", "w") as shard:
        shard.add(tmp_path / "classes", "classes")
    read = CACHES[cache]
    wanted = read(tmp_path)
    (file,) = (path for path in folder.rglob("*") if path.suffix in (".json", ".safetensors", ".part"))
    DAMAGES[damage](file)
    assert read(tmp_path) == wanted and read(tmp_path) == wanted
