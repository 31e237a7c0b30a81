"""Where a run comes from: recipe, machine, versions, and the commands that make it again."""

from __future__ import annotations

import json
import shlex
from typing import Any

from markupsafe import Markup

from dino_ds.config.flat import flat_values
from dino_ds.config.loading import recipe_options, show_value
from dino_ds.config.recipe import Recipe
from dino_ds.report.folder import RunFiles
from dino_ds.report.html import Piece, code, folded, join, note, table


def show_recipe(run: RunFiles) -> Markup:
    """What is not the default first, the whole folded."""
    if run.recipe is None:
        return code(run.recipe_text) if run.recipe_text else note("config.yaml is not there.")
    values, defaults = flat_values(run.recipe), flat_values(Recipe())
    changed = [
        (
            Markup("<code>{}</code>").format(option.name),
            show_plain(values[option.name]),
            show_plain(defaults[option.name]),
            option.description,
        )
        for option in recipe_options()
        if values[option.name] != defaults[option.name]
    ]
    header = ("key", "this run", "default", "what it is")
    return join(
        [
            table(header, changed) if changed else note("All values are the defaults: the ViT-S/16 of the DINO paper."),
            folded("The whole recipe: config.yaml", code(run.recipe_text)),
            folded("How it was computed: ds_config.json", code(json.dumps(run.ds, indent=2))) if run.ds else "",
        ]
    )


def show_plain(value: Any) -> str:
    return show_value(tuple(value) if isinstance(value, list) else value)


def show_environment(run: RunFiles) -> Markup:
    data, versions = run.environment, run.environment.get("versions")
    if not data:
        return note("environment.json is not there, or can't be read.")
    rows = [(key, show_plain(value)) for key, value in data.items() if key not in ("versions", "command", "starts")]
    rows += [(key, run.log.facts[key]) for key in ("engine", "kernels") if key in run.log.facts]
    rows += [(key, show_plain(value)) for key, value in versions.items()] if isinstance(versions, dict) else []
    return table((), rows)


def show_reproduction(run: RunFiles) -> Markup:
    versions, starts = run.environment.get("versions"), _starts(run.environment)
    parts: list[Piece] = []
    if starts:
        title = "The commands of all starts, as they were given" if len(starts) > 1 else "The command, as it was given"
        lines = [f"# {start['time']}\n{launched(start)}" if len(starts) > 1 else launched(start) for start in starts]
        parts += [Markup("<h3>{}</h3>").format(title), code("\n".join(lines))]
    files = ["--config", f"{run.path}/config.yaml", "--ds_config", f"{run.path}/ds_config.json"]
    last = starts[-1] if starts else {"launcher": "", "ranks": run.environment.get("ranks")}
    again = launched(last | {"command": ["train.py", *files, "--run_dir", "NEW"]})
    parts += [Markup("<h3>Or from this run's own files</h3>"), code(again)]
    if isinstance(versions, dict):
        pins = " ".join(f"{name}=={text}" for name, text in versions.items() if name not in ("python", "dino_ds"))
        here = f"# Python {versions.get('python', '?')}, dino_ds {versions.get('dino_ds', '?')}"
        parts += [Markup("<h3>Versions</h3>"), code(f"{here}\npip install {pins}")]
    if run.recipe is not None:
        data = run.recipe.data
        images = run.log.facts.get("images", "images that log.txt does not name")
        text = f"Seed {run.recipe.seed}; data.source {data.source}, data.root {show_value(data.root)}: {images}."
        parts += [Markup("<h3>Seed and data</h3><p>{}</p>").format(text)]
    return join(parts)


def _starts(environment: dict[str, Any]) -> list[dict[str, Any]]:
    """Each with time, command, launcher and ranks; of an older run the last one only."""
    found = environment.get("starts")
    listed = found if isinstance(found, list) else [environment]
    return [
        {"time": str(start.get("time", "")), "command": command, "launcher": start.get("launcher"), "ranks": ranks}
        for start in listed
        if isinstance(start, dict)
        for command, ranks in [(start.get("command"), start.get("ranks"))]
        if isinstance(command, list) and command
    ]


def launched(start: dict[str, Any]) -> str:
    """The command line of train.py or dino-ds on so many processes of one machine; by torchrun if nobody said how."""
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
