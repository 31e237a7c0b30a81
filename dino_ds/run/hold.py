"""Holding the lock of a run folder from a start's first moment to its end."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from dino_ds.engine import distributed
from dino_ds.errors import unwritable
from dino_ds.health.beat import Beat
from dino_ds.health.lock import RunLock
from dino_ds.health.records import Heartbeats


@contextmanager
def held(lock: RunLock, heartbeats: Heartbeats, beat: Beat) -> Iterator[list[str]]:
    """Hold the run folder's lock, with this start's heartbeats in it; yields a note if the last holder is gone.

    A start that was refused, `beat.listed` False at the end, leaves no trace in a run.
    """
    note, first = "", distributed.rank() == 0
    try:
        with distributed.raise_on_all_ranks():
            if first:
                note = lock.acquire()
                try:
                    heartbeats.prepare()
                except OSError as error:
                    raise unwritable(f"run folder {lock.run_dir}", error) from None
        beat.listed = True
        yield [note] if note else []
    finally:
        if first:
            if heartbeats.prepared and not lock.guards_a_run:
                heartbeats.remove()
            elif heartbeats.prepared and not beat.listed:
                heartbeats.bring_back_earlier()
            lock.release()
