"""The command that plans: arithmetic before there is a machine."""

from __future__ import annotations

from dino_ds.options.command import JSON, Command, Flag

PLAN = Command(
    "plan",
    "whether a model fits on given GPUs, by part, how fast it would be, and the ds config to take; needs no GPU",
    "dino_ds.plan.command:run",
    (
        Flag("backbone", "text", None, "as --model.backbone, with crops that its patches divide", "the recipe's"),
        Flag("gpu", "text", None, "kind of GPU, such as a100-40g (an unknown one lists them all)", "none"),
        Flag("gpus", "int", 1, "GPUs of a node"),
        Flag("nodes", "int", 1, "nodes"),
        Flag("memory_gib", "number", None, "memory of a GPU", "as its kind has"),
        Flag("network_gbit", "number", None, "bandwidth of a node to others, each way, Gbit/s", "as sold with the GPU"),
        Flag("write", "text", None, "new file for the recommended ds JSON", "none"),
        Flag("sweep", "switch", False, "model size x card x ZeRO stage: what fits, as table and picture in --out"),
        Flag("scaling", "switch", False, "simulated weak scaling to 1024 GPUs of --gpu, as table and picture in --out"),
        Flag("out", "text", None, "folder of --sweep or --scaling", "none"),
        JSON,
    ),
    ds_config=None,
    loads_torch=False,
)
