"""`dino-ds bench inference`: latency and throughput of feature extraction, by batch size and way to run it."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from dino_ds.basics.formatting import markdown_table, short
from dino_ds.engine.process import device
from dino_ds.errors import ConfigError, is_out_of_memory, one_line
from dino_ds.models.foreign import build_backbone
from dino_ds.models.specs.backbones import backbone_spec
from dino_ds.options.commands import BenchInferenceOptions
from dino_ds.options.definition import Result
from dino_ds.planning.measure import begin, clock_name, describe_host, host_line, synchronize, time_interleaved
from dino_ds.weights.load import Backbone, load

BASELINE = "fp32"
_RANDOM_SIZE = 224

Features = Callable[[Tensor], Tensor]  # images (b, c, h, w) FP32 on the device -> features (b, d)


def run(options: BenchInferenceOptions) -> Result:
    """Measure every way to run `model` at every batch size, interleaved, on random images. Raises UserError."""
    if options.random and options.heads is not None:
        instead = f"the architecture {options.model} has its own: leave it out"
        raise ConfigError(f"--heads {options.heads} is of a file; {instead}")
    begin(1, options.threads, "bench inference")
    if options.random:
        try:
            network = build_backbone(backbone_spec(options.model), _RANDOM_SIZE)
        except ValueError as error:
            raise ConfigError(f"--random: {error}") from None
        backbone = Backbone(network, _RANDOM_SIZE, options.model, {}).to(device())
    else:
        backbone = load(options.model, device(), options.heads)
    side, channels = options.size or backbone.image_size, backbone.network.spec.in_chans
    backbone.features(torch.zeros(1, channels, side, side, device=device()))  # raises now for an impossible size
    rows: list[dict[str, Any]] = []
    skipped: dict[str, str] = {}
    for batch in tqdm(options.batches, desc="batch sizes", leave=False, disable=None):
        torch.compiler.reset()  # each batch size has its own graph: all would fill the cache
        try:
            images = torch.randn(batch, channels, side, side, device=device())
            backbone.features(images)
        except RuntimeError as error:  # out of memory, also on a CPU; without a baseline nothing is compared
            skipped[f"batch {batch}"] = _reason(error)
            continue
        ways, why = _ways(backbone, images)
        skipped |= why
        rows += _measured(ways, images, options)
    if not rows:
        reasons = "; ".join(dict.fromkeys(skipped.values()))
        raise ConfigError(f"--batches {','.join(map(str, options.batches))}: {reasons}: lower them")
    if backbone.is_vit:
        arch = backbone.vit.arch
        sizes = f"patch {arch.patch_size}, width {arch.width}, {arch.depth} blocks, {arch.heads} heads"
    else:
        sizes = f"stride {backbone.stride}, width {backbone.width}"
    result = {"model": options.model, "backbone": sizes, "size": side, "baseline": BASELINE}
    result |= {"inference": rows, "skipped": skipped, "host": describe_host()}
    return Result(result, _page(result))


def _ways(backbone: Backbone, images: Tensor) -> tuple[dict[str, Features], dict[str, str]]:
    """Return functions that compute the features, each tried once, and why others are skipped; both by name."""
    ways, skipped = dict[str, Features]({BASELINE: backbone.features}), dict[str, str]()
    able, refusal = torch.cpu.get_capabilities().get("avx512_bf16"), "this CPU has no bf16 arithmetic (avx512_bf16)"
    if torch.cuda.is_available():
        able, refusal = torch.cuda.is_bf16_supported(including_emulation=False), "this GPU has no bf16 arithmetic"
    for name, bf16, compiled in (("bf16", True, False), ("fp32 compiled", False, True), ("bf16 compiled", True, True)):
        try:
            if bf16 and not able:
                raise ConfigError(refusal)
            other = copy.deepcopy(backbone)
            for parameter in other.parameters() if bf16 else ():  # BatchNorm's averages stay FP32, as in training
                parameter.data = parameter.data.bfloat16()
            if compiled:
                other.network.compile_segments()
            # Casting the images is part of the measured time.
            way = (lambda x, other=other: other.features(x.bfloat16())) if bf16 else other.features
            way(images)
            ways[name] = way
        except (RuntimeError, ConfigError) as error:  # an incomplete compiler raises these too
            full = isinstance(error, torch.OutOfMemoryError)
            skipped[f"{name}, batch {len(images)}" if full else name] = _reason(error)
    return ways, skipped


def _reason(error: Exception) -> str:
    return "not enough memory" if is_out_of_memory(error) else one_line(error)


def _measured(ways: dict[str, Features], images: Tensor, options: BenchInferenceOptions) -> list[dict[str, Any]]:
    began, batch = time.monotonic(), len(images)
    features = {name: way(images).float().cpu() for name, way in ways.items()}
    exact = features[BASELINE]
    synchronize(device())
    fitting = int(options.seconds / max(time.monotonic() - began, 1e-9))
    repeats = max(5, min(options.rounds, fitting))
    runs = {name: (lambda way=way: way(images)) for name, way in ways.items()}
    timings = time_interleaved(runs, repeats, options.warmup, device())
    rows = list[dict[str, Any]]()
    for name, timing in timings.items():
        latencies = {f"p{p}_ms": 1000 * float(np.percentile(timing.all_seconds, p)) for p in (50, 95, 99)}
        deviation = float(((features[name] - exact).norm(dim=1) / exact.norm(dim=1)).max())
        row = {"batch": batch, "way": name, **latencies, "images_per_second": batch / timing.seconds}
        row |= {"ratio": timings[BASELINE].seconds / timing.seconds, "deviation": deviation}
        rows.append(row | {"rounds": repeats, "clock": timing.clock})
    return rows


def _page(result: dict[str, Any]) -> str:
    header = ["batch, way", "p50 ms", "p95 ms", "p99 ms", "images/s", f"x {BASELINE}", "deviation", "rounds"]
    rows = list[list[str]]()
    for row in result["inference"]:
        figures = [short(row[name]) for name in ("p50_ms", "p95_ms", "p99_ms", "images_per_second")]
        compared = f"{row['ratio']:.2f}", f"{row['deviation']:.1e}", str(row["rounds"])
        rows.append([f"{row['batch']}, {row['way']}", *figures, *compared])
    clock = clock_name(result["inference"][0]["clock"])
    lines = [f"bench inference: {result['model']} ({result['backbone']}), {result['size']} pixels, {clock}"]
    lines += [host_line(result["host"]), "", markdown_table(header, rows), ""]
    lines += [f"{name} skipped: {reason}" for name, reason in result["skipped"].items()]
    how = "by the median; deviation from it: the largest |difference| / |features|"
    return "\n".join([*lines, f"images/s and the ratio to {BASELINE} {how}"])
