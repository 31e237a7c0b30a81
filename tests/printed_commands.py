"""Commands in texts that the program prints or that its files hold, and why the command line would refuse them."""

from __future__ import annotations

import contextlib
import io
import re
import shlex
from collections.abc import Iterator

from dino_ds.config.loading import load_recipe
from dino_ds.errors import UserError
from dino_ds.options.commands import COMMANDS, TRAIN, find_command
from dino_ds.options.flags import check_required, parse_flags

_CALL = re.compile(
    r"(?:dino-ds|(?:dino_ds/train\.py|-m(?:odule)? dino_ds\.train)(?= -))((?: +(?:'[^'\n]*'|[^\s`\"]+))*)"
)
_END = re.compile(r"[,;:)](?=\s|$)|\.(?=\s|$)| [(#|]")
_NAMES = "|".join(sorted(COMMANDS, key=len, reverse=True))


def commands_in(text: str) -> Iterator[str]:
    """Yield each command of `text` with its arguments: up to the line's end, or to a punctuation mark after a word."""
    for call in _CALL.finditer(text.replace("\\\n", " ")):
        words = _END.split(call[1])[0].strip()
        words = words if call[0].startswith("dino-ds") else f"train {words}"
        if re.match(rf"({_NAMES}) ", words) and not re.search(r"\.\.|--help|\bhelp\b", words):
            yield words


def why_refused(words: str) -> str:
    """The line of the command line about a command, or "". Words in capitals stand for what the user fills in."""
    command, rest = find_command(shlex.split(words)) or (TRAIN, [])
    try:
        with contextlib.redirect_stderr(io.StringIO()):  # how a word without an option was read
            request = parse_flags(command, rest)
        check_required(command, request)
        config = request.options.get("config", command.recipe)
        if not str(config).isupper():
            recipe = load_recipe(config, request.recipe)
            wants_images = command.needs_images and not {"resume", "print", "from"} & request.options.keys()
            if wants_images and recipe.data.source == "folder" and not recipe.data.root:
                return "no images are given"
    except UserError as error:
        return str(error)
    return ""
