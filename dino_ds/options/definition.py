"""Declares a command by a class whose typed fields are its options, read like the keys of a recipe; and the options of
the commands that evaluate a trained model, use and show its features, and export its weights."""

from __future__ import annotations

import functools
import json
import keyword
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BeforeValidator, Field
from pydantic.fields import FieldInfo
from typing_extensions import dataclass_transform

from dino_ds.basics.names import MODEL_FORMS
from dino_ds.config.evaluation import BENCHMARKS, Evaluation
from dino_ds.config.fields import AllowedCode, Amount, Count, Gib, Listed, Positive, Seed, option
from dino_ds.config.loading import recipe_options
from dino_ds.config.schema import Option, options, options_of

Options = TypeVar("Options")


@dataclass(frozen=True)
class Result:
    """The result of a command, which the command line prints and the Python API returns.

    Args:
        data: the JSON object that --json prints; what Python gets, unless `value` is set.
        page: text for a terminal.
        notes: lines for standard error, which are warnings in Python.
        value: what Python gets instead of `data`.
        error: what ended the command early; raised after the results so far are shown.
    """

    data: Mapping[str, Any]
    page: str
    notes: Sequence[str] = ()
    value: Any = None
    error: BaseException | None = None

    def show(self, as_json: bool) -> None:
        """Print `data` as one JSON object, or `page`, on rank 0. Raises `error`."""
        if int(os.environ.get("RANK", 0)) == 0:  # not by dino_ds.engine.distributed: planning loads no torch
            for note in self.notes:
                print(note, file=sys.stderr)
            print(json.dumps(self.data) if as_json else self.page, flush=True)
        if self.error is not None:
            raise self.error


@dataclass(frozen=True)
class Command:
    """A command: its options, its function, and the files that the function wants.

    Args:
        options: the class whose instance the function of `dino_ds.cli.main` gets, besides `recipe`, `ds` and
            `ds_path` if it takes them.
        group: heading of help.
        recipe: default of --config, None for the schema's defaults.
        ds_config: default of --ds_config, None where it may be left out (`ds` and `ds_path` are None then).
        needs_images: images must be named.
        takes_request: the function also gets `request`, the names and values as the user has given them.
        loads_torch: the command needs torch: it stops before it starts if torch does not load.
        ds_shown: words of help for the default of --ds_config, where that depends on the machine.
    """

    name: str
    summary: str
    options: type
    group: str
    takes_recipe: bool = False
    recipe: str | None = None
    takes_ds: bool = False
    ds_config: str | None = "ds_configs/zero0_fp32.json"
    needs_images: bool = False
    takes_request: bool = False
    loads_torch: bool = True
    ds_shown: str = ""

    @property
    def own_options(self) -> tuple[Option, ...]:
        return tuple(options_of(self.options).values())

    @property
    def all_options(self) -> tuple[Option, ...]:
        """The command's own options, after --ds_config and --config if it takes these, and before --debug."""
        ds_shown = self.ds_shown or self.ds_config or "none: one is recommended"
        recipe_shown = self.recipe or "the ViT-S/16 of the DINO paper"
        ds = option(None, "DeepSpeed's JSON: how fast and on what hardware", shown=ds_shown)
        recipe = option(None, "the recipe: a shipped name or a YAML file: what is learned", shown=recipe_shown)
        added = {"ds_config": ds} if self.takes_ds else {}
        added |= {"config": recipe} if self.takes_recipe else {}
        files = (Option(name, FieldInfo.from_annotated_attribute(str, info)) for name, info in added.items())
        return (*files, *self.own_options, _DEBUG)

    @functools.cached_property
    def known_options(self) -> dict[str, Option]:
        """Every option by name, with the keys of the recipe where the command takes one."""
        recipe = {option.name: option for option in recipe_options() if self.takes_recipe}
        return recipe | {option.name: option for option in self.all_options}

    @property
    def bare(self) -> tuple[str, ...]:
        """The options that words without an option's name set, in this order; a list takes all words that are left."""
        return tuple(option.name for option in self.own_options if option.fact("bare"))

    @property
    def images_option(self) -> str:
        """The option for images, which a word after those of `bare` sets; "" for commands without such an option."""
        own = "root" if "root" not in self.bare and "root" in self.known_options else ""
        return "data.root" if self.needs_images else own


COMMANDS: dict[str, Command] = {}  # every command by name; filled where `options.commands` imports the classes


@dataclass_transform(frozen_default=True, kw_only_default=True)
def command(name: str, group: str, **facts: Any) -> Callable[[type[Options]], type[Options]]:
    """Make a class the options of a command; its docstring is the summary of help. `facts` are fields of Command."""

    def register(cls: type[Options]) -> type[Options]:
        declared = cls if "__pydantic_fields__" in vars(cls) else options(cls)
        COMMANDS[name] = Command(name, declared.__doc__ or "", declared, group, **facts)
        return declared

    return register


def meaning(option: Option) -> str:
    return ": ".join(text for text in (option.description, ", ".join(option.choices)) if text)


def field_of(option: Option) -> str:
    """The name of an option's field in its class: a Python keyword gets an underscore."""
    return f"{option.name}_" if keyword.iskeyword(option.name) else option.name


_DEBUG = Option("debug", FieldInfo.from_annotated_attribute(bool, option(False, "show tracebacks of errors")))

Json = Annotated[bool, option(..., "print one JSON object")]
Model = Annotated[str, option(..., MODEL_FORMS, bare=True)]
_HEADS = "number of attention heads, for a file that does not state it"
Heads = Annotated[Count | None, option(..., _HEADS, shown="as known networks of its width have")]
PictureKind = Literal["map", "neighbors", "pca", "attention"]
EmbedWhat = Literal["cls", "mean", "patches"]
_Source = Annotated[str | None, option(..., "as data.source of a recipe", shown="the run's, else folder")]


def _check_form(form: object) -> object:
    if form == "adapters":
        raise ValueError("LoRA's adapters are added to the weights of every export: take safetensors, timm or onnx")
    return form


ExportForm = Annotated[Literal["safetensors", "timm", "onnx"], BeforeValidator(_check_form)]


@command("eval", "evaluate")
class EvalOptions:
    """k-NN, linear classifiers and statistics of a teacher's frozen features"""

    model: Model
    evals: Listed[Evaluation] = option(("knn",), "comma-separated list of")
    source: _Source = None
    root: str | None = option(None, "labeled training images, as data.root", shown="the run's")
    test_root: str | None = option(None, "labeled test images", shown="the run's eval.root, or the source's own")
    benchmark_root: str | None = option(None, f"folder with the images of {', '.join(BENCHMARKS)}")
    size: Count | None = option(
        None, "side of the images in pixels, a multiple of the patch size", shown="the model's or the benchmark's"
    )
    k: Listed[Count] | None = option(None, "numbers of neighbors, for knn", shown="10,20,100,200")
    temperature: Positive | None = option(None, "knn weighs neighbors by exp(similarity / temperature)", shown="0.07")
    images: Count | None = option(None, "largest number of images of each set", shown="all")
    workers: Amount | None = option(None, "loading processes of each rank", shown="by the cores")
    out: str | None = option(None, "JSON file for the results", shown="RUN/evaluations.json of a run")
    allow_code: AllowedCode = None
    json: Json = False


@command("embed", "evaluate")
class EmbedOptions:
    """a vector for every image, in one file: for search, clustering, or a classifier of your own"""

    model: Model
    out: str = option(..., "file to write, .npy (a .csv beside it names the rows) or .parquet")
    source: _Source = None
    root: str | None = option(None, "images, as data.root", shown="the run's")
    what: EmbedWhat = option("cls", "features of the image (CLS), the mean of its patches, or their map")
    half: bool = option(False, "write 16-bit numbers, in half the size")
    size: Count | None = option(None, "side of the images in pixels, a multiple of the patch size", shown="the model's")
    batch: Count = option(64, "number of images that a process computes at once")
    workers: Amount | None = option(None, "loading processes of each rank", shown="by the cores")
    allow_code: AllowedCode = None
    json: Json = False


_MOVED = "folder of the images, if they have moved since dino-ds embed"
_Moved = Annotated[str | None, option(..., _MOVED, shown="as embed was told")]
_Features = Annotated[str, option(..., "a file of dino-ds embed: .npy or .parquet", bare=True)]


@command("find", "evaluate")
class FindOptions:
    """the nearest images of one or more: a table, a list and a picture"""

    features: _Features
    images: tuple[str, ...] = option(..., "image files, or rows of features by number or name", bare=True)
    top: Count = option(20, "number of neighbors of each image")
    model: str | None = option(None, "model that made the features, to describe image files", shown="as embed was told")
    root: _Moved = None
    out: str | None = option(
        None, "first part of the names of the new list and picture", shown="FEATURES-found, or -2, ..."
    )
    memory_gib: Gib = option(1.0, "GiB of memory for blocks of features")
    allow_code: AllowedCode = None
    json: Json = False


@command("curate", "evaluate")
class CurateOptions:
    """lists without near-duplicates, clusters and balanced lists, from the features of images"""

    features: _Features
    duplicates: Annotated[float, Field(gt=0, le=1)] | Literal["auto"] | None = option(
        None, "keep one of near-duplicates: of neighbors that show the same (auto), or of pairs with this cosine"
    )
    clusters: Listed[Count] | None = option(
        None, "number of clusters; further numbers cluster these again, such as 1000,100,10"
    )
    draw: Count | None = option(None, "number of images in a list that is balanced over the clusters")
    seed: Seed = option(0, "seed of clusters and draws")
    root: _Moved = None
    out: str | None = option(None, "new folder", shown="FEATURES-duplicates, -clusters or -drawn")
    memory_gib: Gib = option(1.0, "GiB of memory for blocks of features")
    allow_code: AllowedCode = None
    json: Json = False


@command("pictures", "look")
class PicturesOptions:
    """what a teacher sees: a map of images, nearest neighbors, PCA of patches, attention"""

    model: Model
    source: _Source = None
    root: str | None = option(None, "images, as data.root", shown="the run's")
    out: str | None = option(None, "folder for the PNG files", shown="RUN/pictures")
    only: Listed[PictureKind] | None = option(None, "comma-separated list of", shown="those that fit the network")
    allow_code: AllowedCode = None
    json: Json = False


@command("export", "export")
class ExportOptions:
    """a run's teacher, or any weights, as safetensors, a folder for timm and transformers, or ONNX"""

    model: Model
    format: ExportForm = option(..., "one of")
    out: str | None = option(None, "file or folder to write", shown="beside the weights")
    heads: Heads = None
    backbone: str | None = option(
        None,
        "timm name or module:Class of a network other than a ViT, for a file that does not state it",
        shown="recognized by its tensors",
    )
    allow_code: AllowedCode = None
    json: Json = False
