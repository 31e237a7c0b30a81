"""The commands about runs: their checkpoints, and what failures cost them."""

from __future__ import annotations

from dino_ds.options.command import JSON as _JSON
from dino_ds.options.command import Command, Flag

CONVERT = Command(
    "convert",
    "a checkpoint for another number of ranks, or the student's weights alone; needs no GPU and no network",
    "dino_ds.tools.convert:run",
    (
        Flag("checkpoint", "text", None, "RUN/checkpoints/step_...", required=True),
        Flag("out", "text", None, "a new folder: a run to resume, or that of student.safetensors", required=True),
        Flag("ranks", "int", None, "number of ranks: files of the new checkpoint", shown="1"),
        Flag("student", "switch", False, "write the student's FP32 weights by name instead of a checkpoint"),
        _JSON,
    ),
    takes_recipe=False,
    takes_ds=False,
)

SIMULATE_GOODPUT = Command(
    "simulate-goodput",
    "what failures cost a run and how often to save: goodput by formula and by simulation",
    "dino_ds.tools.simulate_goodput:run",
    (
        Flag("mtbf_hours", "number", None, "mean time between failures of one node", "24, or the run's recipe"),
        Flag("nodes", "int", 1, "a job of N nodes fails N times as often"),
        Flag("save_every_minutes", "number", None, "an interval to look at", "the best one only"),
        Flag("save_seconds", "number", None, "from a save's begin until it can be loaded", "the run's, else 10"),
        Flag("save_stall_seconds", "number", None, "for which training stands still", "the run's, else all of it"),
        Flag("restart_seconds", "number", None, "from noticing a failure to a new step", "the run's, else 120"),
        Flag("detect_seconds", "number", None, "from a failure until it is noticed", "60", zero=True),
        Flag("run", "text", None, "take what is not given from the files of this run folder", shown="none"),
        Flag("out", "text", None, "PNG file for goodput over the interval", shown="none"),
        _JSON,
    ),
    takes_recipe=False,
    takes_ds=False,
    loads_torch=False,
)

REPORT = Command(
    "report",
    "one HTML file about a run: curves, evaluations, pictures, memory against plan, how to reproduce it",
    "dino_ds.report.command:run",
    (
        Flag("run", "text", None, "the run folder", shown="none"),
        Flag("compare", "texts", None, "other run folders, side by side with it", shown="none"),
        Flag("out", "text", None, "the .html file", shown="RUN/report.html, or RUN/compare.html"),
        _JSON,
    ),
    takes_recipe=False,
    takes_ds=False,
    loads_torch=False,
    bare="run",
)

RUNS = (CONVERT, SIMULATE_GOODPUT, REPORT)
