"""Options of the commands about runs: train one, convert its checkpoints, count what failures cost, report."""

from __future__ import annotations

from typing import Annotated, Literal

from dino_ds.options.definition import Help, Json, command

Resume = bool | int | Literal["auto"]


@command(
    "train",
    "dino_ds.train:train",
    takes_recipe=True,
    takes_ds=True,
    needs_images=True,
    ds_shown="the run's that is resumed; else the planner's for the GPUs, or ds_configs/zero0_fp32.json without",
)
class TrainOptions:
    """train: images in, a teacher out"""

    run_dir: Annotated[
        str, Help("folder of this run: metrics, checkpoints, teacher", "runs/RECIPE, or runs/RECIPE-2, ...")
    ] = ""
    from_: Annotated[
        str | None,
        Help("begin a stage with RUN or RUN/checkpoints/step_N; what is not set is as in RUN's recipe", "none"),
    ] = None
    stages: Annotated[
        str | None,
        Help("RECIPE,RECIPE,...: train each --from the one before, in RUN_DIR/1_RECIPE, RUN_DIR/2_RECIPE, ...", "none"),
    ] = None
    max_steps: Annotated[int | None, Help("stop after N steps; schedules stay as they are", "the recipe's length")] = (
        None
    )
    resume: Annotated[
        Resume,
        Help(
            "continue --run_dir from its newest whole checkpoint, without --config by its own recipe; auto: or start; "
            "N: from that of step N"
        ),
    ] = False
    allow_change: Annotated[
        str | None, Help("KEY,KEY: what may differ from the checkpoint's though it changes what is learned", "none")
    ] = None
    allow_oversize: Annotated[bool, Help("start though more memory is predicted than there is")] = False


@command("init", "dino_ds.commands.project:run", check="dino_ds.commands.project:check")
class InitOptions:
    """a new folder with a recipe, a ds JSON for this machine and launch scripts, to edit and to train with"""

    dir: Annotated[str, Help("a new folder, or an empty one", bare=True)]
    recipe: Annotated[str, Help("the shipped recipe to begin with")] = "vits16"
    root: Annotated[str, Help("your images, as data.root")] = "/images"


@command("completion", "dino_ds.options.completion:run", loads_torch=False)
class CompletionOptions:
    """the script by which a shell completes commands and options at a TAB (docs/quickstart.md)"""

    shell: Annotated[Literal["bash", "zsh", "fish"], Help("one of", bare=True)]


@command("convert", "dino_ds.commands.convert:run")
class ConvertOptions:
    """a checkpoint for another number of ranks, or the student's weights alone; needs no GPU and no network"""

    checkpoint: Annotated[str, Help("RUN/checkpoints/step_...", bare=True)]
    out: Annotated[str, Help("a new folder: a run to resume, or that of student.safetensors")]
    ranks: Annotated[int | None, Help("number of ranks: files of the new checkpoint", "1")] = None
    student: Annotated[bool, Help("write the student's FP32 weights by name instead of a checkpoint")] = False
    json: Json = False


@command("simulate-goodput", "dino_ds.commands.simulate_goodput:run", loads_torch=False)
class SimulateGoodputOptions:
    """what failures cost a run and how often to save: goodput by formula and by simulation"""

    mtbf_hours: Annotated[float | None, Help("mean time between failures of a node", "24, or the run's")] = None
    nodes: Annotated[int, Help("a job of N nodes fails N times as often")] = 1
    save_every_minutes: Annotated[float | None, Help("an interval to look at", "the best one only")] = None
    save_seconds: Annotated[float | None, Help("from a save's begin to its end", "the run's, else 10")] = None
    save_stall_seconds: Annotated[float | None, Help("training stands still", "the run's, else all of it")] = None
    restart_seconds: Annotated[float | None, Help("from detecting it to a new step", "the run's, else 120")] = None
    detect_seconds: Annotated[float | None, Help("from a failure until it is noticed", "60", zero=True)] = None
    run: Annotated[str | None, Help("take what is not given from the files of this run folder", "none")] = None
    out: Annotated[str | None, Help("PNG file for goodput over the interval", "none")] = None
    json: Json = False


@command("report", "dino_ds.report.command:run", loads_torch=False)
class ReportOptions:
    """one HTML file about a run: curves, evaluations, pictures, memory against plan, how to reproduce it"""

    run: Annotated[str | None, Help("the run folder", "none", bare=True)] = None
    compare: Annotated[tuple[str, ...] | None, Help("other run folders, side by side with it", "none")] = None
    out: Annotated[str | None, Help("the .html file", "RUN/report.html, or RUN/compare.html")] = None
    json: Json = False
