"""Classifiers of frozen features, deterministic and without a learning rate: weighted k-NN, logistic regression at its
optimum, and ridge regression; and statistics of how far features spread.

Every rank must call a fit with the same rows; each computes its share of the sums, and all get the same probe.
Sources: k-NN of Wu et al. 2018 (arXiv 1805.01978), as facebookresearch/dino `eval_knn.py`: cosine similarity, votes
weighted by exp(similarity / temperature). L-BFGS as in DINOv2 (arXiv 2304.07193) and CLIP (arXiv 2103.00020)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from dino_ds.engine import distributed
from dino_ds.evals.features import GaveUp

# Size of a block of similarities in memory: 128 MiB. Fewer rows make the product slower.
_QUERY_ROWS = 512
_BANK_ROWS = 65536
_GROUP = 16
"""Columns in a group: a row's k largest values lie in the k groups with the largest maxima: only these are searched."""
_REGULARISATIONS = tuple(10.0**exponent for exponent in range(-6, 3))
"""Candidate weights of |W|^2 / 2 next to the mean cross-entropy."""
_ROWS = 65536
"""Images whose logits are in memory at once: for 1000 classes 256 MiB, not three times 5 GB as for all of ImageNet."""
_MAX_STEPS = 1000
"""Largest number of iterations: weak regularization takes 800; after 200, accuracy is uncertain by half a point."""


def nearest(queries: Tensor, bank: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k rows of bank (m, d) nearest to each row of queries (q, d), of any norms: cosines and indices, (q, k).
    Nearest first; k <= m. Exact: every pair is compared, a block at a time, so that 1M x 1M needs no more memory."""
    blocks = zip(*_search(F.normalize(queries.float(), dim=-1), F.normalize(bank.float(), dim=-1), k), strict=True)
    cosines, indices = map(torch.cat, blocks)
    return cosines, indices


@torch.no_grad()
def _search(queries: Tensor, bank: Tensor, k: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the result of `nearest`, for rows of length 1, block by block of queries; one buffer has all products."""
    scratch = queries.new_empty(_QUERY_ROWS * min(len(bank), _BANK_ROWS))
    for rows in queries.split(_QUERY_ROWS):
        value, index = queries.new_empty(len(rows), 0), torch.empty(len(rows), 0, dtype=torch.long, device=rows.device)
        for start in range(0, len(bank), _BANK_ROWS):
            block = bank[start : start + _BANK_ROWS]
            products = torch.mm(rows, block.T, out=scratch[: len(rows) * len(block)].view(len(rows), len(block)))
            largest, column = topk_by_groups(products, min(k, len(block)))
            value, index = torch.cat((value, largest), dim=1), torch.cat((index, column + start), dim=1)
            if start:
                value, column = value.topk(min(k, value.shape[1]), dim=1)
                index = index.gather(1, column)
        yield value, index


def topk_by_groups(values: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest of each row of values (q, m), and their columns; faster than `topk`, by maxima of groups."""
    groups = values.shape[1] // _GROUP
    if groups <= k:
        return values.topk(k, dim=1)
    # Group g has the columns g, g + groups and so on: maxima are then taken over contiguous memory.
    maxima = values[:, : groups * _GROUP].unflatten(1, (_GROUP, groups)).amax(dim=1)
    chosen = maxima.topk(k, dim=1, sorted=False).indices
    members = torch.arange(_GROUP, device=values.device)[None, :, None] * groups
    rest = torch.arange(groups * _GROUP, values.shape[1], device=values.device).expand(len(values), -1)
    candidates = torch.cat(((chosen[:, None] + members).flatten(1), rest), dim=1)
    value, column = values.gather(1, candidates).topk(k, dim=1)
    return value, candidates.gather(1, column)


@torch.no_grad()
def knn_votes(similarity: Tensor, labels: Tensor, classes: int, temperature: float) -> Tensor:
    """Cosines (q, k) and labels (q, k) of the neighbors -> the votes for each class (q, classes).
    The nearest neighbor's vote is scaled to 1: exp(cosine / temperature) overflows FP32 at temperatures below 0.011."""
    votes = similarity.new_zeros(len(similarity), classes)
    return votes.scatter_add_(1, labels, ((similarity - similarity.amax(1, keepdim=True)) / temperature).exp())


@torch.no_grad()
def knn_accuracies(
    bank: Tensor, bank_labels: Tensor, queries: Tensor, query_labels: Tensor, ks: Sequence[int], temperature: float
) -> dict[int, float]:
    """Top-1 accuracy in percent for each of `ks`, from one search.
    bank (m, d) and queries (q, d): features of any norm; labels (m,) and (q,): int64. A k above m counts as m. Every
    rank must call it with the same rows; each rank searches for its share of the queries."""
    classes = int(bank_labels.max()) + 1
    mine = slice(distributed.rank(), None, distributed.world_size())
    unit, bank = F.normalize(queries[mine].float(), dim=-1), F.normalize(bank.float(), dim=-1)
    correct = torch.zeros(len(ks), dtype=torch.long, device=queries.device)
    wanted_labels = query_labels[mine].split(_QUERY_ROWS)
    for (similarity, index), wanted in zip(_search(unit, bank, max(ks)), wanted_labels, strict=True):
        labels = bank_labels[index]
        for i, k in enumerate(ks):
            votes = knn_votes(similarity[:, :k], labels[:, :k], classes, temperature)
            correct[i] += (votes.argmax(dim=1) == wanted).sum()
    shares = 100.0 * distributed.sum_across_ranks(correct).double() / len(query_labels)
    return dict(zip(ks, shares.tolist(), strict=True))


@torch.no_grad()
def feature_statistics(features: Tensor) -> dict[str, float]:
    """Statistics of features (n, d) of any norm; n >= 2.

    feature_std: mean over dimensions of the standard deviation of unit-length features, times sqrt(d): 1 for features
    spread evenly over the sphere, 0 for a collapse to one point (SimSiam, arXiv 2011.10566, figure 2).
    rankme: exp of the entropy of the singular values (arXiv 2210.02885, equation 1): number of directions in use, 1 to
    d; as in the paper it is of at most 25600 random features.
    uniformity: log of the mean of exp(-2 |x - y|^2) over pairs (arXiv 2005.10242): 0 for a point, lower is more even;
    over all pairs of at most 4096 random features.
    """
    features = features.float()
    unit = F.normalize(features, dim=-1)
    std = unit.std(dim=0, unbiased=False).mean() * features.shape[1] ** 0.5
    singular = torch.linalg.svdvals(_drawn(features, 25600))
    shares = singular / singular.sum() + 1e-7
    rankme = torch.exp(-(shares * shares.log()).sum())
    uniformity = torch.pdist(_drawn(unit, 4096)).square().mul(-2).exp().mean().log()
    return {"feature_std": float(std), "rankme": float(rankme), "uniformity": float(uniformity)}


def _drawn(rows: Tensor, most: int) -> Tensor:
    if len(rows) <= most:
        return rows
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))
    return rows[order[:most].to(rows.device)]


@dataclass(frozen=True)
class LinearProbe:
    """Features (..., d) -> logits (..., classes): standardized by the training set's mean and standard deviation."""

    mean: Tensor
    scale: Tensor
    weight: Tensor
    bias: Tensor
    regularisation: float

    def __call__(self, features: Tensor) -> Tensor:
        return ((features.float() - self.mean) / self.scale) @ self.weight.T + self.bias

    def accuracy(self, features: Tensor, labels: Tensor) -> float:
        """Top-1 accuracy in percent."""
        parts = zip(features.split(_ROWS), labels.split(_ROWS), strict=True)
        return 100.0 * sum(int((self(rows).argmax(dim=1) == wanted).sum()) for rows, wanted in parts) / len(labels)


def fit_linear(
    features: Tensor,
    labels: Tensor,
    classes: int,
    regularisations: Sequence[float] = _REGULARISATIONS,
    give_up: Callable[[], bool] = lambda: False,
) -> LinearProbe:
    """Logistic regression on features (n, d) and labels (n,) int64, in FP32 on their device.
    The regularization with the lowest loss on a held-out tenth of the images is used for the fit to all of them; with a
    single image, the first regularization is used. Raises GaveUp."""
    best, start = regularisations[0], None
    if len(regularisations) > 1 and len(labels) > 1:
        order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0)).to(labels.device)
        held = order[: max(1, int(0.1 * len(labels)))]
        rest = order[len(held) :]
        scores, starts = dict[float, float](), dict[float, Tensor]()
        for strength in sorted(regularisations, reverse=True):  # each fit starts at the previous optimum
            probe = _fit(features[rest], labels[rest], classes, strength, start, give_up)
            start = starts[strength] = torch.cat((probe.weight, probe.bias[:, None]), dim=1)
            # The loss: less noisy than the accuracy on few images.
            scores[strength] = float(F.cross_entropy(probe(features[held]), labels[held]))
        best = min(scores, key=lambda strength: (scores[strength], strength))
        start = starts[best]
    return _fit(features, labels, classes, best, start, give_up)


def fit_ridge(features: Tensor, labels: Tensor, classes: int, regularisation: float = 1e-3) -> LinearProbe:
    """Least squares to one-hot labels with regularisation * |W|^2, in closed form: one solve of a (d, d) system."""
    mean, scale = _moments(features)
    average = torch.bincount(labels, minlength=classes).float() / len(labels)
    x = (_mine(features).float() - mean) / scale
    wanted = F.one_hot(_mine(labels), classes).float() - average
    sums = distributed.sum_across_ranks(torch.cat((x.T @ x, x.T @ wanted), dim=1)) / len(labels)
    normal = sums[:, : x.shape[1]] + regularisation * torch.eye(x.shape[1], device=x.device)
    weight = torch.linalg.solve(normal, sums[:, x.shape[1] :]).T
    return LinearProbe(mean, scale, weight.contiguous(), average, regularisation)


def _moments(features: Tensor) -> tuple[Tensor, Tensor]:
    features = features.float()
    return features.mean(dim=0), features.std(dim=0, unbiased=False).clamp_min(1e-6)


def _mine(rows: Tensor) -> Tensor:
    return rows[distributed.rank() :: distributed.world_size()]


def _fit(
    features: Tensor, labels: Tensor, classes: int, strength: float, start: Tensor | None, give_up: Callable[[], bool]
) -> LinearProbe:
    """Fit by L-BFGS to all rows; the last column of the parameters is the bias, which is not regularized."""
    mean, scale = _moments(features)
    x, wanted = (_mine(features).float() - mean) / scale, _mine(labels)
    parameters = torch.zeros(classes, x.shape[1] + 1, device=x.device) if start is None else start.clone()

    def loss_and_gradient(values: Tensor) -> Tensor:
        """The mean cross-entropy and its gradient over the rows of all ranks: (1 + classes * (width + 1),)."""
        if float(distributed.sum_across_ranks(values.new_tensor(float(give_up())))):
            raise GaveUp
        sums = torch.zeros(1 + values.numel(), device=x.device)
        for rows, targets in zip(x.split(_ROWS), wanted.split(_ROWS), strict=True):
            logits = rows @ values[:, :-1].T + values[:, -1]
            error = logits.softmax(dim=1)
            error[torch.arange(len(rows), device=x.device), targets] -= 1
            sums[0] += F.cross_entropy(logits, targets, reduction="sum")
            sums[1:] += torch.cat((error.T @ rows, error.sum(dim=0)[:, None]), dim=1).flatten()
        return distributed.sum_across_ranks(sums) / len(labels)

    with torch.no_grad():
        optimum = _minimise(loss_and_gradient, parameters, strength)
    return LinearProbe(mean, scale, optimum[:, :-1].contiguous(), optimum[:, -1].contiguous(), strength)


def _minimise(loss_and_gradient: Callable[[Tensor], Tensor], parameters: Tensor, strength: float) -> Tensor:
    """Minimize by L-BFGS from `parameters` (classes, width + 1), with `strength` * |weights|^2 / 2 added.
    Rank 0 runs the optimizer, so that rounding can't make ranks differ; the others compute losses and gradients."""
    message = parameters.new_zeros(1 + parameters.numel())  # whether to continue, and the parameters
    if distributed.rank() > 0:
        while float(distributed.broadcast_from_first(message)[0]):
            loss_and_gradient(message[1:].view_as(parameters))
        return message[1:].view_as(parameters)
    parameters.requires_grad_(True)
    optimizer = torch.optim.LBFGS(
        [parameters], max_iter=_MAX_STEPS, tolerance_grad=1e-6, tolerance_change=1e-9, line_search_fn="strong_wolfe"
    )

    def send(proceed: float) -> None:
        message[0], message[1:] = proceed, parameters.detach().flatten()
        distributed.broadcast_from_first(message)

    def closure() -> Tensor:
        send(1.0)
        values = loss_and_gradient(parameters.detach())
        parameters.grad = values[1:].view_as(parameters).clone()
        weight = parameters.detach()[:, :-1]
        parameters.grad[:, :-1] += strength * weight
        return values[0] + 0.5 * strength * weight.square().sum()

    optimizer.step(closure)
    send(0.0)
    return parameters.detach()
