"""Keeps results of rehearsals in the user's cache folder, by what was rehearsed and by the code that did it."""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar, cast

from pydantic import TypeAdapter

from dino_ds.basics.durable import cache_folder, replacing
from dino_ds.basics.hashing import hash_code
from dino_ds.basics.text_file import MAX_JSON_BYTES, read_bytes

_MOST_FILES = 1000
_UNUSABLE = OSError, RuntimeError
"""Errors from a cache folder that can't be used; RuntimeError: a container's user may have no home."""
_T = TypeVar("_T")
_found: dict[str, Any] = {}


def kept(about: Mapping[str, Any], type_: type[_T], make: Callable[[], Any], modules: tuple[str, ...] = ()) -> _T:
    """The value of `type_` in the plain JSON that `make` returns, or returned before for the same `about` and code.

    A file that holds no such value is replaced. If the folder can't be read or written, only time is lost.

    Args:
        about: what the result depends on, as plain JSON.
        type_: a type that pydantic checks, such as a dataclass.
        make: computes a result that is not in the cache.
        modules: names of other modules whose code `make` runs.
    """
    text = json.dumps([about, _versions(), [_digest(module) for module in modules]], sort_keys=True)
    name = hashlib.sha256(text.encode()).hexdigest()[:32]
    if name not in _found:
        value = TypeAdapter(type_)
        try:
            content = read_bytes(cache_folder() / "steps" / f"{name}.json", MAX_JSON_BYTES)
            _found[name] = value.validate_json(content, strict=True)
        except (*_UNUSABLE, ValueError):
            result = json.dumps(make())
            with suppress(*_UNUSABLE):
                _write(cache_folder() / "steps" / f"{name}.json", result)
            _found[name] = value.validate_json(result, strict=True)
    return cast(_T, _found[name])


def share() -> None:
    """Give every rank the results of rank 0: all ranks need the same ones. Every rank must call this."""
    from dino_ds.engine import distributed  # imports torch, which a plan from the cache does not need

    _found.update(distributed.gather_objects(_found if distributed.rank() == 0 else {})[0])


def _write(path: Path, result: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as temporary:
        temporary.write_text(result, encoding="utf-8")
    files = sorted(path.parent.glob("*.json"), key=lambda file: file.stat().st_mtime)
    for old in files[:-_MOST_FILES]:
        old.unlink(missing_ok=True)


@functools.cache
def _versions() -> list[str]:
    """The versions of the code that a rehearsal runs: torch, timm, and this package's own files."""
    return [version("torch"), version("timm"), hash_code()]


def _digest(module: str) -> str:
    try:
        spec = find_spec(module)
        return hashlib.sha256(Path(spec.origin).read_bytes()).hexdigest() if spec and spec.origin else module
    except (ImportError, OSError, ValueError):
        return module
