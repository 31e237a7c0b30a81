"""Every kind of fault that is injected, and what must come of it; docs/reliability.md sums them up."""

from __future__ import annotations

import os
import shutil
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from tests.disks import fill
from tests.faults import inject, scene
from tests.faults.inject import SLOW, act, at_call, at_once, at_step, in_save, loss_times
from tests.faults.jobs import Job
from tests.faults.scene import Prepare, Scene


@dataclass(frozen=True)
class Kind:
    """One fault.

    codes: what each rank ends with. says: a part of what is printed.
    fault: happens in the ranks. by_hand: what the test does while the job runs. before: what it does to the scene.
    old: the job goes on (`--resume`) from a copy of a run that has saved steps 3 and 6, else it is a new one.
    goes_on: afterwards `--resume` must give the very numbers of a run without a fault; `exact` False: to 1e-5, as
    another number of ranks or ZeRO stage sums in another order.
    """

    name: str
    codes: tuple[int, ...]
    says: str
    fault: inject.Fault | None = None
    by_hand: Callable[[Job, Scene], object] | None = None
    before: Prepare = scene.nothing
    old: bool = False
    resume: bool | None = None
    changes: dict[str, str] = field(default_factory=dict)
    flags: tuple[str, ...] = ()
    ds: str = "zero1_fp32.json"
    goes_on: bool = True
    exact: bool = True

    @property
    def resumes(self) -> bool:
        return self.old if self.resume is None else self.resume


ByHand = Callable[[Job, Scene], object]


def after(steps: int, do: ByHand, holds: bool = False) -> ByHand:
    """`do` after so many steps; holds: the fault holds the job until then."""

    def by_hand(job: Job, place: Scene) -> None:
        job.wait_for_steps(place.run, steps)
        do(job, place)
        if holds:
            job.go_on()

    return by_hand


def send_signal(rank: int, number: int) -> ByHand:
    return after(4, lambda job, place: job.signal(rank, number))


def send_signal_early(job: Job, place: Scene) -> None:
    job.wait_for(lambda: "early" in job.text(0))
    job.signal(0, signal.SIGTERM)


def fifo_at_latest(job: Job, place: Scene) -> None:
    """Put a pipe at RUN/checkpoints/latest: every reader of it waits for ever."""
    (place.run / "checkpoints/latest").unlink()
    os.mkfifo(place.run / "checkpoints/latest")


def rename_run(job: Job, place: Scene) -> Path:
    return place.run.rename(place.run.with_name("renamed"))


NAN = float("nan")
QUICK, QUICKER = {"hang_seconds": "5"}, {"hang_seconds": "3"}
"""QUICKER: for a start that hangs, which is given three times as long."""


def _dies(rank: int, code: int, do: inject.Act, says: str) -> Kind:
    codes = (code, 6) if rank == 0 else (6, code)
    return Kind(f"rank {rank} {says}", codes, f"rank {rank} died", at_step(8, (rank,), do))


def _hangs(name: str, rank: int, do: inject.Act, **more: object) -> Kind:
    return Kind(name, (6, 6), "no progress", at_step(8, (rank,), do), changes=QUICK, **more)


def _exhausts(name: str, codes: tuple[int, ...], fault: inject.Fault, part: str) -> Kind:
    return Kind(name, codes, f"out of memory in {part} after step 7", fault)


def _asked(name: str, by_hand: ByHand) -> Kind:
    return Kind(name, (75, 75), "saved step", SLOW, by_hand)


PROCESSES = [
    _dies(0, -9, inject.kill, "killed"),
    _dies(1, -9, inject.kill, "killed"),
    _dies(1, -11, inject.crash, "crashes"),
    _dies(1, 0, inject.leave, "leaves early"),
    Kind("rank 1 calls sys.exit(0)", (1, 1), "sys.exit(0) was called at step 7", at_step(8, (1,), act(sys.exit, 0))),
    Kind("rank 1 raises", (1, 1), "planted by a test", at_step(8, (1,), inject.fail)),
    Kind(
        "rank 1 raises KeyboardInterrupt", (1, 1), "rank 1: RuntimeError: KeyboardInterrupt was raised at step 7",
        at_step(8, (1,), inject.interrupt),
    ),
    Kind(
        "rank 1 is told a number out of range", (6, 2), "0 to 1 of WORLD_SIZE 2", at_once((1,), inject.told(RANK="3")),
        changes=QUICKER, goes_on=False,
    ),
    Kind(
        "ranks disagree on how many they are", (2, 2), "give all of them the same WORLD_SIZE",
        at_once((1,), inject.told(WORLD_SIZE="4")), goes_on=False,
    ),
    _hangs("rank 1 hangs", 1, inject.sleep, before=scene.stacks),
    _hangs("rank 0 hangs", 0, inject.sleep),
    _hangs("rank 1 frozen", 1, inject.freeze),
    _hangs("rank 1 holds Python's lock", 1, inject.hold_gil),
    _hangs("ranks in different collectives", 1, inject.wait_alone),
    Kind(
        "rank 1 frozen, `latest` never answers", (6, 6), "does not answer", at_step(8, (1,), inject.freeze),
        after(7, fifo_at_latest), scene.latest_back, changes=QUICK,
    ),
    Kind("watcher killed", (0, 0), "done ", at_step(4, (1,), inject.kill_monitor)),
    Kind("launcher killed", (75, 75), "the end of the launcher", inject.LAUNCHER_KILLED),
    Kind(
        "launcher killed while rank 1 hangs", (6, 6), "no progress",
        inject.both(inject.LAUNCHER_KILLED, at_step(8, (1,), inject.sleep)), changes=QUICK,
    ),
]  # fmt: skip
REQUESTS = [
    _asked("SIGTERM to rank 0", send_signal(0, signal.SIGTERM)),
    _asked("SIGTERM to rank 1", send_signal(1, signal.SIGTERM)),
    _asked("SIGINT to rank 1", send_signal(1, signal.SIGINT)),
    _asked("SIGUSR1 to rank 0", send_signal(0, signal.SIGUSR1)),
    _asked("SIGUSR2 to rank 1", send_signal(1, signal.SIGUSR2)),
    _asked("stop file", after(4, lambda job, place: (place.run / "stop").touch())),
    Kind(
        "second signal", (143, 143), "ended at once by SIGTERM and SIGTERM",
        inject.both(inject.forwarded_within(0.5), at_step(8, (0,), inject.send(signal.SIGTERM, 2, pause=3))),
    ),
    Kind(
        "signal before the first step", (75, 75), "before the first step", inject.slow_start, send_signal_early,
        goes_on=False,
    ),
]  # fmt: skip
SAVING = [
    Kind("rank 0 killed while it saves", (-9, 6), "rank 0 died", in_save(6, (0,), inject.kill)),
    Kind("rank 1 killed while it saves", (6, -9), "rank 1 died", in_save(6, (1,), inject.kill)),
    Kind("rank 0 killed before `latest` is written", (-9, 6), "rank 0 died", inject.before_latest(6, inject.kill)),
    Kind("disk full once", (0, 0), "continues (1", in_save(6, (1,), inject.no_space)),
    Kind("disk fails once", (0, 0), "continues (1", in_save(6, (0,), inject.no_disk)),
    Kind(
        "disk full for good", (5, 5), "3 saves in a row have failed", in_save(6, (0,), inject.no_space, times=1000),
        changes={"save_every": "1 steps"},
    ),
    Kind("disk full at the start", (5, 5), "a checkpoint and the teacher need", before=scene.full_disk, goes_on=False),
    Kind(
        "disk filled in mid-run", (5, 5), "3 saves in a row have failed", SLOW,
        after(2, lambda job, place: fill(place.run), holds=True), before=scene.small_disk,
        changes={"save_every": "1 steps"}, goes_on=False,
    ),
    Kind("disk full for the log", (0, 0), "training continues", before=scene.log_full),
]  # fmt: skip


def _loads(name: str, before: Prepare, says: str, **more: object) -> Kind:
    return Kind(name, (0, 0), says, before=before, old=True, **more)


def _refused(name: str, before: Prepare, says: str, **more: object) -> Kind:
    return Kind(name, (3, 3), says, before=before, old=True, goes_on=False, **more)


LOADING = [
    _loads("`latest` garbled", scene.latest("\x00\x9f\x1b[2J" * 8), "resumed  at step 6"),
    _loads("file cut off", scene.cut_file, "using step 3"),
    _loads("one bit flipped", scene.flip("rank_00000.safetensors"), "is damaged"),
    _loads("checkpoint is a link to itself", scene.link_to_itself, "using step 3"),
    _refused("all checkpoints gone", scene.no_checkpoints, "has no checkpoint, and had one"),
    _refused(
        "all checkpoints damaged", scene.flip("rank_00000.safetensors", (scene.NEWEST, scene.OLDER)),
        "no older checkpoint exists",
    ),
    _refused("pickles in place of tensors", scene.pickles, "safetensors: "),
    _refused("settings changed", scene.no_trace, "optimizer.lr", changes={"optimizer.lr": "0.001"}),
    _refused("more images", scene.more_images, "and lengths in epochs with them"),
    _loads("other images", scene.black_images, "0 added, 0 removed, 20 of another size", goes_on=False),
    _refused("model changed", scene.no_trace, "model.width", changes={"model.width": "64"}),
    Kind("fewer ranks", (0,), "done ", before=scene.nothing, old=True, exact=False),
    Kind("more ranks", (0, 0, 0, 0), "done ", before=scene.nothing, old=True, exact=False),
    _loads("another ZeRO stage", scene.nothing, "done ", ds="zero3_fp32.json", exact=False),
]  # fmt: skip


def _bad(name: str, says: str, fault: inject.Fault, ds: str, *flags: str) -> Kind:
    return Kind(name, (4, 4), says, fault, ds=ds, flags=flags, goes_on=False)


_SCALE = ("--ds.fp16.initial_scale_power", "4", "--ds.fp16.hysteresis", "1")
NUMBERS = [
    _bad("NaN on rank 1, ZeRO 0, FP32", "on images of ranks 1", loss_times(NAN, 8, (1,)), "zero0_fp32.json"),
    _bad("NaN on rank 1, ZeRO 2, bf16", "on images of ranks 1", loss_times(NAN, 8, (1,)), "zero2_bf16.json"),
    _bad("infinite on all, ZeRO 3", "3 times", loss_times(1e39, 8, (0, 1)), "zero3_fp32.json"),
    _bad("fp16 overflow", "loss scale", loss_times(1e30, 8, (0,)), "zero2_fp16.json", *_SCALE),
    Kind("NaN twice", (0, 0), "nothing moved (2 in", loss_times(NAN, 8, (1,), 2), goes_on=False),
]  # fmt: skip
MEMORY = [
    _exhausts("rank 1 out of memory", (7, 7), at_step(8, (1,), inject.allocate), "the forward pass"),
    _exhausts(
        "all out of memory", (7, 7), at_call("dino_ds.engine.engine:Engine.backward", 8, (0, 1), inject.allocate),
        "the backward pass",
    ),
    Kind(
        "out of memory in a save", (7, 7), "out of memory in saving after",
        at_call("dino_ds.run.run:Saver.save", 2, (0,), inject.allocate_in_python),
    ),
    Kind(
        "more predicted than there is", (2, 2), "of host memory by prediction",
        changes={"head.hidden": "131072"}, goes_on=False,
    ),
]  # fmt: skip
_LOADER = {"data.workers": "1"}
DATA = [
    Kind(
        "loader process killed", (0, 0), "the loader was started again", at_step(5, (1,), inject.kill_loader),
        changes=_LOADER,
    ),
    Kind(
        "loader process killed twice", (2, 2), "after a restart",
        inject.both(at_step(5, (1,), inject.kill_loader), at_step(8, (1,), inject.kill_loader)), changes=_LOADER,
    ),
    Kind(
        "images of one color", (0, 0), "100.00% of the images are of one color", before=scene.black_images,
        goes_on=False,
    ),
    Kind("half of the images empty", (2, 2), "are unreadable", before=scene.bad_images, goes_on=False),
    Kind("images gone in mid-run", (2, 2), "are unreadable", SLOW,
        after(2, lambda job, place: [path.unlink() for path in place.images.iterdir()], holds=True), goes_on=False),
    Kind("ranks see other images", (2, 2), "same files", inject.other_images, before=scene.other_images, goes_on=False),
]  # fmt: skip
FOLDERS = [
    Kind(
        "absurd values", (2, 2), "must be <= 1024", goes_on=False,
        changes={"hang_seconds": str(10**30), "model.depth": "100000"},
    ),
    Kind("path that no file can have", (2, 2), "is too long", goes_on=False, changes={"data.root": "a/" * 2500}),
    Kind("run folder in use", (2, 2), "is in use by pid", before=scene.other_job, goes_on=False),
    _loads("lock of a dead run", scene.dead_lock, "was taken over"),
    Kind(
        "folder holds a run", (2, 2), "already holds a run", before=scene.no_trace, old=True, resume=False,
        goes_on=False,
    ),
    Kind(
        "run folder renamed", (3, 3), "removed or renamed while the run was at work", SLOW, after(4, rename_run),
        before=scene.gone, goes_on=False,
    ),
    Kind(
        "run folder removed", (3, 3), "removed or renamed while the run was at work", SLOW,
        after(4, lambda job, place: shutil.rmtree(rename_run(job, place))),
        before=scene.gone, goes_on=False,
    ),
    Kind(
        "metrics.jsonl is a folder", (2, 2), "is a folder where a run has a file",
        before=scene.folder_as("metrics.jsonl"), old=True, goes_on=False,
    ),
    Kind(
        "RUN/lock is a folder", (2, 2), "is not the lock of a run", before=scene.folder_as("lock"), old=True,
        goes_on=False,
    ),
    _loads("leftovers are folders", scene.folder_as("config.yaml.tmp"), "done "),
    Kind("nothing to resume", (3, 3), "nothing to resume", resume=True, goes_on=False),
    Kind("run folder below a file", (2, 2), "--run_dir", before=scene.below_a_file, goes_on=False),
    Kind("port in use", (2, 6), "--master_port", before=scene.port_in_use, changes=QUICKER, goes_on=False),
]  # fmt: skip

GROUPS = (PROCESSES, REQUESTS, SAVING, LOADING, NUMBERS, MEMORY, DATA, FOLDERS)
