"""Image retrieval: rank a database by cosine for each query; mean average precision.

Source: revisited Oxford and Paris (arXiv 1803.11285), `compute_map` of filipradenovic/revisitop, as
facebookresearch/dino `eval_image_retrieval.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from dino_ds import distributed


@torch.no_grad()
def rank_database(queries: Tensor, database: Tensor) -> Tensor:
    """Features (q, d) and (m, d) of any length -> indices of the database (q, m), nearest first."""
    similarity = F.normalize(queries.float(), dim=-1) @ F.normalize(database.float(), dim=-1).T
    return similarity.argsort(dim=1, descending=True, stable=True)


def average_precision(ranking: Sequence[int], positive: Iterable[int], junk: Iterable[int] = ()) -> float:
    """Of one query, in [0, 1]: the area under the precision-recall curve by trapezia, junk images passed over.

    NaN where there is nothing to find.
    """
    wanted, ignored = set(positive), set(junk)
    if not wanted:
        return float("nan")
    found, seen, total = 0, 0, 0.0
    for index in ranking:
        if index in ignored:
            continue
        if index in wanted:
            before = found / seen if seen else 1.0
            found += 1
            total += (before + found / (seen + 1)) / 2
            if found == len(wanted):
                break
        seen += 1
    return total / len(wanted)


def class_retrieval(features: Tensor, labels: Tensor) -> float:
    """Mean average precision in percent where every image asks for the others of its class. (n, d), (n,).

    Every rank must call it with the same rows; each ranks the database for its share of them. NaN where every class has
    one image.
    """
    mine = range(distributed.rank(), len(labels), distributed.world_size())
    ranking = rank_database(features[mine.start :: mine.step], features)
    members = {int(label): set((labels == label).nonzero().flatten().tolist()) for label in labels.unique()}
    sums = torch.zeros(2, dtype=torch.float64, device=features.device)
    for i, row in zip(mine, ranking.tolist(), strict=True):
        value = average_precision(row, members[int(labels[i])] - {i}, {i})
        if value == value:
            sums += torch.tensor([value, 1.0], dtype=torch.float64, device=sums.device)
    total, known = distributed.sum_across_ranks(sums).tolist()
    return 100.0 * total / known if known else float("nan")
