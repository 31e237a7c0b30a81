"""Which micro-batches to try, and which one to take. Knows nothing of how one is tried."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Tried:
    """One micro-batch on the real step. Without room: no rate. memory_gib: peak of the fullest process."""

    micro_batch: int
    fits: bool
    images_per_second: float | None = None
    memory_gib: float | None = None


def find_largest(fits: Callable[[int], bool], most: int) -> int:
    """The largest size <= `most` that fits, to a 16th, by doubling and then bisection; 0 if not even one does."""
    size, low, high = 1 << max(0, (most // 64).bit_length() - 1), 0, most + 1  # a power of two, at most 64 times below
    while low < size < high:
        if fits(size):
            low, size = size, min(2 * size, most)
        else:
            high = size
    while high - low > max(1, low // 16) and low < most:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def largest_divisor(number: int, most: int) -> int:
    """The largest divisor of `number` that is <= `most`."""
    return next(size for size in range(min(number, most), 0, -1) if number % size == 0)


def fastest(tried: Iterable[Tried], images_per_rank: int) -> Tried:
    """The best rate among the sizes whose multiples give `images_per_rank` exactly."""
    usable = [t for t in tried if t.fits and images_per_rank % t.micro_batch == 0]
    return max(usable, key=lambda t: t.images_per_second or 0.0)
