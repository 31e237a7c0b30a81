"""Batches of crops, epoch after epoch, from any position in the data; the next batch is copied to the device and
augmented during the current training step. Global batches depend on (seed, epoch) and the global batch size alone;
ranks, micro-batches and workers only divide the work. So a run resumes, or repeats on other hardware, with the same
images in order."""

from __future__ import annotations

import bisect
import time
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import accumulate, islice

import torch
from torch.utils.data import DataLoader, Sampler

from dino_ds.basics.ranges import AUGMENTATION, COPY, loading_range, named_range
from dino_ds.basics.seeds import crop_seed
from dino_ds.config.crops import all_crops
from dino_ds.data import batches as loading
from dino_ds.data.batches import LoaderBatch, LoaderOptions
from dino_ds.data.feed import Batch, Position
from dino_ds.data.images import Source
from dino_ds.data.mixture import Draws, draws_in
from dino_ds.data.multicrop import MultiCrop
from dino_ds.errors import DataError

_LOOK_SECONDS = 2  # time after which the wait for a batch is interrupted to check whether `patience` is over
_POLL_SECONDS = 0.001  # time that a finished batch may take to come out of its queue when `next_if_ready` polls it


class DevicePrefetcher(Iterator[Batch]):
    """Endless iterator of Batch over a loader. Raises the loader's errors. On a GPU, call `prefetch` after the launch
    of a micro-batch's backward pass: it copies and augments the next crops on a side stream during that pass."""

    def __init__(self, loader: Loader, device: torch.device) -> None:
        self._loader, self._device = loader, device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._next: Batch | DataError | None = None

    def __next__(self) -> Batch:
        if self._stream is None:
            return self._to_device(next(self._loader))
        ready, self._next = self._next, None
        if isinstance(ready, DataError):
            raise ready
        if ready is None:
            ready = self._to_device(next(self._loader))
        step = torch.cuda.current_stream(self._device)
        step.wait_stream(self._stream)
        keys = [] if ready.drop_keys is None else [ready.drop_keys]
        masks = (tensor for mask in ready.masks.values() for tensor in mask.values())
        for tensor in (*all_crops(ready.crops), ready.indices, *keys, *masks):
            tensor.record_stream(step)  # or the side stream would reuse its memory while the step reads it
        return ready

    def prefetch(self) -> None:
        """Copy and augment the next batch if it is ready, without waiting; `__next__` raises its errors."""
        if self._stream is None or self._next is not None:
            return
        try:
            if batch := self._loader.next_if_ready():
                self._next = self._to_device(batch)
        except DataError as error:
            self._next = error

    def take_notes(self) -> list[str]:
        notes, self._loader.notes = self._loader.notes, []
        return notes

    def close(self) -> None:
        self._next = None
        self._loader.close()

    def _to_device(self, batch: LoaderBatch) -> Batch:
        with torch.cuda.stream(self._stream):  # does nothing if the stream is None
            return to_device(batch, self._device)


def to_device(batch: LoaderBatch, device: torch.device) -> Batch:
    """Copy a batch to the device and augment it there on the current stream; the host does not wait."""
    with loading_range(COPY):
        moved = batch.moved(lambda tensor: tensor.to(device, non_blocking=True))
    with named_range(AUGMENTATION):
        crops = loading.augmented_crops(moved)
    return Batch(crops, moved.drop_keys, moved.masks, moved.indices, batch.epoch, batch.names, batch.bad)


class BatchKeys(list[tuple[int, int]]):
    """(epoch, index) of the images of a micro-batch; repeat r of image i in an epoch has the index i + r * images."""

    resolution = 0  # index of the step's resolution
    later: tuple[int, ...] = ()  # indices of the images in the batch that the same process gets next, if known


class ResumableSampler(Sampler[BatchKeys]):
    """Endless `BatchKeys` of one rank's micro-batches, and the resolution that each step draws.

    Micro-batch m of a step, on rank r, has `micro` positions of the global batch, from (m * ranks + r) * micro on.
    Images that do not fill a global batch at the end of an epoch are left out; each epoch leaves out different ones.

    Args:
        images: number of images in the source.
        options: the loader's options.
        start: position at which a step begins.
        draws: how often each image is drawn; None = equally often.
    """

    def __init__(self, images: int, options: LoaderOptions, start: Position, draws: Draws | None = None) -> None:
        self._images, self._options, self._start, self._draws = images, options, start, draws
        self._chunk = options.micro_batch * options.world_size
        assert options.global_batch % self._chunk == 0
        self._per_epoch = steps_per_epoch(images, options.global_batch) * options.global_batch
        self._begun = (0, 0)
        """Number of batches that the current step has had, and the step's resolution if there are several."""

    def advance(self) -> None:
        """Count one batch as used: an iterator that begins later continues after it."""
        self._start, self._begun = self._after(self.position, self._begun)

    @property
    def position(self) -> Position:
        start = self._start
        return start if start.samples + self._chunk <= self._per_epoch else Position(start.epoch + 1, 0)

    def _after(self, position: Position, begun: tuple[int, int]) -> tuple[Position, tuple[int, int]]:
        """Position and `_begun` after the batch at `position`; the first batch of a step draws its resolution."""
        options, (batches, resolution) = self._options, begun
        if not batches:
            step = position.samples // options.global_batch
            resolution = draw_resolution(options.shares, options.seed, position.epoch, step)
        begun = (batches + 1) % (options.global_batch // self._chunk), resolution
        return position.advance(self._chunk, self._per_epoch), begun

    def __iter__(self) -> Iterator[BatchKeys]:
        """Yield keys with `later` set for torch's order, batch i to process i % workers; else only time is lost."""
        workers = self._options.workers
        batches, ahead = self._batches(), max(1, loading.automatic_workers() if workers is None else workers)
        waiting = deque(islice(batches, ahead))
        for batch in batches:
            keys = waiting.popleft()
            keys.later = tuple(index for _, index in batch)
            waiting.append(batch)
            yield keys

    def _batches(self) -> Iterator[BatchKeys]:
        position, begun, permuted, order = self.position, self._begun, -1, torch.empty(0)
        micro, seed = self._options.micro_batch, self._options.seed
        while True:
            epoch, first = position.epoch, position.samples + self._options.rank * micro
            if epoch != permuted and self._draws is not None:
                order = self._draws.epoch(seed, epoch, self._per_epoch)
            elif epoch != permuted:
                generator = torch.Generator().manual_seed(crop_seed(seed, epoch, -1) >> 1)  # -1: no such sample
                order = torch.randperm(self._images, generator=generator)
            permuted = epoch
            keys = BatchKeys((epoch, index) for index in order[first : first + micro].tolist())
            position, begun = self._after(position, begun)
            keys.resolution = begun[1]
            yield keys


class Loader(Iterator[LoaderBatch]):
    """Endless iterator of this rank's LoaderBatches from `start` on. If a loader process dies, or none returns a batch
    for `options.patience` seconds, all are restarted at the same batch, once, with a line in `notes`. Raises DataError
    if there are fewer images than a global batch."""

    def __init__(self, source: Source, multicrop: MultiCrop, options: LoaderOptions, start: Position) -> None:
        self._source, self._patience, self._cache = source, options.patience, options.cache
        self._dataset = loading.MultiCropDataset(source, multicrop, options)
        self._sampler = ResumableSampler(len(source), options, start, draws_in(source))
        self._options = loading.worker_options(options.workers)
        self._options["timeout"] = _LOOK_SECONDS if self._options["num_workers"] else 0
        self._restarted = False
        self.notes: list[str] = []
        self._start()

    def _start(self) -> None:
        loader: DataLoader[LoaderBatch | DataError] = DataLoader(
            self._dataset, batch_sampler=self._sampler, collate_fn=loading.as_it_is, **self._options
        )
        self._batches: Iterator[LoaderBatch | DataError] | None = loading.start_workers(loader, self._source)
        # If nobody closes the loader, Python would wait forever at its exit for processes that ignore SIGTERM.
        weakref.finalize(self, loading.kill_workers, self._batches)

    def __next__(self) -> LoaderBatch:
        self._waits_since = time.monotonic()
        while (batch := self._poll(_LOOK_SECONDS)) is None:
            waited = time.monotonic() - self._waits_since
            if self._patience is not None and waited >= self._patience:
                pids = ", ".join(str(worker.pid) for worker in getattr(self._batches, "_workers", []))
                loading.kill_workers(self._batches)
                reason = f"loader processes {pids} gave no batch for {waited:.0f} s"
                self._start_again(f"{reason}. Most often a disk or network does not answer")
        return batch

    def next_if_ready(self) -> LoaderBatch | None:
        """The next batch if a loader process has it ready, else None."""
        return self._poll(_POLL_SECONDS) if self._options["num_workers"] else None

    def _poll(self, seconds: float) -> LoaderBatch | None:
        """The next batch; None if no loader process has it within `seconds`."""
        while True:
            if self._batches is None:
                raise StopIteration
            self._batches._timeout = seconds  # type: ignore[attr-defined]
            try:
                batch = next(self._batches)
                break
            except (RuntimeError, EOFError, OSError) as error:
                if str(error).startswith("DataLoader timed out"):
                    return None
                reason = loading.handle_worker_crash(self._batches)
                if reason is None:
                    raise
                self._start_again(reason, error)
        if isinstance(batch, DataError):
            self.close()
            raise batch
        self._sampler.advance()
        if self._cache is not None and (note := self._cache.take_note()):
            self.notes.append(note)
        return batch

    def _start_again(self, reason: str, error: Exception | None = None) -> None:
        self.close()
        if self._restarted:
            why = f"{reason}, after a restart; what the run has saved is intact, --resume continues from there"
            raise DataError(why) from error
        self._restarted, at = True, self._sampler.position
        self.notes.append(f"{reason}; the loader was started again at epoch {at.epoch}, image {at.samples}")
        self._start()
        self._waits_since = time.monotonic()

    def close(self) -> None:
        loading.stop_workers(self._batches)
        self._batches = None


def steps_per_epoch(images: int, global_batch: int) -> int:
    """Optimizer steps in one pass over the data, without an incomplete last batch. Raises DataError if that is 0."""
    if images < global_batch:
        why = f"{images} images < one global batch of {global_batch}"
        raise DataError(f"{why}: set --data.global_batch to {images} or less, or add images")
    return images // global_batch


def draw_resolution(shares: Sequence[float], seed: int, epoch: int, step: int) -> int:
    """Draw the index of the resolution of an epoch's step: the same on all ranks and in all micro-batches. Where
    facebookresearch/dinov3 draws from a stream that all ranks share, a hash draws here: it needs no state to resume."""
    if len(shares) < 2:
        return 0
    drawn = (crop_seed(crop_seed(seed, epoch, -2), -1, step) >> 11) * 2.0**-53  # -2: no sample has this index
    return min(bisect.bisect_right(list(accumulate(shares)), drawn), len(shares) - 1)
