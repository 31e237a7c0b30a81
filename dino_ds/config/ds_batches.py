"""Micro-batch and accumulation of a ds JSON: with the ranks they multiply to the recipe's global batch."""

from __future__ import annotations

from typing import Any

from dino_ds.errors import ConfigError


def divide_batch(config: dict[str, Any], path: str, global_batch: int, world_size: int) -> tuple[int, int]:
    """(micro-batch, accumulation) whose product with the ranks is the global batch."""
    total = config.get("train_batch_size", "auto")
    if total not in ("auto", global_batch):
        raise ConfigError(
            f"train_batch_size {total} in {path} is not the recipe's data.global_batch {global_batch}: "
            f"remove it from {path}, or set --data.global_batch {total}"
        )
    micro = config.get("train_micro_batch_size_per_gpu", "auto")
    accumulation = config.get("gradient_accumulation_steps", "auto" if micro != "auto" else 1)
    if micro == "auto":
        accumulation = 1 if accumulation == "auto" else accumulation
        known, what = world_size * accumulation, f"ranks {world_size} x accumulation {accumulation}"
    elif accumulation == "auto":
        known, what = world_size * micro, f"ranks {world_size} x micro-batch {micro}"
    else:
        return _agreeing(micro, accumulation, path, global_batch, world_size)
    if global_batch % known:
        below, above = global_batch // known * known, -(-global_batch // known) * known
        choices = " or ".join(f"--data.global_batch {size}" for size in (below, above) if size)
        ranks = _fitting_ranks(global_batch, known // world_size, world_size)
        raise ConfigError(f"global batch {global_batch} is not a multiple of {what} = {known}; set {choices}{ranks}")
    quotient = global_batch // known
    return (quotient, accumulation) if micro == "auto" else (micro, quotient)


def _fitting_ranks(global_batch: int, share: int, world_size: int) -> str:
    """The nearest numbers of ranks between which multiples of `share` images can be divided; "" if there is none."""
    fitting = [ranks for ranks in range(1, 2 * world_size) if global_batch % (ranks * share) == 0]
    nearest = [
        max((r for r in fitting if r < world_size), default=0),
        min((r for r in fitting if r > world_size), default=0),
    ]
    text = " or ".join(str(ranks) for ranks in nearest if ranks)
    return f", or use {text} ranks" if text else ""


def _agreeing(micro: int, accumulation: int, path: str, global_batch: int, world_size: int) -> tuple[int, int]:
    product = micro * accumulation * world_size
    if product == global_batch:
        return micro, accumulation
    cures = [f"--data.global_batch {product}"]
    if global_batch % (micro * world_size) == 0:
        cures.insert(0, f"gradient_accumulation_steps to {global_batch // (micro * world_size)} in {path}")
    elif global_batch % (accumulation * world_size) == 0:
        cures.insert(0, f"train_micro_batch_size_per_gpu to {global_batch // (accumulation * world_size)} in {path}")
    raise ConfigError(
        f"global batch {global_batch} is not micro-batch {micro} x accumulation {accumulation} x ranks {world_size} "
        f"= {product}; set {' or '.join(cures)}"
    )
