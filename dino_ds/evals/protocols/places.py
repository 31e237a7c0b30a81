"""Where a benchmark lies below `--benchmark_root`, and what is said where it does not."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from dino_ds.data.listing import printable
from dino_ds.errors import ConfigError, DataError
from dino_ds.text_file import read_text


@dataclass(frozen=True)
class Benchmark:
    """`folders`: what its folder is called below the root, that itself included as "."; `marks`: what lies in it;
    `layout` and `origin`: for people."""

    name: str
    folders: tuple[str, ...]
    marks: tuple[str, ...]
    layout: str
    origin: str

    def find(self, root: Path | None) -> Path:
        """The folder that has all marks. Raises ConfigError without a root, DataError where there is none."""
        if root is None:
            raise ConfigError(f"{self.name} needs its images: --benchmark_root DIR, {self._wanted()}")
        for folder in self.folders:
            if all((root / folder / mark).exists() for mark in self.marks):
                return root / folder
        best = max(self.folders, key=lambda folder: sum((root / folder / mark).exists() for mark in self.marks))
        missing = next(mark for mark in self.marks if not (root / best / mark).exists())
        places = ", ".join(str(root / folder) for folder in self.folders)
        raise DataError(f"no {self.name} in {places}: {root / best / missing} is not there; {self._wanted()}")

    def check(self, paths: Iterable[Path]) -> None:
        """Raises DataError where one of these files is not there."""
        folders: dict[Path, set[str]] = {}
        missing = []
        for path in paths:
            if path.parent not in folders:
                folders[path.parent] = set(os.listdir(path.parent)) if path.parent.is_dir() else set()
            if path.name not in folders[path.parent]:
                missing.append(path)
        if missing:
            raise DataError(
                f"{self.name} is not complete: {len(missing)} files are not there, such as "
                f"{printable(str(missing[0]))}; {self._wanted()}"
            )

    def names(self, path: Path) -> list[str]:
        """The lines of a list of names, which never lead out of a folder. Raises DataError for another or none."""
        try:
            names = [line.strip() for line in read_text(str(path), "a list of names").splitlines() if line.strip()]
        except ConfigError as error:
            raise DataError(str(error)) from None
        if not names:
            raise DataError(f"{path} names nothing; {self._wanted()}")
        return [plain_name(name, path) for name in names]

    def _wanted(self) -> str:
        return f"wanted is {self.layout} ({self.origin})"


def plain_name(name: object, where: Path) -> str:
    """`name`, if it is one of a file or folder. Raises DataError for what would be a path."""
    if not isinstance(name, str) or not name or name.startswith(".") or {"/", "\\", "\0"} & set(name):
        raise DataError(f"{where} names {ascii(name)[:60]}, which is no name of an image")
    return name
