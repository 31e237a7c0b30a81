"""Every command of `dino-ds`: its flags, what else it takes, and the function that does it. No torch here."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Flag:
    """kind: text, int or number (> 0, with `zero` >= 0) or switch (needs no value).

    `default` is what the function gets; where that is None, `shown` says what it means.
    """

    name: str
    kind: str
    default: str | int | float | bool | None
    description: str
    shown: str = ""
    zero: bool = False

    @property
    def default_text(self) -> str:
        return self.shown or str(self.default).lower()


@dataclass(frozen=True)
class Command:
    """`runs` is "module:function": it gets every flag as a keyword, and `recipe`, `ds`, `ds_path` if it takes them.

    recipe, ds_config: the defaults of --config (None: the schema's) and --ds_config; `takes_recipe` and `takes_ds` say
    whether there are such options. needs_images: they must be named, there is no default.
    """

    name: str
    summary: str
    runs: str
    flags: tuple[Flag, ...] = ()
    takes_recipe: bool = True
    recipe: str | None = None
    takes_ds: bool = True
    ds_config: str = "ds_configs/zero0_fp32.json"
    needs_images: bool = False

    @property
    def all_flags(self) -> tuple[Flag, ...]:
        """Its own flags after those that follow from what it takes."""
        ds = Flag("ds_config", "text", self.ds_config, "DeepSpeed's JSON: how fast and on what hardware")
        recipe = Flag(
            "config",
            "text",
            self.recipe,
            "the recipe: a shipped name or a YAML file: what is learned",
            shown=self.recipe or "the ViT-S/16 of the DINO paper",
        )
        debug = Flag("debug", "switch", False, "show tracebacks of errors")
        return (*((ds,) if self.takes_ds else ()), *((recipe,) if self.takes_recipe else ()), *self.flags, debug)


TRAIN = Command(
    "train",
    "train: images in, a teacher out",
    "dino_ds.train:train",
    (
        Flag("run_dir", "text", None, "folder of this run: metrics, checkpoints, teacher", shown="runs/RECIPE"),
        Flag(
            "max_steps",
            "int",
            None,
            "stop after N optimizer steps; the schedules stay as they are",
            shown="the recipe's length",
        ),
        Flag("resume", "switch", False, "continue the run in --run_dir from its last checkpoint"),
    ),
    needs_images=True,
)

COMMANDS: dict[str, Command] = {command.name: command for command in (TRAIN,)}


def find_command(words: list[str]) -> tuple[Command, list[str]] | None:
    """The command that `words` begin with, and the words after it; None if there is none."""
    for length in (2, 1):
        name = " ".join(words[:length])
        if len(words) >= length and name in COMMANDS:
            return COMMANDS[name], words[length:]
    return None
