"""The commands as Python functions: `dino_ds.train`, `embed`, `evaluate` and one for every other command.

Keywords are a command's options and the recipe's keys. They are read and checked as on a command line, and passed to
the function that the command runs: nothing is decided here. Where a command ends with a message and an exit code, its
function raises an exception of dino_ds.errors."""

from __future__ import annotations

import csv
import json
import os
import re
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from dino_ds.basics.files import read_lines, read_object
from dino_ds.basics.names import did_you_mean
from dino_ds.cli.main import call, check_software, prepare, restored_process, restored_torch
from dino_ds.commands.embed import Embeddings
from dino_ds.config.fields import IMAGE_FORMS
from dino_ds.errors import ConfigError, Stopped, one_line
from dino_ds.options import commands, flags

if TYPE_CHECKING:
    from dino_ds.commands.curate import Curated
    from dino_ds.commands.find import Found
    from dino_ds.commands.model import Model

AnyPath = str | os.PathLike[str]
_TRAINING = threading.Lock()


@dataclass(frozen=True)
class Run:
    """The folder of a run, or of one of its checkpoints; the other functions take a Run in place of the folder's path.

    Raises ConfigError if there is no such folder.
    """

    path: Path

    def __init__(self, path: AnyPath) -> None:
        folder = Path(os.path.expanduser(path))
        if not folder.is_dir():
            beside = [child.name for child in folder.parent.glob("*") if child.is_dir()]
            near = did_you_mean(folder.name, beside)
            raise ConfigError(f"{folder} is not a folder: give that of a run, which train has written.{near}")
        object.__setattr__(self, "path", folder)

    def __fspath__(self) -> str:
        return str(self.path)

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """The complete lines of metrics.jsonl, in order: steps and evaluations. Raises ConfigError without the file."""
        try:
            return [json.loads(line) for line in read_lines(self.path / "metrics.jsonl") if line.endswith(b"\n")]
        except OSError as error:
            raise ConfigError(f"{self.path} holds no metrics.jsonl ({error.strerror}): give a run's folder") from None
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{self.path}/metrics.jsonl has a damaged line ({one_line(error)}): remove it") from None

    def load(self, device: str = "cpu") -> Model:
        """Load the newest teacher as `dino_ds.load` does. Raises CheckpointError if there is none."""
        from dino_ds.commands.model import load

        return load(self.path, device=device)

    def report(self) -> Path:
        """Write the run's page, as `dino_ds.report` does."""
        return report(self)


def train(
    config: AnyPath | None = None,
    *,
    ds_config: AnyPath | None = None,
    run_dir: AnyPath | None = None,
    max_steps: int | None = None,
    resume: bool | int | Literal["auto"] = False,
    callbacks: Sequence[Callable[[int, dict[str, Any]], object]] = (),
    **options: Any,
) -> Run:
    """`dino-ds train`: train in this process, and return the run.

    options: other options and the recipe's keys, as `**{"data.root": "/images"}` or `data={"root": "/images"}`; keys of
    the ds JSON begin with "ds.". A callback is called with the step and the line as soon as a line of metrics.jsonl is
    written; if it raises an error or SystemExit, the run is stopped and saved, and `train` raises the same.

    Raises the UserError that belongs to the command's exit code: ConfigError, DataError, ... and Stopped after Ctrl-C
    (in a notebook: interrupt the kernel), SIGTERM, SIGHUP, SIGUSR1, SIGUSR2 or RUN/stop, once the run is saved; after a
    second Ctrl-C KeyboardInterrupt, without saving.
    """
    named = {"config": config, "ds_config": ds_config, "run_dir": run_dir, "max_steps": max_steps, "resume": resume}
    if not isinstance(callbacks, Sequence) or not all(callable(callback) for callback in callbacks):
        raise ConfigError("callbacks: give a list of functions of a step and its metrics, such as [print]")
    with _one_at_a_time(), restored_process():
        read, files = prepare(commands.TRAIN, flags.parse_keywords(commands.TRAIN, {**named, **options}))
        check_software(commands.TRAIN, read)
        from dino_ds.run.guards import Caller
        from dino_ds.train import train as train_in_process

        caller, stopped = Caller(callbacks), ""
        with restored_torch():
            try:
                train_in_process(read, **files, caller=caller)
            except SystemExit as stop:
                stopped = str(stop.__cause__)
            caller.detach()
        if caller.error is not None:
            raise caller.error
        if stopped:
            raise Stopped(f"{stopped}; the same with resume=True continues it")
        return Run(os.path.abspath(read.run_dir))  # the program may change its working folder later


def embed(
    model: AnyPath, root: AnyPath | Sequence[AnyPath] | None = None, out: AnyPath | None = None, **options: Any
) -> Embeddings | Path:
    """`dino-ds embed`: return a vector for every image, or write them to the file `out` with constant memory and return
    its path. root: images as for data.root, or a list of image files, for rows in the same order. Raises UserError;
    warns of images that can't be read: their rows are NaN."""
    with tempfile.TemporaryDirectory() as folder:
        images = _listed(root, Path(folder)) if isinstance(root, list | tuple) else root
        file = Path(folder) / "embeddings.npy" if out is None else out
        facts = _run("embed", options, model=model, root=images, out=file)
        if out is not None:
            return Path(facts["out"])
        import numpy as np

        with (Path(folder) / "embeddings.csv").open(newline="", encoding="utf-8") as lines:
            _, *rows = csv.reader(lines)
        names, labels, _ = zip(*rows, strict=True)
        classes = read_object(Path(folder) / "embeddings.npy.json")["classes"]
        return Embeddings(np.load(file), list(names), np.array(labels, int), classes)


def find(features: AnyPath, images: Sequence[AnyPath], top: int = 20, **options: Any) -> list[Found]:
    """`dino-ds find`: the nearest images of each of `images`, files or rows of `features`. Raises UserError."""
    return _run("find", options, features=features, images=[*map(str, images)], top=top)


def curate(features: AnyPath, *, out: AnyPath | None = None, **options: Any) -> Curated:
    """`dino-ds curate`: near-duplicates (`duplicates="auto"`), clusters (`clusters=[1000, 100]`) and lists
    (`draw=50000`) of the images of `features`, in memory and in the folder `out`. Raises UserError."""
    return _run("curate", options, features=features, out=out)


def evaluate(
    model: AnyPath,
    evals: Sequence[str] = ("knn",),
    root: AnyPath | None = None,
    test_root: AnyPath | None = None,
    **options: Any,
) -> dict[str, Any]:
    """`dino-ds eval`: return what it prints with --json. "metrics" has the numbers by name; "results" has those of each
    evaluation, with its images, the step and the date. Raises UserError."""
    return _run("eval", options, model=model, evals=evals, root=root, test_root=test_root)


def report(run: AnyPath, *, out: AnyPath | None = None) -> Path:
    """`dino-ds report`: write the HTML page of a run, and return its path. Raises ConfigError."""
    return _run("report", {}, run=run, out=out)


def plan(
    config: AnyPath | None = None,
    *,
    gpu: str | None = None,
    gpus: int = 1,
    nodes: int = 1,
    ds_config: AnyPath | None = None,
    **options: Any,
) -> dict[str, Any]:
    """`dino-ds plan`: return what it prints with --json. Raises ConfigError."""
    named = {"config": config, "gpu": gpu, "gpus": gpus, "nodes": nodes, "ds_config": ds_config}
    return _run("plan", options, **named)


def __getattr__(name: str) -> Callable[..., Any]:
    """The function of any other command, such as `look_data` and `bench_step`: its keywords are the command's options,
    its positional arguments the words without a name; it returns what the command prints with --json."""
    command = next((c for c in commands.COMMANDS.values() if re.sub(r"[- ]", "_", c.name) == name), None)
    if command is None:
        raise AttributeError(f"module 'dino_ds' has no attribute {name!r}")

    def function(*words: Any, **options: Any) -> Any:
        if len(words) > len(command.bare):
            raise TypeError(f"{name} takes {len(command.bare)} arguments without a name, and {len(words)} are given")
        return _run(command.name, options, **dict(zip(command.bare, words, strict=False)))

    function.__name__, function.__doc__ = name, f"`dino-ds {command.name}`: {command.summary}"
    return function


def _run(name: str, options: Mapping[str, Any], **named: Any) -> Any:
    """Run a command in this process and return its result; in `named`, None stands for an option that is not set."""
    command = commands.COMMANDS[name]
    with restored_torch() if command.loads_torch else nullcontext():
        result = call(command, *prepare(command, flags.parse_keywords(command, {**named, **options})))
    if result is None:
        return None
    for note in result.notes:
        warnings.warn(note, stacklevel=3)
    return result.data if result.value is None else result.value


def _listed(files: Sequence[AnyPath], folder: Path) -> Path:
    """Write the paths to a text file in `folder`, as data.root takes it, and return it. Raises ConfigError."""
    odd = next((file for file in files if not isinstance(file, str | os.PathLike)), None)
    paths = [] if odd is not None else [os.path.abspath(os.path.expanduser(file)) for file in files]
    if not paths:
        content = "an empty list" if odd is None else f"a list with a {type(odd).__name__}"
        raise ConfigError(f"root is {content}: give paths of image files, or {IMAGE_FORMS}")
    if (bad := next((path for path in paths if {"\n", "\r", "\t"} & set(path)), None)) is not None:
        raise ConfigError(f"root names {bad!r}: a path with a line break or a tab can't be listed; give its folder")
    (file_list := folder / "files.txt").write_text("\n".join(paths) + "\n", "utf-8", "surrogateescape")
    return file_list


@contextmanager
def _one_at_a_time() -> Iterator[None]:
    """Raises ConfigError if this process is training already: both runs would use the same random generators."""
    if not _TRAINING.acquire(blocking=False):
        raise ConfigError("this process is training already: wait for the end, or start another process")
    try:
        yield
    finally:
        _TRAINING.release()
