"""The linear probe of the papers: SGD on augmented images, many learning rates and kinds of features in one pass.

Source: facebookresearch/dino `eval_linear.py` (momentum 0.9, no weight decay, learning rate x batch / 256 on a cosine
by epoch, 100 epochs, random resized crops and flips, the last blocks' CLS without or with the mean of the patches); the
grid of learning rates and kinds, each with its own classifier, is that of facebookresearch/dinov2 `linear.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Sampler

from dino_ds.basics.hashing import crop_seed
from dino_ds.data.base import Source
from dino_ds.data.cutting import RandomCrop
from dino_ds.engine import distributed
from dino_ds.evals.context import EvalContext, Labelled, Settings
from dino_ds.evals.features import GaveUp, LabelledImages, Reading, load_batches

RATES = (1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 2e-2, 5e-2, 0.1, 0.2, 0.5, 1.0)
"""Learning rates for a batch of 256 images: DINOv2's, and three for data sets so small that they give few steps."""
BLOCKS = 4
_MOMENTUM = 0.9
_REFERENCE_BATCH = 256
_INITIAL_STD = 0.01

Kind = tuple[int, bool]
"""Features that a classifier sees: CLS tokens of the last n blocks, and whether with the mean of the last block's
patches. The sum of both is the number of vectors."""


def linear_sgd(context: EvalContext) -> dict[str, float]:
    """The papers' linear probe: SGD on augmented images, `--epochs 100`, the best of many learning rates"""
    # First: unusable test images must not be noticed after a hundred epochs.
    test = _test_inputs(context)
    model = context.backbone
    kinds = kinds_of(test.features.shape[1] // model.width - 1) if model.is_vit else [(1, False)]
    probes = Probes(kinds, context.backbone.width, test.classes, RATES, context.settings.seed, context.device)
    _train(context, probes, test.features.shape[1])
    found = probes.accuracies(test.features, test.labels)
    return _report(found, kinds)


def probe_inputs(tokens: Tensor) -> Tensor:
    """`last_tokens` (blocks, b, 1 + patches, d) -> (b, (blocks + 1) d): the CLS of each block, the mean of the last
    block's patches."""
    return torch.cat((*tokens[:, :, 0], tokens[-1, :, 1:].mean(dim=1)), dim=1).float()


def kinds_of(blocks: int) -> list[Kind]:
    """The kinds of DINOv2's grid that a network of `blocks` blocks has."""
    return [(count, mean) for count in sorted({1, blocks}) for mean in (False, True)]


class Probes:
    """A linear classifier for each kind of features and each learning rate, trained together on the same images.

    Every rank has some of the learning rates and sees the features of all images: they are a hundred times smaller than
    the classifiers' gradients. Classifier (kind, rate) starts from the same weights on any number of ranks.
    """

    def __init__(
        self, kinds: Sequence[Kind], width: int, classes: int, rates: Sequence[float], seed: int, device: torch.device
    ) -> None:
        self.kinds, self._width, self._all_rates = kinds, width, rates
        self._mine = range(distributed.rank(), len(rates), distributed.world_size())
        self.rates = torch.tensor([rates[i] for i in self._mine], device=device)[:, None, None]
        self.weights = [_initial(kind, self._mine, sum(kind) * width, classes, seed).to(device) for kind in kinds]
        self._velocities = [torch.zeros_like(weight) for weight in self.weights]

    @torch.no_grad()
    def step(self, inputs: Tensor, labels: Tensor, factor: float) -> None:
        """SGD with the gradient of the mean cross-entropy; inputs (b, (blocks + 1) d), labels (b,); learning rates are
        multiplied by `factor`."""
        for kind, weight, velocity in zip(self.kinds, self.weights, self._velocities, strict=True):
            x = self._select(inputs, kind)
            error = _logits(x, weight).softmax(dim=2)
            error.scatter_add_(2, labels.expand(len(weight), -1)[..., None], error.new_full((*error.shape[:2], 1), -1))
            velocity.mul_(_MOMENTUM).add_(error.transpose(1, 2) @ x, alpha=1 / len(x))
            weight.sub_(self.rates * factor * velocity)

    @torch.no_grad()
    def accuracies(self, inputs: Tensor, labels: Tensor) -> dict[tuple[Kind, float], float]:
        """Top-1 in percent of each; the same on all ranks, which must all call it."""
        mine = {}
        for kind, weight in zip(self.kinds, self.weights, strict=True):
            correct = torch.zeros(len(weight), dtype=torch.long, device=labels.device)
            for rows, wanted in zip(inputs.split(4096), labels.split(4096), strict=True):
                correct += (_logits(self._select(rows, kind), weight).argmax(dim=2) == wanted).sum(dim=1)
            for rate, count in zip(self._mine, correct.tolist(), strict=True):
                mine[kind, self._all_rates[rate]] = 100.0 * count / len(labels)
        return {key: value for part in distributed.gather_objects(mine) for key, value in part.items()}

    def _select(self, inputs: Tensor, kind: Kind) -> Tensor:
        """The columns of a kind with one of ones, for the bias: (b, columns + 1)."""
        has_mean = any(mean for _, mean in self.kinds)
        last = inputs.shape[1] - (self._width if has_mean and not kind[1] else 0)
        x = inputs[:, last - sum(kind) * self._width : last]
        return torch.cat((x, x.new_ones(len(x), 1)), dim=1)


def _initial(kind: Kind, rates: Sequence[int], width: int, classes: int, seed: int) -> Tensor:
    """(rates, classes, width + 1), the bias last: normal weights, no bias."""
    weight = torch.zeros(len(rates), classes, width + 1)
    for row, rate in zip(weight, rates, strict=True):
        generator = torch.Generator().manual_seed(crop_seed(seed, rate, 2 * kind[0] + kind[1]) >> 1)
        row[:, :-1].normal_(std=_INITIAL_STD, generator=generator)
    return weight


def _logits(x: Tensor, weight: Tensor) -> Tensor:
    """x (b, w), weight (rates, classes, w) -> (rates, b, classes)."""
    return (x @ weight.flatten(0, 1).T).unflatten(1, weight.shape[:2]).transpose(0, 1)


def _train(context: EvalContext, probes: Probes, width: int) -> None:
    settings, describe = context.settings, _describe(context)
    for epoch, images, targets in augmented_batches(context):
        inputs = describe(images.to(context.device)) if len(images) else torch.empty(0, width, device=context.device)
        stop = torch.tensor(float(context.give_up()), device=context.device)
        if distributed.sum_across_ranks(stop) > 0:
            raise GaveUp
        inputs = distributed.concatenate_across_ranks(inputs)
        labels = distributed.concatenate_across_ranks(targets.to(context.device))
        if len(labels):
            cosine = 0.5 * (1 + math.cos(math.pi * epoch / settings.epochs))
            probes.step(inputs, labels, cosine * settings.batch / _REFERENCE_BATCH)


def augmented_batches(context: EvalContext) -> Iterator[tuple[int, Tensor, Tensor]]:
    """(epoch, images (b, c, h, w), labels (b,)): this rank's share of each batch, which may be empty.

    Crops follow from (seed, epoch, image), the order from (seed, epoch): the same on any number of ranks and workers.
    Unreadable images are left out and noted.
    """
    settings, source, indices = context.settings, context.train_source, context.train_indices
    sampler = _Batches(len(indices), settings.epochs, settings.batch, settings.seed)
    images = _Augmented(source, indices, RandomCrop(context.size, context.backbone.normalisation), settings)
    progress = "linear-sgd" if context.progress else None
    unreadable = set[str]()
    with closing(load_batches(images, source, settings.workers, progress, batch_sampler=sampler)) as batches:
        for step, (crops, rows, bad) in enumerate(batches):
            unreadable.update(bad)
            yield step // sampler.epoch_steps, crops, rows[:, 1]
    of_all_ranks = sorted(set().union(*distributed.gather_objects(unreadable)))
    context.note(f"left out, unreadable: {text}" for text in of_all_ranks)


def _describe(context: EvalContext) -> Callable[[Tensor], Tensor]:
    """Images (b, c, h, w) -> inputs of the classifiers; of a network that is not a ViT its features alone."""
    model = context.backbone
    if not model.is_vit:
        return lambda images: model.features(images).float()
    return lambda images: probe_inputs(model.last_tokens(images, BLOCKS))


def _test_inputs(context: EvalContext) -> Labelled:
    found = context.compute(_describe(context), context.test_source, context.test_indices, context.crop)
    return Labelled(found.features, context.train_labels_of(found.labels), len(context.train_source.classes or []))


def _report(found: dict[tuple[Kind, float], float], kinds: Sequence[Kind]) -> dict[str, float]:
    """The best, and the best of each kind."""
    best_of = {kind: max(value for (other, _), value in found.items() if other == kind) for kind in kinds}
    names = {kind: f"linear_sgd_{kind[0]}{'_mean' if kind[1] else ''}" for kind in kinds}
    return {"linear_sgd": max(best_of.values()), **{names[kind]: value for kind, value in best_of.items()}}


class _Augmented(LabelledImages):
    """Items are asked for by (epoch, place in `indices`)."""

    def __init__(self, source: Source, indices: list[int], crop: RandomCrop, settings: Settings) -> None:
        how = Reading(partial(crop, seed=0), value_range=settings.value_range, channels=crop.channels)
        super().__init__(source, indices, how)
        self._crop, self._seed = crop, settings.seed

    def __getitem__(self, item: tuple[int, int]) -> tuple[Tensor, int, int] | str:
        epoch, place = item
        seed = crop_seed(self._seed, epoch, self._indices[place])
        return self._item(place, partial(self._crop, seed=seed))


class _Batches(Sampler[Any]):
    """(epoch, place) of this rank's images of each global batch; the last batch of an epoch is what is left."""

    def __init__(self, images: int, epochs: int, batch: int, seed: int) -> None:
        self._images, self._epochs, self._batch, self._seed = images, epochs, batch, seed
        self.epoch_steps = math.ceil(images / batch)

    def __len__(self) -> int:
        return self._epochs * self.epoch_steps

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        for epoch in range(self._epochs):
            generator = torch.Generator().manual_seed(crop_seed(self._seed, epoch, self._images) >> 1)
            order = torch.randperm(self._images, generator=generator)
            for batch in order.split(self._batch):
                yield [(epoch, place) for place in batch[distributed.rank() :: distributed.world_size()].tolist()]
