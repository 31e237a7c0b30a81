"""What a ds JSON leaves open: bucket sizes, overlap, the dtype of accumulated gradients, sharding on one process."""

from __future__ import annotations

from typing import Any

from dino_ds.config.ds_check import offloads_optimizer

# At most. DeepSpeed's 5e8 elements are more than a ViT-L has: one bucket, a gigabyte, and nothing to overlap.
BUCKET_ELEMENTS = 50_000_000
# Of a small network on several ranks: while one is reduced, the backward pass fills the next.
REDUCE_BUCKETS = 8


def drop_idle_sharding(raw: dict[str, Any], zero: dict[str, Any], precision: str, world_size: int) -> list[str]:
    """ZeRO 1 and 2 shard nothing on one process; in FP32, where the weights are their own masters, they only copy."""
    stage = zero["stage"]
    if stage not in (1, 2) or precision != "fp32" or world_size > 1 or offloads_optimizer(zero):
        return []
    raw["zero_optimization"] = {"stage": 0}
    return [f"ZeRO {stage} shards nothing on one process: it runs as ZeRO 0, which is the same without its copies"]


def fill_zero(raw: dict[str, Any], zero: dict[str, Any], parameters: int | None, world_size: int) -> None:
    """Decide "auto" and the missing bucket sizes of the ZeRO section, and whether anything can overlap."""
    stage, weights = zero["stage"], parameters or REDUCE_BUCKETS * BUCKET_ELEMENTS
    reduced = -(-weights // REDUCE_BUCKETS) if world_size > 1 else weights
    sizes = {"reduce_bucket_size": ((1, 2, 3), reduced), "allgather_bucket_size": ((1, 2), weights)}
    for key, (stages, size) in sizes.items():
        if stage in stages and zero.get(key, "auto") == "auto":
            zero[key] = min(size, BUCKET_ELEMENTS)
    # One process sends nothing: it would only wait for the device after each backward pass. Copies to the host overlap.
    to_host = offloads_optimizer(zero) or zero.get("offload_param", {}).get("device", "none") != "none"
    if world_size == 1 and stage and not to_host:
        zero["overlap_comm"] = False
    for key in [key for key, value in zero.items() if value == "auto"]:
        del zero[key]
    if offloads_optimizer(zero):
        raw["zero_force_ds_cpu_optimizer"] = False  # else DeepSpeed refuses every optimizer but its own


def fill_accumulation_dtype(raw: dict[str, Any], precision: str, stage: int, accumulation: int) -> list[str]:
    """DeepSpeed accumulates in the model's dtype: in low precision small gradients are lost."""
    if accumulation == 1 or precision == "fp32" or raw.get("data_types", {}).get("grad_accum_dtype"):
        return []
    if stage >= 2:
        raw.setdefault("data_types", {})["grad_accum_dtype"] = "fp32"
        return [
            f"data_types.grad_accum_dtype = fp32: {accumulation} micro-batches are accumulated in FP32, not {precision}"
        ]
    return [
        f"{accumulation} micro-batches are accumulated in {precision} at stage {stage}: "
        'use stage 2, or "data_types": {"grad_accum_dtype": "fp32"} (a whole FP32 gradient on every rank)'
    ]
