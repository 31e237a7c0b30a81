"""Reads a command line, or the keywords of a call in Python, as a `Request`, and turns that into the arguments of a
command's function. Unknown options are refused first: fire would run a command before it complains about them."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from dino_ds.basics.files import is_file, is_url, unusable_text
from dino_ds.basics.names import as_written, nearest, suggestion, unquoted, words_elsewhere
from dino_ds.basics.own_code import allow_code
from dino_ds.config.ds_config import find_ds_config, load_ds_config
from dino_ds.config.ds_schema import is_key, key_names, wrong_key
from dino_ds.config.loading import key_elsewhere, load_recipe, recipe_names
from dino_ds.config.stages import Request, TrainOptions, holds_run, nothing_to_resume
from dino_ds.errors import CheckpointError, ConfigError
from dino_ds.options.commands import TRAIN
from dino_ds.options.definition import Command, field_of, meaning


def read(command: Command, request: Request) -> tuple[Any, dict[str, Any]]:
    """Return an instance of the command's options, and the other keywords of its function. Raises ConfigError."""
    check_required(command, request)
    config = request.options.get("config", command.recipe)
    ds_config = request.options.get("ds_config", command.ds_config)
    fields = {option.name: field_of(option) for option in command.own_options}
    named = {field: request.options[name] for name, field in fields.items() if name in request.options}
    options = command.options(**named)
    allow_code(getattr(options, name, None) for name in ("allow_code", "source", "backbone"))
    files, problems = dict[str, Any](), list[str]()
    if command.takes_recipe:
        try:
            if command is TRAIN:
                options = _with_run_folder(options, request)
                resumed, of_recipe = f"{options.run_dir}/config.yaml", request.settings.values
                names_images = of_recipe.get("data.root") or of_recipe.get("data.source", "folder") != "folder"
                resumes = options.resume is not False and options.from_ is None and is_file(resumed)
                # A shipped recipe that names no images only chooses which run to resume.
                if resumes and request.config in recipe_names() and not names_images:
                    others = {name: value for name, value in request.options.items() if name != "config"}
                    request = dataclasses.replace(request, options=others)
                files["recipe"] = request.recipe_for_start(Path(options.run_dir))
            else:
                files["recipe"] = load_recipe(config, request.recipe, request.notes)
            data, prints = files["recipe"].data, getattr(options, "print", None)
            if command.needs_images and not prints and data.source == "folder" and not data.root and not data.mixture:
                how = "--data.root FOLDER, --data.source NAME, or --config quickstart for embedded photos"
                problems.append(f"no images are given: {how}")
        except ConfigError as error:
            problems.append(str(error))
    if command.takes_ds and ds_config is not None:
        try:
            files["ds"] = load_ds_config(ds_config, request.ds)
            files["ds_path"] = find_ds_config(ds_config)
        except ConfigError as error:
            problems.append(str(error))
    elif command.takes_ds:
        files |= {"ds": None, "ds_path": None}
        if request.ds:
            why = "changes a ds JSON, and none is given: name it with --ds_config"
            problems.append(f"--ds.{next(iter(request.ds))} {why}")
    if problems:
        raise ConfigError("\n".join(problems))
    return options, files | ({"request": request} if command.takes_request else {})


def _with_run_folder(options: TrainOptions, request: Request) -> TrainOptions:
    config = request.config
    if options.print == "-":
        raise ConfigError("--print -: the recipe goes to a file: name one, such as --print recipe.yaml")
    if options.print is not None and (options.from_ or options.resume is not False):
        instead = "leave out --from and --resume; the recipe of a run is RUN/config.yaml"
        raise ConfigError(f"--print writes what --config and keys of the recipe say: {instead}")
    if not options.run_dir and config is None and options.from_ is not None:
        raise ConfigError("--from without --config: name the new run's folder with --run_dir")
    folder, note = options.run_dir, ""
    if not options.run_dir and config is None and options.resume not in (False, "auto"):
        runs = [run for run in Path("runs").glob("*") if holds_run(run)]
        runs.sort(key=lambda run: max(file.stat().st_mtime for file in (run, *run.glob("checkpoints"))), reverse=True)
        if not runs:
            nothing = f"nothing to resume: {Path.cwd() / 'runs'} holds no run"
            raise CheckpointError(f"{nothing}; name its folder with --run_dir")
        if len(runs) > 1:
            resume = f"--resume{'' if options.resume is True else f' {options.resume}'}"
            more = f"; and {len(runs) - 5} more" if len(runs) > 5 else ""
            commands = "; ".join(f"{resume} --run_dir {shlex.quote(str(run))}" for run in runs[:5])
            raise CheckpointError(f"{resume} of which run? the newest first: {commands}{more}")
        folder, note = str(runs[0]), f"run folder {runs[0]}, the only run in runs"
    elif not options.run_dir:
        folder, note = _default_folder(Path(config or "vits16").stem, options.resume is not False)
    request.notes.extend([note] if note else [])
    if is_url(folder):
        raise ConfigError(f"--run_dir {folder} is not a folder: keep a run on a disk, then copy its folder there")
    run_dir = Path(os.path.expanduser(folder))  # as a shell does it
    if config is None and options.from_ is None and options.resume is not False and "data.root" not in request.recipe:
        is_run, recorded = holds_run(run_dir), run_dir / "config.yaml"
        if is_run and not recorded.is_file():
            state = "is not a file" if os.path.lexists(recorded) else "is missing"
            advice = "and it alone says what this run trains: bring it back, or give the run's settings again"
            raise CheckpointError(f"{recorded} {state}, {advice}")
        if not is_run and options.resume != "auto":
            raise nothing_to_resume(run_dir)
    return dataclasses.replace(options, run_dir=os.path.expanduser(folder))


def _default_folder(name: str, resumes: bool) -> tuple[str, str]:
    """Return the run folder for recipe `name`, the newest to resume or one with the next number, and a line about the
    choice or "". On several machines, which may see different folders (a network disk's cache), it has no number."""
    first = os.path.join("runs", name)
    pattern = rf"{re.escape(name)}(?:-([1-9][0-9]{{0,8}}))?"  # NAME-N has the number N, and NAME itself 1
    matches = [(folder, re.fullmatch(pattern, folder.name)) for folder in Path("runs").glob("*")]
    numbers = [int(match[1] or 1) for folder, match in matches if match and match[1] != "1" and holds_run(folder)]
    if not numbers:
        return first, ""
    last = max(numbers)
    newest = first if last == 1 else f"{first}-{last}"
    here = os.environ.get("LOCAL_SIZE") or os.environ.get("LOCAL_WORLD_SIZE") or "1"
    if os.environ.get("WORLD_SIZE", "1") != here:
        if resumes and last > 1:
            several = f"there are {len(numbers)} runs of {name}"
            raise ConfigError(f"{several}: on several machines name the one to resume, --run_dir {newest}")
        return first, ""
    if resumes:
        return newest, f"run folder {newest}, the newest of {len(numbers)} of {name}" if len(numbers) > 1 else ""
    free = f"{first}-{last + 1}"
    return free, f"run folder {free}: {newest} holds a run, which --resume --run_dir {newest} would continue"


def parse_flags(command: Command, argv: Sequence[str]) -> Request:
    """Read the words after the command's name. Raises ConfigError with one line per problem."""
    request, problems = Request(), list[str]()
    for name, value in _pairs(command, list(argv), problems):
        _store(command, request, name, value, problems)
    if problems:
        raise ConfigError("\n".join(problems))
    return request


def parse_keywords(command: Command, keywords: Mapping[str, Any]) -> Request:
    """Read the keywords of a call in Python; None is an option that is not given. Raises ConfigError."""
    by_name = {name: option for option in command.all_options for name in (field_of(option), option.name)}
    request, problems = Request(), list[str]()
    for name, value in _flat("", keywords, command):
        option = by_name.get(name)
        if name in ("json", "debug", "print"):
            problems.append(f"{name}: not an option in Python")
        elif option is None:
            if name != "ds" or value is not None:
                _store(command, request, name, value, problems)
        elif isinstance(value, dict):
            how = 'name a file, and set keys beside it: data={"root": X}, ds={"zero_optimization": {"stage": 1}}'
            problems.append(f"{name}: a dict is not a value; {how}")
        elif value is not None:
            is_text = isinstance(value, tuple) and not option.takes_list
            text = ",".join(map(unquoted, value)) if is_text else value
            for part in value if isinstance(value, tuple) and option.takes_words else [text]:
                _store(command, request, option.name, part, problems)
    if problems:
        raise ConfigError("\n".join(problems))
    return request


def _flat(prefix: str, values: Mapping[Any, Any], command: Command) -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping) and name not in command.known_options:
            yield from _flat(f"{name}.", value, command)
        else:
            yield name, _plain(name, value)


def _plain(name: str, value: Any) -> Any:
    if getattr(value, "shape", None) == ():
        value = value.item()
    if isinstance(value, str | os.PathLike):
        text = str(os.fspath(value))
        return os.path.expanduser(text) if text.startswith("~/") else text  # as a shell does it
    if isinstance(value, list | tuple):
        return tuple(_plain(name, part) for part in value)
    if isinstance(value, Mapping):
        return {str(key): _plain(name, part) for key, part in value.items()}
    if value is None or isinstance(value, bool | int | float):
        return value
    allowed = "a value is text, a number, True, False, None, a path, or a list or dict of those"
    raise ConfigError(f"{name}: a {type(value).__name__} can't be given; {allowed}")


def check_required(command: Command, request: Request) -> None:
    wanted = [option for option in command.own_options if option.info.is_required()]
    for option in wanted:
        if option.name not in request.options:
            named = [f"--{other.name} {[*other.choices, 'X'][0]}" for other in wanted if not other.fact("bare")]
            usage = " ".join(["dino-ds", command.name, *(word.upper() for word in command.bare), *named])
            raise ConfigError(f"no {option.name} is given: {usage}, {meaning(option)}")


def drop_local_rank(argv: Sequence[str]) -> list[str]:
    """Remove the --local_rank=N that DeepSpeed's launcher adds: the environment has the local rank too."""
    kept, before = list[str](), ""
    for word in argv:
        is_rank = word.startswith(("--local_rank=", "--local-rank=")) or word in ("--local_rank", "--local-rank")
        if not is_rank and not (before in ("--local_rank", "--local-rank") and word.isdigit()):
            kept.append(word)
        before = word
    return kept


def _pairs(command: Command, words: list[str], problems: list[str]) -> Iterator[tuple[str, str]]:
    """Yield (name without its two dashes, value) from `--key value`, `--key=value`, switches and bare words."""
    bare, strays, known = list(command.bare), list[str](), command.known_options
    images = list[str]()  # at most one: a path after the words of `bare`
    while words:
        word = words.pop(0)
        if not _is_flag(word) and bare:
            yield bare[0], word
            bare = bare[not known[bare[0]].takes_words :]
            continue
        if not _is_flag(word):
            unusable, is_pattern = unusable_text(word), re.search(r"[*{]|\.h5:", word) is not None
            is_there = not unusable and (is_url(word) or is_pattern or os.path.lexists(os.path.expanduser(word)))
            is_images = command.images_option and not images and is_there
            (images if is_images else strays).append(word if is_images else unusable or as_written(word))
            continue
        name, equals, value = word.removeprefix("--").partition("=")
        if equals:
            yield name, value
        elif name in known and known[name].is_switch:
            is_value = words and words[0].lower() in ("true", "false")
            if words and len(known[name].members) > 1:
                with contextlib.suppress(ValueError):
                    is_value = known[name].read(words[0]) is not None
            yield name, words.pop(0) if is_value else "true"
        else:
            yield name, words.pop(0) if words and not _is_flag(words[0]) else ""
    for word in images:
        option = f"--{command.images_option} {word}"
        if other := _other_meaning(command, word):
            problems.append(f"{as_written(word)} has no option before it: write {option}, or {other}")
            continue
        before = len(problems)
        yield command.images_option, word
        if not strays and len(problems) == before and os.environ.get("RANK", "0") == "0":
            print(f"dino_ds: {word} is read as {option}", file=sys.stderr, flush=True)
    if strays:
        advice = "a value with spaces stands in quotes, several values have commas between them"
        if command.images_option and len(strays) == 1 and not images and "=" not in strays[0]:
            advice = f"as images (--{command.images_option}) it does not exist"
        names = f"{', '.join(strays[:3])}{', ...' if len(strays) > 3 else ''}"
        problems.append(f"unexpected {names}: options are written --key value; {advice}")


def _other_meaning(command: Command, word: str) -> str:
    """The option to write where a `word` given as images names a run, recipe, ds JSON or weights; "" if it does not."""
    if is_file(os.path.join(os.path.expanduser(word), "config.yaml")):
        as_model = f"{' '.join(command.bare) or '--model'} {word} first"
        return f"--resume --run_dir {word}" if command is TRAIN else as_model
    if command.takes_recipe and (word in recipe_names() or word.endswith((".yaml", ".yml"))):
        return f"--config {word}"
    if command.takes_ds and word.endswith(".json"):
        return f"--ds_config {word}"
    return f"--model.init_from {word}" if command is TRAIN and word.endswith((".safetensors", ".pth", ".pt")) else ""


def _is_flag(word: str) -> bool:
    return word.startswith("-") and not re.fullmatch(r"-[0-9.].*|-", word)


def _store(command: Command, request: Request, name: str, value: Any, problems: list[str]) -> None:
    name = "ds_config" if name == "deepspeed_config" else name
    fixed = next((option for option in command.all_options if option.name == name), None)
    target, key, unknown = request.options, name, ""
    if fixed is None and command.takes_ds and name.startswith("ds."):
        target, key = request.ds, name[3:]
        unknown = "" if is_key(key) else wrong_key(key)
    elif fixed is None:
        target, unknown = request.recipe, "" if name in command.known_options else _unknown(command, name)
    if unknown:
        typed = name if name.startswith("-") else f"--{name}"
        problems.append(f"{typed if len(typed) < 100 else f'{typed[:50]}...'}: {unknown}")
    elif isinstance(value, str) and (unusable := unusable_text(value)):
        problems.append(f"--{name}: {unusable}")
    elif isinstance(value, str) and not value.strip():
        problems.append(f"--{name} has no value: write --{name} VALUE")
    elif fixed is not None and fixed.takes_words:
        request.options[key] = (*request.options.get(key, ()), value)
    elif key in target:
        problems.append(f"--{name} is given twice: {as_written(str(target[key]))} and {as_written(value)}")
    elif fixed is None:
        target[key] = value
    else:
        try:
            target[key] = fixed.read(value)
        except ValueError as error:
            problems.append(f"--{name}: {error}")


def _unknown(command: Command, name: str) -> str:
    word = name.replace("-", "_").lower()
    leaf = word.rpartition(".")[2]
    answers, same = words_elsewhere("options"), words_elsewhere("same_option")
    names = (same.get(word) or same.get(leaf, "")).split()
    answer = next((f"write --{option}" for option in names if option in command.known_options), None)
    if command.takes_recipe:
        answer = answer or answers.get(word) or answers.get(leaf) or key_elsewhere(name)
    if answer:
        return f"unknown option: {answer}"
    if name.startswith("-"):
        return "options begin with two dashes"
    ds = [f"ds.{key}" for key in key_names()] if command.takes_ds else []
    near = suggestion([f"--{option}" for option in nearest(name, [*command.known_options, "help", *ds])])
    if not near and "." in name and name in TRAIN.known_options:
        return f"an option of dino-ds train; dino-ds {command.name} goes by the images or the model: leave it out"
    return f"unknown option.{near or f' dino-ds {command.name} --help lists them'}"
