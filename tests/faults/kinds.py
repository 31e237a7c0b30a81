"""Every kind of fault that is injected, and what must come of it: one row of the table in docs/reliability.md each."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from tests.faults import damage, inject
from tests.faults.inject import at_once, at_step, in_save
from tests.faults.jobs import Job

DIED, LOST, HANGS = "died by SIGKILL", (6, -9), {"hang_seconds": "3"}


@dataclass(frozen=True)
class Kind:
    """One fault.

    how: as people would say it. codes: what each rank ends with. says: a part of what is printed or logged.
    limit: seconds from the fault to the last rank's end, on a busy machine.
    The job is new, or with `damage` goes on from a copy of a run that has saved steps 3 and 6 and was stopped there.
    by_hand: what the test itself does while the job runs. Afterwards `--resume` must give the very numbers of a run
    without a fault, unless goes_on is False; `changes` hold for that too. `exact` False: equal to 1e-5, as another
    number of ranks or ZeRO stage sums in another order.
    """

    name: str
    how: str
    codes: tuple[int, ...]
    says: str
    fault: inject.Fault | None = None
    by_hand: Callable[[Job, Path], None] | None = None
    damage: Callable[[Path], None] | None = None
    changes: dict[str, str] = field(default_factory=dict)
    flags: tuple[str, ...] = ()
    ds: str = "zero1_fp32.json"
    world: int = 2
    limit: float = 60.0
    goes_on: bool = True
    exact: bool = True


def _signal(rank: int, *numbers: int) -> Callable[[Job, Path], None]:
    def act(job: Job, run: Path) -> None:
        job.wait_for_steps(run, 4)
        for i, number in enumerate(numbers):
            time.sleep(2.5 if i else 0)
            job.signal(rank, number)

    return act


def _take_port(job: Job, run: Path) -> None:
    pass


def _stop_file(job: Job, run: Path) -> None:
    job.wait_for_steps(run, 4)
    job.mark()
    (run / "stop").touch()


def _signal_early(job: Job, run: Path) -> None:
    job.wait_for(lambda: (job.folder / "rank_0.txt").exists())
    time.sleep(0.2)
    job.signal(0, signal.SIGTERM)


SLOW = at_step(1, (0, 1), inject.act(inject.sleep, 0.4), times=1000)
"""Steps of 0.4 s: a signal comes in the middle of one, and before the last."""

PROCESSES = [
    Kind("rank 0 killed", "SIGKILL before step 8", (-9, 6), f"rank 0 {DIED}", at_step(8, (0,), inject.kill)),
    Kind("rank 1 killed", "SIGKILL before step 8", (6, -9), f"rank 1 {DIED}", at_step(8, (1,), inject.kill)),
    Kind("rank 1 crashes", "SIGSEGV", (6, -11), "rank 1 died by SIGSEGV", at_step(8, (1,), inject.crash)),
    Kind("rank 1 raises", "RuntimeError before step 8", (1, 1), "planted by a test", at_step(8, (1,), inject.fail)),
    Kind("rank 1 ends early", "exit code 0 before step 8", (6, 0), "rank 1 died with code 0", at_step(8, (1,), inject.leave)),
    Kind(
        "rank 1 never arrives",
        "ends before it joins the others",
        (6, 7),
        "no progress on rank 1",
        at_once((1,), inject.act(inject.leave, 7)),
        changes=HANGS,
        goes_on=False,
    ),
    Kind("rank 1 hangs", "sleeps for ever", (6, 6), "no progress on rank 1", at_step(8, (1,), inject.sleep), changes=HANGS),
    Kind("rank 0 hangs", "sleeps for ever", (6, 6), "no progress on rank 0", at_step(8, (0,), inject.sleep), changes=HANGS),
    Kind("rank 1 frozen", "SIGSTOP", (6, 6), "no progress on rank 1", at_step(8, (1,), inject.freeze), changes=HANGS),
    Kind(
        "rank 1 holds Python's lock",
        "a C call that never returns",
        (6, 6),
        "no progress on rank 1",
        at_step(8, (1,), inject.hold_gil),
        changes=HANGS,
    ),
    Kind(
        "ranks in different collectives",
        "rank 1 waits in a barrier of its own",
        (6, 6),
        "no progress",
        at_step(8, (1,), inject.wait_alone),
        changes=HANGS,
    ),
    Kind("watcher killed", "SIGKILL to the watcher of rank 1", (0, 0), "done ", at_step(4, (1,), inject.kill_watcher)),
    Kind("SIGTERM to rank 0", "kill -TERM", (75, 75), "saved step", SLOW, _signal(0, signal.SIGTERM)),
    Kind("SIGTERM to rank 1", "kill -TERM", (75, 75), "saved step", SLOW, _signal(1, signal.SIGTERM)),
    Kind("SIGINT to rank 1", "kill -INT", (75, 75), "saved step", SLOW, _signal(1, signal.SIGINT)),
    Kind("SIGUSR1 to rank 0", "Slurm's warning", (75, 75), "saved step", SLOW, _signal(0, signal.SIGUSR1)),
    Kind("SIGUSR2 to rank 1", "kill -USR2", (75, 75), "saved step", SLOW, _signal(1, signal.SIGUSR2)),
    Kind("stop file", "touch RUN/stop", (75, 75), "saved step", SLOW, _stop_file),
    Kind(
        "second signal",
        "SIGTERM twice in a step that lasts",
        (143, 6),
        "ended at once by SIGTERM and SIGTERM",
        at_step(8, (0,), inject.send(signal.SIGTERM, 2, pause=2.5)),
    ),
    Kind(
        "signal before the first step",
        "SIGTERM while the program starts",
        (75, 75),
        "before the first step",
        at_once((0, 1), inject.act(inject.sleep, 1)),
        _signal_early,
        goes_on=False,
    ),
    Kind("launcher killed", "SIGKILL to the ranks' parent", (75, 75), "saved step", at_step(8, (0,), inject.kill_parent)),
    Kind(
        "launcher killed, rank 1 hangs",
        "SIGKILL to the parent, rank 1 sleeps",
        (6, 6),
        "the launcher is gone",
        inject.both(at_step(8, (0,), inject.kill_parent), at_step(8, (1,), inject.sleep)),
    ),
]  # fmt: skip

SAVING = [
    Kind("rank 0 killed while it saves", "SIGKILL, half a file of step 6", (-9, 6), f"rank 0 {DIED}", in_save(6, (0,), inject.kill)),
    Kind("rank 1 killed while it saves", "SIGKILL, half a file of step 6", (6, -9), f"rank 1 {DIED}", in_save(6, (1,), inject.kill)),
    Kind(
        "killed between the files and `latest`",
        "SIGKILL of rank 0 when step 6 is in place",
        (-9, 6),
        f"rank 0 {DIED}",
        inject.before_latest(6, inject.kill),
    ),
    Kind("disk full once", "ENOSPC on rank 1 at step 6", (0, 0), "training goes on", in_save(6, (1,), inject.no_space)),
    Kind(
        "disk full for good",
        "ENOSPC on rank 0 from step 6 on",
        (5, 5),
        "3 saves in a row have failed",
        in_save(6, (0,), inject.no_space, times=1000),
        changes={"save_every": "1 steps"},
    ),
    Kind("disk broken once", "EIO on rank 1 at step 6", (0, 0), "training goes on", in_save(6, (1,), inject.no_disk)),
]  # fmt: skip

LOADING = [
    Kind("`latest` empty", "0 bytes", (0, 0), "using step 6, the newest whole one", damage=damage.latest("")),
    Kind("`latest` missing", "removed", (0, 0), "latest is missing", damage=damage.remove("latest")),
    Kind("`latest` garbled", "40 random bytes", (0, 0), "using step 6", damage=damage.latest("\x00\x9f\x1b[2J" * 8)),
    Kind("`latest` leads out", "../../../etc", (0, 0), "using step 6", damage=damage.latest("../../../etc")),
    Kind("file cut off", "half of a rank's file of step 6", (0, 0), "using step 3", damage=damage.cut("rank_00001")),
    Kind("file missing", "rank 1's file of step 6", (0, 0), "using step 3", damage=damage.remove("step_00000006/rank_00001.safetensors")),
    Kind("one bit flipped", "in rank 0's file of step 6", (0, 0), "is damaged", damage=damage.flip("rank_00000")),
    Kind("one bit of the teacher flipped", "in a whole file of step 6", (0, 0), "is damaged", damage=damage.flip("whole_00000")),
    Kind("manifest damaged", "one byte", (0, 0), "damaged manifest.json", damage=damage.flip("manifest")),
    Kind("steps mixed", "rank 1's file of step 3 in step 6", (0, 0), "step 3", damage=damage.mix),
    Kind("ranks' files swapped", "in step 6", (0, 0), "is damaged", damage=damage.swap),
    Kind("all checkpoints damaged", "a bit in each", (3, 3), "no older checkpoint exists", damage=damage.flip_all, goes_on=False),
    Kind("all checkpoints gone", "rm -r checkpoints", (0, 0), "there is no checkpoint", damage=damage.remove(".")),
    Kind("pickle in place of tensors", "with good checksums", (3, 3), "rank_00000", damage=damage.pickle, goes_on=False),
    Kind("settings changed", "another optimizer.lr", (3, 3), "optimizer.lr", damage=damage.nothing, changes={"optimizer.lr": "0.001"}, goes_on=False),
    Kind("model changed", "another model.width", (3, 3), "model.width", damage=damage.nothing, changes={"model.width": "64"}, goes_on=False),
    Kind("fewer ranks", "2, then 1", (0,), "done ", damage=damage.nothing, world=1, exact=False),
    Kind("more ranks", "2, then 4", (0, 0, 0, 0), "done ", damage=damage.nothing, world=4, exact=False),
    Kind("another ZeRO stage", "1, then 3", (0, 0), "done ", damage=damage.nothing, ds="zero3_fp32.json", exact=False),
]  # fmt: skip

NUMERICS = [
    Kind("NaN on one rank, ZeRO 0 FP32", "loss of rank 1 from step 8 on", (4, 4), "3 times in a row", inject.loss_times(float("nan"), 8, (1,)), ds="zero0_fp32.json"),
    Kind("NaN on one rank, ZeRO 2 bf16", "loss of rank 1 from step 8 on", (4, 4), "rank 1", inject.loss_times(float("nan"), 8, (1,)), ds="zero2_bf16.json"),
    Kind("infinity on all ranks, ZeRO 3", "loss from step 8 on", (4, 4), "3 times in a row", inject.loss_times(float("inf"), 8, (0, 1)), ds="zero3_fp32.json"),
    Kind("NaN twice", "loss of rank 1 in two micro-batches", (0, 0), "nothing moved", inject.loss_times(float("nan"), 8, (1,), 2), goes_on=False),
    Kind(
        "fp16 overflow for good",
        "loss times 1e30 from step 8 on",
        (4, 4),
        "smallest loss scale",
        inject.loss_times(1e30, 8, (0, 1)),
        ds="zero2_fp16.json",
        flags=("--ds.fp16.initial_scale_power", "4", "--ds.fp16.hysteresis", "1"),
    ),
]  # fmt: skip

DATA = [
    Kind("loader process killed", "SIGKILL, once", (0, 0), "done ", at_step(5, (1,), inject.kill_loader), changes={"data.workers": "1"}),
    Kind("loader process killed again and again", "SIGKILL, at each step", (2, 2), "loader process", at_step(5, (1,), inject.kill_loader, 100), changes={"data.workers": "1"}),
    Kind("images cut off", "half of all files are empty", (2, 2), "data.max_bad_fraction", by_hand=None, changes={"data.root": "BAD"}, goes_on=False),
    Kind("images gone in mid-run", "the folder is emptied", (2, 2), "data.max_bad_fraction", SLOW, damage.empty_images, changes={"data.root": "COPY"}, goes_on=False),
    Kind("ranks see other images", "one image less on rank 1", (2, 2), "same files", damage.other_root, changes={"data.root": "COPY"}, goes_on=False),
]  # fmt: skip

FOLDERS = [
    Kind("run folder in use", "a second job on it", (2, 2), "is in use by pid", by_hand=None, goes_on=False),
    Kind("lock of a dead run", "RUN/lock of a process that is gone", (0, 0), "was taken over", damage=damage.stale_lock),
    Kind("folder that holds a run", "no --resume", (2, 2), "already holds a run", damage=damage.nothing, goes_on=False),
    Kind("nothing to resume", "--resume in an empty folder", (3, 3), "nothing to resume", goes_on=False),
    Kind("run folder can't be made", "below a file", (2, 2), "can't be", goes_on=False),
    Kind("port in use", "another program listens on MASTER_PORT", (2, 2), "is in use", by_hand=_take_port, goes_on=False),
]  # fmt: skip

GROUPS = {
    "Processes and collectives": PROCESSES,
    "Saving": SAVING,
    "Loading": LOADING,
    "Numbers": NUMERICS,
    "Data": DATA,
    "Folders and ports": FOLDERS,
}
KINDS = [kind for kinds in GROUPS.values() for kind in kinds]
