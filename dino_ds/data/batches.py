"""Builds micro-batches of crops from the images of a source, in loader processes."""

from __future__ import annotations

import math
import multiprocessing
import os
import pickle
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import wait
from multiprocessing.context import ForkServerContext
from typing import Any, Literal

import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, get_worker_info

from dino_ds.basics import machine, own_code
from dino_ds.basics.seeds import crop_seed, sample_keys, seed_generators
from dino_ds.config.crops import Masks
from dino_ds.config.fields import MAX_WORKERS, PREFETCHED_BATCHES
from dino_ds.config.recipe import Recipe
from dino_ds.data.decode import DecodedImage, EncodedImage, check_channels, open_image
from dino_ds.data.image_cache import CachedImage, ImageCache
from dino_ds.data.images import Joined, Source, UnreadableImage, ValueRange, is_remote, prepare_images
from dino_ds.data.multicrop import AugmentationParams, CropParameters, MultiCrop, cut_crops, draw_masks
from dino_ds.data.photometric import augment, crops_per_params
from dino_ds.engine.distributed import local_world_size, usable_cores
from dino_ds.errors import STOP_SIGNALS, DataError

_SHARED_MEMORY = "/dev/shm"
_HINTS = {
    "SIGKILL": ". Most often memory has run out: lower data.workers or the micro-batch",
    "SIGBUS": ". Shared memory has run out: start the container with a larger --shm-size",
    "SIGSEGV": ". A decoder crashed on a damaged image",
}
_PATIENCE_SHARE = 0.8  # share of `LoaderOptions.patience` within which a remote image must arrive
_DRAWS = -4  # reserved negative image index that seeds the global generators, from which a user's source may draw


def automatic_workers(ranks: int | None = None) -> int:
    """Loader processes of a rank on a node of `ranks` ranks, by default as many as this node has: the rank's share of
    the cores, less one for training; at most 16."""
    return max(0, min(len(usable_cores()) // (ranks or local_world_size()) - 1, MAX_WORKERS))


def worker_options(workers: int | None) -> dict[str, Any]:
    """Arguments of torch's DataLoader for `workers` processes per rank; 0 = in this process, None = automatic."""
    workers = automatic_workers() if workers is None else workers
    return {
        "num_workers": workers,
        "prefetch_factor": PREFETCHED_BATCHES if workers else None,
        "worker_init_fn": _start_worker if workers else None,
        "multiprocessing_context": _process_context() if workers else None,
        "pin_memory": torch.cuda.is_available(),
        # Otherwise the iterator's own seed is drawn from torch's global generator.
        "generator": torch.Generator().manual_seed(0),
    }


def as_it_is(batch: Any) -> Any:
    """The `collate_fn` of a loader whose dataset makes whole batches."""
    return batch


def check_shared_memory(batch_bytes: int, workers: int | None) -> None:
    """Raises DataError if the batches of this node's ranks exceed shared memory: a writer past its end is killed."""
    workers = automatic_workers() if workers is None else workers
    if workers == 0 or not os.path.isdir(_SHARED_MEMORY):
        return
    # The batches that wait for the training process, and the one that it is reading.
    needed = (workers * PREFETCHED_BATCHES + 1) * batch_bytes * local_world_size()
    room = os.statvfs(_SHARED_MEMORY)
    free = room.f_bavail * room.f_frsize
    if needed > free:
        gib = math.ceil(needed / 2**30 * 1.1)
        raise DataError(
            f"{workers} loader processes a rank need {needed / 2**30:.2f} GiB of shared memory for batches of "
            f"{batch_bytes / 2**20:.0f} MiB, and {_SHARED_MEMORY} has {free / 2**30:.2f} GiB free: start the container "
            f"with --shm-size {gib}g or --ipc=host, lower data.workers or the micro-batch, or use data.augment device "
            "(a quarter of data.augment worker)"
        )


def handle_worker_crash(batches: object) -> str | None:
    """If a process of a torch DataLoader's iterator has died, kill all; returns which one died and why, or None."""
    workers = list(getattr(batches, "_workers", []))
    wait([worker.sentinel for worker in workers], timeout=5)  # the exit is known a little after the pipe broke
    dead = next((worker for worker in workers if worker.exitcode is not None), None)
    if dead is None:
        return None
    kill_workers(batches)
    name = {-number: number.name for number in signal.Signals}.get(dead.exitcode, "")
    how = f"was killed by {name}" if name else f"ended with code {dead.exitcode}"
    return f"loader process {dead.pid} {how}{_HINTS.get(name, '')}"


def kill_workers(batches: object) -> None:
    """Kill loader processes without asking them, unlike `stop_workers`: they may wait for a dead one's lock."""
    for worker in getattr(batches, "_workers", []):
        worker.kill()


def stop_workers(batches: object) -> None:
    """End the processes of a torch DataLoader's iterator, even if a traceback still refers to it."""
    if stop := getattr(batches, "_shutdown_workers", None):  # an iterator without processes lacks it
        stop()


@contextmanager
def started(loader: DataLoader[Any], source: Source) -> Iterator[Iterator[Any]]:
    """Iterator over a torch DataLoader of this source's images, whose processes end with the block."""
    batches = start_workers(loader, source)
    try:
        yield batches
    finally:
        stop_workers(batches)


def start_workers(loader: DataLoader[Any], source: Source) -> Iterator[Any]:
    """Iterator over a torch DataLoader, whose processes do not import the parent's main script, and with it DeepSpeed,
    unless the source is defined there."""
    main = sys.modules["__main__"]
    spec, file = main.__spec__, getattr(main, "__file__", None)
    source_class = type(getattr(source, "whole", source))  # the whole source of a `Part`
    if source_class.__module__ == "__main__" or file is None:
        return iter(loader)
    try:
        main.__spec__, main.__file__ = None, None
        return iter(loader)
    finally:
        main.__spec__, main.__file__ = spec, file


def _process_context() -> ForkServerContext:
    """Context that forks workers from a small server process, which has imported the loader once. A plain fork would
    copy a process in which gloo, NCCL, CUDA and OpenMP threads hold locks; spawning would import torch in each worker,
    which takes 5 seconds."""
    machine.shorten_socket_names()
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "dino_ds.data.loader"])
    # The server inherits the mask, and so does a worker until `_start_worker`: a signal to all processes ends neither.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        resource_tracker.ensure_running()  # this unblocks some of the signals here
        signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return context


def _start_worker(worker: int) -> None:
    torch.set_num_threads(1)  # one image at a time on one core: the cores are shared out over the workers already
    # Stop signals reach all processes; only the parent knows when the last batch is consumed.
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)

    def exit_with_parent() -> None:  # torch only watches the server, which waits for its workers
        parent = multiprocessing.parent_process()
        assert parent is not None
        parent.join()
        os._exit(1)

    threading.Thread(target=exit_with_parent, daemon=True).start()


@dataclass(frozen=True)
class LoaderOptions:
    """Settings of a loader.

    Attributes:
        global_batch: images of a step, a multiple of micro_batch * world_size.
        workers: loader processes; 0 = in this process, None = by the number of cores.
        patience: seconds without a batch after which the processes are restarted, None = never.
        augment: "worker" = crops are cut and augmented in the loader; "device" = only cut there.
        channels: number in every image; unless it is 3, color operations that need RGB are left out.
        value_range: of images deeper than 8 bits; if given, all crops are float32, and torch augments them, not Pillow.
        device: augments the crops.
        shares: for each resolution, the share of the steps that use it.
        cache: of decoded files, only for a source that has files.
    """

    seed: int = 0
    global_batch: int = 1
    micro_batch: int = 1
    rank: int = 0
    world_size: int = 1
    workers: int | None = 0
    patience: float | None = None
    augment: Literal["device", "worker"] = "worker"
    max_pixels: int | None = None
    channels: int = 3
    value_range: ValueRange | None = None
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    shares: tuple[float, ...] = ()
    cache: ImageCache | None = None

    @staticmethod
    def of(recipe: Recipe, **changes: Any) -> LoaderOptions:
        """Options of a recipe with `changes`, such as ranks and micro-batch, which no recipe has."""
        data = recipe.data
        options: dict[str, Any] = {
            "seed": recipe.seed,
            # A third: a loader that hangs twice, before and after its restart, fails before the watchdog ends the run.
            "patience": recipe.hang_seconds / 3 or None,
            "channels": recipe.model.in_chans,
            "value_range": data.known_range,
            "shares": tuple(resolution.share for resolution in recipe.resolutions),
        }
        options |= {name: getattr(data, name) for name in ("global_batch", "workers", "augment", "max_pixels")}
        return LoaderOptions(**options | changes)


@dataclass(frozen=True)
class LoaderBatch:
    """A micro-batch from the loader: each group's crops (v, b, ...) in one tensor; other attributes as in `Batch`.
    Crops augmented in the worker are (v, b, c, h, w) float32, without params. Crops to be augmented on the device are
    (v, b, h, w, c) of uint8, or of float32 in [0, 1] in a run with a value range; `params` then has the augmentation of
    each group's v * b crops, and `normalize` (2, c) the final offset and factor of each channel."""

    crops: dict[str, Tensor]
    params: dict[str, list[AugmentationParams]] | None
    indices: Tensor
    drop_keys: Tensor
    epoch: int
    names: list[str]
    bad: list[str]
    normalize: Tensor
    masks: Masks = field(default_factory=dict)

    def pin_memory(self) -> LoaderBatch:
        return self.moved(Tensor.pin_memory)

    def moved(self, move: Callable[[Any], Any]) -> LoaderBatch:
        """This batch with `move` applied to every tensor."""
        params = self.params and {name: [part.moved(move) for part in parts] for name, parts in self.params.items()}
        crops = {name: move(group) for name, group in self.crops.items()}
        masks = {name: {key: move(tensor) for key, tensor in mask.items()} for name, mask in self.masks.items()}
        indices, drop_keys, normalize = map(move, (self.indices, self.drop_keys, self.normalize))
        return LoaderBatch(crops, params, indices, drop_keys, self.epoch, self.names, self.bad, normalize, masks)

    def __reduce__(self) -> tuple[Any, ...]:
        # One tensor holds everything but the crops: the message in the pipe is then smaller than a page and written in
        # one piece, so that a loader process that is killed never leaves the reader waiting for the rest. Tensors go by
        # shared memory, whatever their size; each takes a file descriptor, so masks are not tensors here.
        rest = pickle.dumps(vars(replace(self, crops={}).moved(Tensor.numpy)))
        return _unpack, (self.crops, torch.frombuffer(bytearray(rest), dtype=torch.uint8))


def _unpack(crops: dict[str, Tensor], rest: Tensor) -> LoaderBatch:
    return replace(LoaderBatch(**pickle.loads(rest.numpy().tobytes())).moved(torch.as_tensor), crops=crops)


class MultiCropDataset(Dataset[LoaderBatch | DataError]):
    """Batches by `BatchKeys`. Boxes, colors and masks depend on (seed, epoch, index) and the resolution alone."""

    def __init__(self, source: Source, multicrop: MultiCrop, options: LoaderOptions) -> None:
        self._source, self._multicrop, self._options = source, multicrop, options
        self._elsewhere, self._draws = is_remote(source), own_code.is_own(getattr(source, "whole", source))
        self._by_pillow = options.augment == "worker" and options.channels == 3 and options.value_range is None

    def __getitems__(self, keys: Sequence[tuple[int, int]]) -> LoaderBatch | DataError:
        """The batch of `keys`, or the error: if it were raised, torch would make a traceback of its message."""
        try:
            return self._build(keys)
        except DataError as error:
            return error

    def _build(self, keys: Sequence[tuple[int, int]]) -> LoaderBatch:
        """Build a batch; its crops are written to memory that the training process reads without another copy."""
        if self._elsewhere:
            # Announce the images of this batch and of this process's next one, except those in the cache.
            cache, patience = self._options.cache, self._options.patience
            announced = [index % len(self._source) for index in (*(i for _, i in keys), *getattr(keys, "later", ()))]
            missing = [index for index in announced if cache is None or cache.get(index) is None]
            prepare_images(self._source, missing, patience and _PATIENCE_SHARE * patience)
        multicrop = self._multicrop.resolutions[getattr(keys, "resolution", 0)]
        crops = {group.name: self._empty(group.count, len(keys), group.size) for group in multicrop.groups}
        sampled, names, bad = list[list[CropParameters]](), list[str](), list[str]()
        slots = [slot for group in crops.values() for slot in group]
        for row, (epoch, index) in enumerate(keys):
            crop_params, name, failures = self._sample(multicrop, epoch, index, [slot[row] for slot in slots])
            sampled.append(crop_params)
            names.append(name)
            bad += failures
        normalize = multicrop.normalization.offset_and_factor()
        params, first = dict[str, list[AugmentationParams]](), 0
        for name, group in crops.items() if not self._by_pillow else ():
            # The first crops of all images, then the second ones, ...
            ordered = [crops_of_image[n] for n in range(first, first + len(group)) for crops_of_image in sampled]
            count = crops_per_params(group.shape[2], self._options.device) or len(ordered)
            pieces = [ordered[i : i + count] for i in range(0, len(ordered), count)]
            params[name] = [AugmentationParams.build(piece, self._options.channels) for piece in pieces]
            first += len(group)
        if params and self._options.augment == "worker":
            crops = {name: _augment_group(group, params[name], normalize) for name, group in crops.items()}
            params = {}
        seeds = [crop_seed(self._options.seed, epoch, index) for epoch, index in keys]
        masks = draw_masks(multicrop.groups, multicrop.masks, seeds)
        epoch, indices = keys[0][0], torch.tensor([index for _, index in keys])
        drop_keys = sample_keys(self._options.seed, epoch, indices)
        return LoaderBatch(crops, params or None, indices, drop_keys, epoch, names, bad, normalize, masks)

    def _empty(self, count: int, images: int, size: int) -> Tensor:
        """Empty tensor for the crops of a group; in a loader process, in memory shared with the training process."""
        channels, augmented = self._options.channels, self._by_pillow
        shape = (count, images, channels, size, size) if augmented else (count, images, size, size, channels)
        dtype = torch.float32 if augmented or self._options.value_range is not None else torch.uint8
        if get_worker_info() is None:
            return torch.empty(shape, dtype=dtype)
        storage = torch.UntypedStorage._new_shared(math.prod(shape) * dtype.itemsize)  # as torch's own collate does it
        return torch.empty(0, dtype=dtype).set_(storage).view(shape)

    def _sample(
        self, multicrop: MultiCrop, epoch: int, index: int, outputs: Sequence[Tensor]
    ) -> tuple[list[CropParameters], str, list[str]]:
        """Write the crops of an image into `outputs`; returns the parameters of the augmentation that Pillow has not
        done, the image's name, and an error for each unreadable image tried before. (seed, epoch, index) determines the
        image in place of an unreadable one: in a mixture, one of the same part. Raises DataError after 100 in a row."""
        options, bad, images = self._options, list[str](), len(self._source)
        seed, cache = crop_seed(options.seed, epoch, index), options.cache
        another = self._source.another if isinstance(self._source, Joined) else lambda _, number: number % images
        for attempt in range(100):
            # Not the next image: broken files often lie side by side.
            again = crop_seed(options.seed, epoch, index + attempt * images)
            actual = another(index % images, again) if attempt else index % images
            if self._draws:
                seed_generators(crop_seed(again, 0, _DRAWS))
            open_file = partial(self._open_file, actual)
            try:
                image = open_file() if cache is None else CachedImage(cache, actual, open_file)
                sampled = [] if self._by_pillow else multicrop.sample(image.width, image.height, seed)
                if self._by_pillow:
                    for output, crop in zip(outputs, multicrop(Image.fromarray(image.decode()), seed), strict=True):
                        output.copy_(crop)
                else:
                    cut_crops(image, sampled, multicrop.sizes, outputs)
                return sampled, self._source.name(actual), bad
            except UnreadableImage as error:
                bad.append(str(error))
        why = f"{len(bad)} images in a row are unreadable, the last one {bad[-1]}; look at these files and data.root"
        raise DataError(why)

    def _open_file(self, index: int) -> EncodedImage | DecodedImage:
        options = self._options
        try:
            image = open_image(self._source, index, options.max_pixels, options.value_range, options.channels)
        except (UnreadableImage, DataError, MemoryError):
            raise
        except (Exception, SystemExit) as error:
            why = f"image {index} of {type(self._source).__name__} raised {type(error).__name__}: {error}"
            raise DataError(f"{why}; a source reports what it can't read by raising UnreadableImage") from error
        if image.channels != options.channels:  # checked first: looking up a name takes as long as a small crop
            check_channels(image, options.channels, self._source.name(index))
        return image


def augmented_crops(batch: LoaderBatch) -> dict[str, list[Tensor]]:
    """The crops (b, c, h, w) float32 of a batch by group, on its device."""
    crops = batch.crops
    if batch.params is not None:
        crops = {name: _augment_group(group, batch.params[name], batch.normalize) for name, group in crops.items()}
    return {name: list(group) for name, group in crops.items()}


def _augment_group(group: Tensor, params: Sequence[AugmentationParams], normalize: Tensor) -> Tensor:
    """Crops (v, b, h, w, c) -> (v, b, c, h, w) float32, augmented and normalized."""
    return augment(group.flatten(0, 1), params, normalize).unflatten(0, group.shape[:2])
