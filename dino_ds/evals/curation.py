"""Search, near-duplicates and clusters of features: every pair is compared, in blocks, so that memory does not grow.

Sources: near-duplicates are connected components, as DINOv2 takes them (arXiv 2304.07193, appendix A.3), here of all
pairs. Levels of clusters and the draw down them: Vo et al. 2024 (arXiv 2405.15613), without their resampling.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

_MOST_BLOCK, _BYTES_OF_A_PAIR = 8192, 64
_ROUNDS = 64
"""Rounds in which the first centers are drawn."""
_MOST_PASSES, _ENOUGH = 100, 1e-5
"""Passes of k-means at most, and the relative gain of one below which it ends."""


@dataclass(frozen=True)
class Vectors:
    """Rows `chosen` of an array (n, d), which may be a memory-mapped file, brought to length 1 unless `unit` is False;
    `block` of them are on the device at once."""

    rows: np.ndarray
    chosen: np.ndarray
    block: int
    device: torch.device
    unit: bool = True

    @staticmethod
    def of(rows: np.ndarray, memory_gib: float, device: torch.device) -> Vectors:
        """The rows (n, d) that have a direction: neither NaN, as of unreadable images, nor zero."""
        block = max(16, min(math.isqrt(int(memory_gib * 2**30) // _BYTES_OF_A_PAIR), _MOST_BLOCK))
        parts = (rows[start : start + block].astype(np.float64) for start in range(0, len(rows), block))
        lengths = np.concatenate([np.linalg.norm(part, axis=1) for part in parts])
        return Vectors(rows, np.flatnonzero(np.isfinite(lengths) & (lengths > 0)), block, device)

    def __len__(self) -> int:
        return len(self.chosen)

    def take(self, places: slice | np.ndarray) -> Tensor:
        """(places, d) in FP64."""
        found = torch.from_numpy(self.rows[self.chosen[places]].astype(np.float64)).to(self.device)
        return found / found.norm(dim=1, keepdim=True) if self.unit else found

    def parts(self, length: int) -> Iterator[slice]:
        return (slice(start, min(start + length, len(self))) for start in range(0, len(self), length))

    @property
    def rounding(self) -> float:
        """The most by which the FP32 product of two rows may miss that in FP64."""
        return float((self.rows.shape[1] + 4) * 2.0**-23)


def nearest_rows(queries: Tensor, bank: Vectors, k: int) -> tuple[np.ndarray, np.ndarray]:
    """The k rows of `bank` nearest to each of queries (q, d), of length 1 in FP64: cosines and places (q, k).

    All in FP64, equal rows giving equal cosines; of these the first comes first.
    """
    blocks = (bank.take(part) for part in bank.parts(bank.block))
    cosines = [torch.stack([(rows * query).sum(dim=1) for query in queries]).cpu().numpy() for rows in blocks]
    found = np.concatenate(cosines, axis=1)
    places = np.argsort(-found, axis=1, kind="stable")[:, :k]
    return np.take_along_axis(found, places, axis=1), places


@torch.no_grad()
def near_duplicates(vectors: Vectors, threshold: float) -> np.ndarray:
    """(n,) the first place of each row's group: rows that a chain of pairs with a cosine of at least `threshold`, in
    FP64, connects."""
    parent, margin = np.arange(len(vectors)), vectors.rounding
    for part in vectors.parts(vectors.block):
        left = vectors.take(part)
        for other in vectors.parts(vectors.block):
            if other.start < part.start:
                continue
            right = left if other == part else vectors.take(other)
            products = left.float() @ right.float().T
            if other == part:
                products.fill_diagonal_(-math.inf)
            rows = (products.amax(dim=1) >= threshold - margin).nonzero().flatten()
            near = products[rows]
            first, second = (near >= threshold - margin).nonzero(as_tuple=True)
            doubtful = (near[first, second] < threshold + margin).nonzero().flatten()
            first = rows[first]
            keep = torch.ones(len(first), dtype=torch.bool, device=first.device)
            for some in doubtful.split(vectors.block):
                keep[some] = (left[first[some]] * right[second[some]]).sum(dim=1) >= threshold
            _join(parent, first[keep].cpu().numpy() + part.start, second[keep].cpu().numpy() + other.start)
    return _roots(parent, np.arange(len(vectors)))


def _join(parent: np.ndarray, first: np.ndarray, second: np.ndarray) -> None:
    """Put the trees of both ends of each pair together, under the smaller root."""
    while len(first):
        first, second = _roots(parent, first), _roots(parent, second)
        apart = first != second
        first, second = np.minimum(first, second)[apart], np.maximum(first, second)[apart]
        np.minimum.at(parent, second, first)


def _roots(parent: np.ndarray, places: np.ndarray) -> np.ndarray:
    roots = parent[places]
    while (parent[roots] != roots).any():
        roots = parent[roots]
    parent[places] = roots
    return roots


def cluster_levels(vectors: Vectors, sizes: Sequence[int], seed: int) -> tuple[list[np.ndarray], np.ndarray]:
    """Cluster (n,) of each row at every level, the centers of one being the rows of the next; and the squared distance
    (n,) of each to its first center."""
    levels, distances, rows = list[np.ndarray](), np.empty(0), vectors
    for level, count in enumerate(sizes):
        centers, labels, distance = k_means(rows, first_centers(rows, min(count, len(rows)), seed + level))
        distances = distance if not levels else distances
        used, labels = np.unique(labels, return_inverse=True)
        levels.append(labels[levels[-1]] if levels else labels)
        rows = Vectors(centers.cpu().numpy()[used], np.arange(len(used)), vectors.block, vectors.device, unit=False)
    return levels, distances


def first_centers(vectors: Vectors, count: int, seed: int) -> Tensor:
    """(count, d) rows drawn as k-means++ does, by their squared distance to those before; many clusters have several
    drawn in each of 64 rounds."""
    draws, added = np.random.default_rng(seed), max(1, count // _ROUNDS)
    chosen = [int(draws.integers(len(vectors)))]
    distance, new = np.full(len(vectors), np.inf), np.array(chosen)
    while len(chosen) < count:
        distance = np.minimum(distance, _assign(vectors, vectors.take(new).float())[1])
        distance[chosen] = 0
        weights = distance if distance.any() else (~np.isin(np.arange(len(vectors)), chosen)).astype(float)
        more = min(added, count - len(chosen), int(np.count_nonzero(weights)))
        new = draws.choice(len(vectors), more, replace=False, p=weights / weights.sum())
        chosen += new.tolist()
    return vectors.take(np.array(chosen)).float()


@torch.no_grad()
def k_means(vectors: Vectors, centers: Tensor) -> tuple[Tensor, np.ndarray, np.ndarray]:
    """Lloyd's algorithm from centers (k, d): centers, the nearest one of each row (n,) and its squared distance (n,).

    A cluster that loses all rows gets the one farthest from its center.
    """
    labels, distances = _assign(vectors, centers)
    for _ in range(_MOST_PASSES):
        before, centers = distances.sum(), _means(vectors, labels, distances, len(centers))
        labels, distances = _assign(vectors, centers)
        if before - distances.sum() <= _ENOUGH * before:
            break
    return centers, labels, distances


def _assign(vectors: Vectors, centers: Tensor) -> tuple[np.ndarray, np.ndarray]:
    labels, distances = np.empty(len(vectors), np.int64), np.empty(len(vectors))
    lengths = centers.square().sum(dim=1) / 2
    for part in vectors.parts(max(16, min(vectors.block, vectors.block**2 // len(centers)))):
        rows = vectors.take(part).float()
        value, near = torch.addmm(lengths, rows, centers.T, alpha=-1).min(dim=1)
        labels[part] = near.cpu().numpy()
        distances[part] = (2 * value.double() + rows.double().square().sum(dim=1)).clamp_min(0).cpu().numpy()
    return labels, distances


def _means(vectors: Vectors, labels: np.ndarray, distances: np.ndarray, count: int) -> Tensor:
    """Means (count, d) of the clusters, added up on the CPU: the same ones each time."""
    sums = torch.zeros(count, vectors.rows.shape[1], dtype=torch.float64)
    for part in vectors.parts(vectors.block):
        sums.index_add_(0, torch.from_numpy(labels[part]), vectors.take(part).cpu())
    rows = np.bincount(labels, minlength=count)
    empty = np.flatnonzero(rows == 0)
    sums /= torch.from_numpy(np.maximum(rows, 1))[:, None]
    if len(empty):
        sums[empty] = vectors.take(np.argsort(-distances, kind="stable")[: len(empty)]).cpu()
    return sums.float().to(vectors.device)


def draw(levels: Sequence[np.ndarray], count: int, seed: int) -> np.ndarray:
    """Places of `count` rows, in order: as many of each cluster of the last level as of the others, if it has them,
    and so on down to the first level, whose rows are drawn at random."""
    draws = np.random.default_rng(seed)
    groups = [(np.arange(len(levels[0])), count)]
    for labels in reversed(levels):
        split = list[tuple[np.ndarray, int]]()
        for members, wanted in groups:
            members = members[np.argsort(labels[members], kind="stable")]
            parts = np.split(members, np.flatnonzero(np.diff(labels[members])) + 1)
            split += zip(parts, _shares(np.array([len(part) for part in parts]), wanted, draws), strict=True)
        groups = split
    return np.sort(np.concatenate([draws.choice(members, wanted, replace=False) for members, wanted in groups]))


def _shares(sizes: np.ndarray, total: int, draws: np.random.Generator) -> list[int]:
    """Parts of `total`, none above its size and otherwise equal; lots decide which of them have one more."""
    low, high = 0, int(sizes.max())
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if np.minimum(sizes, middle).sum() <= total else (low, middle - 1)
    shares = np.minimum(sizes, low)
    shares[draws.choice(np.flatnonzero(sizes > low), total - shares.sum(), replace=False)] += 1
    return [int(share) for share in shares]
