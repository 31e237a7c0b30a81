"""`dino-ds`: checks every flag and file first, then fire dispatches.

Help and checks import neither torch nor deepspeed.
"""

from __future__ import annotations

import os
import socket
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dino_ds import __version__
from dino_ds.config import load_recipe
from dino_ds.ds_config import find_ds_config, load_ds_config, resolve_ds_config
from dino_ds.errors import ConfigError, UserError
from dino_ds.names import did_you_mean
from dino_ds.options.flags import TRAIN_FLAGS, drop_local_rank, parse_flags
from dino_ds.options.help_text import help_text
from dino_ds.preflight import check_hostfile, check_torchvision

INTERRUPTED = 130
# Launchers stop all ranks when one ends: rank 0 must have spoken before.
_SECONDS_FOR_RANK_0 = 3.0


def main(argv: Sequence[str] | None = None) -> None:
    """Run one command. Exits with the code of a UserError after printing it; 130 after Ctrl-C."""
    words = drop_local_rank(sys.argv[1:] if argv is None else argv)
    if {"-h", "--help"} & set(words):
        print(help_text())
        return
    if words == ["--version"]:
        print(f"dino_ds {__version__}")
        return
    debug = any(word in ("--debug", "--debug=true") for word in words)
    try:
        _dispatch(words)
    except UserError as error:
        if debug:
            traceback.print_exc()
        _say_error(str(error))
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        if debug:
            traceback.print_exc()
        _say_error("interrupted", pause=False)
        sys.exit(INTERRUPTED)


def _dispatch(words: list[str]) -> None:
    import fire

    if not words or words[0].startswith("-"):
        raise ConfigError(f"no command is given: {', '.join(COMMANDS)} (dino-ds --help)")
    if words[0] not in COMMANDS:
        near = did_you_mean(words[0], COMMANDS)
        raise ConfigError(f"{words[0]!r} is not a command: there is {', '.join(COMMANDS)}.{near}")
    flags = parse_flags(words[1:])
    values: dict[str, Any] = {**flags.fixed, "recipe": flags.recipe, "ds": flags.ds}
    # repr: fire reads values as Python literals, and the functions want the raw text.
    fire.Fire(COMMANDS, command=[words[0], *(f"--{name}={value!r}" for name, value in values.items())], name="dino-ds")


def _train(
    *,
    ds_config: str = TRAIN_FLAGS[0].default,
    config: str | None = None,
    run_dir: str | None = None,
    max_steps: str | None = None,
    resume: str = "false",
    debug: str = "false",
    recipe: dict[str, str],
    ds: dict[str, str],
) -> None:
    """Check everything that can be checked without torch, then train."""
    check_hostfile()
    learned, problems = None, []
    try:
        learned = load_recipe(config, recipe)
        if learned.data.source == "folder" and learned.data.root is None:
            problems.append(
                "no images are given: --data.root FOLDER, --data.source NAME, "
                "or --config quickstart for the embedded photos"
            )
    except ConfigError as error:
        problems.append(str(error))
    try:
        settings = load_ds_config(ds_config, ds)
    except ConfigError as error:
        problems.append(str(error))
    if problems or learned is None:
        raise ConfigError("\n".join(problems))
    resolve_ds_config(settings, ds_config, learned.data.global_batch, int(os.environ.get("WORLD_SIZE", 1)))
    check_torchvision()

    from dino_ds.distributed import leave
    from dino_ds.train import train

    train(
        learned,
        settings,
        find_ds_config(ds_config),
        run_dir=run_dir or f"runs/{Path(config).stem if config else 'vits16'}",
        max_steps=int(max_steps) if max_steps else None,
        resume=resume.lower() == "true",
    )
    leave()


COMMANDS = {"train": _train}


def _say_error(message: str, pause: bool = True) -> None:
    """Rank 0 speaks; on other nodes the first rank, with its host's name."""
    rank, local_rank = int(os.environ.get("RANK", 0)), int(os.environ.get("LOCAL_RANK", 0))
    host = f"{socket.gethostname()}: " if rank else ""
    if local_rank == 0:
        for line in message.splitlines():
            print(f"dino_ds: {host}error: {line}", file=sys.stderr, flush=True)
    elif pause:
        time.sleep(_SECONDS_FOR_RANK_0)
