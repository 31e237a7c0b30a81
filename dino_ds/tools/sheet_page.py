"""The sheet as a page: one HTML file with everything in it, boxes that light up with their crop, and the statistics."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

from markupsafe import Markup

from dino_ds.report.html import build_document, embedded_picture
from dino_ds.tools.data_report import bin_name, duplicates_sentence
from dino_ds.tools.sheet import GLOBAL_COLOUR, LOCAL_COLOUR, Seen, describe

_ORIGINAL_SIDE = 480
"""Longer side in the page, pixels."""
_ORIGINAL_HEIGHT = 330
"""At most, as shown."""
_CROP_SIDE = 128
"""Smaller crops are shown enlarged, up to it."""
_LISTED = 200


def build_page(rows: Sequence[Seen], found: dict[str, Any], title: str) -> str:
    """HTML of the sheet and of what `summarise` found."""
    body = _BODY.format(
        title=escape(title),
        data=escape(f"{found['images']:,} images in {found['root'] or found['source']}"),
        rows="".join(_card(number, row) for number, row in enumerate(rows)),
        statistics=_statistics(found),
    )
    style = _STYLE.replace("GLOBAL", GLOBAL_COLOUR).replace("LOCAL", LOCAL_COLOUR)
    return build_document(title, Markup(body), style, _SCRIPT)


def _card(number: int, row: Seen) -> str:
    width, height = row.original.size
    small = row.original.copy()
    small.thumbnail((_ORIGINAL_SIDE, _ORIGINAL_SIDE))
    line = max(width, height) / 160
    boxes: list[str] = []
    crops: dict[str, list[str]] = {"global": [], "local": []}
    for view, (parameters, crop) in enumerate(zip(row.sampled, row.crops, strict=True)):
        kind = "global" if view < row.num_global else "local"
        left, top, right, bottom = parameters.box
        boxes.append(
            f'<rect class="{kind}" data-view="{number}-{view}" x="{left}" y="{top}" width="{right - left}" '
            f'height="{bottom - top}" stroke-width="{line:.2f}"/>'
        )
        words, address = escape(f"{kind} crop {view + 1}: {describe(parameters)}"), embedded_picture(crop)
        crops[kind].append(
            f'<img class="{kind}" data-view="{number}-{view}" title="{words}" alt="{words}" src="{address}" '
            f'width="{crop.width * _enlarged(crop.width)}" height="{crop.height * _enlarged(crop.width)}">'
        )
    return (
        f'<section><div class="original" style="max-width:{_ORIGINAL_HEIGHT * width / height:.0f}px">'
        f'<img src="{embedded_picture(small)}" alt="">'
        f'<svg viewBox="0 0 {width} {height}">{"".join(boxes)}</svg></div>'
        f'<div><div class="crops">{"".join(crops["global"])}</div>'
        f'<div class="crops">{"".join(crops["local"])}</div></div>'
        f"<p>{escape(row.name)} · {width} x {height}</p></section>"
    )


def _enlarged(side: int) -> int:
    """How many times a crop is shown larger than it is, in whole pixels."""
    return max(1, _CROP_SIDE // side)


def _statistics(found: dict[str, Any]) -> str:
    tables = [
        _bars("Shorter side, pixels", [(bin_name(b), b["images"]) for b in found["shorter_side"]["histogram"]]),
        _bars("Width / height", [(bin_name(b), b["images"]) for b in found["aspect_ratio"]["histogram"]]),
        _bars("File formats", list(found["formats"].items())),
        _bars("Colour modes", list(found["modes"].items())),
    ]
    if found["classes"] is not None:
        counts = sorted(found["classes"]["counts"].items(), key=lambda item: -item[1])
        tables.append(_bars(f"Classes ({len(counts)})", counts[:_LISTED]))
    bad = found["unreadable"]
    files = [f"{file['name']} ({file['reason']})" for file in bad["files"]]
    groups = [", ".join(group["names"]) for group in found["near_duplicates"]["largest"]]
    enlarged = [
        f"{crops['fraction']:.1%} of {name} crops hold fewer than {crops['size']} x {crops['size']} pixels"
        for name, crops in found["enlarged_crops"].items()
    ]
    looked = f"{found['looked_at']:,} of {found['images']:,} images looked at."
    return (
        f"<p>{looked} {escape('; '.join(enlarged))}.</p><div class='tables'>{''.join(tables)}</div>"
        + _list(f"Unreadable files: {bad['count']:,}", files)
        + _list(f"Near-duplicates: {duplicates_sentence(found)}", groups)
    )


def _bars(head: str, rows: Sequence[tuple[str, int]]) -> str:
    most = max(count for _, count in rows) or 1
    lines = "".join(
        f"<tr><td>{escape(name)}</td><td class='n'>{count:,}</td>"
        f"<td><i style='width:{140 * count / most:.0f}px'></i></td></tr>"
        for name, count in rows
    )
    return f"<table><caption>{escape(head)}</caption>{lines}</table>"


def _list(head: str, lines: Sequence[str]) -> str:
    items = "".join(f"<li>{escape(line)}</li>" for line in lines[:_LISTED])
    return f"<h3>{escape(head)}</h3><ul>{items}</ul>"


_STYLE = """
:root { color-scheme: light dark }
body { font: 15px/1.45 system-ui, sans-serif; max-width: 1240px; margin: 2rem auto; padding: 0 1rem }
h1 { font-size: 1.35rem; margin-bottom: .2rem } h3 { font-size: 1rem }
.key b:first-child { color: GLOBAL } .key b:last-child { color: LOCAL }
section { display: grid; grid-template-columns: minmax(240px, 400px) 1fr; gap: .3rem 1rem; margin: 1.6rem 0 }
section p { grid-column: 1 / 3; margin: 0; opacity: .65; font-size: .85rem; overflow-wrap: anywhere }
.original { position: relative; align-self: start } .original img { width: 100%; display: block }
svg { position: absolute; inset: 0; width: 100%; height: 100% }
rect { fill: transparent } rect.global { stroke: GLOBAL } rect.local { stroke: LOCAL }
.crops { display: flex; flex-wrap: wrap; gap: 6px; margin-bottom: 6px }
.crops img { border-top: 4px solid; image-rendering: pixelated }
img.global { border-color: GLOBAL } img.local { border-color: LOCAL }
.original:has(.on) rect:not(.on) { opacity: .12 } img.on { outline: 3px solid #fab005 }
.tables { display: flex; flex-wrap: wrap; gap: 1.5rem 3rem; align-items: start }
table { border-collapse: collapse; font-size: .88rem; display: block; max-height: 24rem; overflow-y: auto }
caption { text-align: left; font-weight: 600; padding-bottom: .3rem } td { padding: 0 .5rem 0 0 }
.n { text-align: right; font-variant-numeric: tabular-nums } i { display: block; height: .7em; background: LOCAL }
@media (max-width: 700px) { section { grid-template-columns: minmax(0, 1fr) } section p { grid-column: 1 } }
"""
_SCRIPT = """
for (const part of document.querySelectorAll("[data-view]"))
  for (const [event, on] of [["mouseenter", true], ["mouseleave", false]])
    part.addEventListener(event, () => document.querySelectorAll(`[data-view="${part.dataset.view}"]`)
      .forEach(twin => twin.classList.toggle("on", on)));
"""
_BODY = """<h1>{title}</h1>
<p class="key">{data}. <b>Global crops</b> and <b>local crops</b>:
point at one to see what was done to it and where it lies.</p>
{rows}
<h1>Statistics</h1>
{statistics}
"""
