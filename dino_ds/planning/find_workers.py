"""`dino-ds find-workers`: how many loader processes the user's own data and recipe want, by measuring."""

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
from dino_ds.data.held_out import training_images
from dino_ds.data.workers import check_shared_memory, worker_options
from dino_ds.method.build import build_prefetcher
from dino_ds.options.data import FindWorkersOptions
from dino_ds.planning.measure.host import describe_host, host_line
from dino_ds.planning.measure.stages import WORKER_STAGES, measure_stages
from dino_ds.planning.measure.tables import markdown_table, print_result
from dino_ds.planning.measure.timing import synchronize

_MICRO_BATCH = 16
_ROUNDS = 3
_MOST_WORKERS = 32
"""The most processes that are tried by default."""
_AS_GOOD = 0.95
"""Fewer workers are preferred if they give this part of the best rate."""
_RESERVE = 1.1
"""Images a second to have for each that the step takes: loading times vary."""
_BUSY = 1.0
"""Load average at the start above which the results are reported as too low."""
_NAMES = {
    "load": "the source's own loading",
    "read": "storage: reading the file",
    "decode": "decoding",
    "crops": "crops and augmentation",
    "hand over": "handing over to the training process",
    "device": "transfer and augmentation on the device",
}


def run(options: FindWorkersOptions, *, recipe: Recipe) -> None:
    """Print images/s for 0, 1, 2, 4, ... `max_workers` loader processes, the costliest stage, and a recommendation.

    Each number is measured in 3 interleaved rounds, through training's loader and prefetcher. Raises DataError for data
    that can't be loaded.
    """
    host = describe_host()
    ranks = max(torch.cuda.device_count(), 1)
    share = max(host["cores"] // ranks, 1)
    data = recipe.data
    source = training_images(data, recipe.eval.val_share)
    recipe, _ = with_value_range(recipe, source)
    counts = _counts(options.max_workers or min(share, _MOST_WORKERS))
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    check_shared_memory(recipe.batch_bytes(_MICRO_BATCH), counts[-1])
    stages = measure_stages(source, recipe, device, _MICRO_BATCH, options.seconds)
    rates = _measure(source, recipe, device, counts, options.seconds)
    chosen = _recommend({count: median(rates[count]) for count in counts}, share, options.step_images_per_second)
    found = {
        "images": len(source),
        "source": data.source,
        "root": data.place if data.mixture else data.root,
        "augment": data.augment,
        "device": device.type,
        "ranks": ranks,
        "workers": [
            {"workers": count, "images_per_second": _spread(rates[count]), "ideal": _ideal(stages, count)}
            for count in counts
        ],
        "stages": _stages(stages),
        "bottleneck": _bottleneck(stages, chosen["workers"]),
        "recommended": chosen,
        "host": host,
    }
    print_result(_page(found), found, options.json)


def _counts(most: int) -> list[int]:
    """0, 1, 2, 4, ... and `most` itself."""
    powers = [1 << power for power in range(most.bit_length()) if 1 << power < most]
    return [0, *powers, most]


def _measure(
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
    """Images per second from `start` on, and where the next measurement finds images that nobody has read yet."""
    workers, micro_batch = recipe.data.workers or 0, recipe.data.global_batch
    feed = build_prefetcher(recipe, source, micro_batch, device, start)
    try:
        warm_up = max(workers, 1)  # the first batch of each process, which it needs time to start for
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
    per_epoch = len(source) // micro_batch * micro_batch
    for _ in range(warm_up + batches + ahead):
        start = start.advance(micro_batch, per_epoch)
    return rate, start


def _stages(seconds: dict[str, list[float]]) -> dict[str, Any]:
    middle = {stage: median(values) for stage, values in seconds.items()}
    worker = sum(middle[stage] for stage in WORKER_STAGES if stage in middle)
    return {
        stage: {
            "where": "loader process" if stage in WORKER_STAGES else "training process",
            "milliseconds": {name: value * 1000 for name, value in _spread(seconds[stage]).items() if name != "rounds"},
            "images_per_second": 1 / middle[stage],
            "share": middle[stage] / worker if stage in WORKER_STAGES else None,
        }
        for stage in (*WORKER_STAGES, "device")
        if stage in middle
    }


def _ideal(seconds: dict[str, list[float]], workers: int) -> float:
    """Images per second if every process were as fast as alone."""
    worker = sum(median(values) for stage, values in seconds.items() if stage in WORKER_STAGES)
    device = median(seconds["device"])
    return min(workers / worker, 1 / device) if workers else 1 / (worker - median(seconds["hand over"]) + device)


def _bottleneck(seconds: dict[str, list[float]], workers: int) -> dict[str, Any]:
    """The stage where `workers` processes lose most: the costliest of each, or the training process's for all."""
    stages = _stages(seconds)
    in_worker = {name: stage["share"] for name, stage in stages.items() if name in WORKER_STAGES}
    name = max(in_worker, key=lambda stage: in_worker[stage])
    device = stages["device"]["images_per_second"]
    narrow = device <= _ideal(seconds, workers) if workers else device < stages[name]["images_per_second"]
    return {"stage": "device", "share": None} if narrow else {"stage": name, "share": in_worker[name]}


def _recommend(rates: dict[int, float], cores: int, wanted: float | None) -> dict[str, Any]:
    """The fewest workers that are as good as the best, or enough for the step, with one core left for training."""
    room = max(cores - 1, 0)
    allowed = {count: rate for count, rate in rates.items() if count <= room} or {0: rates[0]}
    best = max(allowed.values())
    enough = best * _AS_GOOD if wanted is None else min(wanted * _RESERVE, best * _AS_GOOD)
    workers = min(count for count, rate in allowed.items() if rate >= enough)
    rate = allowed[workers]
    waits = None if wanted is None else max(0.0, 1 - rate / wanted)
    if wanted is not None and rate >= wanted * _RESERVE:
        reason = f"the fewest that load {wanted:g} images/s with a tenth to spare"
    elif rate < best:
        reason = f"the fewest within {1 - _AS_GOOD:.0%} of the best rate, {best:,.0f} images/s"
    else:
        reason = "the best rate"
    core = "core is" if cores == 1 else f"of {cores} cores is"
    return {
        "workers": workers,
        "images_per_second": rate,
        "reason": f"{reason}; one {core} left to the training process",
        "step_images_per_second": wanted,
        "step_waits": waits,
    }


def _spread(values: Sequence[float]) -> dict[str, Any]:
    return {"median": median(values), "low": min(values), "high": max(values), "rounds": list(values)}


def _page(found: dict[str, Any]) -> str:
    rows, stages = [], []
    for row in found["workers"]:
        rate, count = row["images_per_second"], str(row["workers"])
        spread = f"{rate['low']:,.1f} to {rate['high']:,.1f}"
        rows.append([count, f"{rate['median']:,.1f}", spread, f"{rate['median'] / row['ideal']:.0%}"])
    for stage, values in found["stages"].items():
        ms, rate = values["milliseconds"], f"{values['images_per_second']:,.0f}"
        share = values["where"] if values["share"] is None else f"{values['share']:.0%}"
        stages.append([_NAMES[stage], f"{ms['median']:.2f}", f"{ms['low']:.2f} to {ms['high']:.2f}", rate, share])
    where = found["root"] or found["source"]
    return "\n".join(
        [
            f"{found['images']:,} images in {where}; data.augment {found['augment']}",
            host_line(found["host"]),
            "",
            markdown_table(["workers", "images/s", f"{_ROUNDS} rounds", "of the stages' rate"], rows),
            "",
            markdown_table(["one core, each stage alone", "ms an image", "rounds", "images/s", "of a worker"], stages),
            "",
            *_conclusion(found),
        ]
    )


def _conclusion(found: dict[str, Any]) -> list[str]:
    narrow, chosen = found["bottleneck"], found["recommended"]
    wanted, waits = chosen["step_images_per_second"], chosen["step_waits"]
    share = f"{narrow['share']:.0%} of a loader process's time" if narrow["share"] else "in the training process"
    lines = [
        f"bottleneck   {_NAMES[narrow['stage']]}, {share}",
        f"recommended  --data.workers {chosen['workers']}: {chosen['images_per_second']:,.1f} images/s, "
        f"{chosen['reason']}",
    ]
    if found["ranks"] > 1:
        lines.append(f"note         measured with one rank; {found['ranks']} share this machine's storage and memory")
    busy = found["host"]["load_average"][0]
    if busy > _BUSY:
        lines.append(f"note         others were busy here before (load average {busy}): a quiet machine gives more")
    if waits:
        lines.append(
            f"WARNING      the step takes {wanted:,.0f} images/s: it would wait for data {waits:.0%} of the time"
        )
    elif wanted:
        lines.append(f"step         takes {wanted:,.0f} images/s and would not wait")
    return lines
