"""Origin of a run: its settings, machine and versions, and the commands that make it again."""

from __future__ import annotations

import json
import shlex
from typing import Any

from dino_ds.basics.names import step_name
from dino_ds.config.begun_with import ORIGIN, Origin
from dino_ds.config.flat import flat_values
from dino_ds.config.loading import recipe_options
from dino_ds.config.recipe import Recipe
from dino_ds.config.schema import show_value
from dino_ds.report.folder import RunFiles
from dino_ds.report.html import Tag


def changed_settings(run: RunFiles) -> list[tuple[Tag, str, str, str]]:
    """Key, value, default and description of every setting that is not the default."""
    if run.recipe is None:
        return []
    values, defaults = flat_values(run.recipe), flat_values(Recipe())
    return [
        (Tag(key, tag="code"), show_plain(values[key]), show_plain(defaults[key]), option.description)
        for option in recipe_options()
        for key in [option.name]
        if values[key] != defaults[key]
    ]


def show_plain(value: Any) -> str:
    return show_value(tuple(value) if isinstance(value, list) else value)


def environment_rows(run: RunFiles) -> list[tuple[str, str]]:
    data, versions = run.environment, run.environment.get("versions")
    skipped = ("versions", "command", "starts", ORIGIN)
    rows = [(key, show_plain(value)) for key, value in data.items() if key not in skipped]
    if origin := Origin.read(run.path):
        rows.insert(0, ("began with", f"{origin.run}, step {origin.step} ({origin.stage_start}), run {origin.run_id}"))
    rows += [(kind, run.events.text(kind)) for kind in ("engine", "kernels") if kind in run.events.newest]
    return rows + ([(key, show_plain(value)) for key, value in versions.items()] if isinstance(versions, dict) else [])


def reproduction(run: RunFiles) -> dict[str, Any]:
    """The commands as they were given, one that uses the run's own files, and the versions."""
    versions, starts = run.environment.get("versions"), _starts(run.environment)
    lines = [
        f"# {start['time']}\n{command_line(start)}" if len(starts) > 1 else command_line(start) for start in starts
    ]
    files = ["--config", f"{run.path}/config.yaml", "--ds_config", f"{run.path}/ds_config.json"]
    if origin := Origin.read(run.path):
        files += ["--from", f"{origin.run}/checkpoints/{step_name(origin.step)}"]
    last = starts[-1] if starts else {"launcher": "", "ranks": run.environment.get("ranks")}
    pins = ""
    if isinstance(versions, dict):
        names = " ".join(f"{name}=={text}" for name, text in versions.items() if name not in ("python", "dino_ds"))
        pins = f"# Python {versions.get('python', '?')}, dino_ds {versions.get('dino_ds', '?')}\npip install {names}"
    return {
        "ds": json.dumps(run.ds, indent=2) if run.ds else "",
        "starts": starts,
        "commands": "\n".join(lines),
        "again": command_line(last | {"command": ["train.py", *files, "--run_dir", "NEW"]}),
        "pins": pins,
        "root": show_value(run.recipe.data.root) if run.recipe else "",
    }


def _starts(environment: dict[str, Any]) -> list[dict[str, Any]]:
    """Starts of a run, each with time, command, launcher and ranks; an older run has the last one only."""
    found = environment.get("starts")
    listed = found if isinstance(found, list) else [environment]
    return [
        {"time": str(start.get("time", "")), "command": command, "launcher": start.get("launcher"), "ranks": ranks}
        for start in listed
        if isinstance(start, dict)
        for command, ranks in [(start.get("command"), start.get("ranks"))]
        if isinstance(command, list) and command
    ]


def command_line(start: dict[str, Any]) -> str:
    """The command line on all processes of one machine; with torchrun if no launcher is known."""
    words = [str(word) for word in start["command"] if not str(word).startswith(("--local_rank", "--local-rank"))]
    ranks = start["ranks"]
    several = isinstance(ranks, int) and (ranks > 1 or start["launcher"])
    deepspeed = start["launcher"] == "deepspeed"
    launcher = ["deepspeed", "--num_gpus"] if deepspeed else ["torchrun", "--nproc_per_node"]
    if words[0] == "train.py":
        program = ["dino_ds/train.py"] if several else ["dino-ds", "train"]
    else:
        program = [*(["--module"] if deepspeed else ["-m"]), "dino_ds"] if several else [words[0]]
    return shlex.join([*([*launcher, str(ranks)] if several else []), *program, *words[1:]])
