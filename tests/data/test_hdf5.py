"""HDF5 files as data.root: arrays and encoded images, safe with many processes, and nothing outside the file."""

from __future__ import annotations

import resource
import sys

import numpy as np
import pytest
from PIL import Image

from dino_ds.data.decode import open_image
from dino_ds.errors import ConfigError, DataError
from tests.data.files import encoded, read

h5py = pytest.importorskip("h5py")
NOISE = np.random.default_rng(0).integers(0, 256, (7, 20, 24, 3), dtype=np.uint8)


def values(source, index=0, channels=3):
    return open_image(source, index, 10**6, (0, 4095), channels).values()


def written(path, **datasets):
    with h5py.File(path, "w") as file:
        for name, data in datasets.items():
            file[name] = data
    return path


def test_a_lone_dataset_needs_no_name(tmp_path):
    source = read(written(tmp_path / "a.h5", images=NOISE, labels=np.array([3, 3, 5, -1, 5, 5, 3]), scale=1.0))
    assert [np.array_equal(values(source, i), NOISE[i]) for i in range(len(source))] == [True] * 7
    assert source.name(6) == f"{tmp_path}/a.h5:/images/6" and source.member(6) == "a/images/000000006"
    assert (list(source.labels), source.classes, source.notes) == ([0, 0, 1, -1, 1, 1, 0], ["3", "5"], [])
    source = read(written(tmp_path / "c.h5", images=NOISE, labels=np.array([b"cat"] * 7)))
    (note,) = source.notes
    assert source.labels is None and "/labels (7,) |S3 of" in note and "must be whole numbers, one an image" in note


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (NOISE, NOISE),
        (np.moveaxis(NOISE, 3, 1), NOISE),
        (NOISE[..., 0], NOISE[..., :1]),
        (NOISE.astype(">u2") * 16, NOISE.astype(int) * 16),
    ],
    ids=["channels last", "channels first", "gray", "16 bits, big-endian"],
)
@pytest.mark.parametrize("how", [{}, {"chunks": True, "compression": "gzip"}], ids=["contiguous", "chunked"])
def test_arrays_are_read_as_they_are_stored(tmp_path, data, expected, how):
    with h5py.File(tmp_path / "a.hdf5", "w") as file:
        file.create_dataset("images", data=data, **how)
    found = values(read(tmp_path / "a.hdf5"), 5, channels=expected.shape[3])
    assert np.array_equal(found.reshape(expected[5].shape), expected[5])


def test_encoded_images_are_read_from_opaque_bytes(tmp_path):
    """Bytes of variable length: test_forms.py."""
    rows = [encoded(Image.fromarray(pixels), "PNG") for pixels in NOISE]
    longest = max(map(len, rows))
    padded = np.array([np.void(row.ljust(longest, b"\0")) for row in rows], np.dtype(f"V{longest}"))
    source = read(written(tmp_path / "a.h5", files=padded))
    assert all(np.array_equal(values(source, i), NOISE[i]) for i in range(7))


def test_names_patterns_and_folders(tmp_path):
    for name, part in (("b.h5", NOISE[:3]), ("a.h5", NOISE[3:])):
        written(tmp_path / name, train=part, test=part[:1])
    assert len(read(f"{tmp_path}/a.h5:/train")) == 4 and len(read(f"{tmp_path}/a.h5:/test")) == 1
    both = read(f"{tmp_path}/*.h5:/train")
    assert [both.name(i).partition(str(tmp_path))[2] for i in (3, 4)] == ["/a.h5:/train/3", "/b.h5:/train/0"]
    assert np.array_equal(values(both, 4), NOISE[0])
    with pytest.raises(DataError, match=r"a.h5 has 2 datasets .* /test \(1, 20, 24, 3\) uint8, /tr"):
        read(tmp_path)
    with pytest.raises(DataError, match=r"a.h5 has no dataset /val; it has /test .*"):
        read(f"{tmp_path}/a.h5:/val")


def test_what_is_no_set_of_images_is_refused(tmp_path):
    for data in (np.zeros((4, 5)), NOISE[0], np.zeros((3, 8, 8, 3), complex), np.zeros((0, 8, 8, 3)), np.arange(5)):
        with pytest.raises(DataError, match=r"a.h5 has no dataset of images .*: name one, as file.h5:/images"):
            read(written(tmp_path / "a.h5", images=data))
        with pytest.raises(DataError, match=r"a.h5:/images has (the shape|values of type) .*; wanted is \(n, h, w\)"):
            read(f"{tmp_path}/a.h5:/images")
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset("images", (10**8, 224, 224, 3), np.uint8)
    with pytest.raises(DataError, match="has no values: none were written"):
        read(f"{tmp_path}/a.h5:/images")


@pytest.mark.parametrize("kind", [np.uint8, h5py.vlen_dtype(np.uint8), np.dtype("V9")])
def test_claims_are_bounded_by_the_bytes_that_are_there(tmp_path, kind):
    with h5py.File(tmp_path / "a.h5", "w") as file:
        shape = (10**9, 8, 8) if kind is np.uint8 else (10**9,)
        dataset = file.create_dataset("x", shape, kind, chunks=(10**4, *shape[1:]), compression="gzip")
        dataset[0] = np.ones(shape[1:] or 9, np.uint8) if kind != np.dtype("V9") else np.void(b"123456789")
        file.create_dataset("label", (10**9,), np.uint8, chunks=(10**6,), compression="gzip")[0] = 1
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for root in (tmp_path / "a.h5", f"{tmp_path}/a.h5:/x"):
        with pytest.raises(DataError, match=r"no dataset of images|has 1000000000 images in a file of \d+ bytes"):
            read(root)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000  # KiB


def test_nothing_outside_the_file_is_read(tmp_path):
    secret = written(tmp_path / "secret.h5", images=NOISE)
    (tmp_path / "raw").write_bytes(NOISE.tobytes())
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["link"] = h5py.ExternalLink(str(secret), "/images")
        file["group"] = h5py.ExternalLink(str(secret), "/")
        file["soft"] = h5py.SoftLink("/group/images")
        layout = h5py.VirtualLayout(NOISE.shape, np.uint8)
        layout[:] = h5py.VirtualSource(str(secret), "images", NOISE.shape)
        file.create_virtual_dataset("virtual", layout)
        file.create_dataset("raw", NOISE.shape, np.uint8, external=[(str(tmp_path / "raw"), 0, NOISE.nbytes)])
    with pytest.raises(DataError, match="no dataset of images"):
        read(tmp_path / "a.h5")
    for name in ("link", "group/images", "soft", "virtual", "raw"):
        links = name not in ("virtual", "raw")
        said = "is a link, which is not followed" if links else "takes its values from other files, which are not read"
        with pytest.raises(DataError, match=said):
            read(f"{tmp_path}/a.h5:/{name}")


def test_without_h5py_the_extra_is_named(tmp_path, monkeypatch):
    written(tmp_path / "a.h5", images=NOISE)
    monkeypatch.setitem(sys.modules, "h5py", None)
    with pytest.raises(ConfigError, match=r"HDF5 files need h5py: pip install 'dino_ds\[hdf5\]'"):
        read(tmp_path / "a.h5")
