"""Weighted k-nearest-neighbour classification of frozen features: is it learning, without training anything.

Source: Wu et al. 2018 (arXiv 1805.01978), as facebookresearch/dino `eval_knn.py`: cosine similarity, votes weighted by
exp(similarity / temperature).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

# At most this many similarities are held at once: 64 MiB.
_QUERY_ROWS = 1024
_BANK_ROWS = 16384


@torch.no_grad()
def nearest(queries: Tensor, bank: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k rows of bank (m, d) nearest to each of queries (q, d), both of any length: cosines and indices, (q, k).

    Nearest first; k <= m. Exact: every pair is compared, a block at a time, so that 1M x 1M needs no more memory.
    """
    bank, queries = F.normalize(bank.float(), dim=-1), F.normalize(queries.float(), dim=-1)
    found = []
    for rows in queries.split(_QUERY_ROWS):
        best = rows.new_empty(len(rows), 0), torch.empty(len(rows), 0, dtype=torch.long, device=rows.device)
        for start in range(0, len(bank), _BANK_ROWS):
            block = bank[start : start + _BANK_ROWS]
            similarity, index = (rows @ block.T).topk(min(k, len(block)), dim=1)
            both = torch.cat((best[0], similarity), dim=1), torch.cat((best[1], index + start), dim=1)
            similarity, place = both[0].topk(min(k, both[0].shape[1]), dim=1)
            best = similarity, both[1].gather(1, place)
        found.append(best)
    return torch.cat([similarity for similarity, _ in found]), torch.cat([index for _, index in found])


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
    """
    classes = int(torch.maximum(bank_labels.max(), query_labels.max())) + 1
    similarity, index = nearest(queries, bank, min(max(ks), len(bank)))
    labels = bank_labels[index]
    return {k: _accuracy(similarity[:, :k], labels[:, :k], query_labels, classes, temperature) for k in ks}


def _accuracy(similarity: Tensor, labels: Tensor, wanted: Tensor, classes: int, temperature: float) -> float:
    correct = 0
    for rows in torch.arange(len(wanted), device=wanted.device).split(_QUERY_ROWS):
        votes = knn_votes(similarity[rows], labels[rows], classes, temperature)
        correct += int((votes.argmax(dim=1) == wanted[rows]).sum())
    return 100.0 * correct / len(wanted)
