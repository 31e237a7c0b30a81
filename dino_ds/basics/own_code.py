"""Imports the user's classes and functions that a recipe names, and reports if their code changes torch's dtype. Only
what the user has typed is imported, since a file that is read could name any module of the current folder."""

from __future__ import annotations

import importlib
import os
import re
import sys
from collections.abc import Callable, Iterable
from typing import Any

from dino_ds.basics.names import did_you_mean
from dino_ds.errors import ConfigError, one_line

CODE_KEYS = ("data.source", "model.backbone", "objective.terms", "teacher.others")  # keys of a recipe that name code
_allowed = set[str]()


def allow_code(texts: Iterable[object]) -> None:
    """Allow this process to import each MODULE:NAME in `texts`, typed by the user or sent by a process of dino_ds."""
    _allowed.update(code_in(texts))


def code_in(texts: Iterable[object]) -> list[str]:
    return [name for text in texts for name in re.findall(r"[\w.]+:\w+", str(text))]


def allowed_code() -> list[str]:
    return sorted(_allowed)


def why_refused(path: str) -> str:
    """Why the MODULE:NAME `path` that a file names may not be imported, as the end of a sentence; "" if it may."""
    name = ascii(path)[1:-1][:80]
    remedy = f"if it is yours, add --allow_code {name} (in dino_ds.load: backbone=)"
    return "" if path in _allowed else f"names the class {name}, whose code would run: {remedy}"


def check_allowed(key: str, path: str) -> None:
    """Raises ConfigError where a file names the MODULE:NAME `path` as `key`, and the user does not."""
    if refused := why_refused(path):
        raise ConfigError(f"{key}: a file {refused}")


def find_own(key: str, path: str, kind: str, is_kind: Callable[[object], bool]) -> Any:
    """Import the object that `path` names as MODULE:NAME, from Python's path or the current folder. key: the recipe's
    key with this path; kind: words for what `is_kind` accepts. Raises ConfigError, also for other objects."""
    check_allowed(key, path)
    module_name, _, name = path.partition(":")
    # The main program may define the object; a data source only if it is a script, which loader processes can import.
    is_script = os.path.isfile(getattr(sys.modules["__main__"], "__file__", None) or "")
    if module_name == "__main__" and key == "data.source" and not is_script:
        why = "loader processes can't import what is defined in a notebook or a main program"
        how = f"put it into a .py file in {os.getcwd()}, and name that, such as my_module:{name}"
        raise ConfigError(f"{key} {path}: {why}: {how}")
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # a console script has its own folder there instead; workers inherit sys.path
    before = default_dtype()
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        missing = error.name or ""
        why = f"it needs {missing}, which is not installed"
        if f"{module_name}.".startswith(f"{missing}."):
            why = f"there is no {missing} on Python's path or in {os.getcwd()}"
        raise ConfigError(f"{key} {path}: {why}; set PYTHONPATH, or start where {module_name} lies") from None
    except (Exception, SystemExit) as error:
        reason = f"{type(error).__name__}: {one_line(error)}"
        raise ConfigError(f"{key} {path}: importing {module_name} fails: {reason}") from error
    if changed := restore_default_dtype(before):
        raise ConfigError(f"{key} {path}: importing {module_name} {changed}")
    member = getattr(module, name, None)
    if not is_kind(member):
        known = [other for other, value in vars(module).items() if is_kind(value)]
        raise ConfigError(f"{key} {path}: {module_name} has no {kind} {name}.{did_you_mean(name, known)}")
    return member


def is_own(part: object) -> bool:
    return type(part).__module__.partition(".")[0] != "dino_ds"


def default_dtype() -> Any:
    """torch's default dtype, or None as long as torch is not imported."""
    torch = sys.modules.get("torch")
    return torch.get_default_dtype() if torch else None


def restore_default_dtype(before: Any) -> str:
    """Restore torch's default dtype to `before`. Returns how the user's code changed it, in words, or ""."""
    now, torch = default_dtype(), sys.modules.get("torch")
    if torch is None or now == (before or torch.float32):
        return ""
    torch.set_default_dtype(before or torch.float32)
    return f"changes torch's default dtype to {now}, and so what is learned: name the dtype where tensors are made"
