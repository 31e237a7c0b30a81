"""The safetensors writer against the library's reader, and its own eye for damage."""

from __future__ import annotations

import os

import pytest
import safetensors
import torch
from safetensors.torch import load_file

from dino_ds.basics.files import replace_file, replacing_folder
from dino_ds.checkpoint import manifest as checkpoint_files
from dino_ds.checkpoint.manifest import FileRecord, checksum, is_plain_file, write_tensors

TENSORS = {
    "matrix": torch.randn(30, 7),
    "half": torch.randn(5).half(),
    "brain": torch.randn(3, 3).bfloat16(),
    "scalar": torch.tensor(3.5),
    "empty": torch.zeros(0),
    "strided": torch.randn(8, 6).t(),
    "counts": torch.arange(4),
    "bytes": torch.arange(3, dtype=torch.uint8),
}


def test_the_library_reads_what_we_write(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint_files, "_PIECE_BYTES", 100)
    path = tmp_path / "x.safetensors"
    record = write_tensors(path, TENSORS, {"step": "7"})
    read = load_file(path)
    assert read.keys() == TENSORS.keys()
    assert all(torch.equal(read[name], tensor) and read[name].dtype == tensor.dtype for name, tensor in TENSORS.items())
    with safetensors.safe_open(path, framework="pt") as file:
        assert file.metadata() == {"step": "7"}
    assert record == checksum(path) == FileRecord(path.stat().st_size, record.crc32)


def test_a_disk_that_gives_other_bytes_back_is_noticed(tmp_path, monkeypatch):
    path = tmp_path / "x.safetensors"
    fsync = os.fsync

    def flip(descriptor):
        fsync(descriptor)
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content)

    monkeypatch.setattr(os, "fsync", flip)
    with pytest.raises(OSError, match="other bytes back"):
        write_tensors(path, TENSORS, {})


def test_links_and_pipes_are_no_plain_files(tmp_path):
    (tmp_path / "file").write_text("")
    (tmp_path / "link").symlink_to(tmp_path / "file")
    os.mkfifo(tmp_path / "pipe")
    assert [is_plain_file(tmp_path / name) for name in ("file", "link", "pipe", "none")] == [True, False, False, False]


def test_a_replaced_file_is_old_or_new(tmp_path, monkeypatch):
    path = tmp_path / "latest"
    replace_file(path, "old")
    for name in ("fsync", "replace"):
        with monkeypatch.context() as patch:
            patch.setattr(os, name, lambda *_: (_ for _ in ()).throw(OSError("no")))
            with pytest.raises(OSError, match="no"):
                replace_file(path, "new")
        assert path.read_text() == "old" and os.listdir(tmp_path) == ["latest"]
    replace_file(path, "new")
    assert path.read_text() == "new" and os.listdir(tmp_path) == ["latest"]


def test_a_new_folder_is_whole_or_absent(tmp_path):
    def write(fail):
        with replacing_folder(tmp_path / "out") as folder:
            (folder / "a").write_text("a")
            if fail:
                raise OSError("no")

    with pytest.raises(OSError, match="no"):
        write(fail=True)
    assert os.listdir(tmp_path) == []
    (tmp_path / "out.tmp").mkdir()  # the user's
    write(fail=False)
    assert sorted(os.listdir(tmp_path)) == ["out", "out.tmp"] and os.listdir(tmp_path / "out") == ["a"]
