"""Finds the resource that bounds a step, from what a profiler saw, and what to change. The rule, in its order:

1. input: at least 10 % of the time is waiting for data;
2. host: the device computes less than 70 % of the rest. On a CPU a call of an operator counts as computing from 20 us
   on; shorter ones are mostly the cost of calling;
3. communication, compute or memory: the kind of operators on which the device spends most. compute: matrix products,
   convolutions, attention; memory: all others, which move more bytes than they calculate.
"""

from __future__ import annotations

from collections.abc import Sequence

INPUT_SHARE = 0.10
BUSY_SHARE = 0.70
CALL_SECONDS = 20e-6

_COMPUTE = ("mm", "linear", "conv", "attention", "gemm", "flash", "fmha")
_COMMUNICATION = ("nccl", "gloo", "c10d", "all_reduce", "allgather", "all_gather", "reduce_scatter", "broadcast_")

_ADVICE = {
    "input": "more data.workers; a faster disk or shards (dino-ds shard); smaller images; a cheaper crops.augment or "
    "fewer local crops. Until this is fixed nothing else helps",
    "host": "a larger micro-batch (dino-ds bench batch-size), so that each call does more; ds.dino_ds.compile true",
    "communication": "a larger micro-batch or more accumulation, so that gradients are exchanged less often; a lower "
    "ZeRO stage if memory allows; overlap_comm true",
    "compute": "the device does what it is for. Less work: bf16 where the device has it; of ViTs packed and "
    "cls_only_last_block true; no activation checkpointing if memory allows; fewer or smaller local crops",
    "memory": "fewer bytes: bf16 where the device has it; ds.dino_ds.compile true, which fuses elementwise operators; "
    "attention sdpa; a larger micro-batch if optimizer and EMA are much of it",
}
_WORDS = {
    "compute": "matrix products, convolutions and attention",
    "memory": "operators that move bytes: elementwise, norms, copies, optimizer",
    "communication": "communication between ranks",
}


Call = tuple[str, float]
"""An operator and one call's own seconds on the device, without those of operators inside it."""


def kind_of(operator: str) -> str:
    """compute, communication or memory."""
    name = operator.lower()
    if any(part in name for part in _COMMUNICATION):
        return "communication"
    return "compute" if any(part in name for part in _COMPUTE) else "memory"


def judge(seconds: float, data_seconds: float, calls: Sequence[Call], on_gpu: bool) -> dict[str, str]:
    """The resource that bounds steps of `seconds` in all, `data_seconds` of them waiting for data; the figures; what to
    change."""
    waiting = data_seconds / seconds
    by_kind = {"compute": 0.0, "memory": 0.0, "communication": 0.0}
    for name, own_seconds in calls:
        if on_gpu or own_seconds >= CALL_SECONDS:
            by_kind[kind_of(name)] += own_seconds
    busy = min(1.0, sum(by_kind.values()) / max(seconds - data_seconds, 1e-9))
    largest = max(by_kind, key=lambda kind: by_kind[kind])
    if waiting >= INPUT_SHARE:
        resource, reason = "input", f"{100 * waiting:.0f} % of the time is waiting for data"
    elif busy < BUSY_SHARE:
        what = "the GPU computes" if on_gpu else f"operators of {CALL_SECONDS * 1e6:.0f} us and more run"
        resource, reason = "host", f"{what} only {100 * busy:.0f} % of the time"
    else:
        share = by_kind[largest] / sum(by_kind.values())
        resource, reason = largest, f"{100 * share:.0f} % of the device's time is {_WORDS[largest]}"
    return {"bound_by": resource, "reason": reason, "advice": _ADVICE[resource]}
