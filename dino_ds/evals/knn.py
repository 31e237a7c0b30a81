"""Weighted k-nearest-neighbour classification of frozen features: is it learning, without training anything.

Source: Wu et al. 2018 (arXiv 1805.01978), as facebookresearch/dino `eval_knn.py`: cosine similarity, votes weighted by
exp(similarity / temperature).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

_CHUNK_ROWS = 512


@torch.no_grad()
def knn_accuracy(
    bank: Tensor, bank_labels: Tensor, queries: Tensor, query_labels: Tensor, k: int, temperature: float
) -> float:
    """Top-1 accuracy in percent.

    bank (m, d) and queries (q, d) features of any length; labels (m,) and (q,) int64. k is cut to the bank's size.
    """
    bank = F.normalize(bank.float(), dim=-1)
    queries = F.normalize(queries.float(), dim=-1)
    classes = int(torch.maximum(bank_labels.max(), query_labels.max())) + 1
    k = min(k, len(bank))
    correct = 0
    for start in range(0, len(queries), _CHUNK_ROWS):
        rows = slice(start, start + _CHUNK_ROWS)
        similarity, neighbours = (queries[rows] @ bank.T).topk(k, dim=1)
        votes = similarity.new_zeros(len(similarity), classes)
        votes.scatter_add_(1, bank_labels[neighbours], (similarity / temperature).exp())
        correct += int((votes.argmax(dim=1) == query_labels[rows]).sum())
    return 100.0 * correct / len(queries)
