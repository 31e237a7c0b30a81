"""A linear layer on frozen patch tokens: batch norm and 1 x 1 convolution, fitted to its optimum by all ranks together.

Source of the head: facebookresearch/dinov2 `linear_head.py`. Its batch norm comes to the mean and deviation of the
training set, which are taken at once here; what is left is convex, so L-BFGS replaces 40,000 steps of AdamW and has no
learning rate.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from tqdm import tqdm

from dino_ds.distributed import hidden_bar, sum_across_ranks
from dino_ds.evals.linear import LinearProbe
from dino_ds.evals.minimise import minimise

_DECAY = 1e-4
"""Of |W|^2 / 2, beside the mean cross-entropy."""
_STEPS = 100


def fit_patch_probe(
    tokens: Sequence[Tensor],
    pixels: Sequence[Tensor],
    progress: bool = False,
    give_up: Callable[[], bool] = lambda: False,
) -> LinearProbe:
    """Logistic regression, every pixel a sample. All ranks call it and get the same.

    tokens (n, d) of this rank's patches, in parts, and how many pixels of each class lie in each patch, (n, classes)
    FP32; all on one device. `progress`: a bar on rank 0. Raises GaveUp (`minimise`).
    """
    width, classes, device = tokens[0].shape[1], pixels[0].shape[1], tokens[0].device
    mean, scale = _moments(tokens)
    total = float(
        sum_across_ranks(sum((part.double().sum() for part in pixels), torch.zeros((), device=device).double()))
    )
    bar = tqdm(desc="fitting", total=_STEPS * 5 // 4, unit=" passes", leave=False, disable=hidden_bar(progress))

    def loss_and_gradient(values: Tensor) -> Tensor:
        """Of the mean cross-entropy over the pixels of all ranks."""
        bar.update()
        found = torch.zeros(1 + values.numel(), device=device)
        for part, counts in zip(tokens, pixels, strict=True):
            x = (part.float() - mean) / scale
            likely = (x @ values[:, :-1].T + values[:, -1]).log_softmax(dim=1)
            error = counts.sum(dim=1, keepdim=True) * likely.exp() - counts
            found[0] -= (counts * likely).sum()
            found[1:] += torch.cat((error.T @ x, error.sum(dim=0)[:, None]), dim=1).flatten()
        return sum_across_ranks(found) / total

    with torch.no_grad(), bar:
        start = torch.zeros(classes, width + 1, device=device)
        best = minimise(loss_and_gradient, start, _DECAY, _STEPS, give_up)
    return LinearProbe(mean, scale, best[:, :-1].contiguous(), best[:, -1].contiguous(), _DECAY)


def _moments(tokens: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Mean and deviation (d,) of the tokens of all ranks; one may have none."""
    sums = torch.zeros(3, tokens[0].shape[1], dtype=torch.float64, device=tokens[0].device)
    for part in tokens:
        values = part.double()
        sums[0] += values.sum(dim=0)
        sums[1] += values.square().sum(dim=0)
        sums[2] += len(values)
    first, second, count = sum_across_ranks(sums)
    mean = first / count
    return mean.float(), (second / count - mean.square()).clamp_min(1e-12).sqrt().float()
