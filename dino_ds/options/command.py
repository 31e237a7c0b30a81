"""What a command of `dino-ds` is, and a flag of it."""

from __future__ import annotations

from dataclasses import dataclass

from dino_ds.names import MODEL_FORMS


@dataclass(frozen=True)
class Flag:
    """kind: text, texts (one or more words: a list), names or numbers (with commas between, each once: a tuple; numbers
    are whole and > 0), int or number (> 0, with `zero` >= 0), switch (needs no value) or resume (a switch, auto or a
    step).

    `default` is what the function gets; where that is None, `shown` says what it means. choices: all that a text or a
    name may be. required: there is no default.
    """

    name: str
    kind: str
    default: str | int | float | bool | tuple[str | int, ...] | None
    description: str
    shown: str = ""
    zero: bool = False
    choices: tuple[str, ...] = ()
    required: bool = False

    @property
    def default_text(self) -> str:
        if self.required:
            return "required"
        listed = ",".join(map(str, self.default)) if isinstance(self.default, tuple) else str(self.default).lower()
        return self.shown or listed

    @property
    def meaning(self) -> str:
        return ": ".join(text for text in (self.description, ", ".join(self.choices)) if text)


@dataclass(frozen=True)
class Command:
    """`runs` is "module:function": it gets every flag as a keyword, and `recipe`, `ds`, `ds_path` if it takes them.

    recipe, ds_config: the defaults of --config (None: the schema's) and --ds_config (None: may be left out, `ds` and
    `ds_path` are None then); `takes_recipe` and `takes_ds` say whether there are such options. needs_images: they must
    be named, there is no default. takes_train: what follows "--" are options of `train`; the function gets them as
    `train_words`, and as `train` what they mean. check: "module:function" that gets the same before torch is
    loaded. loads_torch: a torch that does not load stops it before it starts.
    ds_shown: what --ds_config is where it is left out, if that depends; the function then gets `ds_overrides`: what
    `--ds.` flags change, or None where --ds_config is given.
    bare: the flag that a word without a name is for; several flags, spaces between, take one word each, in order.
    """

    name: str
    summary: str
    runs: str
    flags: tuple[Flag, ...] = ()
    takes_recipe: bool = True
    recipe: str | None = None
    takes_ds: bool = True
    ds_config: str | None = "ds_configs/zero0_fp32.json"
    needs_images: bool = False
    takes_train: bool = False
    check: str | None = None
    loads_torch: bool = True
    bare: str | None = None
    ds_shown: str = ""

    @property
    def all_flags(self) -> tuple[Flag, ...]:
        """Its own flags after those that follow from what it takes."""
        ds = Flag(
            "ds_config",
            "text",
            self.ds_config,
            "DeepSpeed's JSON: how fast and on what hardware",
            shown=self.ds_shown or self.ds_config or "none: one is recommended",
        )
        recipe = Flag(
            "config",
            "text",
            self.recipe,
            "the recipe: a shipped name or a YAML file: what is learned",
            shown=self.recipe or "the ViT-S/16 of the DINO paper",
        )
        debug = Flag("debug", "switch", False, "show tracebacks of errors")
        return (*((ds,) if self.takes_ds else ()), *((recipe,) if self.takes_recipe else ()), *self.flags, debug)


JSON = Flag("json", "switch", False, "print one JSON object")
MODEL = Flag("model", "text", None, MODEL_FORMS, required=True)
HEADS = Flag("heads", "int", None, "attention heads, of a file that does not say it", shown="as usual")
