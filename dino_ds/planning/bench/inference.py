"""`dino-ds bench inference`: latency and throughput of a teacher's features, by batch size and way to run it."""

from __future__ import annotations

import copy
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from dino_ds.basics.digits import short
from dino_ds.engine.device import device
from dino_ds.errors import ConfigError
from dino_ds.models.build import build_backbone
from dino_ds.models.specs.backbones import backbone_spec
from dino_ds.models.specs.base import BackboneSpec
from dino_ds.options.bench import BenchInferenceOptions
from dino_ds.planning.bench.common import begin, clock_name
from dino_ds.planning.measure.host import describe_host, host_line
from dino_ds.planning.measure.tables import markdown_table, print_result
from dino_ds.planning.measure.timing import synchronize, time_interleaved
from dino_ds.weights.export import export_onnx
from dino_ds.weights.load import Backbone, load

BASELINE = "fp32"
LEAST_ROUNDS = 5
_RANDOM_SIZE = 224


class Skipped(Exception):
    """Why a way to run the network is not measured here."""


Features = Callable[[Tensor], Tensor]
"""Images (b, c, h, w) FP32 on the device -> features (b, d)."""


def run(options: BenchInferenceOptions) -> None:
    """Measure every way to run `model` at every batch size, interleaved, on random images.

    Raises ConfigError, CheckpointError.
    """
    spec = _named(options.model) if options.random else None
    if options.random and options.heads is not None:
        raise ConfigError(
            f"--heads {options.heads} is of a file; the architecture {options.model} has its own: leave it out"
        )
    begin(1, options.threads, "bench inference")
    backbone = load(options.model, device(), options.heads) if spec is None else _random(spec, options.model)
    side = options.size or backbone.image_size
    channels = backbone.network.spec.in_chans
    backbone.features(torch.zeros(1, channels, side, side, device=device()))  # raises now for an impossible size
    rows: list[dict[str, Any]] = []
    skipped: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as folder:
        for batch in tqdm(options.batches, desc="batch sizes", leave=False, disable=None):
            torch.compiler.reset()  # a program for each batch size: together they would fill its cache
            try:
                images = torch.randn(batch, channels, side, side, device=device())
                backbone.features(images)
            except RuntimeError as error:  # of memory, on the CPU too; without it there is nothing to compare with
                skipped[f"batch {batch}"] = _reason(error)
                continue
            ways, why = _ways(backbone, images, Path(folder), options.threads)
            skipped |= why
            rows += _measured(batch, ways, images, options.rounds, options.seconds, options.warmup)
    if not rows:
        raise ConfigError(
            f"--batches {','.join(map(str, options.batches))}: {'; '.join(dict.fromkeys(skipped.values()))}: lower them"
        )
    result = {
        "model": options.model,
        "backbone": _sizes(backbone),
        "size": side,
        "baseline": BASELINE,
        "inference": rows,
        "skipped": skipped,
        "host": describe_host(),
    }
    print_result(_page(result), result, options.json)


def _named(name: str) -> BackboneSpec:
    """Raises ConfigError for a name that a recipe can't have."""
    try:
        return backbone_spec(name)
    except ValueError as error:
        raise ConfigError(f"--random: {error}") from None


def _random(spec: BackboneSpec, name: str) -> Backbone:
    return Backbone(build_backbone(spec, _RANDOM_SIZE), _RANDOM_SIZE, name, {}).to(device())


def _sizes(backbone: Backbone) -> str:
    if not backbone.is_vit:
        return f"stride {backbone.stride}, width {backbone.width}"
    arch = backbone.vit.arch
    return f"patch {arch.patch_size}, width {arch.width}, {arch.depth} blocks, {arch.heads} heads"


def _ways(backbone: Backbone, images: Tensor, folder: Path, threads: int) -> tuple[dict[str, Features], dict[str, str]]:
    """The functions that compute the features by name, each tried once, and why others are left out."""
    builders: dict[str, Callable[[], Features]] = {
        BASELINE: lambda: backbone.features,
        "bf16": lambda: _bf16(backbone, compiled=False),
        "fp32 compiled": lambda: _compiled(backbone),
        "bf16 compiled": lambda: _bf16(backbone, compiled=True),
        "onnxruntime": lambda: _onnxruntime(backbone, folder / "model.onnx", threads),
    }
    ways, skipped = {}, {}
    for name, build in builders.items():
        try:
            way = build()
            way(images)
            ways[name] = way
        except Skipped as reason:
            skipped[name] = str(reason)
        except torch.OutOfMemoryError as error:
            skipped[f"{name}, batch {len(images)}"] = _reason(error)
        except (RuntimeError, ConfigError) as error:  # of a compiler or an exporter that is not whole here
            skipped[name] = _reason(error)
    return ways, skipped


def _reason(error: Exception) -> str:
    text = " ".join(str(error).split())
    is_memory = isinstance(error, torch.OutOfMemoryError) or "DefaultCPUAllocator" in text
    return "not enough memory" if is_memory else text[:160]


def _compiled(backbone: Backbone) -> Features:
    other = copy.deepcopy(backbone)
    other.network.compile_segments()
    return other.features


def _bf16(backbone: Backbone, compiled: bool) -> Features:
    """Weights and activations in bf16; the images are cast in the measured time."""
    if torch.cuda.is_available() and not torch.cuda.is_bf16_supported(including_emulation=False):
        raise Skipped("this GPU has no bf16 arithmetic")
    if not torch.cuda.is_available() and not torch.cpu.get_capabilities().get("avx512_bf16", False):
        raise Skipped("this CPU has no bf16 arithmetic (avx512_bf16)")
    other = copy.deepcopy(backbone)
    for parameter in other.parameters():  # BatchNorm's averages stay FP32, as in training
        parameter.data = parameter.data.bfloat16()
    if compiled:
        other.network.compile_segments()
    return lambda images: other.features(images.bfloat16())


def _onnxruntime(backbone: Backbone, file: Path, threads: int) -> Features:
    try:
        import onnxruntime
    except ImportError:
        raise Skipped("not installed: pip install 'dino_ds[onnx]'") from None
    provider = "CUDAExecutionProvider" if torch.cuda.is_available() else "CPUExecutionProvider"
    if provider not in onnxruntime.get_available_providers():
        raise Skipped("it is the package for CPUs: pip install onnxruntime-gpu")
    if not file.exists():
        export_onnx(backbone, file)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    session = onnxruntime.InferenceSession(file, options, providers=[provider])
    return lambda images: torch.from_numpy(session.run(None, {"images": images.cpu().numpy()})[0])


def _measured(
    batch: int, ways: dict[str, Features], images: Tensor, rounds: int, seconds: float, warmup: int
) -> list[dict[str, Any]]:
    """Measure each way, with as many of `rounds` as fit into `seconds` by the time of the first."""
    began = time.monotonic()
    features = {name: way(images).float().cpu() for name, way in ways.items()}
    exact = features[BASELINE]
    synchronize(device())
    fitting = int(seconds / max(time.monotonic() - began, 1e-9))
    repeats = max(LEAST_ROUNDS, min(rounds, fitting))
    runs = {name: (lambda way=way: way(images)) for name, way in ways.items()}
    timings = time_interleaved(runs, repeats, warmup, device())
    return [
        {
            "batch": batch,
            "way": name,
            **{f"p{p}_ms": 1000 * float(np.percentile(timing.all_seconds, p)) for p in (50, 95, 99)},
            "images_per_second": batch / timing.seconds,
            "ratio": timings[BASELINE].seconds / timing.seconds,
            "deviation": float(((features[name] - exact).norm(dim=1) / exact.norm(dim=1)).max()),
            "rounds": repeats,
            "clock": timing.clock,
        }
        for name, timing in timings.items()
    ]


def _page(result: dict[str, Any]) -> str:
    header = ["batch, way", "p50 ms", "p95 ms", "p99 ms", "images/s", f"x {BASELINE}", "deviation", "rounds"]
    rows = [
        [
            f"{row['batch']}, {row['way']}",
            *(short(row[f"p{percent}_ms"]) for percent in (50, 95, 99)),
            short(row["images_per_second"]),
            f"{row['ratio']:.2f}",
            f"{row['deviation']:.1e}",
            str(row["rounds"]),
        ]
        for row in result["inference"]
    ]
    clock = clock_name(result["inference"][0]["clock"])
    lines = [
        f"bench inference: {result['model']} ({result['backbone']}), {result['size']} pixels, {clock}",
        host_line(result["host"]),
        "",
        markdown_table(header, rows),
        "",
        *(f"{name} skipped: {reason}" for name, reason in result["skipped"].items()),
        f"images/s and the ratio to {BASELINE} by the median; deviation from it: the largest |difference| / |features|",
    ]
    return "\n".join(lines)
