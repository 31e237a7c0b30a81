"""Lines of files that may hold anything."""

from __future__ import annotations

import pytest

from dino_ds.text_file import MAX_LINE_BYTES, read_lines


@pytest.mark.slow
def test_a_line_without_an_end_is_cut(tmp_path):
    """A sparse gigabyte of zeros never lies in memory."""
    path = tmp_path / "lines"
    with path.open("wb") as file:
        file.write(b"first\n")
        file.truncate(1 << 30)
        file.seek(1 << 30)
        file.write(b"\nlast")
    first, zeros, last = read_lines(path)
    assert (first, last) == (b"first\n", b"last") and zeros == bytes(MAX_LINE_BYTES)
