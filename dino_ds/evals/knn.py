"""Geometry of frozen features: weighted k-NN, rankings, and whether they are spread out, without training anything.

Sources: Wu et al. 2018 (arXiv 1805.01978), as facebookresearch/dino `eval_knn.py`: cosine similarity, votes weighted by
exp(similarity / temperature). Mean average precision: revisited Oxford and Paris (arXiv 1803.11285), `compute_map` of
filipradenovic/revisitop, as facebookresearch/dino `eval_image_retrieval.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from dino_ds.engine import distributed

# Size of a block of similarities in memory: 128 MiB. Fewer rows make the product slower.
_QUERY_ROWS = 512
_BANK_ROWS = 65536
_PAIRS = 4096
_RANK_IMAGES = 25600
"""Number of images that RankMe's authors used."""
_GROUP = 16
"""Columns in a group: a row's k largest values lie in the k groups with the largest maxima, a sixteenth to sort."""


def nearest(queries: Tensor, bank: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k rows of bank (m, d) nearest to each row of queries (q, d), of any norms: cosines and indices, (q, k).

    Nearest first; k <= m. Exact: every pair is compared, a block at a time, so that 1M x 1M needs no more memory.
    """
    return nearest_by_product(F.normalize(queries.float(), dim=-1), F.normalize(bank.float(), dim=-1), k)


def nearest_by_product(queries: Tensor, bank: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Find neighbors as `nearest` does, by dot products instead of cosines of FP32 queries (q, d) and bank (m, d)."""
    blocks = list(_search(queries, bank, k))
    return torch.cat([value for value, _ in blocks]), torch.cat([index for _, index in blocks])


@torch.no_grad()
def _search(queries: Tensor, bank: Tensor, k: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield `nearest_by_product` of one block of queries after another; all blocks share the memory of the products."""
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

    The nearest neighbor's vote is scaled to 1: exp(cosine / temperature) overflows FP32 at temperatures below 0.011.
    """
    votes = similarity.new_zeros(len(similarity), classes)
    return votes.scatter_add_(1, labels, ((similarity - similarity.amax(1, keepdim=True)) / temperature).exp())


@torch.no_grad()
def knn_accuracies(
    bank: Tensor, bank_labels: Tensor, queries: Tensor, query_labels: Tensor, ks: Sequence[int], temperature: float
) -> dict[int, float]:
    """Top-1 accuracy in percent for each of `ks`, from one search.

    bank (m, d) and queries (q, d): features of any norm; labels (m,) and (q,): int64. A k above m counts as m.
    Every rank must call it with the same rows; each rank searches for its share of the queries.
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


@torch.no_grad()
def rank_database(queries: Tensor, database: Tensor) -> Tensor:
    """Features (q, d) and (m, d) of any norm -> indices into the database (q, m), nearest first."""
    similarity = F.normalize(queries.float(), dim=-1) @ F.normalize(database.float(), dim=-1).T
    return similarity.argsort(dim=1, descending=True, stable=True)


def average_precision(ranking: Sequence[int], positive: Iterable[int], junk: Iterable[int] = ()) -> float:
    """Average precision of one query, in [0, 1]: the area under the precision-recall curve by the trapezoidal rule.

    Images in `junk` are skipped. NaN without positives.
    """
    wanted, ignored = set(positive), set(junk)
    if not wanted:
        return float("nan")
    hits, seen, total = 0, 0, 0.0
    for index in ranking:
        if index in ignored:
            continue
        if index in wanted:
            before = hits / seen if seen else 1.0
            hits += 1
            total += (before + hits / (seen + 1)) / 2
            if hits == len(wanted):
                break
        seen += 1
    return total / len(wanted)


@torch.no_grad()
def feature_statistics(features: Tensor, seed: int = 0) -> dict[str, float]:
    """Statistics of features (n, d) of any norm; n >= 2.

    feature_std: mean over dimensions of the standard deviation of unit-length features, times sqrt(d): 1 for features
    spread evenly over the sphere, 0 for a collapse to one point (SimSiam, arXiv 2011.10566, figure 2).
    rankme: exp of the entropy of the singular values (arXiv 2210.02885, equation 1): number of directions in use, 1 to
    d; of at most 25600 random features.
    uniformity: log of the mean of exp(-2 |x - y|^2) over pairs (arXiv 2005.10242): 0 for a point, lower is more even;
    over all pairs of at most 4096 random features.
    """
    features = features.float()
    unit = F.normalize(features, dim=-1)
    std = unit.std(dim=0, unbiased=False).mean() * features.shape[1] ** 0.5
    singular = torch.linalg.svdvals(_drawn(features, _RANK_IMAGES, seed))
    shares = singular / singular.sum() + 1e-7
    rankme = torch.exp(-(shares * shares.log()).sum())
    uniformity = torch.pdist(_drawn(unit, _PAIRS, seed)).square().mul(-2).exp().mean().log()
    return {"feature_std": float(std), "rankme": float(rankme), "uniformity": float(uniformity)}


def _drawn(rows: Tensor, most: int, seed: int) -> Tensor:
    if len(rows) <= most:
        return rows
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed))
    return rows[order[:most].to(rows.device)]
