"""The feed: what the loader sends, on the device and augmented."""

from __future__ import annotations

import itertools
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from dino_ds.config.crops import all_crops
from dino_ds.data import loader as feed_module
from dino_ds.data.batches import LoaderOptions, augmented_crops
from dino_ds.data.loader import DevicePrefetcher, Loader
from dino_ds.errors import DataError
from tests.data.test_loader import BOTH, CROPS, GLOBAL, START, Noise, batches


def prefetcher(device: str, augment: str, workers: int = 0) -> DevicePrefetcher:
    where = torch.device(device)
    return DevicePrefetcher(
        Loader(
            Noise(),
            CROPS,
            LoaderOptions(global_batch=GLOBAL, micro_batch=4, workers=workers, augment=augment, device=where),
            START,
        ),
        where,
    )


def same_crops(a, b) -> bool:
    return list(a) == list(b) and all(torch.equal(x, y) for x, y in zip(all_crops(a), all_crops(b), strict=True))


@BOTH
def test_crops_are_those_of_the_batches(augment):
    fed = prefetcher("cpu", augment)
    for fed_batch, batch in zip(itertools.islice(fed, 5), batches(5, 4, augment=augment), strict=True):
        assert torch.equal(fed_batch.indices, batch.indices)
        assert (fed_batch.epoch, fed_batch.names, fed_batch.bad) == (batch.epoch, batch.names, batch.bad)
        assert same_crops(fed_batch.crops, augmented_crops(batch))
    fed.close()


class Recorder:
    """A loader, a device and its streams that only write down what the host does, in order."""

    def __init__(self, monkeypatch, ready):
        self.did, self.ready, self.notes = [], ready, []
        self.batches = (SimpleNamespace(number=number, params=None) for number in itertools.count(1))
        self.streams = ["step"]
        monkeypatch.setattr(torch.cuda, "Stream", lambda device: "side")
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: self)
        monkeypatch.setattr(torch.cuda, "stream", self.stream)
        monkeypatch.setattr(feed_module, "to_device", self.to_device)
        self.prefetcher = DevicePrefetcher(self, torch.device("cuda", 0))

    def __next__(self):
        self.did.append("wait")
        return next(self.batches)

    def next_if_ready(self):
        if isinstance(self.ready, DataError):
            raise self.ready
        return next(self.batches) if self.ready else None

    @contextmanager
    def stream(self, stream):
        self.streams.append(stream)
        yield
        self.streams.pop()

    def wait_stream(self, stream):
        self.did.append(f"step waits for {stream}")

    def to_device(self, batch, device):
        number = batch.number
        self.did.append(f"augment {number} on {self.streams[-1]}")
        tensor = SimpleNamespace(record_stream=lambda stream: self.did.append(f"keep {number} for the step"))
        masks = {"global": {"rows": tensor}}
        return SimpleNamespace(crops={"global": [tensor]}, indices=tensor, masks=masks, number=number)

    def step(self):
        self.did.clear()
        got = next(self.prefetcher).number
        self.did.append("backward")
        self.prefetcher.prefetch()
        self.did.append("optimizer")
        return got, self.did


def test_a_batch_that_is_late_is_waited_for_after_the_step_is_launched(monkeypatch):
    recorder = Recorder(monkeypatch, ready=False)
    for number in (1, 2):
        got, did = recorder.step()
        assert (
            got == number and did[:2] == ["wait", f"augment {number} on side"] and did[-2:] == ["backward", "optimizer"]
        )


def test_an_error_of_the_next_batch_lets_this_step_end(monkeypatch):
    recorder = Recorder(monkeypatch, ready=DataError("100 images in a row"))
    assert recorder.step()[1][-1] == "optimizer"
    with pytest.raises(DataError, match="in a row"):
        next(recorder.prefetcher)


@pytest.mark.gpu
@pytest.mark.parametrize("workers", [0, 2])
@BOTH
def test_a_gpu_is_fed_the_same_crops(augment, workers):
    """Also when the step writes over its memory: nothing of the next batch may lie there yet."""
    fed = prefetcher("cuda", augment, workers)
    for fed_batch, batch in zip(itertools.islice(fed, 12), batches(12, 4, augment=augment), strict=True):
        fed.prefetch()
        assert fed_batch.indices.is_cuda and torch.equal(fed_batch.indices.cpu(), batch.indices)
        for a, b in zip(all_crops(fed_batch.crops), all_crops(augmented_crops(batch)), strict=True):
            torch.testing.assert_close(a.cpu(), b, rtol=0, atol=1 / 58)
            a.zero_()
    fed.close()
