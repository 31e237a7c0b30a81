"""Options of the commands about machines: plan for them, start a run on them, look at one, find what fits."""

from __future__ import annotations

from typing import Annotated, Literal

from dino_ds.options.definition import Help, Json, command


@command("launch", "dino_ds.launching.launch:run", takes_train=True, loads_torch=False)
class LaunchOptions:
    """check the machines, then start `train` on all of them: -- TRAIN OPTIONS"""

    hostfile: Annotated[str | None, Help("the machines, a line each: NAME slots=N", "this machine alone")] = None
    include: Annotated[str | None, Help("only these of the hostfile: NAME@NAME:0,2", "all")] = None
    exclude: Annotated[str | None, Help("all but these of the hostfile: NAME@NAME:0,2", "none")] = None
    ranks: Annotated[int | None, Help("processes on each machine", "the slots, or one a GPU, or 1")] = None
    launcher: Annotated[Literal["deepspeed", "torchrun"], Help("who starts the processes")] = "deepspeed"
    nodes: Annotated[str | None, Help("with torchrun: machines, or LEAST:MOST of an elastic run", "1")] = None
    no_ssh: Annotated[bool, Help("start only this machine's processes; the same is done on the others")] = False
    node_rank: Annotated[
        int | None, Help("with --no_ssh: this machine's line of hostfile, from 0", "none", zero=True)
    ] = None
    master_addr: Annotated[str | None, Help("where the ranks meet", "the first machine")] = None
    master_port: Annotated[int | None, Help("port of that machine", "29500; on one machine a free one")] = None
    max_restarts: Annotated[
        int,
        Help(
            "start again from the last checkpoint after a death, a hang, a bug or a full disk, up to N times", zero=True
        ),
    ] = 0
    skip_checks: Annotated[bool, Help("do not look at the machines first")] = False
    dry_run: Annotated[bool, Help("check, show the command, and start nothing")] = False


@command("doctor", "dino_ds.planning.doctor:run", takes_recipe=True, takes_ds=True, loads_torch=False)
class DoctorOptions:
    """this machine and this installation on one page: what fits, what is slow, each problem with its remedy"""

    run_dir: Annotated[str, Help("folder that runs go to")] = "runs"
    quick: Annotated[bool, Help("leave out what is measured: reading images, summing over two processes")] = False
    json: Json = False


@command("plan", "dino_ds.planning.command:run", takes_recipe=True, takes_ds=True, ds_config=None, loads_torch=False)
class PlanOptions:
    """whether a model fits on given GPUs, by part, how fast it would be, and the ds config to take; needs no GPU"""

    backbone: Annotated[str | None, Help("as --model.backbone, with crops that fit it", "the recipe's")] = None
    gpu: Annotated[str | None, Help("kind of GPU, such as a100-40g (an unknown one lists them all)", "none")] = None
    gpus: Annotated[int, Help("GPUs of a node")] = 1
    nodes: Annotated[int, Help("nodes")] = 1
    memory_gib: Annotated[float | None, Help("memory of a GPU", "as its kind has")] = None
    network_gbit: Annotated[float | None, Help("of a node to others, each way, Gbit/s", "vendor default")] = None
    write: Annotated[str | None, Help("new file for the recommended ds JSON", "none")] = None
    json: Json = False


@command("find-batch-size", "dino_ds.planning.find_batch_size:run", takes_recipe=True, takes_ds=True)
class FindBatchSizeOptions:
    """the largest micro-batch that fits and the fastest one, with the table that was measured"""

    ranks: Annotated[int | None, Help("processes to try with, a GPU each", "one per GPU")] = None
    memory_gib: Annotated[
        float | None,
        Help("largest memory: of each GPU, or on a CPU of all processes", "the GPU's, or 90 % of what is free"),
    ] = None
    steps: Annotated[int, Help("optimizer steps measured per size")] = 3
    threads: Annotated[int | None, Help("threads of each process on a CPU", "its share of the cores")] = None
    write: Annotated[str | None, Help("ds JSON to write the fastest micro-batch into", "none")] = None
    json: Json = False
