"""Weighted k-nearest-neighbour classification of frozen features: is it learning, without training anything.

Source: Wu et al. 2018 (arXiv 1805.01978), as facebookresearch/dino `eval_knn.py`: cosine similarity, votes weighted by
exp(similarity / temperature).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from dino_ds import distributed

# Similarities held at once: 128 MiB. Fewer rows make the product slower.
_QUERY_ROWS = 512
_BANK_ROWS = 65536
_GROUP = 16
"""The k largest of a row are sought in the k groups with the largest maxima: a sixteenth of the row is sorted."""


def nearest(queries: Tensor, bank: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k rows of bank (m, d) nearest to each of queries (q, d), both of any length: cosines and indices, (q, k).

    Nearest first; k <= m. Exact: every pair is compared, a block at a time, so that 1M x 1M needs no more memory.
    """
    return nearest_by_product(F.normalize(queries.float(), dim=-1), F.normalize(bank.float(), dim=-1), k)


def nearest_by_product(queries: Tensor, bank: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k rows of bank (m, d) with the largest dot products with each of queries (q, d), FP32, as `nearest`."""
    found = list(_search(queries, bank, k))
    return torch.cat([value for value, _ in found]), torch.cat([index for _, index in found])


@torch.no_grad()
def _search(queries: Tensor, bank: Tensor, k: int) -> Iterator[tuple[Tensor, Tensor]]:
    """`nearest_by_product` of one block of queries after another; the products of all are in the same memory."""
    room = queries.new_empty(_QUERY_ROWS * min(len(bank), _BANK_ROWS))
    for rows in queries.split(_QUERY_ROWS):
        value, index = queries.new_empty(len(rows), 0), torch.empty(len(rows), 0, dtype=torch.long, device=rows.device)
        for start in range(0, len(bank), _BANK_ROWS):
            block = bank[start : start + _BANK_ROWS]
            products = torch.mm(rows, block.T, out=room[: len(rows) * len(block)].view(len(rows), len(block)))
            largest, place = _largest(products, min(k, len(block)))
            value, index = torch.cat((value, largest), dim=1), torch.cat((index, place + start), dim=1)
            if start:
                value, place = value.topk(min(k, value.shape[1]), dim=1)
                index = index.gather(1, place)
        yield value, index


def _largest(values: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """`values.topk(k)` of (q, m), found faster: the maxima of groups first."""
    groups = values.shape[1] // _GROUP
    if groups <= k:
        return values.topk(k, dim=1)
    # Group g has the columns g, g + groups, ...: so its maximum is taken along rows of the memory.
    maxima = values[:, : groups * _GROUP].unflatten(1, (_GROUP, groups)).amax(dim=1)
    chosen = maxima.topk(k, dim=1, sorted=False).indices
    members = torch.arange(_GROUP, device=values.device)[None, :, None] * groups
    rest = torch.arange(groups * _GROUP, values.shape[1], device=values.device).expand(len(values), -1)
    candidates = torch.cat(((chosen[:, None] + members).flatten(1), rest), dim=1)
    value, place = values.gather(1, candidates).topk(k, dim=1)
    return value, candidates.gather(1, place)


@torch.no_grad()
def knn_votes(similarity: Tensor, labels: Tensor, classes: int, temperature: float) -> Tensor:
    """Cosines (q, k) and labels (q, k) of the neighbours -> the votes for each class (q, classes)."""
    votes = similarity.new_zeros(len(similarity), classes)
    return votes.scatter_add_(1, labels, (similarity / temperature).exp())


@torch.no_grad()
def knn_accuracies(
    bank: Tensor, bank_labels: Tensor, queries: Tensor, query_labels: Tensor, ks: Sequence[int], temperature: float
) -> dict[int, float]:
    """Top-1 accuracy in percent for each of `ks`, from one search.

    bank (m, d) and queries (q, d) features of any length; labels (m,) and (q,) int64. k is cut to the bank's size.
    Every rank must call it with the same rows; each searches for its share of the queries.
    """
    classes = int(bank_labels.max()) + 1
    mine = slice(distributed.rank(), None, distributed.world_size())
    unit, bank = F.normalize(queries[mine].float(), dim=-1), F.normalize(bank.float(), dim=-1)
    correct = torch.zeros(len(ks), dtype=torch.long, device=queries.device)
    blocks = zip(_search(unit, bank, max(ks)), query_labels[mine].split(_QUERY_ROWS), strict=True)
    for (similarity, index), wanted in blocks:
        labels = bank_labels[index]
        for i, k in enumerate(ks):
            votes = knn_votes(similarity[:, :k], labels[:, :k], classes, temperature)
            correct[i] += (votes.argmax(dim=1) == wanted).sum()
    shares = 100.0 * distributed.sum_across_ranks(correct).double() / len(query_labels)
    return dict(zip(ks, shares.tolist(), strict=True))
