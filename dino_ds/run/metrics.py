"""The metrics of a run, its log, and the alarms that metrics raise. They go to metrics.jsonl, TensorBoard, log.txt,
events.jsonl and the console, and to Weights & Biases and trackio where the ds JSON enables these. Only rank 0 writes;
every rank may call everything.

DeepSpeed does not get the sections of these loggers: its engine would synchronize the device in every step to write its
loss."""

from __future__ import annotations

import json
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.util import find_spec
from io import FileIO
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from tqdm import tqdm

from dino_ds.basics.files import append_whole, read_lines, replace_file
from dino_ds.config.ds_schema import LOGGERS
from dino_ds.engine import distributed
from dino_ds.errors import ConfigError, one_line
from dino_ds.health.beat import Event, stamped


class Meter:
    """Averages device scalars over micro-batches and ranks; only `read` makes the host wait for the device."""

    def __init__(self, names: tuple[str, ...], device: torch.device) -> None:
        self._names = names
        self._sums = torch.zeros(len(names) + 1, device=device)

    def add(self, *values: Tensor) -> None:
        self._sums += torch.stack([*values, torch.ones_like(values[0])])

    def read(self) -> dict[str, float]:
        """The means since the last reading, by name; every rank must call this."""
        *sums, count = distributed.sum_across_ranks(self._sums).tolist()
        self._sums = torch.zeros_like(self._sums)
        return {name: total / count for name, total in zip(self._names, sums, strict=True)}


class Clock:
    """Measures throughput and the share of time spent waiting for data between two readings; pauses do not count."""

    def __init__(self, global_batch: int) -> None:
        self._batch = global_batch
        self._reset()

    def _reset(self) -> None:
        self.steps, self._begin, self._spent = 0, time.perf_counter(), {"wait": 0.0, "pause": 0.0}

    @contextmanager
    def spending(self, on: Literal["wait", "pause"]) -> Iterator[None]:
        """A context around the wait for a batch, or around what is not training, such as an evaluation."""
        begin = time.perf_counter()
        yield
        self._spent[on] += time.perf_counter() - begin

    def read(self) -> dict[str, float]:
        """`images_per_second` and `data_wait_fraction` (0 to 1) since the last reading."""
        seconds = time.perf_counter() - self._begin - self._spent["pause"]
        rate, waiting = self.steps * self._batch / seconds, self._spent["wait"] / seconds
        self._reset()
        return {"images_per_second": rate, "data_wait_fraction": waiting}


class Logger(NamedTuple):
    """A service that takes metrics. `write` gets values by name and their step. Both functions may raise any error."""

    name: str
    write: Callable[[Mapping[str, float], int], object]
    close: Callable[[], object]


class RunLog:
    """Writes the growing files of a run folder, and to the console, which shows details if `verbose`.
    On a resume at `step`, later steps, to be written again, are removed from metrics.jsonl and TensorBoard. `loggers`
    get the metrics too; a logger that fails is dropped. `tell` is called with every line of metrics.jsonl."""

    def __init__(
        self,
        run_dir: Path,
        step: int,
        loggers: Sequence[Logger] = (),
        tell: Callable[[dict[str, Any]], None] | None = None,
        verbose: bool = False,
    ) -> None:
        self._loggers, self._tell, self._verbose = [*loggers], tell, verbose
        self._files, self._board, self._lost = dict[str, FileIO](), None, set[str]()
        self._bar: tqdm[Any] | None = None
        self._excepthook = threading.excepthook
        if distributed.rank() != 0:
            return
        from torch.utils.tensorboard import SummaryWriter

        path = run_dir / "metrics.jsonl"
        _keep_lines_until(path, step if step else -1)  # step 0 is evaluated again
        for name in ("metrics.jsonl", "log.txt", "events.jsonl"):
            self._files[name] = (run_dir / name).open("ab", buffering=0)

        def hook(args: threading.ExceptHookArgs) -> None:
            """Hide tracebacks of TensorBoard's thread for files that can't be written: its next call raises again."""
            if not (isinstance(args.exc_value, OSError) and type(args.thread).__module__.startswith("tensorboard.")):
                self._excepthook(args)

        threading.excepthook = hook
        self._board = SummaryWriter(run_dir / "tensorboard", purge_step=step + 1 if step else None)

    def info(self, *lines: str) -> None:
        """Write human-readable lines to the console, with the time to log.txt, and as `Event`s to events.jsonl."""
        for line in lines:
            if self._files:
                event = line if isinstance(line, Event) else Event(line)
                with suppress(OSError):  # a terminal or a pipe that was closed
                    if self._verbose or not event.detail:
                        tqdm.write(line, file=sys.stderr)
                self._append("log.txt", stamped(event))
                self._append("events.jsonl", event.record)

    def write(self, record: dict[str, Any]) -> None:
        """Write an object with a "step" into metrics.jsonl, and its numbers to TensorBoard and the loggers."""
        if not self._files:
            return
        # Floats have nine digits, as FP32 values need; NaN and infinity are text.
        texts = {name: f"{value:.9g}" for name, value in record.items() if isinstance(value, float)}
        finite = {name: float(text) for name, text in texts.items() if math.isfinite(record[name])}
        rounded = {**record, **texts, **finite}
        self._append("metrics.jsonl", json.dumps(rounded))
        for name, value in record.items():
            if name != "step" and isinstance(value, (int, float)):
                self._show("add_scalar", name, value, record["step"])
        numbers = {name: v for name, v in rounded.items() if name != "step" and isinstance(v, (int, float))}
        for logger in [*self._loggers]:
            try:
                logger.write(numbers, record["step"])
            except Exception as error:  # of any package or network: training goes on
                self._loggers.remove(logger)
                failed = f"{logger.name} takes no more metrics: {one_line(error)}"
                self.info(f"warning  {failed}; metrics.jsonl has them all")
        if self._tell is not None:
            self._tell(rounded)

    def picture(self, name: str, image: Tensor, step: int) -> None:
        """Write an image (3 or 4, h, w), in [0, 1] or uint8, to TensorBoard."""
        self._show("add_image", name, image, step)

    def _append(self, name: str, line: str) -> None:
        """Append a line; on a full disk the line is lost with a warning, and the run continues."""
        file = self._files[name]
        try:
            append_whole(file.fileno(), f"{line}\n".encode())
            self._lost.discard(name)
        except OSError as error:
            if name not in self._lost:
                self._warn(str(file.name), error)
            self._lost.add(name)

    def _show(self, method: str, *values: Any) -> None:
        """Call a method of TensorBoard's writer, as long as its files can be written."""
        if self._board is None:
            return
        try:
            getattr(self._board, method)(*values)
        except OSError as error:
            self._board = None
            self._warn("TensorBoard's files", error)

    def _warn(self, target: str, error: OSError) -> None:
        line = f"dino_ds: warning: cannot write to {target}: {error.strerror}; training continues"
        tqdm.write(line, file=sys.stderr)

    def progress(self, step: int, last: int) -> None:
        """Move the progress bar, which a terminal shows below the lines, to `step` of `last`."""
        if not self._files:
            return
        if self._bar is None:
            shown = "{percentage:3.0f} %|{bar:20}| {n_fmt}/{total_fmt} {elapsed}<{remaining}"
            hidden = not sys.stderr.isatty()
            self._bar = tqdm(total=last, initial=step - 1, leave=False, bar_format=shown, disable=hidden)
        self._bar.update(step - self._bar.n)

    def close(self) -> None:
        for logger in self._loggers:
            with suppress(Exception):
                logger.close()
        for thing in (self._bar, *self._files.values(), self._board):
            if thing is not None:
                with suppress(OSError):
                    thing.close()
        threading.excepthook = self._excepthook


def _keep_lines_until(path: Path, step: int) -> None:
    """Remove the lines of steps after `step`, and broken lines."""
    if not path.exists():
        return
    kept = []
    for raw in read_lines(path):
        line = raw.decode(errors="replace").rstrip("\n")
        try:
            if json.loads(line)["step"] <= step:
                kept.append(line)
        except (ValueError, KeyError, TypeError, RecursionError):
            continue  # most often the line that was being written when the process ended
    replace_file(path, "".join(line + "\n" for line in kept))


def open_loggers(ds: Mapping[str, Any], run_dir: Path, run_id: str) -> tuple[list[Logger], list[str]]:
    """Open the loggers that a ds config enables, on rank 0; returns them and warnings, such as for a trackio server
    that can't be reached. Raises ConfigError for a package that is not installed, and for W&B if it does not start."""
    loggers, warnings = list[Logger](), list[str]()
    for name, opener in zip(LOGGERS, (_open_wandb, _open_trackio), strict=True):
        if distributed.rank() != 0 or not ds.get(name, {}).get("enabled"):
            continue
        off = f"set --ds.{name}.enabled false"
        if find_spec(name) is None:
            raise ConfigError(f"the ds JSON's section {name} needs a package: pip install {name}, or {off}")
        try:
            loggers.append(opener(ds[name], run_dir, run_id))
        except Exception as error:  # whatever a package, network or account raises
            if name == "wandb":
                raise ConfigError(f"{name} does not start: {_reason(error)}; set it up, or {off}") from None
            warnings.append(f"warning  {name} does not start: {_reason(error)}; metrics.jsonl has all metrics")
    return loggers, warnings


def _reason(error: BaseException) -> str:
    """Why a service failed, in one line: the network's own error, if any, which libraries wrap in pages of text."""
    innermost = error
    while below := innermost.__cause__ or innermost.__context__:
        innermost = below
    return one_line(innermost if isinstance(innermost, OSError) else error, most=800)


def _open_wandb(section: Mapping[str, Any], run_dir: Path, run_id: str) -> Logger:
    """Open a W&B run. W&B's environment variables, such as WANDB_MODE=offline, act where the section sets nothing."""
    import wandb
    from deepspeed.monitor.config import WandbConfig
    from deepspeed.monitor.wandb import WandbMonitor

    variables = {"WANDB_DIR": str(run_dir), "WANDB_RUN_ID": run_id, "WANDB_NAME": run_dir.name, "WANDB_RESUME": "allow"}
    for name, value in variables.items():
        os.environ.setdefault(name, value)
    monitor = WandbMonitor(WandbConfig(**{"project": "dino_ds", **section}))
    return Logger(
        "wandb", lambda values, step: monitor.write_events([(k, v, step) for k, v in values.items()]), wandb.finish
    )


def _open_trackio(section: Mapping[str, Any], run_dir: Path, run_id: str) -> Logger:
    """Open a trackio run, whose files are in TRACKIO_DIR unless the section names a Space or a server."""
    import trackio

    names = {"project": "dino_ds"} | {key: value for key, value in section.items() if key != "enabled"}
    run = trackio.init(name=f"{run_dir.name}-{run_id[:8]}", resume="allow", embed=False, **names)
    return Logger("trackio", lambda values, step: run.log(dict(values), step), run.finish)


NEAR = 0.02
"""Fraction of ln K within which the entropy counts as 0 or as ln K, and spread below which features count as one."""
NO_KL = 0.01  # fraction of ln K below which the KL says that the teacher gives every image the same target
WINDOWS = 10  # consecutive lines of metrics before the alarm: a single batch may come near either bound
_HINTS = {
    "one prototype": "lower optimizer.lr or raise objective.teacher_temp; with Sinkhorn-Knopp raise data.global_batch, "
    "else lower objective.center_momentum",
    "uniform": "lower optimizer.lr; with Sinkhorn-Knopp raise objective.koleo_weight or lengthen optimizer.warmup, "
    "else lower objective.teacher_temp (DINO: 0.04 to 0.07)",
}


class _Alarm:
    """Reports a symptom once it has lasted for WINDOWS lines of metrics, and again only after a recovery."""

    def __init__(self) -> None:
        self._windows, self._kind = 0, ""
        self.on = False

    def _report(self, step: int, kind: str, symptom: str) -> str:
        """Count a line of metrics with a symptom of this kind; returns the alarm's line when it starts, else ""."""
        self._windows = self._windows + 1 if kind and kind == self._kind else int(bool(kind))
        self._kind, was_on = kind, self.on
        self.on = bool(kind) and (was_on or self._windows >= WINDOWS)
        return f"collapse after step {step}: {symptom}" if self.on and not was_on else ""


class CollapseAlarm(_Alarm):
    """Checks the entropy and the KL of targets over prototypes in each line of metrics.
    Source: DINO, section 5.3 and figure 7 (arXiv 2104.14294): KL -> 0 is a constant output; the entropy tells which:
    -> 0 without centering (one prototype takes all images), -> ln K without sharpening (uniform targets). Uniform
    targets are normal before the end of the learning rate's warm-up; with Sinkhorn-Knopp they are what a constant
    output leads to. rows: what has a target of its own, an image or a patch."""

    def __init__(self, prototypes: int, warmup_steps: int, rows: str = "image") -> None:
        super().__init__()
        self._most, self._rows, self._warmup_steps = math.log(prototypes), rows, warmup_steps

    def look(self, step: int, entropy: float, kl: float) -> str:
        """The alarm's line when it starts, else "". Entropy and KL in nats are means since the last line of metrics."""
        kind = ""
        if abs(kl) < NO_KL * self._most:
            if entropy < NEAR * self._most:
                kind = "one prototype"
            elif entropy > (1 - NEAR) * self._most and step > self._warmup_steps:
                kind = "uniform"
        values = f"{kind}; entropy {entropy:.3f} of {self._most:.3f} nats, KL {kl:.4f}; DINO, figure 7"
        symptom = f"the teacher gives every {self._rows} the same target ({values}); {_HINTS.get(kind)}"
        return self._report(step, kind, symptom)


class SpreadAlarm(_Alarm):
    """Checks the spread of features over images, for objectives without prototypes: 0 if all images have one feature, 1
    if they fill the sphere. A low spread is normal before the end of the warm-up."""

    def __init__(self, name: str, warmup_steps: int) -> None:
        super().__init__()
        self._name, self._warmup_steps = name, warmup_steps

    def look(self, step: int, spread: float) -> str:
        kind = "one feature" if spread < NEAR and step > self._warmup_steps else ""
        hint = "lower optimizer.lr, lengthen optimizer.warmup or raise data.global_batch"
        symptom = f"the student gives every image the same feature ({self._name} {spread:.3f} of 1); {hint}"
        return self._report(step, kind, symptom)


FAR = 0.1
"""Distance of features to the start's, above which what the start knew is being lost. Runs of recipe continue stayed
below 0.02; without objective.preserve_weight they reached 0.14 and a worse ridge result (docs/notes/continue.md)."""


@dataclass
class DriftAlarm:
    """Warns of features that leave those of the weights that a run started from. `ended`: why the run ends, or ""."""

    most: float | None = None
    ended: str = ""
    on: bool = False

    def look(self, step: int, distance: float) -> str:
        if self.most is not None and distance > self.most:
            self.ended = f"eval.stop_after: preserve_loss {distance:.3f} is above {self.most:g}"
        was_on, self.on = self.on, distance > FAR
        if was_on or not self.on:
            return ""
        warning = f"warning  step {step}: features are leaving the start's (preserve_loss {distance:.3f} of 2)"
        return f"{warning}: what it knew may be lost; raise objective.preserve_weight or lower optimizer.lr"
