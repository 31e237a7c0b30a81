"""Turns parsed flags into the arguments of a command's function: its options, and the content of named files."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dino_ds.basics.own_code import allow_code
from dino_ds.basics.text_file import is_url
from dino_ds.config.ds_config import find_ds_config, load_ds_config
from dino_ds.config.loading import load_recipe
from dino_ds.config.stages import Given, default_folder, holds_run, nothing_to_resume, only_run
from dino_ds.errors import CheckpointError, ConfigError
from dino_ds.options.commands import TRAIN
from dino_ds.options.definition import Command, field_of
from dino_ds.options.flags import Flags, check_required
from dino_ds.run.train_options import TrainOptions

_NO_IMAGES = "no images are given: --data.root FOLDER, --data.source NAME, or --config quickstart for embedded photos"


def read(command: Command, flags: Flags) -> tuple[Any, dict[str, Any]]:
    """Return an instance of the command's options, and the other keywords of its function. Raises ConfigError.

    The caller must take out the keyword `notes`, lines for the user; `train` has none, its notes are in `given`.
    """
    check_required(command, flags)
    values = {**flags.fixed}
    config, ds_config = values.pop("config", command.recipe), values.pop("ds_config", command.ds_config)
    values.pop("debug", None)
    fields = {option.name: field_of(option) for option in command.all_options}
    options = command.options(**{fields[name]: value for name, value in values.items()})
    allow_code(getattr(options, name, None) for name in ("allow_code", "source", "backbone"))
    files: dict[str, Any] = {}
    problems: list[str] = []
    if command.takes_recipe:
        try:
            if command is TRAIN:
                options, files = _read_train(options, config, flags.recipe)
            else:
                files["notes"] = list[str]()
                files["recipe"] = load_recipe(config, flags.recipe, files["notes"])
            data = files["recipe"].data
            if (
                command.needs_images
                and not values.get("print")
                and data.source == "folder"
                and not data.root
                and not data.mixture
            ):
                problems.append(_NO_IMAGES)
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
            problems.append(str(error))
    if problems:
        raise ConfigError("\n".join(problems))
    if command.ds_shown:
        files["ds_overrides"] = None if "ds_config" in flags.fixed else flags.ds
    if command.takes_config:
        files["config"] = config
    return options, files


def _read_train(
    options: TrainOptions, config: str | None, overrides: Mapping[str, Any]
) -> tuple[TrainOptions, dict[str, Any]]:
    """Return `train`'s options with a run folder, and as keywords the recipe and what the user gave for it.

    Raises ConfigError, and CheckpointError if --from does not name a run.
    """
    if options.print == "-":
        raise ConfigError("--print -: the recipe goes to a file: name one, such as --print recipe.yaml")
    if options.print is not None and (options.from_ or options.resume is not False):
        raise ConfigError(
            "--print writes what --config and keys of the recipe say: leave out --from and --resume; the recipe of a "
            "run is RUN/config.yaml"
        )
    if not options.run_dir and config is None and options.from_ is not None:
        raise ConfigError("--from without --config: name the new run's folder with --run_dir")
    folder, note = options.run_dir, ""
    if not options.run_dir and config is None and options.resume not in (False, "auto"):
        folder, note = only_run(f"--resume{'' if options.resume is True else f' {options.resume}'}")
    elif not options.run_dir:
        folder, note = default_folder(Path(config or "vits16").stem, options.resume is not False, os.environ)
    if is_url(folder):
        raise ConfigError(f"--run_dir {folder} is not a folder: keep a run on a disk, then copy its folder there")
    options = dataclasses.replace(options, run_dir=os.path.expanduser(folder))  # as a shell does it
    requested, run_dir = Given(config, overrides, [note] if note else []), Path(options.run_dir)
    alone, resumes = config is None and options.from_ is None, options.resume is not False
    if alone and resumes:
        _check_resumed(run_dir, overrides, may_start=options.resume == "auto")
    return options, {
        "recipe": requested.recipe_for_start(run_dir, options.from_, resumes, by_own=alone),
        "given": requested,
    }


def _check_resumed(run_dir: Path, overrides: Mapping[str, Any], may_start: bool) -> None:
    """Check the folder of a --resume without --config and --from. Unless the overrides name images, raises
    CheckpointError if its run has lost config.yaml, or if it holds no run and a new one may not start there."""
    is_run, names_images, recorded = holds_run(run_dir), "data.root" in overrides, run_dir / "config.yaml"
    if is_run and not names_images and not recorded.is_file():
        state = "is not a file" if os.path.lexists(recorded) else "is missing"
        raise CheckpointError(
            f"{recorded} {state}, and it alone says what this run trains: bring it back, or give the run's settings "
            "again"
        )
    if is_run or may_start:
        return
    if not names_images:
        raise nothing_to_resume(run_dir)
