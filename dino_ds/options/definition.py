"""How a command is written down: one frozen dataclass whose typed fields are its options, and a line of facts.

Parsing, help, choices, defaults and docs/configs.md all come from the fields (docs/configs.md is generated).
"""

from __future__ import annotations

import dataclasses
import functools
import keyword
import types
from collections.abc import Callable
from dataclasses import MISSING, dataclass
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from typing_extensions import dataclass_transform

from dino_ds.basics.names import MODEL_FORMS

Options = TypeVar("Options")


@dataclass(frozen=True)
class Help:
    """What an option's annotation says beside its type: `Annotated[int | None, Help("steps to take", "all")]`.

    shown: what the default None means. zero: a number may be 0. bare: a word without a name is for this option; with
    several such options, one word for each, in order. choices: allowed words that a Literal can't list.
    """

    text: str
    shown: str = ""
    zero: bool = False
    bare: bool = False
    choices: tuple[str, ...] = ()


@dataclass(frozen=True)
class Option:
    """One option, as its field says.

    kind: text, words (one or more), names or numbers (comma-separated, each once), int, number, switch (needs no value)
    or resume (a switch, a word or a step).
    """

    name: str
    kind: str
    default: Any
    help: Help
    choices: tuple[str, ...] = ()
    required: bool = False

    @property
    def field(self) -> str:
        """Its name in the class: a word of Python's has an underscore there."""
        return f"{self.name}_" if keyword.iskeyword(self.name) else self.name

    @property
    def default_text(self) -> str:
        if self.required:
            return "required"
        listed = ",".join(map(str, self.default)) if isinstance(self.default, tuple) else str(self.default).lower()
        return self.help.shown or listed

    @property
    def meaning(self) -> str:
        return ": ".join(text for text in (self.help.text, ", ".join(self.choices)) if text)


@dataclass(frozen=True)
class Command:
    """`runs` is "module:function"; it gets an instance of `options`, and `recipe`, `ds`, `ds_path` if it takes them.

    recipe, ds_config: defaults of --config (None: the schema's) and --ds_config (None: it may be left out, `ds` and
    `ds_path` are None then). needs_images: they must be named. takes_train: what follows "--" are options of `train`;
    the function gets them as `train_words`, and as `train` what they mean. check: "module:function" that gets the
    options before torch is loaded. loads_torch: a torch that does not load stops the command before it starts.
    `train` also gets `given`, what was given of its recipes (`dino_ds.config.stages`).
    ds_shown: what --ds_config is where it is left out, if that depends; the function then gets `ds_overrides`: what
    `--ds.` options change, or None where --ds_config is given.
    """

    name: str
    summary: str
    runs: str
    options: type
    takes_recipe: bool = False
    recipe: str | None = None
    takes_ds: bool = False
    ds_config: str | None = "ds_configs/zero0_fp32.json"
    needs_images: bool = False
    takes_train: bool = False
    check: str | None = None
    loads_torch: bool = True
    ds_shown: str = ""

    @property
    def own_options(self) -> tuple[Option, ...]:
        return _options_of(self.options)

    @property
    def all_options(self) -> tuple[Option, ...]:
        """Its own options between those that follow from what it takes."""
        ds_text = self.ds_shown or self.ds_config or "none: one is recommended"
        ds = Option(
            "ds_config", "text", self.ds_config, Help("DeepSpeed's JSON: how fast and on what hardware", ds_text)
        )
        recipe_help = Help(
            "the recipe: a shipped name or a YAML file: what is learned",
            self.recipe or "the ViT-S/16 of the DINO paper",
        )
        recipe = Option("config", "text", self.recipe, recipe_help)
        debug = Option("debug", "switch", False, Help("show tracebacks of errors"))
        return (*[ds] * self.takes_ds, *[recipe] * self.takes_recipe, *self.own_options, debug)

    @property
    def bare(self) -> tuple[str, ...]:
        return tuple(option.name for option in self.own_options if option.help.bare)


COMMANDS: dict[str, Command] = {}
"""By name; filled where `options.commands` imports the dataclasses."""


@dataclass_transform(frozen_default=True, kw_only_default=True)
def command(name: str, runs: str, **facts: Any) -> Callable[[type[Options]], type[Options]]:
    """Make a class the frozen dataclass of a command's options; its docstring is the summary that help shows.

    `facts` are fields of Command.
    """

    def register(cls: type[Options]) -> type[Options]:
        options = dataclass(frozen=True, kw_only=True)(cls)
        COMMANDS[name] = Command(name, cls.__doc__ or "", runs, options, **facts)
        return options

    return register


@functools.cache
def _options_of(cls: type) -> tuple[Option, ...]:
    hints = get_type_hints(cls, include_extras=True)
    return tuple(_option(field.name, hints[field.name], field.default) for field in dataclasses.fields(cls))


def _option(name: str, hint: Any, default: Any) -> Option:
    value_type, help_ = get_args(hint)
    kind, choices = _kind_of(value_type)
    choices = choices or help_.choices
    kind = "names" if kind == "words" and choices else kind
    required = default is MISSING
    return Option(name.removesuffix("_"), kind, None if required else default, help_, choices, required)


def _kind_of(value_type: Any) -> tuple[str, tuple[str, ...]]:
    """A field's type -> the kind of its option, and the words that a Literal allows."""
    origin, inner = get_origin(value_type), get_args(value_type)
    if origin in (Union, types.UnionType):
        several = [one for one in inner if one is not types.NoneType]
        return _kind_of(several[0]) if len(several) == 1 else ("resume", ())
    if origin is Literal:
        return "text", inner
    if origin is tuple:
        kind, choices = _kind_of(inner[0])
        return ("numbers" if kind == "int" else "words"), choices
    return {bool: "switch", int: "int", float: "number", str: "text"}[value_type], ()


Json = Annotated[bool, Help("print one JSON object")]
Model = Annotated[str, Help(MODEL_FORMS, bare=True)]
Heads = Annotated[int | None, Help("attention heads, of a file that does not say it", "as usual")]
