"""Finds the classes and functions of the user's that a recipe names."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from typing import Any

from dino_ds.errors import ConfigError, one_line
from dino_ds.names import did_you_mean


def find_own(key: str, path: str, kind: str, is_kind: Callable[[object], bool]) -> Any:
    """What `path`, MODULE:NAME, names, in a module on Python's path or in the current folder.

    key: of the recipe; kind: what `is_kind` accepts, in words: nothing else is ever called. Raises ConfigError.
    """
    module_name, _, name = path.partition(":")
    if module_name == "__main__" and not _loaders_find_main(key):
        raise ConfigError(
            f"{key} {path}: loader processes can't import what is defined in a notebook or a main program: put it into "
            f"a .py file in {os.getcwd()}, and name that, such as my_module:{name}"
        )
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # a console script has its own folder there instead; workers inherit it
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        missing = error.name or ""
        why = f"it needs {missing}, which is not installed"
        if f"{module_name}.".startswith(f"{missing}."):
            why = f"there is no {missing} on Python's path or in {os.getcwd()}"
        raise ConfigError(f"{key} {path}: {why}; set PYTHONPATH, or start where {module_name} lies") from None
    except Exception as error:
        reason = f"{type(error).__name__}: {one_line(error)}"
        raise ConfigError(f"{key} {path}: importing {module_name} fails: {reason}") from error
    found = getattr(module, name, None)
    if not is_kind(found):
        known = [other for other, value in vars(module).items() if is_kind(value)]
        raise ConfigError(f"{key} {path}: {module_name} has no {kind} {name}.{did_you_mean(name, known)}")
    return found


def _loaders_find_main(key: str) -> bool:
    """They run a main script again, if there is a file of it, for a source alone; other code is none of theirs."""
    script = os.path.isfile(getattr(sys.modules["__main__"], "__file__", None) or "")
    return {"data.source": script, "data.transform": False}.get(key, True)
