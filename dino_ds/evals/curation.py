"""Search, near-duplicates and clusters of features: every pair is compared, in blocks, so that memory does not grow.

Sources: near-duplicates are connected components among neighbors, as in DINOv2 (arXiv 2304.07193, appendix A.3).
Levels of clusters, and drawing rows evenly from them: Vo et al. 2024 (arXiv 2405.15613), without their resampling."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from dino_ds.evals.classifiers import topk_by_groups

Pairs = tuple[np.ndarray, np.ndarray]  # first and second rows (p,) of pairs
SIDE = 32  # pixels of the thumbnails by which near-duplicates are told apart
_INNER, _SIZES = 28, (28, 29, 30, 31, 32)
"""Side of the windows that are compared, and sides to which one of two thumbnails is shrunk before the comparison."""
_MOST_CLUSTERS, _SAMPLE, _SAMPLE_OF_EACH = 2048, 16384, 32
"""Limits with which scikit-learn's k-means takes minutes: clusters, and sampled rows, in all or for each cluster."""


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
        block = max(16, min(math.isqrt(int(memory_gib * 2**30) // 64), 8192))  # 64 bytes for each pair of a block
        parts = (rows[start : start + block].astype(np.float64) for start in range(0, len(rows), block))
        lengths = np.concatenate([np.linalg.norm(part, axis=1) for part in parts])
        return Vectors(rows, np.flatnonzero(np.isfinite(lengths) & (lengths > 0)), block, device)

    def __len__(self) -> int:
        return len(self.chosen)

    def take(self, places: slice | np.ndarray, dtype: torch.dtype = torch.float64) -> Tensor:
        """The rows at `places`, (p, d), computed in `dtype`."""
        rows = torch.from_numpy(self.rows[self.chosen[places]]).to(self.device, dtype)
        return F.normalize(rows, eps=0) if self.unit else rows

    def parts(self, length: int) -> Iterator[slice]:
        return (slice(start, min(start + length, len(self))) for start in range(0, len(self), length))


@torch.no_grad()
def nearest_rows(queries: Tensor, bank: Vectors, k: int) -> tuple[np.ndarray, np.ndarray]:
    """The k rows of `bank` nearest to each of queries (q, d), of length 1 in FP64: FP64 cosines and places, (q, k).
    Equal rows have equal cosines, and the first of them comes first. FP32 products choose k + 6 candidates; a query for
    which their rounding may have left out a neighbor is compared with all rows."""
    k, wanted = min(k, len(bank)), min(k + 6, len(bank))
    near = torch.full((len(queries), wanted), -math.inf, device=bank.device)
    places = torch.zeros_like(near, dtype=torch.long)
    for part in bank.parts(bank.block):
        products = queries.float() @ bank.take(part, torch.float32).T
        rows = (products.amax(dim=1) > near[:, -1]).nonzero().flatten()
        values, columns = topk_by_groups(products[rows], min(wanted, products.shape[1]))
        near[rows], order = torch.cat((near[rows], values), dim=1).topk(wanted)
        places[rows] = torch.cat((places[rows], columns + part.start), dim=1).gather(1, order)
    places = places.sort(dim=1).values
    exact = [(bank.take(column) * queries).sum(dim=1) for column in places.T.cpu().numpy()]
    cosines, order = torch.stack(exact, dim=1).sort(dim=1, descending=True, stable=True)
    places = places.gather(1, order)
    rounding = (2 * queries.shape[1] + 8) * 2.0**-23  # of FP32 products, lengths too, against FP64
    unsure = cosines[:, k - 1] < near[:, -1] + rounding
    for row in unsure.nonzero().flatten().tolist() if wanted < len(bank) else ():
        every = torch.cat([(bank.take(part) * queries[row]).sum(dim=1) for part in bank.parts(bank.block)])
        values, order = every.sort(descending=True, stable=True)
        cosines[row], places[row] = values[:wanted], order[:wanted]
    return cosines[:, :k].cpu().numpy(), places[:, :k].cpu().numpy()


def pairs_of_cosine(vectors: Vectors, threshold: float) -> Iterator[Pairs]:
    """All pairs of rows with a cosine of at least `threshold`, in FP64."""
    for part in vectors.parts(vectors.block):
        rows = vectors.take(part)
        for others in vectors.parts(vectors.block):
            if others.start >= part.start:
                near = (rows @ vectors.take(others).T >= threshold).triu(1 if others == part else -len(rows))
                first, second = near.nonzero(as_tuple=True)
                yield first.cpu().numpy() + part.start, second.cpu().numpy() + others.start


@torch.no_grad()
def pairs_of_pictures(vectors: Vectors, thumbnails: np.ndarray) -> Iterator[Pairs]:
    """Pairs of rows, one among the 10 nearest of the other, whose thumbnails (n, 32 * 32) show the same: shrunk to
    8 x 8 pixels they correlate by 0.65 or more, and the details of a window of one correlate with those of the other by
    0.92 or more, at some shift and with one of the two shrunk by up to an eighth."""
    near = [nearest_rows(vectors.take(part), vectors, 11)[1] for part in vectors.parts(vectors.block)]
    second = np.concatenate(near)
    first = np.broadcast_to(np.arange(len(second))[:, None], second.shape)
    pairs = np.unique(np.minimum(first, second) * len(second) + np.maximum(first, second))
    for some in np.array_split(pairs, -(-len(pairs) // 1024)):
        ends = np.divmod(some, len(second))
        images = [torch.from_numpy(thumbnails[end].astype(np.float32)).view(-1, 1, SIDE, SIDE) for end in ends]
        rough = [_unit(F.avg_pool2d(image, SIDE // 8).flatten(1)) for image in images]
        chosen = ((rough[0] * rough[1]).sum(dim=1) >= 0.65).numpy() & (ends[0] != ends[1])
        if not chosen.any():
            continue
        left, right = (_details(image[chosen]) for image in images)
        alike = (torch.maximum(_correlation(left, right), _correlation(right, left)) >= 0.92).numpy()
        yield ends[0][chosen][alike], ends[1][chosen][alike]


def _details(images: Tensor) -> Tensor:
    """Thumbnails (n, 1, 32, 32), reduced to details of 3 to 9 pixels. Contrast is made equal everywhere, so that no
    single edge decides; only details fainter than 2 of 255 stay faint."""
    band = _blurred(images, 3) - _blurred(images, 9)
    return band / (_blurred(band.square(), 9).sqrt() + 2)


def _blurred(images: Tensor, side: int) -> Tensor:
    return F.avg_pool2d(images, side, 1, side // 2, count_include_pad=False)


def _unit(rows: Tensor) -> Tensor:
    return F.normalize(rows - rows.mean(dim=-1, keepdim=True), dim=-1)


def _correlation(images: Tensor, others: Tensor) -> Tensor:
    """(n,) the highest correlation of any window of an image (n, 1, 32, 32) with the middle of the other, shrunk."""
    windows, middles = _unit(F.unfold(images, _INNER).transpose(1, 2)), list[Tensor]()
    for size in _SIZES:
        shrunk = F.interpolate(others, (size, size), mode="bilinear", antialias=True)
        middle = slice((size - _INNER) // 2, (size + _INNER) // 2)
        middles.append(shrunk[:, 0, middle, middle].flatten(1))
    return (windows @ _unit(torch.stack(middles, dim=1)).transpose(1, 2)).amax(dim=(1, 2))


def groups(count: int, pairs: Iterable[Pairs]) -> np.ndarray:
    """(count,) for each row the first row of its group; a chain of pairs connects the rows of a group."""
    parent = np.arange(count)
    for first, second in pairs:
        while len(first):  # both ends' trees come together, under the smaller root
            first, second = _roots(parent, first), _roots(parent, second)
            apart = first != second
            first, second = np.minimum(first, second)[apart], np.maximum(first, second)[apart]
            np.minimum.at(parent, second, first)
    return _roots(parent, np.arange(count))


def _roots(parent: np.ndarray, rows: np.ndarray) -> np.ndarray:
    roots = parent[rows]
    while (parent[roots] != roots).any():
        roots = parent[roots]
    parent[rows] = roots
    return roots


def cluster_levels(vectors: Vectors, sizes: Sequence[int], seed: int) -> tuple[list[np.ndarray], np.ndarray]:
    """The cluster (n,) of each row at every level, and the squared distance (n,) of each row to its center of the first
    level. Each level after the first clusters the centers of the level before."""
    levels, distances, rows = list[np.ndarray](), np.empty(0), vectors
    for level, count in enumerate(sizes):
        centers, labels, distance = k_means(rows, best_centers(rows, min(count, len(rows)), seed + level))
        distances = distance if not levels else distances
        used, labels = np.unique(labels, return_inverse=True)
        levels.append(labels[levels[-1]] if levels else labels)
        rows = Vectors(centers.cpu().numpy()[used], np.arange(len(used)), vectors.block, vectors.device, unit=False)
    return levels, distances


def best_centers(vectors: Vectors, count: int, seed: int) -> Tensor:
    """Initial centers (count, d): the best of ten runs of scikit-learn's k-means on all rows, or on a sample of many.
    For more than `_MOST_CLUSTERS` clusters they are rows that lie far from each other."""
    if count > _MOST_CLUSTERS:
        return first_centers(vectors, count, np.random.default_rng(seed))
    from sklearn.cluster import KMeans

    draws, most = np.random.default_rng(seed), max(_SAMPLE, _SAMPLE_OF_EACH * count)
    sample = np.sort(draws.choice(len(vectors), min(len(vectors), most), replace=False))
    rows = vectors.take(sample).float().cpu().numpy()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a warning that there are fewer distinct rows than clusters
        centers = KMeans(count, n_init=10, random_state=seed).fit(rows).cluster_centers_
    return torch.from_numpy(centers).to(vectors.device)


@torch.no_grad()
def first_centers(vectors: Vectors, count: int, draws: np.random.Generator) -> Tensor:
    """Rows (count, d) drawn by greedy k-means++: of a few draws by squared distance to the rows chosen so far, it takes
    the draw that brings all rows nearest. Many clusters get several rows in each of 256 rounds."""
    added, trials = max(1, count // 256), 2 + int(math.log(count))
    chosen = draws.integers(len(vectors), size=1)
    distance = _assign(vectors, vectors.take(chosen).float())[1]
    while len(chosen) < count:
        distance[chosen] = 0
        weights = distance if distance.any() else (~np.isin(np.arange(len(vectors)), chosen)).astype(float)
        more = min(added, count - len(chosen), int(np.count_nonzero(weights)))
        drawn = np.stack([draws.choice(len(vectors), more, False, weights / weights.sum()) for _ in range(trials)])
        near = _assign(vectors, vectors.take(drawn.reshape(-1)).float(), trials)[1]
        np.minimum(near, distance[:, None], out=near)
        best = near.sum(axis=0).argmin()
        chosen, distance = np.concatenate((chosen, drawn[best])), near[:, best].copy()
    return vectors.take(chosen).float()


@torch.no_grad()
def k_means(vectors: Vectors, centers: Tensor) -> tuple[Tensor, np.ndarray, np.ndarray]:
    """Lloyd's algorithm from centers (k, d). Returns the centers, and for each row the nearest one and the squared
    distance to it, (n,). A cluster that loses all its rows gets the row that is farthest from its center."""
    labels, distances = _assign(vectors, centers)
    for _ in range(100):
        before, centers = distances.sum(), _means(vectors, labels, distances, len(centers))
        labels, distances = _assign(vectors, centers)
        if before - distances.sum() <= 1e-5 * before:
            break
    return centers, labels, distances


def _assign(vectors: Vectors, centers: Tensor, sets: int = 1) -> tuple[np.ndarray, np.ndarray]:
    """For each row the nearest of centers (k, d) and its squared distance: (n,), or (n, sets), one for each set."""
    shape = (len(vectors), sets)[: 1 + (sets > 1)]
    labels, distances = np.empty(shape, np.int64), np.empty(shape)
    lengths = centers.square().sum(dim=1) / 2
    for part in vectors.parts(max(16, min(vectors.block, vectors.block**2 // len(centers)))):
        rows = vectors.take(part, torch.float32)
        products = torch.addmm(lengths, rows, centers.T, alpha=-1)
        value, near = products.unflatten(1, (sets, -1)).min(dim=2)
        squares = rows.double().square().sum(dim=1, keepdim=True)
        labels[part] = near.cpu().numpy().reshape(-1, *shape[1:])
        distances[part] = (2 * value.double() + squares).clamp_min(0).cpu().numpy().reshape(-1, *shape[1:])
    return labels, distances


def _means(vectors: Vectors, labels: np.ndarray, distances: np.ndarray, count: int) -> Tensor:
    """Means (count, d) of the clusters, the same each time: they are summed on the CPU. Empty clusters get far rows."""
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
    """Places of `count` rows, ascending. Clusters of the last level have equal shares, as far as they have rows; each
    shares its part out among its clusters one level below, and so on. Rows of the first level are drawn at random."""
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
