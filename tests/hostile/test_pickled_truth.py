"""Ground truth that comes as a pickle: read as data, or refused; nothing in it is run, and nothing large is built."""

from __future__ import annotations

import pickle
import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dino_ds.errors import DataError
from dino_ds.evals.protocols.plain_pickle import read_plain_pickle
from tests.hostile.guard import examples, raised_by
from tests.hostile.mutate import broken_bytes
from tests.hostile.test_payloads import CANARY, EVAL, PICKLES, RUN

pytestmark = pytest.mark.faults

PLAIN = {"gnd": [{"easy": np.arange(5), "bbx": [1.5, 2.0], "x": np.float32(0.5)}], "imlist": ["a", "ü"], "b": b"\x80"}


def _read(tmp_path, data, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "truth.pkl").write_bytes(data)
    message = raised_by(lambda: read_plain_pickle(tmp_path / "truth.pkl"), DataError)
    assert not list(tmp_path.rglob(f"{CANARY}*"))
    return message


@pytest.mark.parametrize("kind", PICKLES)
def test_payloads_are_refused(tmp_path, kind, monkeypatch):
    assert _read(tmp_path, PICKLES[kind](), monkeypatch)


@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.parametrize("payload", [RUN, EVAL, np.array([RUN], dtype=object)], ids=["system", "eval", "objects"])
def test_payloads_among_data_are_refused(tmp_path, payload, protocol, monkeypatch):
    message = _read(tmp_path, pickle.dumps({**PLAIN, "junk": payload}, protocol=protocol), monkeypatch)
    assert "refused: it holds more than plain data" in message


@pytest.mark.parametrize("protocol", range(6))
def test_plain_data_is_read(tmp_path, protocol):
    path = tmp_path / "truth.pkl"
    fortran = np.asfortranarray(np.arange(6, dtype=">i4").reshape(2, 3))
    path.write_bytes(pickle.dumps({**PLAIN, "f": fortran, "none": (None, True, 10**30)}, protocol=protocol))
    read = read_plain_pickle(path)
    assert np.asarray(read["gnd"][0]["easy"]).tolist() == [0, 1, 2, 3, 4]
    assert np.asarray(read["f"]).tolist() == fortran.tolist()
    assert read["gnd"][0]["x"] == 0.5 and read["imlist"] == ["a", "ü"] and read["b"] == b"\x80"
    assert read["none"] == (None, True, 10**30)


_NAMED = b"cnumpy._core.multiarray\n_reconstruct\n"


@pytest.mark.parametrize(
    "data",
    [
        b"cbuiltins\ngetattr\n.",
        b"cnumpy.core.multiarray.x\n_reconstruct\n.",
        b"cnumpy\nload\n.",
        b"c_codecs\nencode\n(S'a'\nS'zip'\ntR.",
        # The name of a stand-in, changed, instantiated or given a class.
        _NAMED + b"}S'__code__'\nI1\nsb.",
        _NAMED + b"N}S'__defaults__'\nI1\ns\x86b.",
        b"cnumpy\nndarray\n)\x81.",
        b"(icnumpy\nndarray\n.",
        b"(cnumpy\nndarray\no.",
        # Other operations: an extension code, a persistent id, a buffer out of band.
        b"\x82\x01.",
        b"Pevil\n.",
        b"\x97.",
        # Sizes that are not there: a memo of 2^32 entries, bytes of 2^60, an array of 2^60 numbers.
        b"I1\nr\xff\xff\xff\xff.",
        b"\x8e" + struct.pack("<Q", 1 << 60) + b"x.",
        b"\x96" + struct.pack("<Q", 1 << 60) + b"x.",
        pickle.dumps(np.arange(4), protocol=2).replace(b"K\x04\x85", b"\x8a\x08" + b"\0" * 7 + b"\x10\x85"),
        b"(" * 10_000 + b"l" * 10_000 + b".",
        b"",
    ],
)
def test_strange_operations_are_refused_or_harmless(tmp_path, data, monkeypatch):
    message = _read(tmp_path, data, monkeypatch)
    assert message or data.startswith(b"I1\nr") or data.startswith(b"((")


def test_a_text_named_often_is_encoded_once(tmp_path, monkeypatch):
    """Else a megabyte and three bytes a time would make terabytes."""
    many = b"h\x00h\x01R" * 20_000
    data = b"c_codecs\nencode\nq\x00(X" + struct.pack("<I", 1 << 20) + b"a" * (1 << 20) + b"S'latin1'\ntq\x01" + many
    assert _read(tmp_path, data + b".", monkeypatch) is None


def test_bytes_of_many_arrays_are_kept_once(tmp_path, monkeypatch):
    """Eight megabytes and forty bytes an array would make terabytes."""
    size = 8 << 20
    kind = b"cnumpy\ndtype\nq\x00(S'u1'\ntRq\x01"
    data = b"\x96" + struct.pack("<Q", size) + bytes(size) + b"q\x02"
    one = b"cnumpy._core.multiarray\n_reconstruct\n)R(I1\n(I%d\nth\x01I00\nh\x02tb" % size
    assert _read(tmp_path, b"(" + kind + data + one * 100 + b"l.", monkeypatch) is None


def test_large_files_and_pipes_are_refused(tmp_path):
    import os

    with open(tmp_path / "large", "wb") as file:
        file.truncate(1 << 30)
    os.mkfifo(tmp_path / "pipe")
    for name in ("large", "pipe", "nothing", "."):
        assert raised_by(lambda: read_plain_pickle(tmp_path / name), DataError)  # noqa: B023


@examples(200)
@given(data=st.data(), protocol=st.sampled_from([0, 2, 4, 5]))
def test_broken_pickles(tmp_path_factory, data, protocol):
    path = tmp_path_factory.mktemp("broken") / "truth.pkl"
    path.write_bytes(data.draw(broken_bytes(pickle.dumps(PLAIN, protocol=protocol))))
    raised_by(lambda: read_plain_pickle(path), DataError)
