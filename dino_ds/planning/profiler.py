"""`dino-ds profile`: where the time of the training step goes, what bounds it and what to change.

The step is the real one, on real images if some are given, else on noise that is already on the device. The resource
that bounds it, in this order:

1. input: at least 10 % of the time is waiting for data;
2. host: the device computes less than 70 % of the rest. On a CPU a call of an operator counts as computing from 20 us
   on; shorter ones are mostly the cost of calling;
3. communication, compute or memory: the kind of operators on which the device spends most. compute: matrix products,
   convolutions, attention; memory: all others, which move more bytes than they calculate.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from json import dumps
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function, schedule
from tqdm import tqdm

from dino_ds.basics.digits import short
from dino_ds.basics.ranges import PARTS, listen
from dino_ds.config.recipe import Recipe
from dino_ds.engine import distributed
from dino_ds.engine.device import device
from dino_ds.errors import ConfigError
from dino_ds.options.bench import ProfileOptions
from dino_ds.planning.measure.host import describe_host, host_line
from dino_ds.planning.measure.tables import markdown_table, print_result
from dino_ds.planning.measure.timing import PartTimes, synchronize
from dino_ds.planning.measure.trial import begin, build_trial, real_feed, resolve, run_on_data

_WAIT, _OPERATORS = 1, 15
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


def run(options: ProfileOptions, *, recipe: Recipe, ds: dict[str, Any], ds_path: str) -> None:
    """Profile `steps` steps; files into the folder `out`, the summary to stdout. Raises ConfigError."""
    folder = Path(options.out)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--out {options.out} can't be made: {error.strerror}") from None
    batch = begin(options.batch, options.threads)
    recipe, config = resolve(recipe, ds, ds_path, batch)
    trial = build_trial(recipe, config)
    data = recipe.data
    real = data.root is not None or data.mixture or data.source == "photos" or ":" in data.source
    if real:
        # Closed also after an error: the end of the process would wait for the workers for ever.
        with contextlib.closing(real_feed(recipe, trial)) as feed:
            result = profile_step(lambda: run_on_data(trial, feed, recipe.seed), options.warmup, options.steps, folder)
    else:
        result = profile_step(trial.run, options.warmup, options.steps, folder)
    ranks = distributed.world_size()
    result = {
        "backbone": recipe.model.backbone,
        "data": recipe.data.place if real else "noise",
        "batch": batch,
        "processes": ranks,
        "stage": config.stage,
        "precision": config.precision,
        "images_per_second": batch * ranks / result["step_seconds"],
        "host": describe_host(),
        **result,
    }
    if distributed.rank() == 0:
        (folder / "summary.json").write_text(dumps(result, indent=1) + "\n")
    print_result(_page(result, folder), result, options.json)


def profile_step(step: Callable[[], object], warmup: int, steps: int, folder: Path) -> dict[str, Any]:
    """Steps under torch's profiler: one that waits, `warmup` that it sees and forgets, `steps` that it keeps."""
    where = device()
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if where.type == "cuda" else [])]
    parts = PartTimes(where, waits=True)  # for data
    trace = folder / ("trace.json" if distributed.rank() == 0 else f"trace_rank{distributed.rank()}.json")
    profiler = profile(
        activities=activities,
        schedule=schedule(wait=_WAIT, warmup=warmup, active=steps, repeat=1),
        on_trace_ready=lambda done: done.export_chrome_trace(str(trace)),
        profile_memory=True,
        acc_events=True,
    )
    with profiler, listen(_annotate):
        for _ in _progress(_WAIT + warmup):
            step()
            profiler.step()
        with listen(parts):
            for _ in _progress(steps):
                step()
                synchronize(where)
                profiler.step()
    return _summarise(profiler, parts.read(), steps, where.type == "cuda")


def _summarise(profiler: profile, parts: dict[str, float], steps: int, on_gpu: bool) -> dict[str, Any]:
    events = list(profiler.events() or [])
    seconds = sum(e.time_range.elapsed_us() for e in events if e.name.startswith("ProfilerStep")) / 1e6
    calls: list[Call] = []
    for event in events:
        if event.name in PARTS or event.name.startswith("ProfilerStep") or event.device_type.name != "CPU":
            continue  # kernels of a GPU are counted with the operator that launched them
        own = event.self_device_time_total if on_gpu else event.self_cpu_time_total
        if own > 0:
            calls.append((event.name, own / 1e6))
    return {
        "steps": steps,
        "step_seconds": seconds / steps,
        "parts": {part: parts[part] / steps for part in PARTS if part in parts},
        "operators": _by_operator(calls, steps),
        **judge(seconds, parts.get("data", 0.0), calls, on_gpu),
    }


def _by_operator(calls: list[Call], steps: int) -> list[dict[str, Any]]:
    by_name: dict[str, list[float]] = {}
    for name, seconds in calls:
        by_name.setdefault(name, []).append(seconds)
    slowest = sorted(by_name.items(), key=lambda item: -sum(item[1]))[:_OPERATORS]
    return [
        {"name": name, "kind": kind_of(name), "calls": len(each) / steps, "seconds": sum(each) / steps}
        for name, each in slowest
    ]


@contextmanager
def _annotate(name: str) -> Iterator[None]:
    on_gpu = torch.cuda.is_available()
    with record_function(name), torch.cuda.nvtx.range(name) if on_gpu else contextlib.nullcontext():
        yield


def _progress(steps: int) -> Any:
    return tqdm(range(steps), desc="steps", leave=False, disable=None)


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


def _page(result: dict[str, Any], folder: Path) -> str:
    whole, parts = result["step_seconds"], result["parts"]
    rest = {**parts, "other": max(0.0, whole - sum(parts.values()))}
    part_rows = [(name, f"{1000 * s:.2f}", f"{100 * s / whole:.1f} %") for name, s in rest.items()]
    rows = [
        (
            o["name"],
            o["kind"],
            short(o["calls"], 4),
            f"{1000 * o['seconds']:.2f}",
            f"{100 * o['seconds'] / whole:.1f} %",
        )
        for o in result["operators"]
    ]
    lines = [
        f"profile: {result['backbone']}, ZeRO {result['stage']}, {result['precision']}, {result['batch']} images per "
        f"process, {result['processes']} process(es), data: {result['data']}",
        host_line(result["host"]),
        f"{short(result['images_per_second'], 4)} images/s, {1000 * whole:.2f} ms a step, with the profiler's own cost",
        "",
        markdown_table(("part", "ms a step", "share"), part_rows),
        "",
        markdown_table(("operator", "kind", "calls a step", "own ms", "share"), rows),
        "",
        f"bound by {result['bound_by']}: {result['reason']}",
        f"to change: {result['advice']}",
        f"files: {folder / 'trace.json'} (ui.perfetto.dev), {folder / 'summary.json'}",
    ]
    return "\n".join(lines)
