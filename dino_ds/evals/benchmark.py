"""Benchmarks of the DINO papers, which bring images of their own: their files and features."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from dino_ds.data.base import Source
from dino_ds.errors import ConfigError, DataError
from dino_ds.evals.context import EvalContext


@dataclass(frozen=True)
class Benchmark:
    """A benchmark's files below a root, or below `folder` in it.

    Args:
        name: for messages.
        folder: name that its download usually has.
        marks: files that tell that it is there.
        layout, origin: for messages, what is wanted and where it comes from.
    """

    name: str
    folder: str
    marks: tuple[str, ...]
    layout: str
    origin: str

    def find(self, root: Path | None) -> Path:
        """The folder that has all marks. Raises ConfigError without a root, DataError where there is none."""
        if root is None:
            raise ConfigError(f"{self.name} needs its images: --benchmark_root DIR, {self._wanted}")
        candidates = root, root / self.folder
        for candidate in candidates:
            if all((candidate / mark).exists() for mark in self.marks):
                return candidate
        marks = " or ".join(self.marks)
        raise DataError(f"no {self.name} in {candidates[0]} or {candidates[1]}: {marks} is not there; {self._wanted}")

    def check(self, paths: Iterable[Path]) -> None:
        """Raises DataError where one of these files is not there."""
        missing = [path for path in paths if not path.is_file()]
        if missing:
            raise DataError(
                f"{self.name} is not complete: {len(missing)} files are not there, such as {str(missing[0])!r}; "
                f"{self._wanted}"
            )

    @property
    def _wanted(self) -> str:
        return f"wanted is {self.layout} ({self.origin})"


def describe_files(
    context: EvalContext,
    files: Source,
    transform: Callable[..., Tensor],
    describe: Callable[[Tensor], Tensor],
    batch: int,
    label: str,
) -> Tensor:
    """Features (n, d) of all files in their order, on all ranks; each rank describes its share.

    Args:
        transform: image -> (3, h, w), of one size unless `batch` is 1.
        describe: (b, 3, h, w) -> (b, d).
        label: name of the progress bar.

    Raises:
        DataError: an image can't be read; a benchmark without it is another one.
    """
    features, _, unreadable = context.gather(describe, files, range(len(files)), transform, label, batch)
    if unreadable:
        raise DataError(f"{len(unreadable)} images can't be read, such as {unreadable[0]}: download it again")
    return features
