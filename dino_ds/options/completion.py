"""`dino-ds completion SHELL`: a script of fixed words, made from the commands, so that a TAB starts no Python."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from dino_ds.config.ds_config import find_ds_config
from dino_ds.config.ds_schema import KEYS
from dino_ds.config.fields import SOURCES
from dino_ds.config.loading import recipe_options
from dino_ds.config.recipe_files import recipe_names
from dino_ds.models.specs.backbones import BACKBONES, FROM_SOURCE
from dino_ds.options.commands import COMMANDS
from dino_ds.options.definition import Command
from dino_ds.options.run import CompletionOptions

_KINDS = {"integer", "length", "low", "names", "number", "numbers", "text", "weight"}
"""What the type of a recipe's key says where it does not list words."""
_BASH = """\
# Completion of dino-ds in {name}: made by `dino-ds completion {name}`, again after an update.
_dino_ds() {{
    local cur="${{COMP_WORDS[COMP_CWORD]}}" prev="${{COMP_WORDS[COMP_CWORD-1]}}" name="${{COMP_WORDS[1]}}"
    local words word IFS=$' \\t\\n'
    local recipe="{recipe}"
    local ds="{ds}"
    # bash takes --key=value apart.
    if [ "$cur" = "=" ]; then cur=; elif [ "$prev" = "=" ]; then prev="${{COMP_WORDS[COMP_CWORD-2]}}"; fi
    case "$name" in {groups}) if [ "$COMP_CWORD" -gt 2 ]; then name="$name ${{COMP_WORDS[2]}}"; fi ;; esac
    for word in "${{COMP_WORDS[@]}}"; do if [ "$word" = "--" ]; then name=train; fi; done
    COMPREPLY=()
    if [ "$COMP_CWORD" -eq 1 ]; then
        COMPREPLY=($(compgen -W "{commands}" -- "$cur"))
        return
    fi
    case "$name $prev" in
{choices}
    *)
        case "$cur" in -*) case "$name" in
{options}
        esac ;; esac ;;
    esac
    if [ -n "$words" ]; then COMPREPLY=($(compgen -W "$words" -- "$cur")); fi
    if [ ${{#COMPREPLY[@]}} -eq 0 ]; then
        case "$cur" in -*) ;; *)
            compopt -o filenames 2>/dev/null
            IFS=$'\\n'
            COMPREPLY=($(compgen -f -- "$cur")) ;;
        esac
    fi
}}
complete -F _dino_ds dino-ds dino_ds
"""
_ZSH = "autoload -Uz compinit bashcompinit && compinit && bashcompinit\n"


def run(options: CompletionOptions) -> None:
    """Print the script."""
    print(fish() if options.shell == "fish" else bash(options.shell), end="")


def bash(shell: str = "bash") -> str:
    """The completion script of bash, or of zsh, which reads the same after `bashcompinit`."""
    groups = sorted({name.split()[0] for name in COMMANDS if " " in name})
    values: dict[str, Iterable[str]] = {
        f'"{name} --{key}"': words for name, command in COMMANDS.items() for key, words in _own_choices(command).items()
    }
    values |= {f'*" --{key}"': words for key, words in _recipe_choices().items()}
    values |= {f'"{g} {g}"': [name.split()[1] for name in COMMANDS if name.startswith(f"{g} ")] for g in groups}
    text = _BASH.format(
        name=shell,
        recipe=_listed(f"--{option.name}" for option in recipe_options()),
        ds=_listed(f"--ds.{key}" for key in KEYS),
        groups="|".join(groups),
        commands=_listed({name.split()[0] for name in COMMANDS}),
        choices="\n".join(f'    {place}) words="{_listed(words)}" ;;' for place, words in values.items()),
        options="\n".join(f'        "{name}") words="{_options(command)}" ;;' for name, command in COMMANDS.items()),
    )
    return _ZSH + text if shell == "zsh" else text


def fish() -> str:
    """One line an option: its condition is the command that was typed."""
    lines = ["# Completion of dino-ds in fish: made by `dino-ds completion fish`, again after an update."]
    by_recipe: list[str] = []
    for name, command in COMMANDS.items():
        first, _, second = name.partition(" ")
        seen = f"__fish_seen_subcommand_from {first}" + (
            f"; and __fish_seen_subcommand_from {second}" if second else ""
        )
        if second:
            lines.append(f"complete -c dino-ds -n '__fish_seen_subcommand_from {first}' -a {second}")
        summary = command.summary.replace("'", "")
        lines.append(f"complete -c dino-ds -n __fish_use_subcommand -f -a {first} -d '{'' if second else summary}'")
        choices = _own_choices(command)
        for option in command.all_options:
            words = f" -a '{_listed(choices[option.name])}'" if option.name in choices else ""
            value = "" if option.is_switch else " -r"
            lines.append(f"complete -c dino-ds -n '{seen}' -l {option.name}{value}{words}")
        by_recipe += [first] if command.takes_recipe and not second else []
    seen = f"__fish_seen_subcommand_from {_listed(by_recipe)}"
    for key in recipe_options():
        words = f" -a '{_listed(_recipe_choices()[key.name])}'" if key.name in _recipe_choices() else ""
        lines.append(f"complete -c dino-ds -n '{seen}' -l {key.name} -r{words}")
    return "\n".join(lines) + "\n"


def _options(command: Command) -> str:
    own = _listed(f"--{option.name}" for option in command.all_options)
    return own + " --help" + " $recipe" * command.takes_recipe + " $ds" * command.takes_ds


def _own_choices(command: Command) -> dict[str, tuple[str, ...]]:
    """The words that an option of the command takes, files aside; of --help too."""
    ds_configs = sorted(path.stem for path in Path(find_ds_config("zero0_fp32")).parent.glob("*.json"))
    shipped = {"config": tuple(recipe_names()), "ds_config": tuple(ds_configs)}
    offered = {option.name: option.choices or shipped.get(option.name, ()) for option in command.all_options}
    offered |= {"help": ("all",)} if command.takes_recipe else {}
    return {name: words for name, words in offered.items() if words}


def _recipe_choices() -> dict[str, tuple[str, ...]]:
    found = {"data.source": SOURCES, "model.backbone": (*BACKBONES, FROM_SOURCE)}
    for option in recipe_options():
        words = re.split(", | or ", option.type)
        if len(words) > 1 and all(re.fullmatch(r"[\w-]+", word) for word in words) and not _KINDS & {*words}:
            found[option.name] = tuple(words)
    return found


def _listed(words: Iterable[str]) -> str:
    return " ".join(dict.fromkeys(words))
