"""The commands as Python functions: `dino_ds.train`, `embed`, `find`, `curate`, `evaluate`, `report`, `plan`.

Keywords are a command's options and the recipe's keys. They become the words of a command line, are read and checked as
those are, and go to the same function: nothing is decided here. What ends a command with a message and an exit code is
an exception of dino_ds.errors.
"""

from __future__ import annotations

import json
import os
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from dino_ds.basics.names import did_you_mean
from dino_ds.basics.text_file import read_lines
from dino_ds.cli.as_it_was import as_it_was, torch_as_it_was
from dino_ds.cli.main import check_software, prepare
from dino_ds.config.fields import IMAGE_FORMS
from dino_ds.errors import ConfigError, Stopped, one_line
from dino_ds.options.commands import COMMANDS
from dino_ds.options.reading import words_of

if TYPE_CHECKING:
    import numpy as np

    from dino_ds.commands.curate import Curated
    from dino_ds.commands.find import Found
    from dino_ds.weights.load import Backbone

Place = str | os.PathLike[str]
_TRAINING = threading.Lock()


@dataclass(frozen=True)
class Run:
    """The folder of a run, or of a checkpoint of it; the other functions take it in place of the folder's name.

    Raises ConfigError where there is no such folder.
    """

    path: Path

    def __init__(self, path: Place) -> None:
        place = Path(os.path.expanduser(path))
        if not place.is_dir():
            beside = [one.name for one in place.parent.iterdir() if one.is_dir()] if place.parent.is_dir() else []
            near = did_you_mean(place.name, beside)
            raise ConfigError(f"{place} is not a folder: give that of a run, which train has written.{near}")
        object.__setattr__(self, "path", place)

    def __fspath__(self) -> str:
        return str(self.path)

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """The whole lines of metrics.jsonl, in order: steps and evaluations. Raises ConfigError where there is none."""
        try:
            return [json.loads(line) for line in read_lines(self.path / "metrics.jsonl") if line.endswith(b"\n")]
        except OSError as error:
            raise ConfigError(f"{self.path} holds no metrics.jsonl ({error.strerror}): give a run's folder") from None
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{self.path}/metrics.jsonl has a damaged line ({one_line(error)}): remove it") from None

    def load(self, device: str = "cpu", weights: str = "newest") -> Backbone:
        """The teacher, as `dino_ds.load` has it: newest, best or step_N. Raises CheckpointError if there is none."""
        from dino_ds.weights.load import load

        return load(self.path, device=device, weights=weights)

    def report(self) -> Path:
        """Write the run's page, as `dino_ds.report` does."""
        return report(self)


class Embeddings(NamedTuple):
    """`features` (images, ...); of each row the image's name and its label, a place in `classes` or -1."""

    features: np.ndarray
    names: list[str]
    labels: np.ndarray
    classes: list[str]


def train(
    config: Place | None = None,
    *,
    ds_config: Place | None = None,
    run_dir: Place | None = None,
    max_steps: int | None = None,
    resume: bool | int | Literal["auto"] = False,
    callbacks: Sequence[Callable[[int, dict[str, Any]], object]] = (),
    **options: Any,
) -> Run:
    """`dino-ds train`: train in this process, and return the run.

    options: the command's others and the recipe's keys, as `**{"data.root": "/images"}` or `data={"root": "/images"}`;
    keys of the ds JSON begin with "ds.". A callback gets the step and the line, for each line of metrics.jsonl as soon
    as it is written; if it raises an error or SystemExit, the run is stopped and saved, and that comes out of here.

    Raises UserError, of a class by the exit code that the command has: ConfigError, DataError, ... and Stopped after
    Ctrl-C (in a notebook: interrupt the kernel), SIGTERM, SIGHUP, SIGUSR1, SIGUSR2 or RUN/stop, when all is saved; a
    second Ctrl-C is a KeyboardInterrupt, and saves nothing.
    """
    own = {"config": config, "ds_config": ds_config, "run_dir": run_dir, "max_steps": max_steps}
    own["resume"] = None if resume is False else resume
    if not isinstance(callbacks, Sequence) or not all(callable(callback) for callback in callbacks):
        raise ConfigError("callbacks: give a list of functions of a step and its metrics, such as [print]")
    return Run(_train_here(words_of(COMMANDS["train"], own, options), callbacks))


def embed(
    model: Place, root: Place | Sequence[Place] | None = None, out: Place | None = None, **options: Any
) -> Embeddings | Path:
    """`dino-ds embed`: a vector for every image, in memory or, with constant memory, in the file `out`, whose path is
    returned then. root: images as data.root, or a list of image files, one row for each in its order. Raises UserError;
    warns of images that can't be read: their rows are NaN."""
    from dino_ds.commands.embed import write

    with torch_as_it_was(), tempfile.TemporaryDirectory() as folder:
        place = Path(folder) / "embeddings.pt" if out is None else out
        images = _listed(root, Path(folder)) if isinstance(root, list | tuple) else root
        facts = write(_prepare("embed", {"model": model, "root": images, "out": place}, options)[0])
        for note in facts["notes"]:
            warnings.warn(note, stacklevel=2)
        if out is not None:
            return Path(facts["out"])
        import torch

        found = torch.load(place, weights_only=True)
        return Embeddings(found["features"].numpy(), found["names"], found["labels"].numpy(), found["classes"])


def find(features: Place, images: Sequence[Place], top: int = 20, **options: Any) -> list[Found]:
    """`dino-ds find`: the nearest images of each of `images`, files or rows of `features`. Raises UserError."""
    from dino_ds.commands.find import find as search

    own = {"features": features, "images": [str(image) for image in images], "top": top}
    with torch_as_it_was():
        return search(_prepare("find", own, options)[0])[0]


def curate(features: Place, *, out: Place | None = None, **options: Any) -> Curated:
    """`dino-ds curate`: near-duplicates (`duplicates=0.95`), clusters (`clusters=[1000, 100]`) and lists (`draw=50000`)
    of the images of `features`, in memory and in the folder `out`. Raises UserError."""
    from dino_ds.commands.curate import curate as divide

    with torch_as_it_was():
        return divide(_prepare("curate", {"features": features, "out": out}, options)[0])


def evaluate(
    model: Place,
    evals: Sequence[str] = ("knn",),
    root: Place | None = None,
    test_root: Place | None = None,
    **options: Any,
) -> dict[str, Any]:
    """`dino-ds eval`: what it prints with --json. Its "metrics" are the numbers by name; "results" has those of each
    evaluation, with what they were made of. Raises UserError."""
    from dino_ds.commands.evaluate import Evaluated, run_evals

    own = {"model": model, "evals": evals, "root": root, "test_root": test_root}
    done: list[Evaluated] = []
    with torch_as_it_was():
        run_evals(_prepare("eval", own, options)[0], done.append)
    for note in done[0].context.notes:
        warnings.warn(note, stacklevel=2)
    return done[0].to_json()


def report(run: Place, *, out: Place | None = None) -> Path:
    """`dino-ds report`: write the HTML page of a run, and return its path. Raises ConfigError."""
    from dino_ds.report.command import write_page

    return write_page(_prepare("report", {"run": run, "out": out}, {})[0])[0]


def plan(
    config: Place | None = None,
    *,
    gpu: str | None = None,
    gpus: int = 1,
    nodes: int = 1,
    ds_config: Place | None = None,
    **options: Any,
) -> dict[str, Any]:
    """`dino-ds plan`: what it prints with --json. Raises ConfigError."""
    from dino_ds.planning.command import plan as find

    own = {"config": config, "gpu": gpu, "gpus": gpus, "nodes": nodes, "ds_config": ds_config}
    chosen, files = _prepare("plan", own, options)
    return find(chosen, **files)


def _train_here(words: list[str], callbacks: Sequence[Callable[[int, dict[str, Any]], object]]) -> Path:
    with _one_at_a_time(), as_it_was():
        command, chosen, files = prepare(["train", *words])
        check_software(command, chosen)
        from dino_ds.run.caller import Caller
        from dino_ds.train import train_for

        caller, stopped = Caller(callbacks), ""
        with torch_as_it_was():
            try:
                train_for(caller, chosen, files)
            except SystemExit as stop:
                stopped = str(stop.__cause__)
            caller.let_go()
        if caller.error is not None:
            raise caller.error
        if stopped:
            raise Stopped(f"{stopped}; the same with resume=True continues it")
        return Path(os.path.abspath(chosen.run_dir))  # the program may change its working folder later


def _listed(files: Sequence[Place], folder: Path) -> Path:
    """A text file in `folder` of the paths, as data.root takes it. Raises ConfigError."""
    odd = next((one for one in files if not isinstance(one, str | os.PathLike)), None)
    paths = [] if odd is not None else [os.path.abspath(os.path.expanduser(one)) for one in files]
    if not paths:
        what = "an empty list" if odd is None else f"a list with a {type(odd).__name__}"
        raise ConfigError(f"root is {what}: give paths of image files, or {IMAGE_FORMS}")
    if (bad := next((path for path in paths if {"\n", "\r", "\t"} & set(path)), None)) is not None:
        raise ConfigError(f"root names {bad!r}: a path with a line break or a tab can't be listed; give its folder")
    (place := folder / "files.txt").write_text("\n".join(paths) + "\n", encoding="utf-8", errors="surrogateescape")
    return place


def _prepare(name: str, own: Mapping[str, Any], options: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """A command's options and files."""
    command, chosen, files = prepare([*name.split(), *words_of(COMMANDS[name], own, options)])
    check_software(command, chosen)
    return chosen, files


@contextmanager
def _one_at_a_time() -> Iterator[None]:
    """Two runs in one process would draw from the same random generators. Raises ConfigError."""
    if not _TRAINING.acquire(blocking=False):
        raise ConfigError("this process is training already: wait for the end, or start another process")
    try:
        yield
    finally:
        _TRAINING.release()
