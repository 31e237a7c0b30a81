"""The commands that are about machines: start a run on them, look at one."""

from __future__ import annotations

from dino_ds.options.command import HEADS, JSON, MODEL, Command, Flag

LAUNCH = Command(
    "launch",
    "check the machines, then start `train` on all of them: -- TRAIN OPTIONS",
    "dino_ds.launching.launch:run",
    (
        Flag("hostfile", "text", None, "the machines, a line each: NAME slots=N", shown="this machine alone"),
        Flag("include", "text", None, "only these of the hostfile: NAME@NAME:0,2", shown="all"),
        Flag("exclude", "text", None, "all but these of the hostfile: NAME@NAME:0,2", shown="none"),
        Flag("ranks", "int", None, "processes on each machine", shown="the slots, or one a GPU, or 1"),
        Flag("launcher", "text", "deepspeed", "deepspeed or torchrun"),
        Flag("nodes", "text", None, "with torchrun: machines, or LEAST:MOST of an elastic run", shown="1"),
        Flag("no_ssh", "switch", False, "start only this machine's processes; the same is done on the others"),
        Flag("node_rank", "int", None, "with --no_ssh: this machine's line in the hostfile, from 0", "none", zero=True),
        Flag("master_addr", "text", None, "where the ranks meet", shown="the first machine"),
        Flag("master_port", "int", None, "port of that machine", shown="29500; on one machine a free one"),
        Flag(
            "max_restarts",
            "int",
            0,
            "start again after a death, a hang, a bug or a full disk, at most N times, from the last checkpoint; only "
            "here: train has no such flag, a rank can't start its peers",
            zero=True,
        ),
        Flag("skip_checks", "switch", False, "do not look at the machines first"),
        Flag("dry_run", "switch", False, "check, show the command, and start nothing"),
    ),
    takes_recipe=False,
    takes_ds=False,
    takes_train=True,
    loads_torch=False,
)

DOCTOR = Command(
    "doctor",
    "this machine and this installation on one page: what fits, what is slow, each problem with its remedy",
    "dino_ds.tools.doctor:run",
    (
        Flag("run_dir", "text", "runs", "folder that runs go to"),
        Flag("quick", "switch", False, "leave out what is measured: reading images, summing over two processes"),
        JSON,
    ),
    loads_torch=False,
)

BENCH_INFERENCE = Command(
    "bench inference",
    "latency p50, p95, p99 and images/s of a teacher's features: FP32, bf16, compiled, onnxruntime, by turns",
    "dino_ds.bench.inference:run",
    (
        MODEL,
        Flag("random", "switch", False, "MODEL is an architecture: random weights, 224 pixels; they change no speed"),
        Flag("batches", "numbers", (1, 4, 16, 64), "images of a call"),
        Flag("size", "int", None, "pixels of a side, a multiple of the patch size", shown="the model's"),
        Flag("rounds", "int", 200, "measured calls of each way, at most"),
        Flag("seconds", "number", 30.0, "for each batch size, about; 5 rounds at least"),
        Flag("warmup", "int", 3, "calls before them", zero=True),
        Flag("threads", "int", 1, "threads of the CPU's operators; with 1 CPU time is measured, else wall time"),
        HEADS,
        JSON,
    ),
    takes_recipe=False,
    takes_ds=False,
    bare="model",
)
