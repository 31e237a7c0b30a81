"""The type of a setting that holds keywords: JSON, or a mapping of YAML."""

from __future__ import annotations

import json
import re
from typing import Annotated, NoReturn

from pydantic import BeforeValidator


def _parse_arguments(value: object) -> str:
    """JSON, or a mapping of YAML whose values are JSON or words, as JSON in one spelling."""
    try:
        found = _from_json(value) if isinstance(value, str) else _from_text(value)
        if not isinstance(found, dict):
            raise TypeError
        return json.dumps(found, sort_keys=True)
    except (ValueError, TypeError, RecursionError):
        raise ValueError(f'{str(value)[:80]!r} is not keywords as JSON, such as {{"layers": [1, 1, 1, 1]}}') from None


def _from_text(value: object) -> object:
    """Numbers, true, false and null of a YAML file, in YAML's spellings (False, .5), whose values a recipe reads as
    text; other words stay."""
    if isinstance(value, dict):
        return {key: _from_text(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_from_text(inner) for inner in value]
    if not isinstance(value, str):
        return value
    constant = "null" if value == "~" else value.lower()
    try:
        return _from_json(constant if constant in ("true", "false", "null") else value)
    except ValueError:
        return float(value) if _YAML_FLOAT.fullmatch(value) else value


def _from_json(text: str) -> object:
    """Raises ValueError for a key that is given twice, and for NaN and infinities, which are not JSON."""

    def once(pairs: list[tuple[str, object]]) -> dict[str, object]:
        if len(found := dict(pairs)) < len(pairs):
            raise ValueError
        return found

    def refuse(word: str) -> NoReturn:
        raise ValueError(word)

    return json.loads(text, object_pairs_hook=once, parse_constant=refuse)


_YAML_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+\.?[0-9]*)([eE][-+]?[0-9]+)?")
ArgumentsField = Annotated[str, BeforeValidator(_parse_arguments)]
