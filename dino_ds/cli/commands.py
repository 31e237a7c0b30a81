"""The function of each command, which is imported when the command is given: help and checks need no torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dino_ds.options.definition import Result

Function = Callable[..., Result | None]
"""Gets the options and files of a command; returns its result, or None where it has printed what it does."""


def function_of(command: str) -> Function:
    """The function of a command. Imports its module."""
    match command:
        case "train":
            from dino_ds.train import train

            return train
        case "report":
            from dino_ds.report import command as report

            return report.run
        case "pictures":
            from dino_ds.report import pictures

            return pictures.run
        case "advise":
            from dino_ds.planning import advise

            return advise.run
        case "doctor":
            from dino_ds.planning import doctor

            return doctor.run
        case "plan":
            from dino_ds.planning import command as plan

            return plan.run
        case "bench step":
            from dino_ds.planning.bench import step

            return step.run
        case "bench ladder":
            from dino_ds.planning.bench import ladder

            return ladder.run
        case "bench tune":
            from dino_ds.commands import tune

            return tune.run
        case "bench inference":
            from dino_ds.planning.bench import inference

            return inference.run
    return _function_about_images_and_weights(command)


def _function_about_images_and_weights(command: str) -> Function:
    match command:
        case "look-data":
            from dino_ds.commands import look_data

            return look_data.run
        case "shard":
            from dino_ds.commands import shard

            return shard.run
        case "eval":
            from dino_ds.commands import evaluate

            return evaluate.run
        case "embed":
            from dino_ds.commands import embed

            return embed.run
        case "find":
            from dino_ds.commands import find

            return find.run
        case "curate":
            from dino_ds.commands import curate

            return curate.run
        case "export":
            from dino_ds.commands import export

            return export.run
    raise AssertionError(f"the command {command} has no function")


def check_options(command: str, options: Any) -> None:
    """Raises UserError for wrong options that a command checks before torch is loaded."""
    match command:
        case "embed":
            from dino_ds.commands import embed

            embed.check(options)
        case "curate":
            from dino_ds.commands import curate

            curate.check(options)
        case "export":
            from dino_ds.commands import export

            export.check(options)
