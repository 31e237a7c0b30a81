"""The format number in each kind of file that dino_ds writes and reads again, and the one check of it."""

from __future__ import annotations

from dino_ds.errors import CheckpointError

FORMAT = 1
"""The number under the key "format": a change of a file's content that this code could not read raises it."""


def check_format(number: object, file: object, remedy: str) -> None:
    """Raises CheckpointError, with what to do, unless `number`, which `file` states as its "format", is FORMAT."""
    if str(number) != str(FORMAT):
        says = "has no format number" if number is None else f"is of format {str(number)[:20]}"
        raise CheckpointError(f"{file} {says}, and this dino_ds reads format {FORMAT} alone: {remedy}")
