"""Every command of `dino-ds`, with the options of those about runs, images, machines and speed. No torch here. Makes
the pages of `--help` from the schemas; the site's page of options is that of `train --help all`."""

from __future__ import annotations

import textwrap
from typing import Annotated

from pydantic import Field

from dino_ds.basics.names import words_elsewhere
from dino_ds.config.ds_schema import KEYS, PASSED
from dino_ds.config.fields import IMAGE_FORMS, AllowedCode, Amount, Count, Gib, Listed, Positive, option
from dino_ds.config.loading import recipe_options
from dino_ds.config.schema import Option
from dino_ds.config.stages import TrainOptions
from dino_ds.errors import EXIT_CODES
from dino_ds.models.specs.backbones import BACKBONES
from dino_ds.options.definition import COMMANDS, Command, Heads, Json, Model, command, meaning, options

_DS = "that of a resumed run; else the planner's for these GPUs; without GPUs ds_configs/zero0_fp32.json"
_TAKES = dict.fromkeys(("takes_recipe", "takes_ds", "takes_request", "needs_images"), True)
command("train", "train", **_TAKES, ds_shown=_DS)(TrainOptions)


@command("report", "look", loads_torch=False)
class ReportOptions:
    """one HTML file about a run: curves, evaluations, pictures, memory against plan, how to reproduce it"""

    run: str = option(..., "the run folder", bare=True)
    out: str | None = option(None, "the .html file", shown="RUN/report.html")
    allow_code: AllowedCode = None
    json: Json = False


@command("look-data", "look", takes_recipe=True, needs_images=True)
class LookDataOptions:
    """a sheet of images with all their crops, and what the data set is like"""

    images: Annotated[Count, Field(le=200)] = option(8, "number of images on the sheet, at most 200")
    sample: Amount = option(10000, "number of images, drawn at random, on which statistics are made; 0: all")
    out: str | None = option(None, "the new sheet", shown="look-data.png, look-data-2.png, ...")
    json: Json = False


@command("advise", "train", loads_torch=False)
class AdviseOptions:
    """which settings for your images and GPUs: each with its reason, and the command to type"""

    root: str | None = option(None, f"as data.root: {IMAGE_FORMS}", bare=True)
    source: str = option("folder", "as data.source of a recipe")
    gpus: Count | None = option(None, "number of GPUs, of any kind", shown="this machine's")
    sample: Count = option(500, "number of images to look at, drawn at random, for 3 s at most")
    json: Json = False


@command("shard", "cluster")
class ShardOptions:
    """image files -> tar shards with checksums; continues after an interruption"""

    root: str = option(..., f"as data.root: {IMAGE_FORMS}")
    out: str = option(..., "folder of the shards")
    shard_size: Count = option(2000, "number of images in a shard")
    shrink: Count | None = option(None, "shrink larger images to a shorter side of N pixels, as JPEGs")
    workers: Count | None = option(None, "number of processes", shown="one a core")
    json: Json = False


@command("doctor", "train", takes_recipe=True, takes_request=True, takes_ds=True, loads_torch=False)
class DoctorOptions:
    """what would stop a training on this machine and with this installation, each problem with its remedy"""

    run_dir: str = option("runs", "folder in which runs are made")
    hostfile: str | None = option(
        None, "check also the machines in this file, over ssh: each in a line NAME slots=N", shown="this machine alone"
    )
    json: Json = False


@command("plan", "train", takes_recipe=True, takes_ds=True, ds_config=None, loads_torch=False)
class PlanOptions:
    """whether a model fits on given GPUs, by part, and the ds config to take; needs no GPU"""

    gpu: str | None = option(None, "kind of GPU, such as a100-40g (an unknown one lists them all)")
    gpus: Count = option(1, "number of GPUs of a node")
    nodes: Count = option(1, "number of nodes")
    memory_gib: Gib | None = option(None, "GiB of memory of a GPU", shown="as its kind has")
    write: str | None = option(None, "new file for the recommended ds JSON")
    json: Json = False


_Steps = Annotated[Count, option(..., "number of measured steps")]
_Threads = Annotated[Count, option(..., "number of threads; with one, CPU time is measured, else wall time")]


@options
class BenchOptions:
    """The options of every bench of the training step."""

    batch: Count | None = option(
        None, "number of images of a process; sets data.global_batch", shown="64 on a GPU, 8 without"
    )
    steps: _Steps = 5
    warmup: Amount = option(2, "number of steps before the measured ones")
    threads: _Threads = 1
    json: Json = False


@command("bench step", "measure", takes_recipe=True, recipe="vitti16", takes_ds=True)
class BenchStepOptions(BenchOptions):
    """images/s, TFLOP/s, MFU, peak memory and the share of each part of the training step"""

    compare: str | None = option(None, "KEY=A,B: two values of a key, interleaved in one process")
    profile: str | None = option(None, "folder for torch's trace of 3 more steps, whose operators are listed")
    steps: _Steps = 10


@command("bench ladder", "measure", takes_recipe=True, recipe="vitti16")
class BenchLadderOptions(BenchOptions):
    """from the plain DINO step upwards, one optimization at a time: speed and memory of each"""

    steps: _Steps = 7


@command("bench tune", "measure", takes_recipe=True, takes_ds=True, takes_request=True)
class BenchTuneOptions:
    """the largest and the fastest micro-batch, loader processes and levers of this machine, by measuring"""

    minutes: Positive = option(5.0, "minutes that the search takes, about")
    ranks: Count | None = option(None, "number of processes", shown="one a GPU, or 1")
    threads: Count | None = option(None, "number of threads in each process", shown="its share of the cores")
    memory_gib: Gib | None = option(
        None, "GiB of memory that a process may take", shown="the GPU's, or 90 % of the free host memory"
    )
    out: str = option("tune.html", "the page; its figures are in the .json beside it")
    write: str | None = option(None, "new folder for the recipe and the ds JSON that were found")
    profile: str | None = option(None, "folder for torch's trace of the tuned step")
    resume: bool = option(False, "continue with the trials in the .json")
    json: Json = False


@command("bench inference", "measure")
class BenchInferenceOptions:
    """latency p50, p95, p99 and images/s of a teacher's features: FP32, bf16, compiled, interleaved"""

    model: Model
    random: bool = option(False, "take MODEL as an architecture with random weights, at 224 pixels")
    batches: Listed[Count] = option((1, 4, 16, 64), "numbers of images of a call")
    size: Count | None = option(None, "pixels of a side, a multiple of the patch size", shown="the model's")
    rounds: Count = option(200, "largest number of measured calls of each variant")
    seconds: Positive = option(30.0, "seconds for each batch size, about; at least 5 rounds are made")
    warmup: Amount = option(3, "number of calls before the measured ones")
    threads: _Threads = 1
    heads: Heads = None
    allow_code: AllowedCode = None
    json: Json = False


TRAIN = COMMANDS["train"]


def find_command(words: list[str]) -> tuple[Command, list[str]] | None:
    for length in (2, 1):
        name = " ".join(words[:length])
        if len(words) >= length and name in COMMANDS:
            return COMMANDS[name], words[length:]
    return None


_EXAMPLES = """\
examples
  dino-ds train --config quickstart
  deepspeed --num_gpus 4 --module dino_ds.train --ds_config zero2_fp16 --data.root /images
  torchrun --nproc_per_node 2 -m dino_ds.train --config cifar10 --data.root data --data.download true
  dino-ds train --config vitb16 --data.root /images --optimizer.lr 5e-4 --ds.gradient_clipping 0.3
"""

FIRST_DAY = {
    "dino-ds train --config quickstart": "the embedded photographs: minutes, to see that it works",
    "dino-ds advise IMAGES": "settings for your images and this machine, and the command to type",
    "dino-ds look-data --data.root IMAGES": "your images as the network will see them",
    "dino-ds train --config small --data.root IMAGES --run_dir runs/mine": "a small ViT on them, without a GPU; "
    "--resume continues",
    "dino-ds report runs/mine": "curves, evaluations and pictures on one page",
    "dino-ds export runs/mine --format timm": "the result for other programs",
}
GROUPS = ("train", "look", "evaluate", "export", "measure", "cluster")  # headings of commands, in the order of help
FIRST_OPTIONS = ("config", "run_dir", "resume", "max_steps", "ds_config")
FIRST_KEYS = (  # keys of the recipe that a new user needs first: the short page shows only these
    *("data.root", "data.source", "data.global_batch", "length", "optimizer.lr", "crops.global_size"),
    *("model.backbone", "model.init_from", "eval.root", "save_every"),
)
_RULES = """\
rules
  a recipe says what is learned, the ds JSON how fast and on what hardware: it changes results by rounding alone
  defaults < recipe file < command line; "extends: NAME" or "extends: FILE.yaml" in a file: it sets what differs
  a length is "100 epochs", "5000 steps" or "1e6 images", a bare number is steps; none (null in YAML) unsets a value
  --resume continues a run, --from RUN begins a stage with another one, --model.init_from takes weights alone
  global batch = micro-batch x accumulation x ranks: the recipe has the product, the ds JSON its factors ("auto")
"""


def help_text(words: list[str]) -> str:
    if named := find_command([word for word in words if not word.startswith("-")]):
        command, rest = named
        return _short_page(command) if command.takes_recipe and "all" not in rest else _command_page(command)
    first = [(line, "", about) for line, about in FIRST_DAY.items()]
    lines = ["usage: dino-ds COMMAND [--option value ...]", "", "a first day", *_rows(first), ""]
    for group in GROUPS:  # a command with the heading's name comes first
        commands = sorted((c for c in COMMANDS.values() if c.group == group), key=lambda c: (c.name != group, c.name))
        lines += [group, *_rows([(command.name, "", command.summary) for command in commands]), ""]
    lines += ["dino-ds COMMAND --help: the options of a first day; --help all: every one", "", "exit codes"]
    return "\n".join([*lines, *_rows([(str(code), "", meaning) for code, meaning in EXIT_CODES.items()]), ""])


def _short_page(command: Command) -> str:
    known, is_train = command.known_options, command is TRAIN
    options = [known[name] for name in FIRST_OPTIONS] if is_train else command.all_options
    rows = [(f"--{name}", known[name].default, known[name].description) for name in FIRST_KEYS]
    lines = [*_head(command, "recipes"), "first options (default)", *_rows([*map(_row, options), *rows], 120), ""]
    rest = "with the keys of the ds JSON" if is_train else "keys of the ds JSON: dino-ds train --help all"
    lines += [f"all {len(known)} options: dino-ds {command.name} --help all, {rest}"]
    return "\n".join([*lines, "", *_EXAMPLES.splitlines()[:3]] if is_train else lines)


def _command_page(command: Command) -> str:
    parts = _head(command, "recipes", "other_recipes")
    parts += ["options (default)", *_rows([*map(_row, command.all_options)]), ""]
    if command.takes_recipe:
        options = [(f"--{o.name}", o.default, f"{o.description} [{o.type}]") for o in recipe_options()]
        lengths = "a length is '100 epochs', '5000 steps', '1e6 images', or '5 %' of --length"
        parts += [f"overrides of the recipe (default); {lengths}", *_rows(options), ""]
    if command.takes_ds:
        where = "" if command is TRAIN else "; dino-ds train --help all lists them"
        text = f"any key of the JSON, for example --ds.zero_optimization.stage 2{where}"
        keys = list[tuple[str, str, str]]()
        for name, key in KEYS.items():
            stages = f" (ZeRO {', '.join(map(str, acts_at))})" if (acts_at := key.fact("stages")) else ""
            keys.append((f"--ds.{name}", "", f"{key.description} [{key.type}]{stages}"))
        parts += ["overrides of the ds JSON", *_rows([("--ds.KEY", "the file's", text)])]
        passed = ("--ds.KEY", "", f"as DeepSpeed's documentation says: {', '.join(PASSED)}")
        parts += [*_rows([*keys, passed], 120), ""] if command is TRAIN else [""]
    if command is not TRAIN:
        return "\n".join(parts)
    backbones = f"backbones that dino_ds builds itself: {', '.join(BACKBONES)}"
    return "\n".join([*parts, *textwrap.wrap(backbones, 120, subsequent_indent="  "), "", _RULES, _EXAMPLES])


def _head(command: Command, *recipes: str) -> list[str]:
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


def _row(option: Option) -> tuple[str, str, str]:
    letter = "N" if option.type.startswith(("integer", "number")) else "X"
    several = f" {letter},{letter}" if option.takes_list else f" {letter}"
    return f"--{option.name}{'' if option.is_switch else several}", option.default, meaning(option)


def _rows(rows: list[tuple[str, str, str]], width: int = 110) -> list[str]:
    left, lines = max(len(name) for name, _, _ in rows) + 2, list[str]()
    for name, default, description in rows:
        text = textwrap.wrap(f"{description} ({default})" if default else description, width - left - 2)
        lines += [f"  {name:<{left}}{text[0]}", *(" " * (left + 2) + line for line in text[1:])]
    return lines
