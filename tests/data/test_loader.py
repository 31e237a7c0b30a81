"""The loader and its feed: the same images and crops in the same order, whoever shares the work, wherever it starts."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import signal
import subprocess
import sys
import textwrap
import time
from contextlib import closing
from functools import partial
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
import torch
from PIL import Image

from dino_ds.basics.seeds import crop_seed
from dino_ds.config.crops import all_crops, dino_groups
from dino_ds.config.loading import change_recipe
from dino_ds.config.recipe import Recipe
from dino_ds.data import batches as workers_module
from dino_ds.data import loader as loader_module
from dino_ds.data.batches import LoaderBatch, LoaderOptions, MultiCropDataset, augmented_crops
from dino_ds.data.feed import Position
from dino_ds.data.images import UnreadableImage
from dino_ds.data.loader import DevicePrefetcher, Loader, ResumableSampler
from dino_ds.data.multicrop import MultiCrop
from dino_ds.errors import DataError, is_out_of_memory
from dino_ds.run.loop import allowed_bad_images
from tests.ranks import fork_server

IMAGES, GLOBAL = 21, 8
START = Position()


class Noise:
    """Images of noise; those in `broken` can't be read."""

    labels = None
    classes = None

    def __init__(self, images: int = IMAGES, broken: tuple[int, ...] = (), side: int = 12) -> None:
        self.images, self.broken, self.side = images, broken, side

    def __len__(self) -> int:
        return self.images

    def load(self, index: int) -> Image.Image:
        if index in self.broken:
            raise UnreadableImage(self.name(index), "truncated")
        pixels = np.random.default_rng(index).integers(0, 255, (self.side, self.side, 3), dtype=np.uint8)
        return Image.fromarray(pixels)

    def name(self, index: int) -> str:
        return f"noise/{index}"


CROPS = MultiCrop(dino_groups(8, (0.4, 1.0), 4, (0.1, 0.4), 1), "low_res")
BOTH = pytest.mark.parametrize("augment", ["worker", "device"])


def batches(count, micro=GLOBAL, rank=0, world=1, *, source=None, crops=CROPS, start=START, **options):
    options |= {"global_batch": GLOBAL, "micro_batch": micro, "rank": rank, "world_size": world}
    with closing(Loader(source or Noise(), crops, LoaderOptions(**options), start)) as loader:
        return list(itertools.islice(loader, count))


def by_sample(some: list[LoaderBatch]) -> dict[tuple[int, int], list[torch.Tensor]]:
    """The bytes that the loader sends of an image, then the crop that the network sees."""
    return {
        (batch.epoch, int(index)): [crop[row] for crop in (*all_crops(batch.crops), *all_crops(augmented_crops(batch)))]
        for batch in some
        for row, index in enumerate(batch.indices)
    }


def assert_same_crops(a, b) -> None:
    """To the last bit; 1e-6 where other crops of the batch move the rounding of FP32 sums on the device."""
    assert a.keys() == b.keys()
    for key in a:
        sent = len(a[key]) // 2
        assert all(torch.equal(x, y) for x, y in zip(a[key][:sent], b[key][:sent], strict=True)), key
        torch.testing.assert_close(a[key][sent:], b[key][sent:], rtol=0, atol=1e-6)


def test_an_epoch_meets_each_image_once_and_drops_the_rest():
    seen = batches(6)
    epochs = [torch.cat([batch.indices for batch in seen if batch.epoch == epoch]).tolist() for epoch in (0, 1, 2)]
    assert [len(epoch) for epoch in epochs] == [16, 16, 16]
    assert [len(set(epoch)) for epoch in epochs] == [16, 16, 16]
    assert epochs[0] != epochs[1] != epochs[2]
    assert set(range(IMAGES)) == set().union(*epochs)


@pytest.mark.parametrize("world,micro", [(2, 2), (4, 1), (1, 2)])
def test_global_batches_do_not_depend_on_ranks_and_micro_batches(world, micro):
    expected = [batch.indices.tolist() for batch in batches(5)]
    per_step = GLOBAL // (world * micro)
    ranks = [batches(5 * per_step, micro, rank, world) for rank in range(world)]
    for step, wanted in enumerate(expected):
        places = []
        for m in range(per_step):
            for rank in ranks:
                places += rank[step * per_step + m].indices.tolist()
        assert places == wanted


@pytest.mark.slow
def test_the_worker_augments_as_multicrop_does():
    """To the last bit: MultiCrop is what is compared with the reference."""
    source = Noise()
    for (epoch, index), crops in by_sample(batches(3)).items():
        expected = CROPS(source.load(index), crop_seed(0, epoch, index))
        assert all(torch.equal(a, b) for a, b in zip(crops[: len(expected)], expected, strict=True))


def crops_of(key: tuple[int, int], source: Noise, seed: int, augment: str) -> list[torch.Tensor]:
    dataset = MultiCropDataset(source, CROPS, LoaderOptions(seed=seed, augment=augment))
    return all_crops(augmented_crops(dataset.__getitems__([key])))


@BOTH
def test_crops_differ_between_epochs_images_and_seeds(augment):
    same = Noise(1)
    one = crops_of((0, 0), same, 0, augment)
    assert all(torch.equal(a, b) for a, b in zip(one, crops_of((0, 0), same, 0, augment), strict=True))
    others = [crops_of((1, 0), same, 0, augment), crops_of((0, 0), same, 1, augment)]
    monotone = type("Monotone", (Noise,), {"load": lambda self, index: same.load(0)})
    others.append(crops_of((0, 1), monotone(), 0, augment))
    for other in others:
        assert not any(torch.equal(a, b) for a, b in zip(one, other, strict=True))
    assert batches(1)[0].indices.tolist() != batches(1, seed=1)[0].indices.tolist()


@BOTH
@pytest.mark.parametrize("consumed", [1, 5])
def test_resuming_from_a_position_continues_the_straight_run(consumed, augment):
    straight = batches(9, micro=4, augment=augment)
    position = Position()
    for _ in range(consumed):
        position = position.advance(4, per_epoch=16)
    resumed = batches(9 - consumed, micro=4, start=position, augment=augment)
    for a, b in zip(straight[consumed:], resumed, strict=True):
        assert (a.epoch, a.names) == (b.epoch, b.names)
        crops, again = all_crops(augmented_crops(a)), all_crops(augmented_crops(b))
        assert all(torch.equal(x, y) for x, y in zip(crops, again, strict=True))


def test_position_of_another_global_batch_still_fits():
    start = Position(0, 10)
    [whole] = itertools.islice(ResumableSampler(IMAGES, LoaderOptions(global_batch=20, micro_batch=20), START), 1)
    sampler = iter(ResumableSampler(IMAGES, LoaderOptions(global_batch=4, micro_batch=4), start))
    assert next(sampler) + next(sampler) == whole[10:18]
    assert next(sampler)[0][0] == 1
    position = start
    for epoch in (0, 0, 1):
        assert position.epoch == epoch
        position = position.advance(4, per_epoch=20)


def test_unreadable_images_are_replaced_named_and_reported():
    broken = (3, 4, 20)
    good, mixed = batches(4, source=Noise()), batches(4, source=Noise(broken=broken))
    assert [batch.indices.tolist() for batch in good] == [batch.indices.tolist() for batch in mixed]
    for batch in mixed:
        broken_drawn = [i for i in batch.indices.tolist() if i in broken]
        for i, name in zip(batch.indices.tolist(), batch.names, strict=True):
            assert (name == f"noise/{i}") == (i not in broken) and name not in {f"noise/{j}" for j in broken}
        # A replacement may itself be a broken image: then that one is reported too.
        assert {f"noise/{i} (truncated)" for i in broken_drawn} <= set(batch.bad)
        assert bool(batch.bad) == bool(broken_drawn)
    assert any(batch.bad for batch in mixed)
    readable = {key: value for key, value in by_sample(good).items() if key[1] not in broken}
    after = by_sample(mixed)
    assert_same_crops(readable, {key: after[key] for key in readable})


@pytest.mark.parametrize("workers", [0, 1])
def test_data_without_a_readable_image_is_given_up(workers):
    with pytest.raises(DataError) as caught:
        batches(1, source=Noise(200, broken=tuple(range(200))), workers=workers)
    assert str(caught.value).startswith("100 images in a row are unreadable, the last one noise/")
    assert "\n" not in str(caught.value)


class Faulty(Noise):
    """Its second image makes `fault`."""

    def __init__(self, fault) -> None:
        super().__init__(8)
        self.fault = fault

    def load(self, index: int) -> Image.Image:
        return self.fault() if index == 1 else super().load(index)


def test_a_source_that_raises_something_else_is_named():
    with pytest.raises(DataError, match=r"of Faulty raised KeyError: 'label'; a source reports what it can't read"):
        batches(1, source=Faulty(partial({}.__getitem__, "label")))


def _workers(loader):
    return [psutil.Process(worker.pid) for worker in loader._batches._workers]


@pytest.mark.slow
def test_a_killed_worker_is_named_and_started_again_once():
    """No image is lost or seen twice, also where batches are taken if they are there; a second death is an error."""
    undisturbed, loader = open_loader(workers=0), open_loader()
    everything = [next(undisturbed).indices.tolist() for _ in range(40)]
    seen = [next(loader).indices.tolist()]
    first = _workers(loader)
    os.kill(first[0].pid, signal.SIGKILL)
    seen += [(loader.next_if_ready() or next(loader)).indices.tolist() for _ in range(39)]
    assert seen == everything
    assert len(loader.notes) == 1
    assert f"loader process {first[0].pid} was killed by SIGKILL" in loader.notes[0]
    assert "started again at epoch 0, image " in loader.notes[0]
    second = _workers(loader)
    os.kill(second[0].pid, signal.SIGBUS)
    with pytest.raises(DataError, match=f"loader process {second[0].pid} was killed by SIGBUS") as caught:
        list(itertools.islice(loader, 1000))
    assert "\n" not in str(caught.value) and "--resume" in str(caught.value)
    _, alive = psutil.wait_procs([*first, *second], timeout=60)
    assert alive == []


@pytest.mark.slow
def test_a_loader_that_hangs_is_seen_started_again_and_given_up(monkeypatch):
    """An image never comes, as from a disk that does not answer."""
    monkeypatch.setattr(loader_module, "_LOOK_SECONDS", 0.1)
    loader = open_loader(1, Faulty(partial(time.sleep, 1000)), patience=0.5)
    assert loader.next_if_ready() is None
    first = _workers(loader)
    with pytest.raises(DataError, match=r"loader processes \d+ gave no batch for \d+ s.*after a restart"):
        next(loader)
    assert len(loader.notes) == 1
    _, alive = psutil.wait_procs(first, timeout=60)
    assert alive == []


def test_too_little_shared_memory_is_said_before_the_first_batch(monkeypatch):
    docker = SimpleNamespace(f_bavail=64 * 2**20, f_frsize=1)
    monkeypatch.setattr(workers_module.os, "statvfs", lambda path: docker)
    check = workers_module.check_shared_memory
    large, worker = Recipe(), change_recipe(Recipe(), {"data.augment": "worker"})
    small = change_recipe(worker, {"crops.global_size": "32", "crops.local_size": "16"})
    assert large.batch_bytes(64) == 64 * 3 * (2 * 224**2 + 8 * 96**2)
    with pytest.raises(DataError, match=r"0\.50 GiB .* /dev/shm has 0\.06 GiB free: start .* --shm-size 1g") as caught:
        check(large.batch_bytes(64), 5)
    assert "\n" not in str(caught.value)
    check(small.batch_bytes(8), 5)
    check(worker.batch_bytes(64), 0)
    monkeypatch.setattr(workers_module, "_SHARED_MEMORY", "/nowhere")
    check(worker.batch_bytes(64), 5)


def open_loader(workers: int = 2, source: Noise | None = None, **options) -> Loader:
    options = LoaderOptions(global_batch=8, micro_batch=8, workers=workers, **options)
    return Loader(source or Noise(200), CROPS, options, START)


@pytest.mark.slow
def test_workers_survive_the_signals_that_stop_a_run_and_end_with_it(tmp_path):
    """They reach every process, even before a worker has begun, and the server that forks workers; the parent still
    gets the batch that it waits for, without a traceback. A loader that nobody closes does not hold up its program's
    end. The script is one whose import is noticed: workers must not run it again."""
    script = tmp_path / "job.py"
    script.write_text(
        textwrap.dedent(
            """
            import os, signal, sys
            open(sys.argv[1], "a").write("run\\n")
            if __name__ == "__main__":
                import psutil
                from dino_ds.errors import STOP_SIGNALS
                from tests.data.test_loader import open_loader
                loader = open_loader()
                family = psutil.Process().children(recursive=True)
                workers = [p for p in family if p.parent().pid != os.getpid()]
                for turn in range(10):
                    for process in family if turn < 3 else []:
                        for number in STOP_SIGNALS:
                            os.kill(process.pid, number)
                    next(loader)
                print(len(family), signal.pthread_sigmask(signal.SIG_BLOCK, []) == set())
                print(len(workers), all(worker.is_running() for worker in workers))
                loader.close()
                gone, alive = psutil.wait_procs(workers, timeout=60)
                print(len(gone), len(alive))
                forgotten = open_loader()
                next(forgotten)
            """
        )
    )
    command, env = [sys.executable, str(script), str(tmp_path / "runs")], {"PYTHONPATH": os.pathsep.join(sys.path)}
    how = {"capture_output": True, "text": True, "timeout": 300, "env": os.environ | env}
    out = subprocess.run(command, **how, check=False)
    assert out.stderr == ""
    assert out.stdout.split() == ["4", "True", "2", "True", "2", "0"]
    assert (tmp_path / "runs").read_text() == "run\n"
    assert out.returncode == 0


def _load_for_ever(pipe) -> None:
    loader = open_loader()
    for _ in range(2):  # both processes have begun
        next(loader)
    pipe.send([worker.pid for worker in loader._batches._workers])
    time.sleep(600)


@pytest.mark.slow
def test_workers_end_when_the_run_is_killed():
    here, there = multiprocessing.Pipe()
    job = psutil.Process(fork_server().fork(_load_for_ever, there))
    family = [psutil.Process(pid) for pid in here.recv()]
    family += job.children(recursive=True)
    job.kill()
    _, alive = psutil.wait_procs(family, timeout=60)
    assert len(family) >= 2
    assert alive == []


@pytest.mark.parametrize("workers", [0, 1])
def test_memory_that_runs_out_in_a_loader_is_no_unreadable_image(workers):
    with pytest.raises(MemoryError) as raised:
        batches(3, workers=workers, source=Faulty(partial(bytearray, 2**62)))
    assert is_out_of_memory(raised.value)


def test_the_whole_data_set_is_held_to_the_fraction_exactly():
    assert allowed_bad_images(0.01, 1000, 1000) == allowed_bad_images(0.01, 5000, 1000) == 10
    assert allowed_bad_images(0.01, 20, 20) == 1
    assert allowed_bad_images(1.0, 20, 20) == 20
    assert [allowed_bad_images(0.0, drawn, 1000) for drawn in (1, 500, 1000)] == [0, 0, 0]
    assert min(allowed_bad_images(1e-4, drawn, 10**9) for drawn in (1, 8, 64, 512)) >= 1


@pytest.mark.gpu
@pytest.mark.parametrize("workers", [0, 2])
@BOTH
def test_a_gpu_is_fed_the_same_crops(augment, workers):
    """Also when the step writes over its memory: nothing of the next batch may lie there yet."""
    gpu = torch.device("cuda")
    options = LoaderOptions(global_batch=GLOBAL, micro_batch=4, workers=workers, augment=augment, device=gpu)
    fed = DevicePrefetcher(Loader(Noise(), CROPS, options, START), gpu)
    for fed_batch, batch in zip(itertools.islice(fed, 12), batches(12, 4, augment=augment), strict=True):
        fed.prefetch()
        assert fed_batch.indices.is_cuda and torch.equal(fed_batch.indices.cpu(), batch.indices)
        for a, b in zip(all_crops(fed_batch.crops), all_crops(augmented_crops(batch)), strict=True):
            torch.testing.assert_close(a.cpu(), b, rtol=0, atol=1 / 58)
            a.zero_()
    fed.close()
