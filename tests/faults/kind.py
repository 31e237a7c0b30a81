"""One kind of fault, and what a test does by hand while the job runs."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable
from dataclasses import dataclass, field

from tests.disks import fill
from tests.faults import inject, scene
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
    by_hand: Callable[[Job, Scene], None] | None = None
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


def send_signal(rank: int, number: int) -> Callable[[Job, Scene], None]:
    def by_hand(job: Job, place: Scene) -> None:
        job.wait_for_steps(place.run, 4)
        job.signal(rank, number)

    return by_hand


def send_signal_early(job: Job, place: Scene) -> None:
    job.wait_for(lambda: "early" in job.text(0))
    job.signal(0, signal.SIGTERM)


def stop_file(job: Job, place: Scene) -> None:
    job.wait_for_steps(place.run, 4)
    (place.run / "stop").touch()


def fifo_at_latest(job: Job, place: Scene) -> None:
    """Put a pipe at RUN/checkpoints/latest: every reader of it waits for ever."""
    job.wait_for_steps(place.run, 7)
    (place.run / "checkpoints/latest").unlink()
    os.mkfifo(place.run / "checkpoints/latest")


def empty_images(job: Job, place: Scene) -> None:
    job.wait_for_steps(place.run, 2)
    for path in place.images.iterdir():
        path.unlink()
    job.go_on()


def fill_disk(job: Job, place: Scene) -> None:
    job.wait_for_steps(place.run, 2)
    fill(place.run)
    job.go_on()


def rename_run(job: Job, place: Scene) -> None:
    job.wait_for_steps(place.run, 4)
    place.run.rename(place.run.with_name("renamed"))


def remove_run(job: Job, place: Scene) -> None:
    rename_run(job, place)
    shutil.rmtree(place.run.with_name("renamed"))
