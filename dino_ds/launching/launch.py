"""`dino-ds launch`: checks the machines, starts DeepSpeed's launcher, and supervises it."""

from __future__ import annotations

import copy
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dino_ds.config.ds_config import resolve_ds_config
from dino_ds.config.recipe_files import RECIPES, read_recipe_files
from dino_ds.errors import ConfigError
from dino_ds.launching.checks import check_machines
from dino_ds.launching.plan import LaunchPlan, build_command, build_plan
from dino_ds.launching.supervise import supervise
from dino_ds.options.commands import LaunchOptions


def run(options: LaunchOptions, *, train_words: tuple[str, ...], train: Mapping[str, Any]) -> None:
    """Train, then end the process with the training's exit code. Raises ConfigError before anything has started.

    train: what the words after "--" mean: options, recipe, ds, ds_path and given of `train`.
    """
    plan = build_plan(options)
    # Raises ConfigError if the global batch can't be shared out over the ranks.
    resolve_ds_config(copy.deepcopy(train["ds"]), train["ds_path"], train["recipe"].data.global_batch, plan.ranks)
    run_dir, words = train["options"].run_dir, train_words
    if not any(word.partition("=")[0] == "--run_dir" for word in words):
        words = (*words, "--run_dir", run_dir)  # ranks that chose for themselves might choose different folders
    command = build_command(plan, words)
    if plan.hosts:
        _check(plan, train)
    for note in train["given"].notes:
        print(f"note     {note}", flush=True)
    print(f"command  {shlex.join(command)}", flush=True)

    def start(resumes: bool) -> list[str]:
        """The command of a start; to resume, on another free port."""
        if not resumes:
            return command
        return build_command(build_plan(options), (*_without_resume(words), "--resume", "auto"))

    if not options.dry_run and (code := supervise(start, Path(run_dir), options.max_restarts)):
        sys.exit(code)


def _without_resume(words: Sequence[str]) -> list[str]:
    """The words of a command line without --resume and its value."""
    kept, dropped = list[str](), False
    for word in words:
        value, dropped = dropped and not word.startswith("-"), word == "--resume"
        if not value and word.partition("=")[0] != "--resume":
            kept.append(word)
    return kept


def _check(plan: LaunchPlan, train: Mapping[str, Any]) -> None:
    """Check all machines and print a line about each. Raises ConfigError with all problems."""
    config = train["given"].config
    recipes = [] if config is None else [file.path for file in read_recipe_files(config)]
    custom = dict.fromkeys(path for path in recipes if Path(path).parent != RECIPES)
    files = tuple(os.path.abspath(path) for path in (train["ds_path"], *custom))
    data = train["recipe"].data
    images = data.root if data.root and not data.download else None
    machines, problems = check_machines(plan, files, images, Path(train["options"].run_dir))
    for line in machines:
        print(f"machine  {line}", flush=True)
    if problems:
        raise ConfigError("\n".join(problems))
