"""Disks of a few KiB, for tests that fill them: needs the right to mount."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

PAGE = 4096


def mount_disk(place: Path, kib: int = 4096) -> None:
    place.mkdir(parents=True, exist_ok=True)
    command = ["mount", "-t", "tmpfs", "-o", f"size={kib}k", "none", place]
    if subprocess.run(command, capture_output=True).returncode:
        pytest.skip("no right to mount")


def unmount(place: Path) -> None:
    subprocess.run(["umount", "-l", place], check=True)


def fill(disk: Path, free_kib: int = 0) -> None:
    """Write FILLER until only `free_kib` are free."""
    with (disk / "FILLER").open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(PAGE))
        except OSError:
            file.truncate(max(0, file.tell() - free_kib * 1024))
