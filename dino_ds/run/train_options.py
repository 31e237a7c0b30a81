"""The options of `dino-ds train` beside recipe and ds JSON. No torch here."""

from __future__ import annotations

from typing import Annotated

from pydantic import BeforeValidator

from dino_ds.basics.names import as_written
from dino_ds.config.fields import AllowedCode, Count, Resume, option
from dino_ds.config.schema import options


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
        "", "folder of this run: metrics, checkpoints, teacher", shown="runs/RECIPE, or runs/RECIPE-2, ..."
    )
    from_: str | None = option(
        None, "begin a stage with RUN or RUN/checkpoints/step_N; what is not set is as in RUN's recipe"
    )
    max_steps: Count | None = option(
        None, "stop after N steps; schedules stay as they are", shown="the recipe's length"
    )
    resume: Annotated[Resume, BeforeValidator(_read_resume)] = option(
        False,
        "continue --run_dir from its newest whole checkpoint, by its own recipe; N: from step N's; auto: a new run "
        "where there is none yet",
    )
    allow_change: str | None = option(
        None, "KEY,KEY: what may differ from the checkpoint's though it changes what is learned"
    )
    allow_code: AllowedCode = None
    allow_oversize: bool = option(False, "start though more memory is predicted than there is")
    verbose: bool = option(False, "show on the screen all that goes to RUN_DIR/log.txt")
    print: str | None = option(None, "new YAML file for the recipe with what is given here, to edit; trains nothing")
