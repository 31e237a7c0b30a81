"""The options of `dino-ds train` beside recipe and ds JSON, and the ds config that is chosen for a start. No torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

from pydantic import BeforeValidator

from dino_ds.basics.names import as_written
from dino_ds.config.ds_schema import DsConfig
from dino_ds.config.fields import AllowedCode, Count, Resume, option
from dino_ds.config.schema import options
from dino_ds.health.beat import Event


def _read_resume(value: object) -> object:
    words = {"true": True, "false": False, "auto": "auto"}
    if not isinstance(value, str) or value.lower() in words:
        return words[value.lower()] if isinstance(value, str) else value
    if not (value.isascii() and value.isdigit() and int(value) > 0):
        raise ValueError(f"{as_written(value)} is not auto or the step of a checkpoint")
    return int(value)


@options
class TrainOptions:
    """train: images in, a teacher out"""

    run_dir: str = option(
        "", "folder of this run, for its metrics, checkpoints and teacher", shown="runs/RECIPE, or runs/RECIPE-2, ..."
    )
    from_: str | None = option(
        None,
        "run, or checkpoint RUN/checkpoints/step_N, with which a stage begins; keys not given are as in its recipe",
    )
    max_steps: Count | None = option(None, "stop after N steps, on the same schedules", shown="the recipe's length")
    resume: Annotated[Resume, BeforeValidator(_read_resume)] = option(
        False,
        "continue --run_dir by its own recipe from its newest complete checkpoint, or from step N's; auto: a new run "
        "if there is none yet",
    )
    allow_change: str | None = option(
        None, "KEY,KEY: settings that may differ from the checkpoint's although they change what is learned"
    )
    allow_code: AllowedCode = None
    allow_oversize: bool = option(False, "start even if more memory is predicted than the machine has")
    verbose: bool = option(False, "show all lines of RUN_DIR/log.txt on the screen too")
    print: str | None = option(
        None, "write the recipe, with all that is given here, to this new YAML file for editing, and do not train"
    )


@dataclass(frozen=True)
class ChosenDsConfig:
    """The ds config of a start, with its predicted memory.

    reason: how the config was chosen, "" if the user named it; memory: the log's event about the prediction; trained:
    the part of the weights that is trained, in words, "" for all; predicted_gib: of a rank, None if it is not
    estimated; check_fits: raises ConfigError, with a config that fits, if the prediction exceeds the machine's memory.
    """

    config: DsConfig
    reason: str
    memory: Event
    trained: str
    predicted_gib: float | None
    check_fits: Callable[[], None]
