"""Options of the commands about runs: train one, report."""

from __future__ import annotations

from dino_ds.config.fields import option
from dino_ds.options.definition import Json, command, declare_command
from dino_ds.run.train_options import TrainOptions

declare_command(
    TrainOptions,
    "train",
    "dino_ds.train:train",
    "train",
    takes_recipe=True,
    takes_ds=True,
    needs_images=True,
    ds_shown="the run's that is resumed; else the planner's for the GPUs, or ds_configs/zero0_fp32.json without",
)


@command("report", "dino_ds.report.command:run", "look", loads_torch=False)
class ReportOptions:
    """one HTML file about a run: curves, evaluations, pictures, memory against plan, how to reproduce it"""

    run: str | None = option(None, "the run folder", bare=True)
    compare: tuple[str, ...] | None = option(None, "other run folders, side by side with it")
    out: str | None = option(None, "the .html file", shown="RUN/report.html, or RUN/compare.html")
    json: Json = False
