"""Images that look the same: a 64-bit hash of each, and all pairs of hashes that differ in a few bits."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations, pairwise

import numpy as np
from PIL import Image

MAX_DISTANCE = 3
"""Bits in which the hashes of near-duplicates may differ (docs/data.md has the measurement)."""
_BLOCKS = 6
_SET_BITS = np.array([number.bit_count() for number in range(256)], dtype=np.uint8)


def difference_hash(image: Image.Image) -> int:
    """64 bits: is each pixel of the 9 x 8 grey thumbnail brighter than its left neighbour? (dHash, N. Krawetz 2013)"""
    small = np.asarray(image.convert("L").resize((9, 8), Image.Resampling.BOX), dtype=np.int16)
    return int.from_bytes(np.packbits(small[:, 1:] > small[:, :-1]).tobytes(), "big")


def find_groups(hashes: np.ndarray) -> list[list[int]]:
    """Hashes (n,) uint64 -> groups of at least two places, largest first, linked by distances <= MAX_DISTANCE.

    Exact: no pair is missed. A million random hashes take seconds, since equal ones are compared once.
    """
    values, inverse = np.unique(hashes, return_inverse=True)
    parent = list(range(len(values)))
    for one, other in _close_pairs(values):
        parent[_root(parent, one)] = _root(parent, other)
    groups: dict[int, list[int]] = {}
    for place, value in enumerate(inverse.tolist()):
        groups.setdefault(_root(parent, value), []).append(place)
    return sorted((group for group in groups.values() if len(group) > 1), key=lambda group: (-len(group), group))


def _close_pairs(values: np.ndarray) -> Iterator[tuple[int, int]]:
    """Places (a, b) of different values with distance <= MAX_DISTANCE; a pair may come more than once.

    Of 6 blocks of bits, 3 wrong bits leave at least 3 untouched: for each choice of 3 blocks, the values that agree
    in them are neighbours after sorting (Manku, Jain, Das Sarma 2007, "Detecting near-duplicates for web crawling").
    """
    edges = [round(64 * block / _BLOCKS) for block in range(_BLOCKS + 1)]
    masks = [(1 << high) - (1 << low) for low, high in pairwise(edges)]
    for kept in combinations(masks, _BLOCKS - MAX_DISTANCE):
        keys = values & np.uint64(sum(kept))
        order = np.argsort(keys)
        keys = keys[order]
        place = np.arange(len(keys) - 1)
        step = 1
        while len(place := place[place < len(keys) - step]):  # neighbours, then neighbours but one, ...
            place = place[keys[place] == keys[place + step]]
            one, other = order[place], order[place + step]
            close = _distances(values[one], values[other]) <= MAX_DISTANCE
            yield from zip(one[close].tolist(), other[close].tolist(), strict=True)
            step += 1


def _distances(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return _SET_BITS[(a ^ b).view(np.uint8).reshape(-1, 8)].sum(1)


def _root(parent: list[int], node: int) -> int:
    while parent[node] != node:
        parent[node] = node = parent[parent[node]]
    return node
