"""The sheet as a page: one HTML file with everything in it, boxes that light up with their crop, and the statistics."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dino_ds.commands.sheet import GLOBAL_COLOR, LOCAL_COLOR, Seen, describe
from dino_ds.planning.data_report import bin_name, channel_flags, duplicates_sentence
from dino_ds.report.html import build_document, embedded_picture, render

_ORIGINAL_SIDE = 480
"""Longer side in the page, pixels."""
_ORIGINAL_HEIGHT = 330
"""Greatest height in the page, pixels."""
_CROP_SIDE = 128
"""Smaller crops are shown enlarged, in whole pixels, up to it."""
_LISTED = 200


def build_page(rows: Sequence[Seen], found: dict[str, Any], title: str) -> str:
    """HTML of the sheet and of the findings of `summarise`."""
    body = render(
        "sheet.html",
        title=title,
        found=found,
        rows=[_card(number, row) for number, row in enumerate(rows)],
        global_color=GLOBAL_COLOR,
        local_color=LOCAL_COLOR,
        **_statistics(found),
    )
    return build_document(title, body, "sheet")


def _card(number: int, row: Seen) -> dict[str, Any]:
    width, height = row.original.size
    small = row.original.copy()
    small.thumbnail((_ORIGINAL_SIDE, _ORIGINAL_SIDE))
    crops = []
    for place, (sampled, crop) in enumerate(zip(row.sampled, row.crops, strict=True)):
        kind, times = "global" if place < row.num_global else "local", max(1, _CROP_SIDE // crop.width)
        crops.append(
            {"kind": kind, "key": f"{number}-{place}", "box": sampled.box, "picture": embedded_picture(crop)}
            | {"words": f"{kind} crop {place + 1}: {describe(sampled)}"}
            | {"width": crop.width * times, "height": crop.height * times}
        )
    return {
        "name": row.name,
        "width": width,
        "height": height,
        "picture": embedded_picture(small),
        "shown_width": round(_ORIGINAL_HEIGHT * width / height),
        "line": f"{max(width, height) / 160:.2f}",
        "crops": crops,
    }


def _statistics(found: dict[str, Any]) -> dict[str, Any]:
    """(heading, rows) of the tables and of the lists."""
    tables = [
        ("Shorter side, pixels", [(bin_name(b), b["images"]) for b in found["shorter_side"]["histogram"]]),
        ("Width / height", [(bin_name(b), b["images"]) for b in found["aspect_ratio"]["histogram"]]),
        ("File formats", list(found["formats"].items())),
        ("Color modes", list(found["modes"].items())),
    ]
    if found["classes"] is not None:
        counts = sorted(found["classes"]["counts"].items(), key=lambda item: -item[1])
        tables.append((f"Classes ({len(counts)})", counts[:_LISTED]))
    bad, measured = found["unreadable"], found["channels"]
    files = [f"{file['name']} ({file['reason']})" for file in bad["files"][:_LISTED]]
    groups = [", ".join(group["names"]) for group in found["near_duplicates"]["largest"][:_LISTED]]
    enlarged = [
        f"{crops['fraction']:.1%} of {name} crops hold fewer than {crops['size']} x {crops['size']} pixels"
        for name, crops in found["enlarged_crops"].items()
    ]
    channels = [(f"Channels: {channel_flags(measured)}", [measured["advice"]])] if measured else []
    return {
        "looked_at": f"{found['looked_at']:,} of {found['images']:,} images looked at. {'; '.join(enlarged)}.",
        "tables": tables,
        "lists": [
            *channels,
            (f"Unreadable files: {bad['count']:,}", files),
            (f"Near-duplicates: {duplicates_sentence(found)}", groups),
        ],
    }
