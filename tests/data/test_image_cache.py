"""The cache of decoded images changes no crop, keeps to its size, is shared, and leaves nothing behind."""

from __future__ import annotations

import fcntl
import multiprocessing
import os
import shutil
import signal
from contextlib import closing
from itertools import islice

import numpy as np
import pytest
import torch
from PIL import Image

from dino_ds.config.crops import dino_groups
from dino_ds.config.loading import load_recipe
from dino_ds.data.batches import LoaderOptions
from dino_ds.data.feed import Position
from dino_ds.data.folder import ImageFolder
from dino_ds.data.image_cache import ImageCache, fitting_cache, open_cache
from dino_ds.data.loader import Loader
from dino_ds.data.multicrop import MultiCrop
from dino_ds.engine import distributed
from dino_ds.errors import ConfigError
from tests.data.files import Arrays, Files
from tests.ranks import run_on_ranks
from tests.run.harness import read_metrics, train_tiny

CROPS = MultiCrop(dino_groups(16, (0.4, 1.0), 8, (0.1, 0.4), 1), "low_res")
MIB = 2**20


def _pixels(seed, *shape):
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


def _images(folder, count, *shape, ending="png"):
    """A folder of images of random pixels of this shape."""
    folder.mkdir(exist_ok=True)
    for number in range(count):
        Image.fromarray(_pixels(number, *shape)).save(folder / f"{number:02d}.{ending}")
    return ImageFolder(str(folder))


@pytest.fixture
def root(tmp_path):
    """Every way of a file to its pixels: shrunk JPEGs among them, oriented and gray ones, and a broken file."""
    folder = tmp_path / "images"
    folder.mkdir()
    for number, side in enumerate((20, 64, 200)):
        Image.fromarray(_pixels(number, side, side + 9, 3)).save(folder / f"{side}.jpg")
    Image.fromarray(_pixels(3, 30, 20)).save(folder / "gray.jpg")
    Image.fromarray(_pixels(4, 70, 90, 3)).save(folder / "large.png")
    turned = Image.Exif()
    turned[0x0112] = 6
    Image.fromarray(_pixels(5, 40, 90, 3)).save(folder / "turned.jpg", exif=turned)
    (folder / "z_broken.jpg").write_bytes((folder / "64.jpg").read_bytes()[:900])
    return folder


def _batches(source, cache, count=3, epochs=2, **options):
    given = {"global_batch": count, "micro_batch": count, "max_pixels": 10**6, "cache": cache, **options}
    with closing(Loader(source, CROPS, LoaderOptions(**given), Position())) as loader:
        return list(islice(loader, epochs * len(source) // count))


def _assert_same(some, others):
    assert len(some) == len(others) > 0
    for a, b in zip(some, others, strict=True):
        assert a.names == b.names and a.bad == b.bad and a.crops.keys() == b.crops.keys()
        assert all(torch.equal(crops, b.crops[name]) for name, crops in a.crops.items())


@pytest.mark.parametrize("augment", ["device", "worker"])
def test_crops_are_the_same_bit_for_bit(root, augment):
    source = ImageFolder(str(root))
    cache = ImageCache.create(len(source), MIB)
    plain = _batches(source, None, epochs=5, augment=augment)
    _assert_same(_batches(source, cache, epochs=5, augment=augment), plain)
    _assert_same(_batches(source, cache, epochs=5, augment=augment), plain)
    kept = sum(cache.get(index) is not None for index in range(len(source)))
    assert kept == 6 if augment == "worker" else 3 <= kept < 6  # some are only ever decoded smaller


def test_loader_processes_share_it_and_a_file_is_decoded_once(tmp_path):
    """Once all images are there the files are no longer needed: new processes, as after a crash, get the same crops."""
    folder = tmp_path / "images"
    source = _images(folder, 12, 20, 20, 3, ending="jpg")
    plain = _batches(source, None)
    cache = ImageCache.create(12, MIB)
    _assert_same(_batches(source, cache, workers=2), plain)
    assert all(cache.get(index) is not None for index in range(12))
    shutil.rmtree(folder)
    _assert_same(_batches(source, cache, workers=2), plain)


def test_it_keeps_to_its_size_and_says_once_that_it_is_full(tmp_path):
    source = _images(tmp_path, 6, 20, 20, 3)
    cache = ImageCache.create(6, 3000)  # of 1200 bytes each
    size = os.fstat(cache._fd).st_size
    _assert_same(_batches(source, cache), _batches(source, None))
    assert sum(cache.get(index) is not None for index in range(6)) == 2
    assert os.fstat(cache._fd).st_size == size <= 3000 + 64 + 8 * 8
    assert cache.take_note() is None  # the loader had it
    options = LoaderOptions(global_batch=6, micro_batch=6, cache=ImageCache.create(6, 0))
    with closing(Loader(source, CROPS, options, Position())) as loader:
        list(islice(loader, 2))
    assert loader.notes == ["data.cache_gib is full with 0 of 6 images; the others are decoded in every epoch"]


def _die_in(cache, pipe):
    cache = cache or ImageCache.create(1, MIB)
    cache.put(0, _pixels(0, 4, 4, 3), False)
    fcntl.lockf(cache._fd, fcntl.LOCK_EX)
    pipe.send(cache.address)
    signal.pause()


@pytest.mark.parametrize("shared", [True, False])
def test_a_killed_process_leaves_no_memory_and_no_lock(shared):
    names = sorted(os.listdir("/dev/shm"))
    cache = ImageCache.create(2, MIB)
    ours, theirs = multiprocessing.Pipe()
    fork = multiprocessing.get_context("fork")
    child = fork.Process(target=_die_in, args=(cache if shared else None, theirs))
    child.start()
    address = ours.recv()
    child.kill()
    child.join()
    left = set(os.listdir("/dev/shm")) - set(names)
    assert not [name for name in left if not name.startswith(("sem.", "torch_"))]  # those are other processes'
    if shared:
        assert np.array_equal(cache.get(0)[0], _pixels(0, 4, 4, 3))
        cache.put(1, _pixels(1, 4, 4, 3), False)
        assert np.array_equal(cache.get(1)[0], _pixels(1, 4, 4, 3))
    else:
        with pytest.raises(FileNotFoundError):
            ImageCache.attach(address, 1)


def _share():
    cache = open_cache(0.001, 2)
    cache.put(distributed.rank(), _pixels(distributed.rank(), 4, 4, 3), False)
    distributed.gather_objects(None)
    return all(np.array_equal(cache.get(index)[0], _pixels(index, 4, 4, 3)) for index in range(2))


def test_the_ranks_of_a_machine_have_one_together():
    assert run_on_ranks(_share) == [True, True]


def test_what_can_t_be_kept_is_refused_or_left_out():
    with pytest.raises(ConfigError, match=r"data.cache_gib 1000000 is more than this machine has free \("):
        fitting_cache(1e6, Files())
    with pytest.raises(ConfigError, match=r"data\.cache_gib"):
        load_recipe(None, {"data.cache_gib": "-1"})
    assert fitting_cache(0.1, Files()) == (0.1, [])
    gib, [note] = fitting_cache(0.1, Arrays())
    assert gib == 0 and "data.cache_gib 0.1 is left out: it keeps decoded files" in note


@pytest.mark.slow
def test_a_run_learns_the_same_with_it_and_may_be_resumed_without(tmp_path):
    folder = tmp_path / "images"
    _images(folder, 16, 40, 48, 3)
    assert train_tiny(folder, tmp_path / "plain", max_steps=3) is None
    assert train_tiny(folder, tmp_path / "cached", max_steps=2, changes={"data.cache_gib": "0.01"}) is None
    assert train_tiny(folder, tmp_path / "cached", max_steps=3, resume=True, changes={"data.cache_gib": "0"}) is None
    plain, cached = ([line["loss"] for line in read_metrics(tmp_path / run)] for run in ("plain", "cached"))
    assert plain == cached and len(plain) == 3
