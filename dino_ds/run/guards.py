"""Watches over a run from its first moment: hangs, failures, memory, the run folder, requests to stop it at the next
step (signals, RUN/stop, a launcher's end), and the Python program that has started the run and outlives it."""

from __future__ import annotations

import itertools
import os
import re
import select
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from dino_ds import errors
from dino_ds.basics.own_code import default_dtype, restore_default_dtype
from dino_ds.config.ds_schema import COMMUNICATES_IN_STEP, DsConfig
from dino_ds.config.recipe import Recipe
from dino_ds.engine import distributed, process
from dino_ds.engine.distributed import set_store_flag, store_flag_is_set
from dino_ds.errors import FORWARDED_SECONDS, STOP_SIGNALS, STOPPED, ConfigError, OutOfMemory, UserError
from dino_ds.health.beat import Beat, Heartbeats
from dino_ds.health.monitor import Failures, watchdog
from dino_ds.health.processes import RunLock

_PARTS = {  # `Beat.where` in words
    **dict.fromkeys(("teacher", "targets", "student", "loss", "step"), "the forward pass"),
    **dict.fromkeys(("optimizer", "center", "ema"), "the optimizer"),
    "backward": "the backward pass", "evaluate": "evaluation", "save": "saving",
    "data": "loading", "start": "building the model", "end": "the end",
}  # fmt: skip


class Guards(NamedTuple):
    """The guards of one rank; `beat` tells the monitor process what the rank is doing."""

    beat: Beat
    failures: Failures
    stop: StopRequests
    memory: MemoryGuard


@contextmanager
def guarded(run_dir: Path, hang_seconds: float, caller: Caller | None) -> Iterator[Guards]:
    """Watch over the block: an error that ends it is reported once, by the rank on which it began."""
    rank, ranks = distributed.rank(), distributed.world_size()
    with watchdog(run_dir, rank, ranks, 0.0 if caller else hang_seconds) as beat:
        failures, memory = Failures(run_dir, rank, ranks, beat), MemoryGuard(beat)
        stop = StopRequests(beat, failures.stopped_early, failures.ended_at_once)
        if caller:
            stop = caller.stop = CallersStopRequests(beat)
        with failures.reported(), stop, memory.explain():
            yield Guards(beat, failures, stop, memory)


class FolderLock:
    """The lock of a run folder and the heartbeats of this start in it, held from the start's first moment to its end.
    `notes` has a line if the last holder has died. A refused start leaves no trace in the run of another start."""

    def __init__(self, run_dir: Path, guards: Guards) -> None:
        self._lock, self._heartbeats = RunLock(run_dir), Heartbeats(run_dir)
        self._beat, self._failures = guards.beat, guards.failures
        self._first, self._prepared = distributed.rank() == 0, False
        self.notes: list[str] = []

    @contextmanager
    def held(self) -> Iterator[FolderLock]:
        """Hold the lock during the block. Raises ConfigError or StorageError, on all ranks, where it can't be taken."""
        try:
            with distributed.raise_on_all_ranks():
                if self._first:
                    self.notes = [note] if (note := self._lock.acquire()) else []
                    try:
                        self._heartbeats.prepare()
                    except OSError as error:
                        raise errors.unwritable(f"run folder {self._lock.run_dir}", error) from None
                    self._prepared = True
            self._beat.listed = True
            yield self
        finally:
            if self._prepared and not self._lock.guards_a_run:
                self._heartbeats.remove()
            elif self._prepared and not self._beat.listed:
                self._heartbeats.bring_back_earlier()
            if self._first:
                self._lock.release()

    @contextmanager
    def starting(self) -> Iterator[None]:
        """Wrap the code that may still refuse this start, by a UserError that all ranks raise."""
        try:
            yield
        except UserError as error:
            if self._lock.guards_a_run:
                self._beat.listed = False  # the run in the folder is another start's
            else:
                self._failures.settle(error)
            raise
        if self._first:
            self._heartbeats.forget_earlier()


@dataclass
class MemoryGuard:
    """Turns this rank's allocator errors into OutOfMemory, with advice from `run`: recipe, ds config, predicted GiB."""

    beat: Beat
    run: tuple[Recipe, DsConfig, float | None] | None = None

    @contextmanager
    def explain(self) -> Iterator[None]:
        """Raise OutOfMemory instead of an allocator's error."""
        try:
            yield
        except UserError:
            raise
        except Exception as error:
            if not errors.is_out_of_memory(error):
                raise
            part = _PARTS.get(self.beat.where, self.beat.where)
            predicted, cure = "", "take a smaller model, or one more GPU"
            if self.run is not None:
                recipe, config, gib = self.run
                predicted = f"{gib:.2f} GiB were predicted, " if gib is not None else ""
                cure = _cure(part, recipe, config, on_gpu=type(error).__name__ == "OutOfMemoryError")
            request = re.search(r"tried to allocate ([\d.]+ \w+)", str(error), re.IGNORECASE)
            asked = f" ({request[1]} more)" if request else ""
            where = f"out of memory in {part} after step {self.beat.step}{asked}"
            said = f"{where}: {predicted}{process.free_memory()}. To continue with --resume: {cure}"
            raise OutOfMemory(said) from error


def _cure(part: str, recipe: Recipe, config: DsConfig, on_gpu: bool) -> str:
    """The setting to change after running out of memory in `part`."""
    if part == "saving" and recipe.save_in_background:
        return "--save_in_background false, which needs no second copy of a checkpoint in host memory"
    if part == "evaluation":
        return f'--eval.bank_images {max(1, recipe.eval.bank_images // 2)}, or --eval.every "0 steps" for none'
    if part == "loading" and not on_gpu:
        return "fewer --data.workers, or a smaller micro-batch"
    if part in ("the optimizer", "building the model", "saving", "the end"):
        only_shards = recipe.optimizer.kind in COMMUNICATES_IN_STEP
        more, ds = ("shard", "zero3_bf16") if only_shards else ("shard or offload", "zero2_bf16_offload")
        return f"{more} more, such as --ds_config ds_configs/{ds}.json, or take a smaller model"
    images = config.micro_batch * config.accumulation
    size = next((size for size in range(config.micro_batch // 2, 0, -1) if images % size == 0), 0)
    if size:
        low = config.stage == 1 and config.precision != "fp32"  # stage 1 would accumulate in low precision
        flags = f"--ds.train_micro_batch_size_per_gpu {size} --ds.gradient_accumulation_steps {images // size}"
        return f"{flags}{' --ds.zero_optimization.stage 2' * low}, the same global batch in smaller parts"
    return "--ds.activation_checkpointing.number_checkpoints auto, or a smaller model"


class StopRequests:
    """A `with` block in which the first signal asks for a stop, and a second one ends the process at once.
    Before `install` there is nothing to save: the first signal calls `nothing_to_save` (reason) and ends the process.
    After it, the second signal calls `at_once` (exit code, message) and ends it. A thread handles the signals, woken by
    Python's C handler, so that they act while the main thread waits in a collective."""

    def __init__(self, beat: Beat, nothing_to_save: Callable[[str], None], at_once: Callable[[int, str], None]) -> None:
        self._beat, self._nothing_to_save, self._at_once = beat, nothing_to_save, at_once
        self._signal, self._first_at = "", 0.0
        self._ask: Callable[[], None] | None = None
        self.over = False  # True once everything is saved: signals, such as a launcher's SIGTERM, are then ignored
        self._handlers: dict[signal.Signals, Any] = {}
        self._name = f"dino_ds stop {next(_numbers)}"

    def __enter__(self) -> StopRequests:
        self._read, self._write = os.pipe()
        os.set_blocking(self._write, False)
        self._before = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        # Python's part of a handler does nothing: the thread does the work.
        self._handlers = {number: signal.signal(number, lambda *_: None) for number in signals_to_handle()}
        self._thread = threading.Thread(target=self._listen, name="dino_ds signals", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._before)
        os.close(self._write)
        self._thread.join()
        os.close(self._read)

    def install(self, ask: Callable[[], None]) -> None:
        """Let the first request call `ask`, from any thread: from now on there is something to save."""
        self._ask = ask

    def request(self, why: str) -> None:
        """Ask for a stop at the next step, as a first signal does; only after `install`."""
        assert self._ask is not None
        for output in (1, 2):  # to a closed terminal, printing would raise an error before all is saved
            poll = select.poll()
            poll.register(output, 0)
            if any(events & (select.POLLHUP | select.POLLERR) for _, events in poll.poll(0)):
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, output)
                os.close(nowhere)
        self._signal, self._first_at = why, time.monotonic()
        self._ask()

    @property
    def why(self) -> str:
        """The reason for this rank to stop, such as "SIGTERM", "the stop file" or "the end of the launcher", or ""."""
        return self._signal or self._beat.stop_reason

    def requested_anywhere(self) -> bool:
        """Whether a stop was requested on any rank, for work between steps; asks rank 0's store, in 0.1 ms."""
        if self.why:
            set_store_flag(self._name)
        return bool(self.why) or store_flag_is_set(self._name)

    def _listen(self) -> None:
        while data := os.read(self._read, 64):
            for number in data:
                if number not in self._handlers or self.over:
                    continue
                name = self._beat.stop_reason or signal.Signals(number).name
                if not self._signal:
                    if self._ask is None:
                        self._signal = name
                        self._nothing_to_save(name)
                        _leave(STOPPED)
                    self.request(name)
                elif self._again():
                    lost = f"ended at once by {self._signal} and {name}; what was not saved is lost"
                    self._at_once(128 + number, lost)
                    _leave(128 + number)

    def _again(self) -> bool:
        """Whether a signal that comes now is a second one, not the first one forwarded by a launcher."""
        return time.monotonic() - self._first_at > FORWARDED_SECONDS


def signals_to_handle() -> list[signal.Signals]:
    """The signals that make a run stop; under nohup the end of a terminal is not one of them."""
    ignored = {signal.SIGHUP} if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else set()
    return [number for number in STOP_SIGNALS if number not in ignored]


_numbers = itertools.count()


def _leave(code: int) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


Callback = Callable[[int, dict[str, Any]], object]  # called with a step and its line of metrics.jsonl


class Caller:
    """Callbacks of the program that started the run. An `error` that one of them raises makes the run stop and save."""

    def __init__(self, callbacks: Iterable[Callback] = ()) -> None:
        self.error: Exception | SystemExit | None = None
        self._callbacks = tuple(callbacks)
        self.stop: CallersStopRequests | None = None

    def tell(self, line: dict[str, Any]) -> None:
        """Call the callbacks until one raises an error, or changes torch's default dtype, which counts as an error."""
        before = default_dtype()
        try:
            for callback in self._callbacks:
                callback(line["step"], dict(line))
                if told := restore_default_dtype(before):
                    raise ConfigError(f"callback {getattr(callback, '__name__', callback)} {told}")
        except (Exception, SystemExit) as error:
            self.error, self._callbacks = error, ()
            if self.stop is not None:
                self.stop.request(f"{type(error).__name__} of a callback")

    def detach(self) -> None:
        """Free the run's memory, which a callback's error would keep: its traceback holds the frames of the run."""
        if self.error is not None and self.error.__traceback__ is not None:
            for frame, _ in traceback.walk_stack(self.error.__traceback__.tb_frame):
                with suppress(RuntimeError):  # the frame is still running
                    frame.clear()


class CallersStopRequests(StopRequests):
    """Stop requests in a program that goes on after the run, such as a notebook: nothing here ends the process.
    Before `install`, from the second signal on, and outside the main thread the program's own handlers act."""

    def __init__(self, beat: Beat) -> None:
        super().__init__(beat, lambda _: None, lambda *_: None)

    def __enter__(self) -> CallersStopRequests:
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        self._ask = None  # it holds the engine, and this object outlives the run

    def install(self, ask: Callable[[], None]) -> None:
        super().install(ask)
        if threading.current_thread() is threading.main_thread():
            self._handlers = {number: signal.signal(number, self._note) for number in signals_to_handle()}

    def _note(self, number: int, _frame: object) -> None:
        if not self._signal:
            self.request(signal.Signals(number).name)
        elif self._again() and not self.over:
            signal.signal(number, self._handlers[signal.Signals(number)])
            signal.raise_signal(number)
