"""From a checked command line to what a command's function gets: its options, and what the named files hold."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from dino_ds.config.ds_config import find_ds_config, load_ds_config
from dino_ds.config.loading import load_recipe
from dino_ds.errors import ConfigError
from dino_ds.options.commands import TRAIN
from dino_ds.options.definition import Command
from dino_ds.options.flags import Flags, check_required


def read(command: Command, flags: Flags) -> tuple[Any, dict[str, Any]]:
    """An instance of the command's options, and its function's other keywords. Raises ConfigError."""
    check_required(command, flags)
    given = {**flags.fixed}
    config, ds_config = given.pop("config", command.recipe), given.pop("ds_config", command.ds_config)
    given.pop("debug", None)
    options = command.options(**given)
    files: dict[str, Any] = {}
    problems: list[str] = []
    if command.takes_recipe:
        try:
            files["recipe"] = load_recipe(config, flags.recipe)
            if command.needs_images and files["recipe"].data.source == "folder" and not files["recipe"].data.root:
                problems.append(
                    "no images are given: --data.root FOLDER, --data.source NAME, "
                    "or --config quickstart for the embedded photos"
                )
        except ConfigError as error:
            problems.append(str(error))
    if command.takes_ds and ds_config is None:
        files |= {"ds": None, "ds_path": None}
        if flags.ds:
            problems.append(
                f"--ds.{next(iter(flags.ds))} changes a ds JSON, and none is given: name it with --ds_config"
            )
    elif command.takes_ds:
        try:
            files["ds"] = load_ds_config(ds_config, flags.ds)
            files["ds_path"] = find_ds_config(ds_config)
        except ConfigError as error:
            unnamed = flags.ds and "ds_config" not in flags.fixed
            problems.append(f"{error}{f' (of {ds_config}; --ds_config takes another)' if unnamed else ''}")
    if problems:
        raise ConfigError("\n".join(problems))
    if command.ds_shown:
        files["ds_overrides"] = None if "ds_config" in flags.fixed else flags.ds
    if command is TRAIN and not options.run_dir:
        options = dataclasses.replace(options, run_dir=f"runs/{Path(config).stem if config else 'vits16'}")
    if flags.train is not None:
        train_options, train_files = read(TRAIN, flags.train)
        files["train_words"] = flags.train_words
        files["train"] = {"options": train_options, **train_files, "config": flags.train.fixed.get("config")}
    return options, files
