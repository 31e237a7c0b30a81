"""The types of the recipe's fields: text from the command line or YAML -> checked values."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, PlainSerializer, PlainValidator

from dino_ds.config.lengths import Length
from dino_ds.errors import ConfigError


def _parse_length(value: object) -> Length:
    try:
        return Length.parse(value)
    except ConfigError as error:
        raise ValueError(str(error)) from None  # pydantic collects ValueErrors only


def positive(length: Length) -> Length:
    if length.value <= 0:
        raise ValueError(f"'{length}' must be more than 0")
    return length


def _split_range(value: object) -> object:
    """The command line gives "0.4,1" where YAML gives [0.4, 1]."""
    return re.split(r"[,\s]+", value.strip("[]() ")) if isinstance(value, str) else value


def check_range(value: tuple[float, float]) -> tuple[float, float]:
    if not 0 < value[0] <= value[1] <= 1:
        raise ValueError(f"{list(value)} is not a range of areas: two numbers with 0 < low <= high <= 1")
    return value


def _parse_value_range(value: object) -> tuple[float, float] | Literal["auto"]:
    """ "auto", or two numbers in a list or with a comma between them."""
    if value == "auto":
        return "auto"
    parts = _split_range(value)
    try:
        low, high = map(float, parts)  # type: ignore[call-overload]
    except (TypeError, ValueError):
        raise ValueError(f"{value!r} is not auto, nor two numbers such as 0,4095") from None
    if not (-_MOST_VALUE <= low < high <= _MOST_VALUE and high - low >= 1 / _MOST_VALUE):
        raise ValueError(f"{low:g},{high:g} is not a range: low < high, no more than {_MOST_VALUE:g}")
    return low, high


_MOST_VALUE = 1e18
"""Of a pixel: differences and their inverses are far from the limits of FP32."""


LengthField = Annotated[Length, BeforeValidator(_parse_length), PlainSerializer(str)]
SaveEvery = Annotated[
    Length | Literal["auto"], PlainValidator(lambda v: v if v == "auto" else _parse_length(v)), PlainSerializer(str)
]
ValueRangeField = Annotated[tuple[float, float] | Literal["auto"], PlainValidator(_parse_value_range)]
ScaleRange = Annotated[tuple[float, float], BeforeValidator(_split_range)]
Count = Annotated[int, Field(ge=1)]
CountOrZero = Annotated[int, Field(ge=0)]
Positive = Annotated[float, Field(gt=0)]
NotNegative = Annotated[float, Field(ge=0)]
Fraction01 = Annotated[float, Field(ge=0, le=1)]
BelowOne = Annotated[float, Field(ge=0, lt=1)]
