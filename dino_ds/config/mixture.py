"""Sources of a mixture and their shares, as data.mixture names them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Annotated

from pydantic import AfterValidator, BeforeValidator

from dino_ds.basics.names import as_written
from dino_ds.basics.text_file import unusable_text
from dino_ds.config.fields import PathText

_FORM = "PLACE=SHARE, such as mine=0.7,theirs=0.3"
_ENTRY = re.compile(r"\s*(?P<place>\S.*?)\s*=\s*(?P<share>[0-9]*\.?[0-9]+)\s*(?:,|$)")
_BRACES = re.compile(r"\{[^{}]*\}")
_TOLERANCE = Fraction(1, 10**6)
"""Rounding error of shares that are written in decimals."""
_MOST_DIGITS, _MOST_PARTS = 20, 1000


@dataclass(frozen=True)
class MixturePart:
    """A source of a mixture: its path `place`, absolute or below data.root; and its share of the images of an
    epoch."""

    place: str
    share: Fraction


def parse_mixture(texts: Sequence[str]) -> tuple[MixturePart, ...]:
    """The parts of a mixture, whose shares add up to 1. Raises ValueError."""
    parts = tuple(_parse_part(text) for text in texts)
    if len(parts) == 1:
        raise ValueError(f"mixture {texts[0]}: there is one source; name it as data.root instead")
    if twice := [part.place for part in parts if [other.place for other in parts].count(part.place) > 1]:
        raise ValueError(f"mixture: {twice[0]} is named twice; give it once, with the sum of its shares")
    total = sum((part.share for part in parts), Fraction(0))
    if parts and abs(total - 1) > _TOLERANCE:
        raise ValueError(f"mixture: the shares add up to {float(total):.7g}, and must add up to 1")
    return tuple(MixturePart(part.place, part.share / total) for part in parts)


def _parse_part(text: str) -> MixturePart:
    match = _ENTRY.fullmatch(text)
    if match is None or len(match["share"]) > _MOST_DIGITS or "," in _BRACES.sub("", match["place"]):
        raise ValueError(f"mixture: {as_written(text)} is not {_FORM}")
    place, share = match["place"], Fraction(match["share"])
    if problem := unusable_text(place):
        raise ValueError(f"mixture: {problem}")
    if not share:
        raise ValueError(f"mixture: {place} has the share 0: leave it out")
    return MixturePart(place, share)


def _split(value: object) -> object:
    """The entries of a mixture: of a text with commas between them, of a list, or of a mapping from path to share."""
    if isinstance(value, Mapping):
        return tuple(f"{place}={share}" for place, share in value.items())
    if not isinstance(value, str):
        return value
    entries, begin = [], 0
    while begin < len(value):
        match = _ENTRY.match(value, begin)
        if match is None:
            entries.append(value[begin:])
            break
        entries.append(match[0].strip().removesuffix(","))
        begin = match.end()
    return tuple(entries)


def _few(texts: tuple[str, ...]) -> tuple[str, ...]:
    if len(texts) > _MOST_PARTS:
        raise ValueError(f"mixture: {len(texts)} sources, at most {_MOST_PARTS} are taken")
    return texts


def _check_balance(value: str) -> str:
    kind, colon, file = value.partition(":")
    if value not in ("none", "classes") and not (kind == "clusters" and colon and file):
        raise ValueError(f"{value!r} is not none, classes, or clusters:FILE")
    return value


MixtureField = Annotated[tuple[str, ...], BeforeValidator(_split), AfterValidator(_few)]
BalanceField = Annotated[PathText, AfterValidator(_check_balance)]
