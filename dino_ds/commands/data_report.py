"""The statistics of a data set as text for a terminal."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from dino_ds.data.listing import printable

_NAMED = 20
"""Unreadable files that are named; --json names all."""


def report(found: dict[str, Any]) -> str:
    """Text of the findings of `summarise`, with source, root, class_folder, value_range, misfits, enlarged_crops,
    shown and sheet."""
    return "\n".join(f"{head:<14}{text}".rstrip() for head, text in _lines(found))


def _channel_flags(channels: dict[str, Any]) -> str:
    """Mean and standard deviation as a run takes them."""
    return " ".join(f"--data.{name} {','.join(f'{value:g}' for value in channels[name])}" for name in ("mean", "std"))


def _lines(found: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """(heading or nothing, text)"""
    yield "images", f"{found['images']:,} in {found['root'] or found['source']}"
    if found["looked_at"] < found["images"]:
        yield "looked at", f"{found['looked_at']:,} of them, drawn at random (--sample 0: all)"
    yield from _class_lines(found["classes"], found["class_folder"])
    yield from _unreadable_lines(found)
    yield "size", ", ".join(f"{side} {_spread(found[side])}" for side in ("width", "height")) + " px"
    yield "formats", _shares(found["formats"])
    yield "modes", _shares(found["modes"])
    yield from _value_lines(found)
    if found["channels"]:
        yield "channels", _channel_flags(found["channels"])
        yield "", found["channels"]["advice"]
    if found["file_bytes"] is not None:
        kilobytes = {name: value / 1000 for name, value in found["file_bytes"].items()}
        yield "file size", f"{_spread(kilobytes)} kB"
    for name, crops in found["enlarged_crops"].items():
        yield (
            "enlarged" if name == "global" else "",
            f"{crops['fraction']:.1%} of {name} crops hold fewer pixels than the {crops['size']} x {crops['size']} "
            "that the network gets",
        )
    ratio = found["aspect_ratio"]
    yield "width/height", f"{ratio['min']:.2g} to {ratio['max']:.2g} (median {ratio['median']:.2g})"
    yield "sheet", found["sheet"]
    if found["shown"]:
        yield "", f"shown: {found['shown']}"


def _class_lines(classes: dict[str, Any] | None, folder: str | None) -> Iterator[tuple[str, str]]:
    if classes is None:
        yield "classes", "none: images have no labels"
        if folder:
            yield "", f"all lie in one folder, whose folders are classes with --data.root {printable(folder)}"
        return
    counts = sorted(classes["counts"].items(), key=lambda item: -item[1])
    unlabelled = f"; {classes['unlabelled']:,} images without a label" if classes["unlabelled"] else ""
    yield "classes", f"{classes['count']:,}; images in a class: {_spread(classes['images'])}{unlabelled}"
    if classes["images"]["min"] == classes["images"]["max"]:
        return
    if len(counts) <= 2 * _NAMED:
        yield "", ", ".join(f"{name} {count:,}" for name, count in counts)
    else:
        yield "", "largest " + ", ".join(f"{name} {count:,}" for name, count in counts[:5])
        yield "", "smallest " + ", ".join(f"{name} {count:,}" for name, count in counts[-5:])


def _value_lines(found: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Lines on values of images, if some are deeper than 8 bits."""
    deep = {name: each for name, each in found["values"].items() if "min" in each}
    for number, (name, each) in enumerate(deep.items()):
        span = f"{each['min']:.10g} to {each['max']:.10g}"
        yield "" if number else "values", f"{name} in {each['images']:,}: {span}"
    if deep:
        yield "", found["value_range"]
    for number, words in enumerate(found["misfits"]):
        yield "" if deep or number else "values", words


def _unreadable_lines(found: dict[str, Any]) -> Iterator[tuple[str, str]]:
    bad = found["unreadable"]
    share = f" ({bad['count'] / found['looked_at']:.2%})" if bad["count"] else ""
    yield "unreadable", f"{bad['count']:,}{share}"
    for file in bad["files"][:_NAMED]:
        yield "", f"{file['name']} ({file['reason']})"
    if bad["count"] > _NAMED:
        yield "", f"and {bad['count'] - _NAMED:,} more (--json names all)"


def _spread(values: dict[str, float]) -> str:
    low, middle, high = (f"{values[name]:,.0f}" for name in ("min", "median", "max"))
    return low if low == high else f"{low} to {high} (median {middle})"


def _shares(counts: dict[str, int]) -> str:
    total = sum(counts.values())
    return ", ".join(f"{name} {count:,} ({count / total:.1%})" for name, count in counts.items())
