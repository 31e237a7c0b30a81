"""Every command of `dino-ds`. No torch here."""

from __future__ import annotations

from dino_ds.options import bench, data, machine, model, run  # noqa: F401  (their commands)
from dino_ds.options.definition import COMMANDS, Command

TRAIN = COMMANDS["train"]


def find_command(words: list[str]) -> tuple[Command, list[str]] | None:
    """The command that `words` begin with, and the words after it, or None if there is none."""
    for length in (2, 1):
        name = " ".join(words[:length])
        if len(words) >= length and name in COMMANDS:
            return COMMANDS[name], words[length:]
    return None
