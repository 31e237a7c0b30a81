"""Where pictures go: PNG files in a folder, and on TensorBoard for those that go into a run's own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from dino_ds.durable import replace_file, why_not_writable
from dino_ds.errors import ConfigError
from dino_ds.pictures.canvas import figure_png, figure_tensor

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class PictureFiles:
    """`out`, or RUN/pictures where `model` is a run, or ./pictures; `written` are the files' paths so far.

    Raises ConfigError where nothing can be written: a map may take minutes.
    """

    def __init__(self, model: str, out: str | None) -> None:
        run = Path(model)
        self._folder = Path(out).expanduser() if out else run / "pictures" if run.is_dir() else Path("pictures")
        self._board = run / "tensorboard" if out is None and (run / "tensorboard").is_dir() else None
        self._step = _step_of(run / "teacher.json")
        self.written: list[str] = []
        if reason := why_not_writable(self._folder / "a.png"):
            raise _not_written(self._folder, reason)

    def add(self, name: str, figure: Figure) -> None:
        """Raises ConfigError where it can't be written."""
        path = self._folder / f"{name}.png"
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            replace_file(path, figure_png(figure))
            if self._board is not None:
                self._show(f"pictures/{name}", figure, self._board)
        except OSError as error:
            raise _not_written(path, error.strerror or error) from None
        self.written.append(str(path))

    def _show(self, name: str, figure: Figure, board: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        with SummaryWriter(board) as writer:
            writer.add_image(name, figure_tensor(figure), self._step)


def _not_written(path: Path, reason: object) -> ConfigError:
    return ConfigError(f"{path} can't be written: {reason}; name another folder with --out")


def _step_of(about: Path) -> int:
    """Of the teacher that is shown; 0 where nothing says it."""
    try:
        return int(json.loads(about.read_text())["step"])
    except (OSError, ValueError, KeyError, TypeError):
        return 0
