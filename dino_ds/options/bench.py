"""Options of the benches and of the profiler."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from dino_ds.options.definition import Heads, Help, Json, Model, command

_Steps = Annotated[int, Help("steps that are measured")]
_Warmup = Annotated[int, Help("steps before them", zero=True)]
_Threads = Annotated[int, Help("threads of the CPU's operators; with 1 CPU time is measured, else wall time")]


@dataclass(frozen=True, kw_only=True)
class BenchOptions:
    """The options of every bench of the training step."""

    batch: Annotated[int | None, Help("images per process; sets data.global_batch", "64 on a GPU, 8 without")] = None
    steps: _Steps = 5
    warmup: _Warmup = 2
    threads: _Threads = 1
    json: Json = False


@command("bench step", "dino_ds.planning.bench.step:run", takes_recipe=True, recipe="vitti16", takes_ds=True)
class BenchStepOptions(BenchOptions):
    """images/s, TFLOP/s, MFU, peak memory and the share of each part of the training step"""

    compare: Annotated[str | None, Help("KEY=A,B: two values of a key, interleaved in one process", "none")] = None
    data: Annotated[bool, Help("real images through the loader, so that waiting for data is real")] = False
    steps: _Steps = 10


@command("bench ladder", "dino_ds.planning.bench.ladder:run", takes_recipe=True, recipe="vitti16")
class BenchLadderOptions(BenchOptions):
    """from the plain DINO step upwards, one optimization at a time: speed and memory of each"""

    only: Annotated[
        Literal["all", "engine", "memory"],
        Help("engine: torch's AdamW beside ZeRO 0, 1, 3; memory: FP32, bf16, with checkpointing"),
    ] = "all"
    out: Annotated[str | None, Help("folder for ladder.md, ladder.json and ladder.png", "none")] = None
    steps: _Steps = 7


@command("bench scaling", "dino_ds.planning.bench.scaling:run", takes_recipe=True, recipe="vitti16")
class BenchScalingOptions(BenchOptions):
    """one process against several on this machine: images/s and the share of communication at each ZeRO stage"""

    ranks: Annotated[int, Help("processes, each with a core or a GPU to itself")] = 2


@command("bench inference", "dino_ds.planning.bench.inference:run")
class BenchInferenceOptions:
    """latency p50, p95, p99 and images/s of a teacher's features: FP32, bf16, compiled, onnxruntime, interleaved"""

    model: Model
    random: Annotated[bool, Help("MODEL is an architecture: random weights, 224 pixels; they change no speed")] = False
    batches: Annotated[tuple[int, ...], Help("images of a call")] = (1, 4, 16, 64)
    size: Annotated[int | None, Help("pixels of a side, a multiple of the patch size", "the model's")] = None
    rounds: Annotated[int, Help("measured calls of each way, at most")] = 200
    seconds: Annotated[float, Help("for each batch size, about; 5 rounds at least")] = 30.0
    warmup: Annotated[int, Help("calls before them", zero=True)] = 3
    threads: _Threads = 1
    heads: Heads = None
    json: Json = False


@command("profile", "dino_ds.planning.profiler:run", takes_recipe=True, recipe="vitti16", takes_ds=True)
class ProfileOptions(BenchOptions):
    """where the step's time goes by part and by operator, which resource bounds it and what to change"""

    out: Annotated[str, Help("folder for the traces and the summary")] = "profile"
    tool: Annotated[
        Literal["torch", "cprofile", "nsight"], Help("the Python side is cprofile's; nsight's wants nsys")
    ] = "torch"
