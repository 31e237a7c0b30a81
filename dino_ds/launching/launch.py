"""`dino-ds launch`: check the machines, show the command of DeepSpeed's launcher or of torchrun, run it to its end."""

from __future__ import annotations

import copy
import os
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from dino_ds.basics.ports import find_free_port, port_is_free
from dino_ds.config.ds_config import resolve_ds_config
from dino_ds.config.recipe_files import RECIPES, read_recipe_files
from dino_ds.config.stages import stages_to_train
from dino_ds.errors import ConfigError
from dino_ds.launching.checks import check_machines
from dino_ds.launching.plan import LaunchPlan, build_command, build_plan, check_paths
from dino_ds.launching.supervise import supervise
from dino_ds.options.machine import LaunchOptions


def run(options: LaunchOptions, *, train_words: tuple[str, ...], train: Mapping[str, Any]) -> None:
    """Train, then end the process with the training's exit code. Raises ConfigError before anything has started.

    train: the meaning of the words after "--": `train`'s options, recipe, ds, ds_path and given.
    """
    plan = build_plan(options, train_words)
    # Raises ConfigError if the global batch can't be shared out over the ranks.
    resolve_ds_config(copy.deepcopy(train["ds"]), train["ds_path"], train["recipe"].data.global_batch, plan.world_size)
    check_paths(plan, Path.cwd())
    build_command(plan)  # refuses what can't be forwarded
    if not options.skip_checks:
        _check(plan, train)
    for note in train["given"][0].notes:
        print(f"note     {note}", flush=True)
    for run_dir, words in _runs(train_words, train):
        command = build_command(build_plan(options, words))
        print(f"command  {shlex.join(command)}", flush=True)
        if options.dry_run:
            continue
        if code := supervise(partial(_start, command, options, words), run_dir, options.max_restarts):
            sys.exit(code)


def _start(command: list[str], options: LaunchOptions, words: tuple[str, ...], resumes: bool) -> list[str]:
    """The command of a start: `command`, or one that resumes, on another port where its own is taken and nobody else
    must know it."""
    if not resumes:
        return command
    plan = build_plan(options, (*_without(words, "--resume"), "--resume", "auto"))
    if not plan.hosts and plan.options.nodes == 1 and not port_is_free(plan.master_port):
        plan = replace(plan, master_port=find_free_port())
    return build_command(plan)


def _runs(words: tuple[str, ...], train: Mapping[str, Any]) -> Iterator[tuple[Path, tuple[str, ...]]]:
    """Folder and words of each run to train: the only one, or each of `--stages` that is not over."""
    options = train["options"]
    if options.stages is None:
        named = any(word.partition("=")[0] == "--run_dir" for word in words)
        # The ranks are not to choose a folder each: another run may have begun meanwhile.
        yield Path(options.run_dir), words if named else (*words, "--run_dir", options.run_dir)
        return
    kept = _without(words, "--stages", "--run_dir", "--from", "--resume")
    resume = ["--resume", "auto"] if options.resume else []
    resumes, allowed = bool(options.resume), options.allow_change
    for stage in stages_to_train(options.run_dir, train["given"], options.from_, resumes, allowed):
        own = ["--config", str(stage.given.config), "--run_dir", str(stage.folder), *resume]
        own += [] if stage.origin is None else ["--from", stage.origin]
        if not stage.is_over:
            yield stage.folder, (*kept, *own)


def _without(words: Sequence[str], *names: str) -> list[str]:
    """The words of a command line but for these options and their values."""
    kept, dropped = list[str](), False
    for word in words:
        value, dropped = dropped and not word.startswith("-"), word in names
        if not value and word.partition("=")[0] not in names:
            kept.append(word)
    return kept


def _check(plan: LaunchPlan, train: Mapping[str, Any]) -> None:
    """Examine all machines and show them. Raises ConfigError with all that stops the training."""
    configs = [one.config for one in train["given"] if one.config is not None]
    recipes = [file.path for config in configs for file in read_recipe_files(config)]
    own = dict.fromkeys(path for path in recipes if Path(path).parent != RECIPES)
    files = tuple(os.path.abspath(path) for path in (train["ds_path"], *own))
    data = train["recipe"].data
    images = data.root if data.root and not data.download else None
    machines, problems = check_machines(plan, files, images, Path(train["options"].run_dir))
    for line in machines:
        print(f"machine  {line}", flush=True)
    if problems:
        raise ConfigError("\n".join(problems))
