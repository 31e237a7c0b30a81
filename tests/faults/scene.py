"""The scene of a fault: images and a run folder before a job starts, and what a test does to them."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from PIL import Image

from dino_ds.health.beat import Heartbeats
from tests.disks import fill, mount_disk, unmount
from tests.faults import jobs
from tests.faults.inject import SLOW
from tests.hostile.guard import put_with_good_sums
from tests.run.harness import image_folder

NEWEST, OLDER = "step_00000006", "step_00000003"
Prepare = Callable[["Scene"], Callable[[], None] | None]
"""A change of a scene; it may return a function to call when the job has ended."""


@dataclass
class Scene:
    """`run` may be a copy of a run that has saved steps 3 and 6; `images` are a copy; port: the job's, None = free."""

    run: Path
    images: Path
    port: int | None = None

    @property
    def newest(self) -> Path:
        return self.run / "checkpoints" / NEWEST


def nothing(scene: Scene) -> None:
    """The copy of a run as it is."""


def latest(text: str) -> Prepare:
    return lambda scene: (scene.run / "checkpoints/latest").write_text(text) and None


def no_checkpoints(scene: Scene) -> None:
    shutil.rmtree(scene.run / "checkpoints")


def cut_file(scene: Scene) -> None:
    path = scene.newest / "rank_00001.safetensors"
    os.truncate(path, path.stat().st_size // 2)


def flip(name: str, folders: tuple[str, ...] = (NEWEST,)) -> Prepare:
    def act(scene: Scene) -> None:
        for folder in folders:
            path = scene.run / "checkpoints" / folder / name
            data = bytearray(path.read_bytes())
            data[len(data) // 2] ^= 4
            path.write_bytes(data)

    return act


def pickles(scene: Scene) -> None:
    """A pickle that would run a command in place of each rank's tensors, with the checksums that go with it."""
    for folder in (scene.newest, scene.newest.with_name(OLDER)):
        for path in folder.glob("*.safetensors"):
            put_with_good_sums(folder, path.name, b"cos\nsystem\n(S'touch canary'\ntR.")


def stacks(scene: Scene) -> Callable[[], None]:
    """Afterwards the stacks of both ranks are there, and the log says who hangs."""

    def check() -> None:
        text, log = (scene.run / "hang-7.txt").read_text(), (scene.run / "log.txt").read_text()
        assert "== rank 0, " in text and "all_reduce" in text
        assert "== rank 1, " in text and "tests/faults/inject.py" in text and "in sleep" in text
        assert f"error    no progress on rank 1 for 5 s (step 7, step); stacks in {scene.run}/hang-7.txt; last " in log
        assert [beat.ended for beat in Heartbeats(scene.run).read()] == ["error"] * 2

    return check


def dead_lock(scene: Scene) -> None:
    """RUN/lock of a process that has held it and is gone."""
    code = "import pathlib, sys, dino_ds.health.processes as l; l.RunLock(pathlib.Path(sys.argv[1])).acquire()"
    subprocess.run([sys.executable, "-c", code, scene.run], check=True, cwd=jobs.REPOSITORY)
    assert (scene.run / "lock").exists()


def bad_images(scene: Scene) -> None:
    for path in sorted(scene.images.iterdir())[::2]:
        path.write_bytes(b"")


def other_images(scene: Scene) -> None:
    shutil.copytree(scene.images, scene.images.with_name("images_of_rank_1"))
    next(scene.images.with_name("images_of_rank_1").iterdir()).unlink()


def other_job(scene: Scene) -> Callable[[], None]:
    """Another job at work in the same folder; it must come to its end."""
    first = jobs.start(scene.run, scene.images, fault=SLOW)
    first.wait_for_steps(scene.run, 2)

    def check() -> None:
        first.go_on()
        first.finish()

    return check


def port_in_use(scene: Scene) -> Callable[[], None]:
    taken = socket.socket()
    taken.bind(("127.0.0.1", 0))
    taken.listen()
    scene.port = taken.getsockname()[1]
    return taken.close


def log_full(scene: Scene) -> None:
    """Every write to log.txt finds no space."""
    scene.run.mkdir()
    (scene.run / "log.txt").symlink_to("/dev/full")


def no_trace(scene: Scene) -> Callable[[], None]:
    """The run must be the same afterwards, to the byte, but for its heartbeats."""

    def contents() -> dict[Path, bytes | None]:
        paths = [path for path in scene.run.rglob("*") if "heartbeats" not in path.parts]
        return {path: path.read_bytes() if path.is_file() else None for path in paths}

    before = contents()

    def check() -> None:
        assert contents() == before

    return check


def more_images(scene: Scene) -> None:
    image_folder(scene.images / "more", 100, seed=1)


def black_images(scene: Scene) -> None:
    for path in scene.images.iterdir():
        Image.new("RGB", (48, 40)).save(path)


def link_to_itself(scene: Scene) -> None:
    shutil.rmtree(scene.newest)
    scene.newest.symlink_to(scene.newest.name)


def folder_as(name: str) -> Prepare:
    """A folder with something in it, in place of a file of the run."""

    def act(scene: Scene) -> None:
        path = scene.run / name
        path.unlink(missing_ok=True)
        (path / "inner").mkdir(parents=True)

    return act


def small_disk(scene: Scene) -> Callable[[], None]:
    """The run folder is a disk of 4 MiB; whatever happens, it holds no half line."""
    mount_disk(scene.run)

    def check() -> None:
        lines = [scene.run / name for name in ("metrics.jsonl", "log.txt") if (scene.run / name).exists()]
        whole = all(path.read_bytes().endswith(b"\n") for path in lines)
        left = [str(path) for path in scene.run.rglob("*") if path.name.endswith(".tmp") or path.name.startswith(".")]
        unmount(scene.run)
        assert whole and not left

    return check


def full_disk(scene: Scene) -> Callable[[], None]:
    """A `small_disk` with 16 KiB free from the start: nothing is left there."""
    check = small_disk(scene)
    fill(scene.run, 16)

    def check_empty() -> None:
        names = os.listdir(scene.run)
        check()
        assert names == ["FILLER"]

    return check_empty


def gone(scene: Scene) -> Callable[[], None]:
    def check() -> None:
        assert not scene.run.exists()

    return check


def below_a_file(scene: Scene) -> None:
    scene.run.parent.joinpath("file").touch()
    scene.run = scene.run.parent / "file" / "run"


def latest_back(scene: Scene) -> Callable[[], None]:
    def restore() -> None:
        (scene.run / "checkpoints/latest").unlink()
        latest(NEWEST)(scene)

    return restore
