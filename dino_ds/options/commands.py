"""Every command of `dino-ds`, with the options of those about runs, images, machines and speed. No torch here."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from dino_ds.config.fields import IMAGE_FORMS, AllowedCode, Amount, Count, Gib, Listed, Positive, option
from dino_ds.options import model  # noqa: F401  (its commands)
from dino_ds.options.definition import COMMANDS, Command, Heads, Json, Model, command, declare_command, options
from dino_ds.run.train_options import TrainOptions

declare_command(
    TrainOptions,
    "train",
    "train",
    takes_recipe=True,
    takes_ds=True,
    needs_images=True,
    ds_shown="the run's that is resumed; else the planner's for the GPUs, or ds_configs/zero0_fp32.json without",
)


@command("report", "look", loads_torch=False)
class ReportOptions:
    """one HTML file about a run: curves, evaluations, pictures, memory against plan, how to reproduce it"""

    run: str = option(..., "the run folder", bare=True)
    out: str | None = option(None, "the .html file", shown="RUN/report.html")
    allow_code: AllowedCode = None
    json: Json = False


@command("look-data", "look", takes_recipe=True, needs_images=True)
class LookDataOptions:
    """a sheet of images with all their crops, and what the data set is like"""

    images: Annotated[Count, Field(le=200)] = option(8, "images on the sheet, 200 at most")
    sample: Amount = option(10000, "images that the statistics are made of, drawn at random; 0 = all")
    out: str | None = option(None, "the new sheet", shown="look-data.png, look-data-2.png, ...")
    json: Json = False


@command("advise", "train", loads_torch=False)
class AdviseOptions:
    """which settings for your images and GPUs: each with its reason, and the command to type"""

    root: str | None = option(None, f"as data.root: {IMAGE_FORMS}", bare=True)
    source: str = option("folder", "as data.source of a recipe")
    gpus: Count | None = option(None, "GPUs in all, of any kind", shown="this machine's")
    sample: Count = option(500, "images that are looked at, drawn at random, within 3 s")
    json: Json = False


@command("shard", "cluster")
class ShardOptions:
    """image files -> tar shards with checksums; continues after an interruption"""

    root: str = option(..., f"as data.root: {IMAGE_FORMS}")
    out: str = option(..., "folder of the shards")
    shard_size: Count = option(2000, "images of a shard")
    shrink: Count | None = option(None, "make the shorter side of larger images N pixels, as JPEG")
    workers: Count | None = option(None, "processes", shown="one a core")
    json: Json = False


@command("doctor", "train", takes_recipe=True, takes_config=True, takes_ds=True, loads_torch=False)
class DoctorOptions:
    """what would stop a training on this machine and with this installation, each problem with its remedy"""

    run_dir: str = option("runs", "folder that runs go to")
    hostfile: str | None = option(
        None, "also the machines of this file, over ssh: a line each, NAME slots=N", shown="this machine alone"
    )
    json: Json = False


@command("plan", "train", takes_recipe=True, takes_ds=True, ds_config=None, loads_torch=False)
class PlanOptions:
    """whether a model fits on given GPUs, by part, and the ds config to take; needs no GPU"""

    gpu: str | None = option(None, "kind of GPU, such as a100-40g (an unknown one lists them all)")
    gpus: Count = option(1, "GPUs of a node")
    nodes: Count = option(1, "nodes")
    memory_gib: Gib | None = option(None, "memory of a GPU", shown="as its kind has")
    write: str | None = option(None, "new file for the recommended ds JSON")
    json: Json = False


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


@command("bench step", "measure", takes_recipe=True, recipe="vitti16", takes_ds=True)
class BenchStepOptions(BenchOptions):
    """images/s, TFLOP/s, MFU, peak memory and the share of each part of the training step"""

    compare: str | None = option(None, "KEY=A,B: two values of a key, interleaved in one process")
    data: bool = option(False, "real images through the loader, so that waiting for data is real")
    profile: str | None = option(None, "folder for torch's trace of 3 more steps, whose operators are listed")
    steps: _Steps = 10


@command("bench ladder", "measure", takes_recipe=True, recipe="vitti16")
class BenchLadderOptions(BenchOptions):
    """from the plain DINO step upwards, one optimization at a time: speed and memory of each"""

    steps: _Steps = 7


@command("bench tune", "measure", takes_recipe=True, takes_ds=True)
class BenchTuneOptions:
    """the largest and the fastest micro-batch, loader processes and levers of this machine, by measuring"""

    minutes: Positive = option(5.0, "time of the search, about")
    ranks: Count | None = option(None, "processes", shown="one a GPU, or 1")
    threads: Count | None = option(None, "threads of a process's operators", shown="its share of the cores")
    memory_gib: Gib | None = option(
        None, "memory that a process may take", shown="the GPU's, or 90 % of the free host memory"
    )
    out: str = option("tune.html", "the page; its figures are in the .json beside it")
    write: str | None = option(None, "new folder for the recipe and the ds JSON that were found")
    profile: str | None = option(None, "folder for torch's trace of the tuned step")
    resume: bool = option(False, "go on with the trials that the .json has")
    json: Json = False


@command("bench inference", "measure")
class BenchInferenceOptions:
    """latency p50, p95, p99 and images/s of a teacher's features: FP32, bf16, compiled, interleaved"""

    model: Model
    random: bool = option(False, "MODEL is an architecture: random weights, 224 pixels; they change no speed")
    batches: Listed[Count] = option((1, 4, 16, 64), "images of a call")
    size: Count | None = option(None, "pixels of a side, a multiple of the patch size", shown="the model's")
    rounds: Count = option(200, "measured calls of each way, at most")
    seconds: Positive = option(30.0, "for each batch size, about; 5 rounds at least")
    warmup: Amount = option(3, "calls before them")
    threads: _Threads = 1
    heads: Heads = None
    allow_code: AllowedCode = None
    json: Json = False


TRAIN = COMMANDS["train"]


def find_command(words: list[str]) -> tuple[Command, list[str]] | None:
    """Find the command that `words` begin with; returns it and the words after it, or None."""
    for length in (2, 1):
        name = " ".join(words[:length])
        if len(words) >= length and name in COMMANDS:
            return COMMANDS[name], words[length:]
    return None
