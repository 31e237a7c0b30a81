"""Options of the benches."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from dino_ds.config.fields import Amount, Count, Listed, Positive, option
from dino_ds.options.definition import Heads, Json, Model, Weights, command, options

_Steps = Annotated[Count, Field(description="steps that are measured")]
_Threads = Annotated[
    Count, Field(description="threads of the CPU's operators; with 1 CPU time is measured, else wall time")
]


@options
class BenchOptions:
    """The options of every bench of the training step."""

    batch: Count | None = option(None, "images per process; sets data.global_batch", shown="64 on a GPU, 8 without")
    steps: _Steps = 5
    warmup: Amount = option(2, "steps before them")
    threads: _Threads = 1
    json: Json = False


@command("bench step", "dino_ds.planning.bench.step:run", "measure", takes_recipe=True, recipe="vitti16", takes_ds=True)
class BenchStepOptions(BenchOptions):
    """images/s, TFLOP/s, MFU, peak memory and the share of each part of the training step"""

    compare: str | None = option(None, "KEY=A,B: two values of a key, interleaved in one process")
    data: bool = option(False, "real images through the loader, so that waiting for data is real")
    profile: str | None = option(None, "folder for torch's trace of 3 more steps, whose operators are listed")
    steps: _Steps = 10


@command("bench ladder", "dino_ds.planning.bench.ladder:run", "measure", takes_recipe=True, recipe="vitti16")
class BenchLadderOptions(BenchOptions):
    """from the plain DINO step upwards, one optimization at a time: speed and memory of each"""

    steps: _Steps = 7


@command("bench inference", "dino_ds.planning.bench.inference:run", "measure")
class BenchInferenceOptions:
    """latency p50, p95, p99 and images/s of a teacher's features: FP32, bf16, compiled, onnxruntime, interleaved"""

    model: Model
    weights: Weights = "newest"
    random: bool = option(False, "MODEL is an architecture: random weights, 224 pixels; they change no speed")
    batches: Listed[Count] = option((1, 4, 16, 64), "images of a call")
    size: Count | None = option(None, "pixels of a side, a multiple of the patch size", shown="the model's")
    rounds: Count = option(200, "measured calls of each way, at most")
    seconds: Positive = option(30.0, "for each batch size, about; 5 rounds at least")
    warmup: Amount = option(3, "calls before them")
    threads: _Threads = 1
    heads: Heads = None
    json: Json = False


@command("bench batch-size", "dino_ds.planning.bench.batch_size:run", "measure", takes_recipe=True, takes_ds=True)
class BenchBatchSizeOptions:
    """which micro-batches fit on the real step, and the fastest of them"""

    ranks: Count | None = option(None, "processes to try with, a GPU each", shown="one per GPU")
    memory_gib: Positive | None = option(
        None, "largest memory: of each GPU, or on a CPU of all processes", shown="the GPU's, or 90 % of what is free"
    )
    steps: Count = option(3, "optimizer steps measured per size")
    threads: Count | None = option(None, "threads of each process on a CPU", shown="its share of the cores")
    json: Json = False
