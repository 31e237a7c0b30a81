"""Every command of `dino-ds`: its flags, what else it takes, and the function that does it. No torch here."""

from __future__ import annotations

from dino_ds.options.command import JSON as _JSON
from dino_ds.options.command import Command, Flag
from dino_ds.options.machine_commands import BENCH_INFERENCE, DOCTOR, LAUNCH
from dino_ds.options.model_commands import MODELS
from dino_ds.options.plan_commands import PLAN
from dino_ds.options.run_commands import RUNS

TRAIN = Command(
    "train",
    "train: images in, a teacher out",
    "dino_ds.train:train",
    (
        Flag("run_dir", "text", None, "folder of this run: metrics, checkpoints, teacher", shown="runs/RECIPE"),
        Flag(
            "max_steps",
            "int",
            None,
            "stop after N optimizer steps; the schedules stay as they are",
            shown="the recipe's length",
        ),
        Flag(
            "resume",
            "resume",
            False,
            "continue the run in --run_dir from its newest whole checkpoint; auto: or start it, if there is none; "
            "N: from that of step N",
        ),
        Flag(
            "allow_change",
            "text",
            None,
            "KEY,KEY: settings that may differ from the checkpoint's though they change what is learned",
            shown="none",
        ),
        Flag("allow_oversize", "switch", False, "start though more memory is predicted than there is"),
    ),
    needs_images=True,
    ds_shown="the run's that is resumed; else the planner's for the GPUs, or ds_configs/zero0_fp32.json without",
)


def _bench_flags(steps: int, warmup: int = 2) -> tuple[Flag, ...]:
    """Of every bench."""
    return (
        Flag("batch", "int", None, "images per process; sets data.global_batch", shown="64 on a GPU, 8 without"),
        Flag("steps", "int", steps, "steps that are measured"),
        Flag("warmup", "int", warmup, "steps before them", zero=True),
        Flag("threads", "int", 1, "threads of the CPU's operators; with 1 CPU time is measured, else wall time"),
        _JSON,
    )


BENCHES = (
    Command(
        "bench step",
        "images/s, TFLOP/s, MFU, peak memory and the share of each part of the training step",
        "dino_ds.bench.step:run",
        (
            Flag("compare", "text", None, "KEY=A,B: two values of a recipe or ds.KEY, by turns in one process", "none"),
            Flag("data", "switch", False, "real images through the loader, so that waiting for data is real"),
            *_bench_flags(steps=10),
        ),
        recipe="vitti16",
    ),
    Command(
        "bench ladder",
        "from the plain DINO step upwards, one lever at a time: speed and memory of each",
        "dino_ds.bench.ladder:run",
        (
            Flag("out", "text", None, "folder for ladder.md, ladder.json and ladder.png", shown="none"),
            *_bench_flags(steps=7),
        ),
        recipe="vitti16",
        takes_ds=False,
    ),
    Command(
        "bench memory",
        "peak memory and step time: FP32 or bf16, with and without activation checkpointing",
        "dino_ds.bench.memory:run",
        _bench_flags(steps=5),
        recipe="vitti16",
        takes_ds=False,
    ),
    Command(
        "bench attention",
        "the plain formula, each kernel of SDPA and varlen at the sequence lengths in use",
        "dino_ds.bench.attention:run",
        _bench_flags(steps=5),
        recipe="vitti16",
        takes_ds=False,
    ),
    Command(
        "bench engine",
        "what DeepSpeed adds at ZeRO 0, 1, 2 to the step with torch's AdamW; the shares of loss and EMA",
        "dino_ds.bench.engine:run",
        _bench_flags(steps=7),
        recipe="vitti16",
        takes_ds=False,
    ),
    Command(
        "bench scaling",
        "one process against several on this machine: images/s and the share of communication at each ZeRO stage",
        "dino_ds.bench.scaling:run",
        (Flag("ranks", "int", 2, "processes, each with a core or a GPU to itself"), *_bench_flags(steps=5)),
        recipe="vitti16",
        takes_ds=False,
    ),
    Command(
        "bench knn",
        "k-NN's search and vote beside faiss's exact search, and the time of the features",
        "dino_ds.bench.knn:run",
        (
            Flag("queries", "int", 10000, "test images"),
            Flag("bank", "int", 50000, "training images"),
            Flag("width", "int", 192, "of the features"),
            Flag("k", "int", 20, "neighbours"),
            Flag("images", "int", 10000, "images of 32 pixels whose features ViT-Ti computes"),
            Flag("patch_size", "int", 8, "pixels of its patches"),
            Flag("rounds", "int", 5, "rounds, all searches by turns"),
            Flag("threads", "int", None, "threads of the CPU's operators, measured beside 1", shown="the cores"),
            _JSON,
        ),
        takes_recipe=False,
        takes_ds=False,
    ),
    Command(
        "bench plan",
        "predicted memory beside the resident set: 3 sizes at every ZeRO stage on 1 and several processes (CPU)",
        "dino_ds.bench.plan:run",
        (
            Flag("batch", "int", 4, "images per process"),
            Flag("ranks", "int", 2, "processes of the second column"),
            Flag("precision", "text", "fp32", "", choices=("fp32", "bf16")),
            _JSON,
        ),
        takes_recipe=False,
        takes_ds=False,
    ),
)

_DATA = (
    Command(
        "bench data",
        "images/s of each way of making crops beside DINO's own, of decoding and of reading",
        "dino_ds.bench.data:run",
        (
            Flag("images", "int", 120, "image files that are measured"),
            Flag("rounds", "int", 5, "rounds, all pipelines by turns"),
            Flag("threads", "int", 1, "threads of torch's operators"),
            Flag("out", "text", None, "folder for data.json and data.png", shown="none"),
            _JSON,
        ),
        takes_ds=False,
    ),
    Command(
        "find-workers",
        "images/s for 0, 1, 2, 4, ... loader processes, the costliest stage, and a recommendation",
        "dino_ds.tools.find_workers:run",
        (
            Flag("seconds", "number", 15.0, "measured for each number of processes, in 3 rounds by turns"),
            Flag("max_workers", "int", None, "largest number of processes", shown="the cores, shared over the GPUs"),
            Flag(
                "step_images_per_second",
                "number",
                None,
                "what one rank's training step takes: says whether it would wait",
                shown="not compared",
            ),
            _JSON,
        ),
        takes_ds=False,
        needs_images=True,
    ),
    Command(
        "look-data",
        "a sheet of images with all their crops, and what the data set is like",
        "dino_ds.tools.look_data:run",
        (
            Flag("images", "int", 8, "images on the sheet, 200 at most"),
            Flag("sample", "int", 10000, "images that the statistics are made of, drawn at random; 0 = all", zero=True),
            Flag("out", "text", "look-data.png", "the sheet; a page with more goes beside it (.html)"),
            _JSON,
        ),
        takes_ds=False,
        needs_images=True,
    ),
)

_SHARDING = (
    Command(
        "shard",
        "images of any source -> tar shards with an index and checksums; goes on after an interruption",
        "dino_ds.tools.shard:run",
        (
            Flag("source", "text", "folder", "as data.source of a recipe"),
            Flag("root", "text", None, "as data.root: folder, list, shards, Parquet", shown="none"),
            Flag("split", "text", "train", "of a torchvision data set", choices=("train", "test")),
            Flag("out", "text", None, "folder of the shards", required=True),
            Flag("shard_size", "text", "256MiB", "images of a shard (10000) or about its size (256MiB)"),
            Flag("shrink", "int", None, "make the shorter side of larger images N pixels, as JPEG", shown="none"),
            Flag("quality", "int", 90, "of shrunken JPEGs, 1 to 100"),
            Flag("workers", "int", None, "processes", shown="one a core"),
            _JSON,
        ),
        takes_recipe=False,
        takes_ds=False,
    ),
    Command(
        "unshard",
        "tar shards -> a folder of images",
        "dino_ds.tools.unshard:run",
        (
            Flag("root", "text", None, "the shards: a folder or a pattern", required=True),
            Flag("out", "text", None, "a new folder for the images", required=True),
            Flag("skip_checksums", "switch", False, "do not check the shards first"),
            _JSON,
        ),
        takes_recipe=False,
        takes_ds=False,
    ),
)

PROFILERS = ("torch", "cprofile", "nsight")
_TOOLS = (
    Command(
        "find-batch-size",
        "the largest micro-batch that fits and the fastest one, with the table that was measured",
        "dino_ds.tools.find_batch_size:run",
        (
            Flag("ranks", "int", None, "processes to try with, a GPU each", shown="one per GPU"),
            Flag(
                "memory_gib",
                "number",
                None,
                "largest memory: of each GPU, or of all processes together on a CPU",
                shown="what a GPU has, or 90 % of what is free on a CPU",
            ),
            Flag("steps", "int", 3, "optimizer steps measured per size"),
            Flag("threads", "int", None, "threads of each process on a CPU", shown="its share of the cores"),
            Flag("write", "text", None, "ds JSON to write the fastest micro-batch into; the rest of it stays", "none"),
            _JSON,
        ),
    ),
    Command(
        "profile",
        "where the step's time goes by part and by operator, which resource bounds it and what to change",
        "dino_ds.tools.profiler:run",
        (
            Flag("out", "text", "profile", "folder for the traces and the summary"),
            Flag("tool", "text", "torch", "the Python side is cprofile's; nsight's wants nsys", choices=PROFILERS),
            *_bench_flags(steps=5),
        ),
        recipe="vitti16",
    ),
)

_ALL = (TRAIN, LAUNCH, DOCTOR, PLAN, *BENCHES, BENCH_INFERENCE, *_TOOLS, *_DATA, *_SHARDING, *RUNS, *MODELS)
COMMANDS: dict[str, Command] = {command.name: command for command in _ALL}


def find_command(words: list[str]) -> tuple[Command, list[str]] | None:
    """The command that `words` begin with, and the words after it; None if there is none."""
    for length in (2, 1):
        name = " ".join(words[:length])
        if len(words) >= length and name in COMMANDS:
            return COMMANDS[name], words[length:]
    return None
