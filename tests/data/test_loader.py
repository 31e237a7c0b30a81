"""The loader: the same images in the same order and the same crops, whoever shares the work and wherever it starts."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import textwrap

import numpy as np
import pytest
import torch
from PIL import Image

from dino_ds.data import workers as workers_module
from dino_ds.data.images import UnreadableImage
from dino_ds.data.loader import (
    Batch,
    MultiCropDataset,
    Position,
    ResumableSampler,
    build_loader,
    steps_per_epoch,
)
from dino_ds.data.multicrop import MultiCrop
from dino_ds.data.workers import automatic_workers
from dino_ds.errors import DataError

IMAGES, GLOBAL = 21, 8
START = Position()


class Noise:
    """Images of noise; those in `broken` can't be read."""

    labels = None
    classes = None

    def __init__(self, images: int = IMAGES, broken: tuple[int, ...] = ()) -> None:
        self.images, self.broken = images, broken

    def __len__(self) -> int:
        return self.images

    def load(self, index: int) -> Image.Image:
        if index in self.broken:
            raise UnreadableImage(self.name(index), "truncated")
        pixels = np.random.default_rng(index).integers(0, 255, (12, 12, 3), dtype=np.uint8)
        return Image.fromarray(pixels)

    def name(self, index: int) -> str:
        return f"noise/{index}"


CROPS = MultiCrop(8, (0.4, 1.0), 4, (0.1, 0.4), 1, "low_res")


def batches(
    count: int,
    micro: int = GLOBAL,
    rank: int = 0,
    world: int = 1,
    workers: int = 0,
    start=START,
    source=None,
    seed=0,
) -> list[Batch]:
    loader = build_loader(source or Noise(), CROPS, seed, GLOBAL, micro, rank, world, workers, start)
    try:
        return list(itertools.islice(loader, count))
    finally:
        loader.close()


def by_sample(some: list[Batch]) -> dict[tuple[int, int], list[torch.Tensor]]:
    return {
        (batch.epoch, int(index)): [crop[row] for crop in batch.crops]
        for batch in some
        for row, index in enumerate(batch.indices)
    }


def assert_same_crops(a, b) -> None:
    assert a.keys() == b.keys()
    for key in a:
        assert all(torch.equal(x, y) for x, y in zip(a[key], b[key], strict=True)), key


def test_batch_contents():
    (batch,) = batches(1)
    assert [tuple(crop.shape) for crop in batch.crops] == [(8, 3, 8, 8)] * 2 + [(8, 3, 4, 4)]
    assert batch.indices.dtype == torch.int64
    assert batch.indices.shape == (8,)
    assert batch.epoch == 0
    assert batch.names == [f"noise/{i}" for i in batch.indices.tolist()]
    assert batch.bad == []


def test_an_epoch_meets_each_image_once_and_drops_the_rest():
    seen = batches(6)
    epochs = [torch.cat([batch.indices for batch in seen if batch.epoch == epoch]).tolist() for epoch in (0, 1, 2)]
    assert [len(epoch) for epoch in epochs] == [16, 16, 16]
    assert [len(set(epoch)) for epoch in epochs] == [16, 16, 16]
    assert epochs[0] != epochs[1] != epochs[2]
    assert set(range(IMAGES)) == set().union(*epochs)


@pytest.mark.parametrize("world,micro", [(1, 8), (2, 4), (2, 2), (4, 1), (1, 2)])
def test_global_batches_do_not_depend_on_ranks_and_micro_batches(world, micro):
    """Accumulated over micro-steps and put together over ranks: the same images, and in the same order."""
    expected = [batch.indices.tolist() for batch in batches(5)]
    per_step = GLOBAL // (world * micro)
    ranks = [batches(5 * per_step, micro, rank, world) for rank in range(world)]
    for step, wanted in enumerate(expected):
        places = []
        for m in range(per_step):
            for rank in ranks:
                places += rank[step * per_step + m].indices.tolist()
        assert places == wanted


def test_crops_do_not_depend_on_workers_and_ranks():
    alone = by_sample(batches(4))
    assert_same_crops(alone, by_sample(batches(4, workers=2)))
    assert_same_crops(alone, by_sample(batches(8, 2, 0, 2)) | by_sample(batches(8, 2, 1, 2)))


def test_crops_differ_between_epochs_images_and_seeds():
    same = Noise(1)
    dataset = MultiCropDataset(same, CROPS, seed=0)
    one = dataset[0, 0].crops
    assert all(torch.equal(a, b) for a, b in zip(one, dataset[0, 0].crops, strict=True))
    others = [dataset[1, 0].crops, MultiCropDataset(same, CROPS, seed=1)[0, 0].crops]
    monotone = type("Monotone", (Noise,), {"load": lambda self, index: same.load(0)})
    others.append(MultiCropDataset(monotone(), CROPS, seed=0)[0, 1].crops)
    for other in others:
        assert not any(torch.equal(a, b) for a, b in zip(one, other, strict=True))
    assert batches(1)[0].indices.tolist() != batches(1, seed=1)[0].indices.tolist()


@pytest.mark.parametrize("consumed", [0, 1, 2, 3, 5])
def test_resuming_from_a_position_continues_the_straight_run(consumed):
    """Micro-batches of 4 in global batches of 8: also from the middle of a step, and over the epoch's end."""
    straight = batches(9, micro=4)
    position = Position()
    for _ in range(consumed):
        position = position.advance(4, per_epoch=16)
    resumed = batches(9 - consumed, micro=4, start=position)
    for a, b in zip(straight[consumed:], resumed, strict=True):
        assert (a.epoch, a.names) == (b.epoch, b.names)
        assert all(torch.equal(x, y) for x, y in zip(a.crops, b.crops, strict=True))


def test_position_moves_to_the_next_epoch():
    assert Position(0, 0).advance(8, 16) == Position(0, 8)
    assert Position(0, 8).advance(8, 16) == Position(1, 0)
    assert Position(3, 12).advance(4, 16) == Position(4, 0)


def test_position_of_another_global_batch_still_fits():
    """A run resumed with another batch size goes on where it stopped; sampler and position agree on the epoch's end."""
    start = Position(0, 10)
    sampler = iter(ResumableSampler(IMAGES, 0, 4, 4, 0, 1, start))
    order = [
        i
        for batch in itertools.islice(iter(ResumableSampler(IMAGES, 0, 20, 20, 0, 1, Position())), 1)
        for _, i in batch
    ]
    got = [next(sampler) for _ in range(3)]
    assert [i for _, i in got[0] + got[1]] == order[10:18]
    assert got[2][0][0] == 1
    position = start
    for epoch in (0, 0, 1):
        assert position.epoch == epoch
        position = position.advance(4, per_epoch=20)


def test_too_few_images():
    assert steps_per_epoch(1024, 512) == steps_per_epoch(1030, 512) == 2
    with pytest.raises(
        DataError, match=r"512 images < one global batch of 1024: set --data\.global_batch to 512 or less"
    ):
        steps_per_epoch(512, 1024)
    with pytest.raises(DataError, match="7 images < one global batch of 8"):
        batches(1, source=Noise(7))


@pytest.mark.parametrize("workers", [0, 1])
def test_unreadable_images_are_replaced_named_and_reported(workers):
    broken = (3, 4, 20)
    good, mixed = batches(4, source=Noise()), batches(4, source=Noise(broken=broken), workers=workers)
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
def test_data_without_a_readable_image_is_given_up(workers, monkeypatch):
    with pytest.raises(DataError) as caught:
        batches(1, source=Noise(200, broken=tuple(range(200))), workers=workers)
    assert str(caught.value).startswith("100 images in a row are unreadable, the last one noise/")
    assert "\n" not in str(caught.value)


def test_automatic_workers_leave_a_core_to_each_rank(monkeypatch):
    monkeypatch.setattr(workers_module.sys, "platform", "linux")
    for cores, ranks, expected in (
        (2, 2, 0),
        (2, 1, 1),
        (1, 2, 0),
        (16, 1, 15),
        (64, 4, 15),
        (256, 8, 16),
        (96, 8, 11),
    ):
        monkeypatch.setattr(workers_module.os, "sched_getaffinity", lambda pid, n=cores: set(range(n)), raising=False)
        monkeypatch.setattr(workers_module, "local_world_size", lambda n=ranks: n)
        assert automatic_workers() == expected


def test_torchs_generator_is_not_moved():
    """Otherwise what is drawn from it after a resume would depend on when the loader was built."""
    before = torch.get_rng_state()
    batches(2)
    assert torch.equal(torch.get_rng_state(), before)


def test_workers_survive_the_signals_that_stop_a_run_and_end_with_it(tmp_path):
    """SIGINT and SIGTERM reach every process; the parent still gets the batch that it waits for, without a traceback.

    The script is one whose import is noticed: workers must not run it again.
    """
    script = tmp_path / "job.py"
    script.write_text(
        textwrap.dedent(
            """
            import os, signal, sys, time
            import psutil
            open(sys.argv[1], "a").write("run\\n")
            if __name__ == "__main__":
                from dino_ds.data.loader import Position, build_loader
                from dino_ds.data.multicrop import MultiCrop
                from dino_ds.data.sources import build_source
                crops = MultiCrop(8, (0.4, 1.0), 4, (0.1, 0.4), 1, "low_res")
                loader = build_loader(build_source("photos", None, "train", False), crops, 0, 8, 8, 0, 1, 2, Position())
                next(loader)
                family = psutil.Process().children(recursive=True)
                workers = [p for p in family if p.parent().pid != os.getpid()]
                for worker in workers:
                    os.kill(worker.pid, signal.SIGINT)
                    os.kill(worker.pid, signal.SIGTERM)
                for _ in range(30):
                    next(loader)
                print(len(workers), all(worker.is_running() for worker in workers))
                loader.close()
                gone, alive = psutil.wait_procs(workers, timeout=10)
                print(len(gone), len(alive))
            """
        )
    )
    out = subprocess.run(
        [sys.executable, str(script), str(tmp_path / "runs")],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        check=False,
    )
    assert out.stderr == ""
    assert out.stdout.split() == ["2", "True", "2", "0"]
    assert (tmp_path / "runs").read_text() == "run\n"
    assert out.returncode == 0


def test_workers_end_when_the_run_is_killed(tmp_path):
    """A rank that dies without a farewell leaves no process behind."""
    code = textwrap.dedent(
        """
        import os, time
        import psutil
        from dino_ds.data.loader import Position, build_loader
        from dino_ds.data.multicrop import MultiCrop
        from dino_ds.data.sources import build_source
        crops = MultiCrop(8, (0.4, 1.0), 4, (0.1, 0.4), 1, "low_res")
        loader = build_loader(build_source("photos", None, "train", False), crops, 0, 8, 8, 0, 1, 1, Position())
        next(loader)
        print(*[p.pid for p in psutil.Process().children(recursive=True)], flush=True)
        time.sleep(60)
        """
    )
    import psutil

    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=environment) as job:
        assert job.stdout is not None
        family = [psutil.Process(int(pid)) for pid in job.stdout.readline().split()]
        os.kill(job.pid, signal.SIGKILL)
        _, alive = psutil.wait_procs(family, timeout=15)
    assert len(family) >= 2
    assert alive == []
