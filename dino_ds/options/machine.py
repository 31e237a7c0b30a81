"""Options of the commands about machines: plan for them, start a run on them, look at one, find what fits."""

from __future__ import annotations

from typing import Literal

from dino_ds.config.fields import Amount, Count, Positive, option
from dino_ds.options.definition import Json, command


@command("launch", "dino_ds.launching.launch:run", "cluster", takes_train=True, loads_torch=False)
class LaunchOptions:
    """check the machines, then start `train` on all of them: -- TRAIN OPTIONS"""

    hostfile: str | None = option(None, "the machines, a line each: NAME slots=N", shown="this machine alone")
    ranks: Count | None = option(None, "processes on each machine", shown="the slots, or one a GPU, or 1")
    launcher: Literal["deepspeed", "torchrun"] = option("deepspeed", "who starts the processes")
    nodes: Count = option(1, "with torchrun: machines, on each of which the same command is run")
    master_addr: str | None = option(None, "where the ranks meet", shown="the first machine")
    master_port: Count | None = option(None, "port of that machine", shown="29500; on one machine a free one")
    max_restarts: Amount = option(
        0, "start again from the last checkpoint after a death, a hang, a bug or a full disk, up to N times"
    )
    skip_checks: bool = option(False, "do not look at the machines first")
    dry_run: bool = option(False, "check, show the command, and start nothing")


@command("doctor", "dino_ds.planning.doctor:run", "train", takes_recipe=True, takes_ds=True, loads_torch=False)
class DoctorOptions:
    """what would stop a training on this machine and with this installation, each problem with its remedy"""

    run_dir: str = option("runs", "folder that runs go to")
    quick: bool = option(False, "do not look at the images")
    json: Json = False


@command(
    "plan", "dino_ds.planning.command:run", "train", takes_recipe=True, takes_ds=True, ds_config=None, loads_torch=False
)
class PlanOptions:
    """whether a model fits on given GPUs, by part, and the ds config to take; needs no GPU"""

    backbone: str | None = option(None, "as --model.backbone, with crops that fit it", shown="the recipe's")
    gpu: str | None = option(None, "kind of GPU, such as a100-40g (an unknown one lists them all)")
    gpus: Count = option(1, "GPUs of a node")
    nodes: Count = option(1, "nodes")
    memory_gib: Positive | None = option(None, "memory of a GPU", shown="as its kind has")
    write: str | None = option(None, "new file for the recommended ds JSON")
    json: Json = False
