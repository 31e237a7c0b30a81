"""Each kind of file that is written and read again has a format number; another number, or none, is refused."""

from __future__ import annotations

import json
import tarfile
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from dino_ds.checkpoint.manifest import MANIFEST, content_sum, read_manifest
from dino_ds.commands.find import open_embedded
from dino_ds.config.loading import dump_recipe
from dino_ds.config.recipe import Recipe
from dino_ds.config.stages import load_run_recipe
from dino_ds.data import listing
from dino_ds.data.tar_members import IndexedMembers, index_line
from dino_ds.errors import CheckpointError, UserError
from dino_ds.options.definition import FindOptions
from dino_ds.weights.sidecar import read_sidecar, write_with_sidecar


def _run(folder: Path, numbered: dict[str, int]) -> None:
    lines = [f"{key}: {value}\n" for key, value in numbered.items()]
    (folder / "config.yaml").write_text(dump_recipe(Recipe()).replace("format: 1\n", "".join(lines)))
    load_run_recipe(folder)


def _checkpoint(folder: Path, numbered: dict[str, int]) -> None:
    body = {**numbered, "crc32": content_sum(numbered)}
    (folder / MANIFEST).write_text(json.dumps(body, indent=1, sort_keys=True) + "\n")
    read_manifest(folder)


def _teacher(folder: Path, numbered: dict[str, int]) -> None:
    weights = folder / "teacher.safetensors"
    write_with_sidecar(weights, lambda path: save_file({"a": torch.ones(3)}, path), {"step": 1})
    facts = json.loads((folder / "teacher.json").read_text())
    kept = {key: value for key, value in facts.items() if key not in ("format", "crc32")}
    (folder / "teacher.json").write_text(json.dumps(kept | numbered))
    assert read_sidecar(weights) == {"step": 1}


def _features(folder: Path, numbered: dict[str, int]) -> None:
    np.save(folder / "a.npy", np.ones((2, 3)))
    (folder / "a.npy.json").write_text(json.dumps(numbered))
    open_embedded(FindOptions(features=str(folder / "a.npy"), images=("0",)))


def _index(folder: Path, numbered: dict[str, int]) -> None:
    tarfile.open(folder / "a.tar", "w").close()
    line = json.loads(index_line(folder / "a.tar", "a.tar"))
    del line["format"]
    IndexedMembers(json.dumps(line | numbered).encode(), "index.jsonl")


EMPTY = (_checkpoint, _features)  # written without content: their number is accepted, and the rest is not


@pytest.mark.parametrize("kind", [_run, _checkpoint, _teacher, _features, _index])
def test_a_file_of_another_format_is_refused_in_one_line_that_says_what_to_do(kind, tmp_path):
    for numbered, words in (({}, "has no format number"), ({"format": 2}, "is of format 2")):
        with pytest.raises(CheckpointError, match=f"^[^\n]*{words}, and this dino_ds reads format 1 alone: [^\n]+$"):
            kind(tmp_path, numbered)
    with pytest.raises(UserError, match=r"can't be used|not as embed") if kind in EMPTY else nullcontext():
        kind(tmp_path, {"format": 1})


def test_a_list_in_the_cache_of_another_format_is_made_anew(tmp_path, monkeypatch):
    monkeypatch.setenv("DINO_DS_CACHE", str(tmp_path))
    made = []

    def find() -> listing.Listing:
        contents = listing.Contents({"a": np.arange(3)}, {})
        return listing.find_listing("list", "key", lambda known: True, lambda: made.append(1) or contents)

    with monkeypatch.context() as other:
        other.setattr(listing, "FORMAT", 2)
        assert find() is not None and find() is not None and len(made) == 1
    assert find() is not None and find() is not None and len(made) == 2
