"""The objective's own loss on images that are never trained on: always the same crops, against the teacher's targets.

Every micro-batch is measured by itself, whatever the number of ranks: terms that compare images (Sinkhorn-Knopp, KoLeo)
see one micro-batch, and the means over images are equal to the bit on any number of ranks whose kernels round alike.
"""

from __future__ import annotations

import sys
from collections.abc import Generator
from contextlib import closing
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

from dino_ds.config.recipe import Recipe
from dino_ds.data.batches import (
    LoaderBatch,
    LoaderOptions,
    MultiCropDataset,
    as_it_is,
    started,
    worker_options,
)
from dino_ds.data.image_set import digest_of
from dino_ds.data.images import Source, evenly_spaced_indices
from dino_ds.data.loader import to_device
from dino_ds.data.multicrop import MultiCrop
from dino_ds.engine import distributed
from dino_ds.errors import DataError
from dino_ds.evals.features import ImageMemory, keep_generators
from dino_ds.run.run import StepContext

_BATCH = 32
"""Smallest micro-batch, or a smaller global batch; up to twice as many images, so that no batch has a single one."""
_MOST_NAMES = 5


class HeldOutLoss:
    """Measures the held-out loss: val_loss, and as val_NAME every scalar of the loss terms and their KL.

    Crops and masks depend on the images and a fixed seed alone. Raises DataError for fewer than two images.
    """

    def __init__(self, recipe: Recipe, source: Source) -> None:
        self._recipe, self._source = recipe, source
        count = min(len(source), recipe.eval.test_images)
        if count < 2:
            raise DataError(f"a held-out loss needs two images, and there is {count}: name more, or a larger share")
        parts = max(1, count // min(_BATCH, max(2, recipe.data.global_batch)))
        chosen = evenly_spaced_indices(len(source), count)
        self._parts = [part.tolist() for part in np.array_split(np.array(chosen), parts)]
        self._noted, self._memory = False, ImageMemory()
        self.basis = digest_of(source, chosen)
        """A digest of the images: only values with the same digest are comparable."""

    def measure(self, moment: StepContext) -> dict[str, float] | None:
        """The metrics, {} if images can't be read any more, or None if a stop was requested; the same on all ranks.

        Leaves training's state and random numbers unchanged. Raises DataError only at the start of a run.
        """
        assert moment.training is not None
        losses, bad = dict[int, list[float]](), list[str]()
        ranks, mine = distributed.world_size(), distributed.rank()
        rounds = [self._parts[first : first + ranks] for first in range(0, len(self._parts), ranks)]
        # In the last round a rank without a part repeats another rank's: every rank must join each pass.
        my_parts = [parts[mine % len(parts)] for parts in rounds]
        kept = self._memory.batches("held out", lambda: self._batches(my_parts, moment), _copied)
        with keep_generators(moment.device), closing(kept) as batches:
            for number, (part, batch) in enumerate(zip(my_parts, batches, strict=True)):
                error = batch if isinstance(batch, DataError) else None
                answers = distributed.gather_objects((moment.stop_requested(), error))
                if any(stop for stop, _ in answers):
                    return None
                if error := next((error for _, error in answers if error), None):
                    if moment.at_start:
                        raise error
                    moment.log.info(f"evals    no held-out loss at step {moment.step}: {error}")
                    return {}
                assert isinstance(batch, LoaderBatch)
                bad += batch.bad
                values = self._measure(batch, moment)
                if mine < len(rounds[number]):
                    losses[number * ranks + mine] = [float(len(part)), *values]
        return self._means(losses, bad, moment)

    def _measure(self, batch: LoaderBatch, moment: StepContext) -> list[float]:
        """The loss and the scalars of the objective for one micro-batch."""
        assert moment.training is not None
        with distributed.alone():
            loss, scalars = moment.training.measure(to_device(batch, moment.device))
        return [float(loss), *(float(scalars[name]) for name in moment.training.objective.scalars)]

    def _means(self, losses: dict[int, list[float]], bad: list[str], moment: StepContext) -> dict[str, float]:
        """Means over all images, summed in the order of the micro-batches and not of the ranks."""
        assert moment.training is not None
        answers, objective = distributed.gather_objects((losses, bad)), moment.training.objective
        rows = dict(sorted((number, row) for by_number, _ in answers for number, row in by_number.items())).values()
        unreadable = sorted({name for _, names in answers for name in names})
        if unreadable and not self._noted:
            such = ", ".join(unreadable[:_MOST_NAMES])
            moment.log.info(f"evals    {len(unreadable)} held-out images can't be read, others stand for them: {such}")
            self._noted = True
        images = sum(row[0] for row in rows)
        names = ("loss", *objective.scalars)
        means = {name: sum(row[0] * row[i] for row in rows) / images for i, name in enumerate(names, 1)}
        means |= {entropy.kl: means[entropy.loss] - means[entropy.scalar] for entropy in objective.entropies}
        return {f"val_{name}": value for name, value in means.items()}

    def _batches(self, my_parts: list[list[int]], moment: StepContext) -> Generator[Any, None, None]:
        """Yield a LoaderBatch for each list of images, or a DataError in its stead."""
        options = LoaderOptions.of(self._recipe, seed=0, device=moment.device, shares=())
        keys = [[(0, index) for index in part] for part in my_parts]
        dataset = MultiCropDataset(self._source, MultiCrop.of(self._recipe), options)
        loader: Any = DataLoader(
            dataset, batch_sampler=keys, collate_fn=as_it_is, **worker_options(self._recipe.data.workers)
        )
        with started(loader, self._source) as batches:
            yield from batches


def _copied(batch: Any) -> tuple[Any, int]:
    """A copy of a batch and its size in bytes; an error counts as too large to be kept."""
    if not isinstance(batch, LoaderBatch):
        return batch, sys.maxsize
    return batch.moved(torch.Tensor.clone), sum(crops.nbytes for crops in batch.crops.values())
