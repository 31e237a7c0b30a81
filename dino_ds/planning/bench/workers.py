"""`dino-ds bench workers`: how many loader processes the user's own data and recipe want, by measuring."""

from __future__ import annotations

import time
from collections.abc import Sequence
from statistics import median
from typing import Any

import torch
from tqdm import tqdm

from dino_ds.config.loading import change_recipe
from dino_ds.config.recipe import Recipe
from dino_ds.data.base import Source
from dino_ds.data.feed import Position
from dino_ds.data.find_range import with_value_range
from dino_ds.data.sources import training_images
from dino_ds.data.workers import check_shared_memory, worker_options
from dino_ds.method.build import build_prefetcher
from dino_ds.options.bench import BenchWorkersOptions
from dino_ds.planning.measure.host import describe_host, host_line
from dino_ds.planning.measure.tables import markdown_table, print_result
from dino_ds.planning.measure.timing import synchronize

_MICRO_BATCH = 16
_ROUNDS = 3
_MAX_WORKERS = 32
"""The most processes that are tried by default."""
_AS_GOOD = 0.95
"""Fewer workers are preferred if they reach this part of the best rate."""
_BUSY = 1.0
"""Load average at the start above which the results are reported as too low."""


def run(options: BenchWorkersOptions, *, recipe: Recipe) -> None:
    """Print images/s for 0, 1, 2, 4, ... `max_workers` loader processes, and a recommendation.

    Each number is measured in 3 interleaved rounds, through training's loader and prefetcher. Raises DataError for data
    that can't be loaded.
    """
    host, ranks = describe_host(), max(torch.cuda.device_count(), 1)
    cores = max(host["cores"] // ranks, 1)
    source = training_images(recipe.data, recipe.eval.val_share)
    recipe, _ = with_value_range(recipe, source)
    counts = worker_counts(options.max_workers or min(cores, _MAX_WORKERS))
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    check_shared_memory(recipe.batch_bytes(_MICRO_BATCH), counts[-1])
    rates = measure_rates(source, recipe, device, counts, options.seconds)
    result = {
        "images": len(source),
        "source": recipe.data.source,
        "root": recipe.data.place if recipe.data.mixture else recipe.data.root,
        "augment": recipe.data.augment,
        "device": device.type,
        "ranks": ranks,
        "workers": [{"workers": count, "images_per_second": _spread(rates[count])} for count in counts],
        "recommended": recommend({count: median(rates[count]) for count in counts}, cores),
        "host": host,
    }
    print_result(_page(result), result, options.json)


def worker_counts(most: int) -> list[int]:
    """0, 1, 2, 4, ... and `most` itself."""
    return [0, *(1 << power for power in range(most.bit_length()) if 1 << power < most), most]


def measure_rates(
    source: Source, recipe: Recipe, device: torch.device, counts: Sequence[int], seconds: float
) -> dict[int, list[float]]:
    """Workers -> images per second, one number a round."""
    micro_batch = str(min(_MICRO_BATCH, len(source)))
    recipes = {n: change_recipe(recipe, {"data.global_batch": micro_batch, "data.workers": str(n)}) for n in counts}
    position = Position()
    rates: dict[int, list[float]] = {count: [] for count in counts}
    for turn in tqdm(range(_ROUNDS), unit="round", desc="workers", disable=None):
        for count in list(counts)[:: -1 if turn % 2 else 1]:
            rate, position = _measure_once(source, recipes[count], device, position, seconds / _ROUNDS)
            rates[count].append(rate)
    return rates


def _measure_once(
    source: Source, recipe: Recipe, device: torch.device, start: Position, seconds: float
) -> tuple[float, Position]:
    """Images per second from `start` on, and where the next measurement begins: with images that nobody has read."""
    workers, micro_batch = recipe.data.workers or 0, recipe.data.global_batch
    feed = build_prefetcher(recipe, source, micro_batch, device, start)
    try:
        warm_up = max(workers, 1)  # each process needs time to start before its first batch
        for _ in range(warm_up):
            next(feed)
        batches, begin = 0, time.perf_counter()
        while batches < max(2, workers) or time.perf_counter() - begin < seconds:
            next(feed)
            batches += 1
        synchronize(device)
        rate = batches * micro_batch / (time.perf_counter() - begin)
    finally:
        feed.close()
    ahead = workers * (worker_options(workers)["prefetch_factor"] or 0) + 1
    for _ in range(warm_up + batches + ahead):
        start = start.advance(micro_batch, len(source) // micro_batch * micro_batch)
    return rate, start


def recommend(rates: dict[int, float], cores: int) -> dict[str, Any]:
    """The fewest workers that are as good as the best, with one core left for training."""
    allowed = {count: rate for count, rate in rates.items() if count < cores} or {0: rates[0]}
    best = max(allowed.values())
    workers = min(count for count, rate in allowed.items() if rate >= best * _AS_GOOD)
    return {
        "workers": workers,
        "images_per_second": allowed[workers],
        "reason": f"the fewest within {1 - _AS_GOOD:.0%} of the best rate, {best:,.0f} images/s; one of {cores} cores "
        "is left to the training process",
    }


def _spread(values: Sequence[float]) -> dict[str, Any]:
    return {"median": median(values), "low": min(values), "high": max(values), "rounds": list(values)}


def _page(result: dict[str, Any]) -> str:
    rows = []
    for row in result["workers"]:
        rate = row["images_per_second"]
        rows.append([str(row["workers"]), f"{rate['median']:,.1f}", f"{rate['low']:,.1f} to {rate['high']:,.1f}"])
    chosen, busy = result["recommended"], result["host"]["load_average"][0]
    lines = [
        f"{result['images']:,} images in {result['root'] or result['source']}; data.augment {result['augment']}",
        host_line(result["host"]),
        "",
        markdown_table(["workers", "images/s", f"{_ROUNDS} rounds"], rows),
        "",
        f"recommended  --data.workers {chosen['workers']}: {chosen['images_per_second']:,.1f} images/s, "
        f"{chosen['reason']}",
    ]
    if result["ranks"] > 1:
        lines.append(f"note         measured with one rank; {result['ranks']} share this machine's storage and memory")
    if busy > _BUSY:
        lines.append(f"note         other programs were running (load average {busy}): a quiet machine loads faster")
    return "\n".join(lines)
