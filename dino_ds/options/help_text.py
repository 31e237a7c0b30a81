"""Makes the pages of `--help` from the schemas; the site's page of options is that of `train --help all`."""

from __future__ import annotations

import textwrap

from dino_ds.basics.names import words_elsewhere
from dino_ds.config.ds_schema import KEYS, PASSED
from dino_ds.config.loading import recipe_options
from dino_ds.config.schema import Option
from dino_ds.errors import EXIT_CODES
from dino_ds.models.specs.backbones import BACKBONES
from dino_ds.options.commands import COMMANDS, TRAIN, find_command
from dino_ds.options.definition import Command, meaning

_EXAMPLES = """\
examples
  dino-ds train --config quickstart
  deepspeed --num_gpus 4 --module dino_ds.train --ds_config zero2_fp16 --data.root /images
  torchrun --nproc_per_node 2 -m dino_ds.train --config cifar10 --data.root data --data.download true
  dino-ds train --config vitb16 --data.root /images --optimizer.lr 5e-4 --ds.gradient_clipping 0.3
"""

FIRST_DAY = {
    "dino-ds train --config quickstart": "the embedded photographs: minutes, to see that it works",
    "dino-ds look-data --data.root IMAGES": "your images as the network will see them",
    "dino-ds train --data.root IMAGES --run_dir runs/mine": "a ViT-S/16 on them; --resume continues",
    "dino-ds report runs/mine": "curves, evaluations and pictures on one page",
    "dino-ds export runs/mine --format timm": "the result for other programs",
}
GROUPS = ("train", "look", "evaluate", "export", "measure", "cluster")
"""Headings of commands, in the order in which `--help` shows them."""
FIRST_OPTIONS = ("config", "run_dir", "resume", "max_steps", "ds_config")
FIRST_KEYS = (
    *("data.root", "data.source", "data.global_batch", "length", "optimizer.lr", "crops.global_size"),
    *("model.backbone", "model.init_from", "eval.root", "save_every"),
)
"""Options of `train`, and keys of the recipe, that a new user needs first: the short page shows only these."""
_RULES = """\
rules
  a recipe says what is learned, the ds JSON how fast and on what hardware: another changes results by rounding alone
  defaults < recipe file < command line; "extends: NAME" or "extends: FILE.yaml" in a file: it sets what differs
  a length is "100 epochs", "5000 steps" or "1e6 images", a bare number is steps; none (null in YAML) unsets a value
  --resume continues a run, --from RUN begins a stage with another one, --model.init_from takes weights alone
  global batch = micro-batch x accumulation x ranks: the recipe has the product, the ds JSON its factors ("auto")
"""


def help_text(words: list[str]) -> str:
    """Return the page of `dino-ds [COMMAND] --help [all]`."""
    named = find_command([word for word in words if not word.startswith("-")])
    if named is None:
        return _overview()
    command, rest = named
    return _short_page(command) if command.takes_recipe and "all" not in rest else _command_page(command)


def _overview() -> str:
    first = [(line, "", about) for line, about in FIRST_DAY.items()]
    groups = [
        line
        for group in GROUPS
        for line in (group, *_rows([(command.name, "", command.summary) for command in _commands_of(group)]), "")
    ]
    codes = [(str(code), "", meaning) for code, meaning in EXIT_CODES.items()]
    usage = [
        "usage: dino-ds COMMAND [--option value ...]",
        "",
        "a first day",
        *_rows(first),
        "",
        *groups,
        "dino-ds COMMAND --help: the options of a first day; --help all: every one",
        "",
    ]
    return "\n".join([*usage, "exit codes", *_rows(codes), ""])


def _commands_of(group: str) -> list[Command]:
    """Return the commands under a heading, sorted by name; a command with the heading's name comes first."""
    return sorted((c for c in COMMANDS.values() if c.group == group), key=lambda c: (c.name != group, c.name))


def _short_page(command: Command) -> str:
    """Return the first screen for a command with hundreds of options."""
    options = {option.name: option for option in command.all_options}
    options = {name: options[name] for name in FIRST_OPTIONS} if command is TRAIN else options
    keys = {key.name: key for key in recipe_options()}
    rows = [(f"--{name}", keys[name].default, keys[name].description) for name in FIRST_KEYS]
    count = len(command.all_options) + len(keys)
    parts = [
        *_head(command, "recipes"),
        "first options (default)",
        *_rows([*map(_row, options.values()), *rows], 120),
        "",
    ]
    rest = "with the keys of the ds JSON" if command is TRAIN else "keys of the ds JSON: dino-ds train --help all"
    parts += [f"all {count} options: dino-ds {command.name} --help all, {rest}"]
    return "\n".join([*parts, "", *_EXAMPLES.splitlines()[:3]] if command is TRAIN else parts)


def _command_page(command: Command) -> str:
    parts = [
        *_head(command, "recipes", "other_recipes"),
        "options (default)",
        *_rows([_row(option) for option in command.all_options]),
        "",
    ]
    if command.takes_recipe:
        options = [(f"--{o.name}", o.default, f"{o.description} [{o.type}]") for o in recipe_options()]
        parts.append("overrides of the recipe (default); a length is '100 epochs', '5000 steps' or '1e6 images'")
        parts += [*_rows(options), ""]
    if command.takes_ds:
        where = "" if command is TRAIN else "; dino-ds train --help all lists them"
        text = f"any key of the JSON, for example --ds.zero_optimization.stage 2{where}"
        keys = [(f"--ds.{name}", "", f"{key.description} [{key.type}]{_stages(key)}") for name, key in KEYS.items()]
        parts += ["overrides of the ds JSON", *_rows([("--ds.KEY", "the file's", text)])]
        passed = ("--ds.KEY", "", f"as DeepSpeed's documentation says: {', '.join(PASSED)}")
        parts += [*_rows([*keys, passed], 120), ""] if command is TRAIN else [""]
    if command is not TRAIN:
        return "\n".join(parts)
    backbones = f"backbones that dino_ds builds itself: {', '.join(BACKBONES)}"
    return "\n".join([*parts, *textwrap.wrap(backbones, 120, subsequent_indent="  "), "", _RULES, _EXAMPLES])


def _head(command: Command, *recipes: str) -> list[str]:
    """Return usage and summary; for `train` also recipes by purpose, from the given sections of elsewhere.yaml."""
    ds = " [--ds_config FILE.json]" if command.takes_ds else ""
    recipe = " [--config RECIPE] [--section.key value ...]" if command.takes_recipe else " [--option value ...]"
    bare = "".join(f" {name.upper()}" for name in command.bare)
    parts = [f"usage: dino-ds {command.name}{bare}{ds}{recipe}"]
    if command is not TRAIN:
        return [*parts, "", command.summary, ""]
    parts.append("       deepspeed [--num_gpus N] dino_ds/train.py [the same options]")
    purposes: dict[str, list[str]] = {}
    for name, purpose in (pair for section in recipes for pair in words_elsewhere(section).items()):
        purposes.setdefault(purpose, []).append(name)
    rows = [(purpose, "", " ".join(names)) for purpose, names in purposes.items()]
    return [*parts, "", command.summary, "", "recipes by what they are for", *_rows(rows, 120), ""]


def _stages(key: Option) -> str:
    stages = key.fact("stages")
    return f" (ZeRO {', '.join(map(str, stages))})" if stages else ""


def _row(option: Option) -> tuple[str, str, str]:
    letter = "N" if option.type.startswith(("integer", "number")) else "X"
    several = f" {letter},{letter}" if option.takes_list else f" {letter}"
    return f"--{option.name}{'' if option.is_switch else several}", option.default, meaning(option)


def _rows(rows: list[tuple[str, str, str]], width: int = 110) -> list[str]:
    left = max(len(name) for name, _, _ in rows) + 2
    lines = []
    for name, default, description in rows:
        text = textwrap.wrap(f"{description} ({default})" if default else description, width - left - 2)
        lines += [f"  {name:<{left}}{text[0]}", *(" " * (left + 2) + line for line in text[1:])]
    return lines
