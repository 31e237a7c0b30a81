"""The options of `train`, and the recipes of new runs, resumed runs and stages. A stage begins with another run: it
changes that run's recipe, and the lengths that it sets count from its own first step. No torch."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import socket
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from pydantic import BeforeValidator

from dino_ds.basics import names
from dino_ds.basics.files import check_format, is_url, read_object
from dino_ds.config.fields import PATH, AllowedCode, Count, Ramp, Resume, option
from dino_ds.config.loading import RecipeSettings, change_recipe, read_yaml, recorded_recipe
from dino_ds.config.recipe import Recipe
from dino_ds.config.schema import differences, flatten, named_values, options, options_of, show_value
from dino_ds.errors import CheckpointError, ConfigError, one_line
from dino_ds.method.specs.own import TERMS, counted_from
from dino_ds.models.specs.backbones import BACKBONES


def _read_resume(value: object) -> object:
    words = {"true": True, "false": False, "auto": "auto"}
    if not isinstance(value, str):
        return value
    if value.lower() not in words and not (value.isascii() and value.isdigit() and int(value) > 0):
        raise ValueError(f"{names.as_written(value)} is not auto or the step of a checkpoint")
    return words[value.lower()] if value.lower() in words else int(value)


@options
class TrainOptions:
    """train: images in, a teacher out"""

    run_dir: str = option(
        "", "folder of this run, for its metrics, checkpoints and teacher", shown="runs/RECIPE, or runs/RECIPE-2, ..."
    )
    from_: str | None = option(
        None,
        "run, or checkpoint RUN/checkpoints/step_N, with which a stage begins; keys not given are as in its recipe",
    )
    max_steps: Count | None = option(None, "stop after N steps, on the same schedules", shown="the recipe's length")
    resume: Annotated[Resume, BeforeValidator(_read_resume)] = option(
        False,
        "continue --run_dir by its own recipe from its newest complete checkpoint, or from step N's; auto: a new run "
        "if there is none yet",
    )
    allow_change: str | None = option(
        None, "KEY,KEY: settings that may differ from the checkpoint's although they change what is learned"
    )
    allow_code: AllowedCode = None
    allow_oversize: bool = option(False, "start even if more memory is predicted than the machine has")
    verbose: bool = option(False, "show all lines of RUN_DIR/log.txt on the screen too")
    print: str | None = option(
        None, "write the recipe, with all that is given here, to this new YAML file for editing, and do not train"
    )


ORIGIN = "from"  # the key of environment.json with the `Origin` of a stage
ENVIRONMENT = "environment.json"  # name of the file in a run folder with the run's id, its origin and its starts
CONFIG_NAME = "config"  # the key of environment.json with the --config that the run was begun with, null without one
STARTED_IN = "folder"  # the key of a start in environment.json with the working folder of that start


@dataclass(frozen=True)
class Origin:
    """The run that a stage began with: its folder and id, the step of the checkpoint, and what was taken over."""

    run: str
    run_id: str
    step: int
    stage_start: str

    @property
    def first_step(self) -> int:
        return self.step if self.stage_start == "continue" else 0

    @staticmethod
    def read(run_dir: Path) -> Origin | None:
        """The origin of the run in this folder; None for a run without one, or an unreadable environment.json."""
        recorded = read_environment(run_dir, ORIGIN)
        try:
            run, run_id, stage_start = (str(recorded[name]) for name in ("run", "run_id", "stage_start"))
            return Origin(run, run_id, int(recorded["step"]), stage_start)
        except (ValueError, KeyError, TypeError, OverflowError):
            return None

    def check_is(self, run: Path, step: int | None) -> None:
        """Raises CheckpointError if the run in the folder `run`, or `step` if it is given, is not that of this origin.
        A folder without a readable run id, such as one that is gone, is compared by its path."""
        run_id = read_run_id(run)
        is_same = str(run) == self.run if run_id is None else run_id == self.run_id
        if is_same and step in (None, self.step):
            return
        named = f"{run}{'' if step is None else f', step {step}'}"
        which = "which can't be read" if run_id is None else f"run {run_id}"
        began = f"this stage began with {self.run}, step {self.step} (run {self.run_id})"
        how = "leave --from out to continue it, or begin another stage in another --run_dir"
        raise CheckpointError(f"--from {named} ({which}), and {began}: {how}")


def read_environment(run_dir: Path, key: str) -> Any:
    """The value of a key of a folder's environment.json, or None if it is missing or can't be read."""
    try:
        return read_object(run_dir / ENVIRONMENT)[key]
    except (OSError, ValueError, KeyError):
        return None


def read_run_id(run_dir: Path) -> str | None:
    """The run id in environment.json of a folder, or None if it is missing or can't be read."""
    run_id = read_environment(run_dir, "run_id")
    return run_id if isinstance(run_id, str) and re.fullmatch("[0-9a-f]{1,64}", run_id) else None


def learned(recipe: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in flatten(dict(recipe)).items() if not is_free(key)}


def is_free(key: str) -> bool:
    """Whether a resumed run may change this key: its field says that it is not `learned`; by default, keys of eval."""
    by_section, option = not key.startswith("eval."), options_of(Recipe).get(key)
    return not (by_section if option is None else option.fact("learned", by_section))


def changed_settings(before: Mapping[str, Any], now: Mapping[str, Any], began_in: str | None = None) -> dict[str, str]:
    """The differences between two recipes that change what is learned: words such as "seed 0 -> 1", by dotted name. The
    same path in another spelling is no difference; relative paths of `before` start in the folder `began_in`."""
    old, new = learned(before), learned(now)
    changes = differences(old, new)
    return {key: how for key, how in changes.items() if not _is_same_place(key, old.get(key), new.get(key), began_in)}


def _is_same_place(key: str, old: Any, new: Any, began_in: str | None) -> bool:
    if key not in path_keys() or not isinstance(old, str) or not isinstance(new, str):
        return False
    (kind, there), (other, here) = split_place(old), split_place(new)
    if kind != other or not there or not here:
        return False
    there, here = (os.path.expanduser(path) for path in (there, here))
    if is_url(there) or is_url(here):
        return there == here
    is_same = os.path.realpath(os.path.join(began_in or "", there)) == os.path.realpath(here)
    return is_same or bool(options_of(Recipe)[key].fact("by_content"))


@functools.cache
def path_keys() -> tuple[str, ...]:
    """The dotted names of the keys whose values may be paths, as their types say."""
    options = options_of(Recipe).items()
    return tuple(name for name, option in options if any(PATH in limits for _, limits in option.members))


def split_place(value: str) -> tuple[str, str]:
    """A value of one of `path_keys` -> the prefix before its path, and the path; "" for a word that is no path."""
    if value.startswith("clusters:"):
        return "clusters:", value.removeprefix("clusters:")
    return "", "" if value in ("none", "classes", "snapshot", "ema") else value


def load_run_recipe(run_dir: Path) -> Recipe:
    """The recipe in a run folder's config.yaml. Raises ConfigError, and CheckpointError for a run of another format."""
    path, remedy = run_dir / "config.yaml", "continue it with the dino_ds that began it, or begin another run"
    check_format(read_yaml(str(path)).get("format"), path, remedy)
    return recorded_recipe(path)


def own_recipe(run_dir: Path, replaced: Collection[str], notes: list[str], flag: str = "--data.root") -> Recipe:
    """The recipe of the run in `run_dir`, with relative paths completed by the folder in which the run was started;
    `notes` gets a line for each. replaced: keys whose values are not used; flag: the option that names other images.
    Raises ConfigError if config.yaml is not a recipe, or if the images are neither there nor in the working folder."""
    recipe, folder, moved = load_run_recipe(run_dir), started_in(run_dir), dict[str, str]()
    for key, value in named_values(recipe):
        is_place = key in path_keys() and key not in replaced and value is not None
        kind, value = split_place(value) if is_place else ("", "")
        if not value or is_url(value) or os.path.isabs(os.path.expanduser(value)):
            continue
        there = os.path.join(folder or "", value)
        if folder is not None and not os.path.samefile(folder, ".") and _is_there(there):
            moved[key] = kind + there
            notes.append(f"{key} {value} is {there}: {run_dir} was started in {folder}")
        elif key == "data.root" and not recipe.data.download and ":" not in recipe.data.source and not _is_there(value):
            places = f"{folder}, where it was started, nor in {os.getcwd()}" if folder else os.getcwd()
            missing = f"data.root {value}, which is not in {places}: name it with {flag}"
            raise ConfigError(f"{run_dir} was trained on {missing}")
    return change_recipe(recipe, moved) if moved else recipe


def started_in(run_dir: Path) -> str | None:
    """The working folder of the run's newest start, or None if it is gone or not recorded."""
    try:
        folder = read_environment(run_dir, "starts")[-1][STARTED_IN]
    except (LookupError, TypeError):
        return None
    return folder if isinstance(folder, str) and os.path.isdir(folder) else None


def _is_there(path: str) -> bool:
    """Whether `path` exists; of a pattern, the folder in which it begins; of FILE:/DATASET, the file."""
    path = path.partition(":/")[0]
    plain = re.split(r"[*?\[{]", path)[0]
    return os.path.lexists(path) or (plain != path and os.path.isdir(os.path.dirname(plain) or "."))


@dataclass(frozen=True)
class Request:
    """A command's request as the user typed it: the names of options and keys, and their values.

    Args:
        options: the command's own options by name, converted; `config` and `ds_config` are among them.
        recipe: keys of the recipe by dotted name, as text of a command line or as Python values.
        ds: keys of the ds JSON, likewise.
        notes: lines for the user about values that are understood otherwise than written.
    """

    options: dict[str, Any] = field(default_factory=dict)
    recipe: dict[str, Any] = field(default_factory=dict)
    ds: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list, compare=False)

    @property
    def config(self) -> str | None:
        return self.options.get("config")

    @property
    def names_ds_config(self) -> bool:
        """Whether the user has chosen a ds JSON, so that neither a resumed run nor the planner gives one."""
        return "ds_config" in self.options

    @functools.cached_property
    def settings(self) -> RecipeSettings:
        """The settings of the recipe by --config and keys. Raises ConfigError for a file that can't be read."""
        return RecipeSettings.collect(self.config, self.recipe)

    def recipe_for_start(self, run_dir: Path) -> Recipe:
        """The recipe of a start in `run_dir`. A resumed stage, or any run that is resumed without --config and --from,
        takes the recipe in its folder, and a new stage that of the run of --from, both with this request's changes.
        Other starts take the request's recipe alone. Raises ConfigError, and CheckpointError for a run of another
        format, a damaged environment.json, or a --from that is no run or not the one that a stage began with."""
        self.settings.allow_code()
        stage_from, resumes = self.options.get("from"), self.options.get("resume", False) is not False
        origin, step = (None, None) if stage_from is None else split_origin(stage_from)
        recorded, by_own = run_dir / "config.yaml", self.config is None and origin is None
        if resumes and recorded.is_file() and (by_own or load_run_recipe(run_dir).stage_start is not None):
            recipe = self.applied_to(own_recipe(run_dir, self.recipe, self.notes), forget=False)
            if recipe.stage_start is None:
                return recipe
            if (there := Origin.read(run_dir)) is None:
                only = "and it alone says which run this stage began with: bring it back from a copy"
                raise CheckpointError(f"{run_dir / ENVIRONMENT} is missing or damaged, {only}")
            if origin is not None:
                there.check_is(origin, step)
            return self.rebased_to_step(recipe, there.first_step)
        if origin is None:
            recipe = self.settings.load(self.notes)
            if recipe.stage_start is not None:
                why = "the recipe is a stage, which begins with another run"
                raise ConfigError(f"stage_start {recipe.stage_start}: {why}: add --from RUN")
            return recipe
        if not (origin / "config.yaml").is_file():
            near = near_run(origin)
            raise CheckpointError(f"--from {origin}: it is not a run (no config.yaml); give a run folder{near}")
        recipe = self.applied_to(own_recipe(origin, self.settings.names(), self.notes))
        if recipe.stage_start is None:
            how = "continue (its whole state, steps count on) or restart (its teacher's weights, from step 0)"
            raise ConfigError(f"no stage_start says what is taken over from the run before: add --stage_start {how}")
        if origin.resolve() == run_dir.resolve():
            itself = "is the run folder itself: --resume continues it, --run_dir names another"
            raise ConfigError(f"--from {origin} {itself}")
        if recipe.model.init_from is not None:
            both = f"--from {origin} and model.init_from {recipe.model.init_from}"
            raise ConfigError(f"{both}: a run begins with one of them")
        return recipe

    def applied_to(self, recipe: Recipe, forget: bool = True) -> Recipe:
        """A run's `recipe`, changed by this request; `forget`: first drop the settings that say how that run began."""
        if forget:
            weight, start = recipe.objective.preserve_weight, recipe.model.init_from
            dropped = f"objective.preserve_weight {weight} ends with the run before: it kept features of {start}"
            self.notes.extend([dropped] if weight else [])
            began = {"stage_start": "none", "model.init_from": "none", "objective.preserve_weight": "0"}
            recipe = change_recipe(recipe, began | recipe.outlasting_start)
        return self.settings.applied_to(recipe)

    def rebased_to_step(self, recipe: Recipe, step: int) -> Recipe:
        """Rebase the `recipe` of a stage that began at `step`: lengths that this request sets count from `step`,
        and those that are taken over stay. If the stage restarts at step 0, all lengths count from there."""
        written, restarts = self.settings.names(), recipe.stage_start == "restart"
        step = 0 if restarts else step
        moved = dict[str, str]()
        for key, value in named_values(recipe):
            section, _, leaf = key.rpartition(".")
            if not restarts and not {key, *[f"{section}.weight", f"{section}.teacher"] * (leaf == "start")} & written:
                continue  # a term's weight or teacher sets the term's start too
            if isinstance(value, Ramp) and value.length is not None:
                moved[key] = show_value(replace(value, length=replace(value.length, begin=step)))
            elif key == "length" or leaf == "start":
                moved[key] = show_value(replace(value, begin=step))
        if restarts or TERMS in written:
            moved[TERMS] = counted_from(recipe.objective.terms, step)
        return change_recipe(recipe, moved) if moved else recipe


def split_origin(origin: str) -> tuple[Path, int | None]:
    """RUN or RUN/checkpoints/step_N -> the run folder, and the step if it is named."""
    path = Path(origin)
    match = re.fullmatch(r"step_(\d{8,12})", path.name)
    return (path.parent.parent, int(match[1])) if match and path.parent.name == "checkpoints" else (path, None)


class ModelFolder(NamedTuple):
    """A model's folder, a run's or not; `name` marks another teacher than the newest: step_00000500, best_teacher."""

    folder: Path
    name: str

    @property
    def is_run(self) -> bool:
        return (self.folder / "config.yaml").is_file()

    def place(self, start: str, ending: str = "") -> Path:
        """The path of a result of the model: `start` + `ending`, with the `name` between them unless that is ""."""
        return self.folder / f"{start}{'-' if self.name else ''}{self.name}{ending}"


def find_model_folder(model: str) -> ModelFolder:
    """The `ModelFolder` of a model that is given as a run folder, a checkpoint or best teacher in it, or any other."""
    path = Path(os.path.expanduser(model))
    if path.name == names.BEST_TEACHER and (path.parent / "config.yaml").is_file():
        return ModelFolder(path.parent, path.stem)
    folder, step = split_origin(str(path if len(path.parts) > 2 else path.absolute()))
    return ModelFolder(path, "") if step is None else ModelFolder(folder, path.name)


def holds_run(run_dir: Path) -> bool:
    return (run_dir / "config.yaml").exists() or holds_checkpoint(run_dir)


def holds_checkpoint(run_dir: Path) -> bool:
    return any(run_dir.glob("checkpoints/step_*"))


def near_run(missing: str | Path) -> str:
    """The words ". Did you mean runs/x?" for run folders with names similar to a missing one's, or ""."""
    path, near = Path(os.path.expanduser(missing)), list[str]()
    with contextlib.suppress(OSError):
        runs = [folder.name for folder in path.parent.iterdir() if (folder / "config.yaml").is_file()]
        near = [str(path.with_name(name)) for name in names.nearest(path.name, runs) if name != path.name]
    return f".{names.suggestion(near)}" if near else ""


def missing_model(model: str) -> CheckpointError:
    near = near_run(model) or f".{names.did_you_mean(model, BACKBONES)}"
    how = names.weights_elsewhere(model) or f"give {names.MODEL_FORMS}{near}"
    return CheckpointError(f"{one_line(model, 300)} does not exist; {how}")


def check_may_begin(run_dir: Path, resume: Resume) -> None:
    """Raises ConfigError for a new run in a folder with a run, CheckpointError for --resume without a checkpoint."""
    there = holds_run(run_dir)
    if resume is False and there:
        how = "--resume to continue it" if holds_checkpoint(run_dir) else "--resume auto: it made no checkpoint"
        raise ConfigError(f"{run_dir} already holds a run; add {how}, or give another --run_dir")
    if resume not in (False, "auto") and not there:
        raise nothing_to_resume(run_dir)
    # Where checkpoints seem to be lost, a later message says what is known about them.
    had_one = (run_dir / "teacher.safetensors").exists() or (run_dir / "checkpoints").is_symlink()
    if resume is True and not holds_checkpoint(run_dir) and not had_one:
        raise no_checkpoint(run_dir)


def no_checkpoint(run_dir: Path) -> CheckpointError:
    how = "--resume auto starts from the beginning then"
    return CheckpointError(f"no checkpoint in {run_dir} and --resume was given; {how}")


def nothing_to_resume(run_dir: Path) -> CheckpointError:
    several = os.environ.get("WORLD_SIZE", "1") != "1"  # it may be another machine's folder
    why = f"nothing to resume: {run_dir} holds no run{f' on {socket.gethostname()}' if several else ''}"
    return CheckpointError(f"{why}; start without --resume, or fix --run_dir{near_run(run_dir)}")
