"""Every kind of fault that is injected, and what must come of it; docs/reliability.md sums them up."""

from __future__ import annotations

import shutil
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass, field

from tests.disks import fill
from tests.faults import inject, scene
from tests.faults.inject import SLOW, act, at_once, at_step, in_save, loss_times
from tests.faults.jobs import Job
from tests.faults.scene import Prepare, Scene


@dataclass(frozen=True)
class Kind:
    """One fault.

    codes: what each rank ends with. says: a part of what is printed.
    fault: happens in the ranks. by_hand: what the test does while the job runs. before: what it does to the scene.
    old: the job goes on (`--resume`) from a copy of a run that has saved steps 3 and 6, else it is a new one.
    goes_on: afterwards `--resume` must give the very numbers of a run without a fault.
    """

    name: str
    codes: tuple[int, ...]
    says: str
    fault: inject.Fault | None = None
    by_hand: Callable[[Job, Scene], object] | None = None
    before: Prepare = scene.nothing
    old: bool = False
    changes: dict[str, str] = field(default_factory=dict)
    flags: tuple[str, ...] = ()
    ds: str = "zero1_fp32.json"
    goes_on: bool = True


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


NAN = float("nan")
QUICK, QUICKER = {"hang_seconds": "5"}, {"hang_seconds": "3"}
"""QUICKER: for a start that hangs, which is given three times as long."""


def _dies(rank: int, code: int, do: inject.Act, says: str) -> Kind:
    codes = (code, 6) if rank == 0 else (6, code)
    return Kind(f"rank {rank} {says}", codes, f"rank {rank} died", at_step(8, (rank,), do))


def _hangs(name: str, rank: int, do: inject.Act, **more: object) -> Kind:
    return Kind(name, (6, 6), "no progress", at_step(8, (rank,), do), changes=QUICK, **more)


def _asked(name: str, by_hand: ByHand) -> Kind:
    return Kind(name, (75, 75), "saved step", SLOW, by_hand)


PROCESSES = [
    _dies(0, -9, inject.kill, "killed"),
    _dies(1, -11, inject.crash, "crashes"),
    _dies(1, 0, inject.leave, "leaves early"),
    Kind("rank 1 calls sys.exit(0)", (1, 1), "sys.exit(0) was called at step 7", at_step(8, (1,), act(sys.exit, 0))),
    Kind("rank 1 raises", (1, 1), "planted by a test", at_step(8, (1,), inject.fail)),
    Kind(
        "rank 1 raises KeyboardInterrupt", (1, 1), "rank 1: RuntimeError: KeyboardInterrupt was raised at step 7",
        at_step(8, (1,), inject.interrupt),
    ),
    Kind(
        "ranks disagree on how many they are", (2, 2), "give all of them the same WORLD_SIZE",
        at_once((1,), inject.told(WORLD_SIZE="4")), goes_on=False,
    ),
    _hangs("rank 1 hangs", 1, inject.sleep, before=scene.stacks),
    _hangs("rank 1 frozen", 1, inject.freeze),
    _hangs("rank 1 holds Python's lock", 1, inject.hold_gil),
    _hangs("ranks in different collectives", 1, inject.wait_alone),
    Kind("watcher killed", (0, 0), "done ", at_step(4, (1,), inject.kill_monitor)),
    Kind("launcher killed", (75, 75), "the end of the launcher", inject.LAUNCHER_KILLED),
    Kind(
        "launcher killed while rank 1 hangs", (6, 6), "no progress",
        inject.both(inject.LAUNCHER_KILLED, at_step(8, (1,), inject.sleep)), changes=QUICK,
    ),
]  # fmt: skip
REQUESTS = [
    _asked("SIGTERM to rank 0", send_signal(0, signal.SIGTERM)),
    _asked("SIGINT to rank 1", send_signal(1, signal.SIGINT)),
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
    Kind("rank 1 killed while it saves", (6, -9), "rank 1 died", in_save(6, (1,), inject.kill)),
    Kind("rank 0 killed before `latest` is written", (-9, 6), "rank 0 died", inject.before_latest(6, inject.kill)),
    Kind("disk full once", (0, 0), "continues (1", in_save(6, (1,), inject.no_space)),
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
]  # fmt: skip


def _refused(name: str, before: Prepare, says: str, **more: object) -> Kind:
    return Kind(name, (3, 3), says, before=before, old=True, goes_on=False, **more)


LOADING = [
    _refused(
        "all checkpoints damaged", scene.flip("rank_00000.safetensors", (scene.NEWEST, scene.OLDER)),
        "no older checkpoint exists",
    ),
    _refused("pickles in place of tensors", scene.pickles, "safetensors: "),
    _refused("settings changed", scene.no_trace, "optimizer.lr", changes={"optimizer.lr": "0.001"}),
    Kind(
        "other images", (0, 0), "0 added, 0 removed, 20 of another size", before=scene.black_images, old=True,
        goes_on=False,
    ),
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
    Kind(
        "rank 1 out of memory", (7, 7), "out of memory in the forward pass after step 7",
        at_step(8, (1,), inject.allocate),
    ),
    Kind(
        "more predicted than there is", (2, 2), "of host memory by prediction",
        changes={"head.hidden": "131072"}, goes_on=False,
    ),
]  # fmt: skip
_LOADER = {"data.workers": "1"}
DATA = [
    Kind(
        "loader process killed twice", (2, 2), "after a restart",
        inject.both(at_step(5, (1,), inject.kill_loader), at_step(8, (1,), inject.kill_loader)), changes=_LOADER,
    ),
    Kind("half of the images empty", (2, 2), "are unreadable", before=scene.bad_images, goes_on=False),
    Kind("images gone in mid-run", (2, 2), "are unreadable", SLOW,
        after(2, lambda job, place: [path.unlink() for path in place.images.iterdir()], holds=True), goes_on=False),
]  # fmt: skip
FOLDERS = [
    Kind(
        "absurd values", (2, 2), "must be <= 1024", goes_on=False,
        changes={"hang_seconds": str(10**30), "model.depth": "100000"},
    ),
    Kind("run folder in use", (2, 2), "is in use by pid", before=scene.other_job, goes_on=False),
    Kind(
        "run folder removed", (3, 3), "removed or renamed while the run was at work", SLOW,
        after(4, lambda job, place: shutil.rmtree(place.run.rename(place.run.with_name("renamed")))),
        before=scene.gone, goes_on=False,
    ),
    Kind("run folder below a file", (2, 2), "--run_dir", before=scene.below_a_file, goes_on=False),
    Kind("port in use", (2, 6), "--master_port", before=scene.port_in_use, changes=QUICKER, goes_on=False),
]  # fmt: skip

GROUPS = (PROCESSES, REQUESTS, SAVING, LOADING, NUMBERS, MEMORY, DATA, FOLDERS)
