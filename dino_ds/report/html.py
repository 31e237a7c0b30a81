"""The parts of a page that is one file: nothing is fetched, nothing of a file is taken for HTML.

Everything here returns Markup, and text that is no Markup is escaped when it is put into one.
"""

from __future__ import annotations

import base64
import hashlib
import io
from collections.abc import Iterable, Sequence
from pathlib import Path

from markupsafe import Markup
from PIL import Image, features

_HERE = Path(__file__).parent
_MAX_PIXELS = 100_000_000
_LONG_WORD = 28
"""Letters, beyond which a word in a table may be broken: paths."""
Piece = str | Markup


def build_document(title: str, body: Markup, style: str, script: str) -> str:
    """A whole document. Its policy forbids every request and every script but this one, whatever `body` holds."""
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    return _PAGE.format(policy=Markup(policy), title=title, style=Markup(style), body=body, script=Markup(script))


_PAGE = Markup(
    '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
    '<meta http-equiv="Content-Security-Policy" content="{policy}">'
    '<meta name="viewport" content="width=device-width, initial-scale=1">'
    '<link rel="icon" href="data:,"><title>{title}</title>\n<style>{style}</style></head>\n'
    "<body>\n{body}\n<script>{script}</script></body></html>\n"
)


def page_style() -> str:
    return (_HERE / "page.css").read_text(encoding="utf-8")


def page_script() -> str:
    return (_HERE / "page.js").read_text(encoding="utf-8")


def join(parts: Iterable[Piece]) -> Markup:
    return Markup("").join(parts)


def section(title: str, *parts: Piece) -> Markup:
    return Markup("<section><h2>{}</h2>\n{}</section>\n").format(title, join(parts))


def note(text: Piece) -> Markup:
    return Markup('<p class="note">{}</p>\n').format(text)


def folded(title: str, *parts: Piece, is_open: bool = False) -> Markup:
    opened = Markup(" open" if is_open else "")
    return Markup("<details{}><summary>{}</summary>{}</details>\n").format(opened, title, join(parts))


def code(text: str) -> Markup:
    return Markup("<pre>{}</pre>\n").format(text)


def table(header: Sequence[Piece], rows: Sequence[Sequence[Piece]], numbers: Iterable[int] = ()) -> Markup:
    """`numbers`: the columns that are set to the right."""
    right = set(numbers)

    def row(cells: Sequence[Piece], tag: str) -> Markup:
        found = (
            Markup("<{0}{1}>{2}</{0}>").format(Markup(tag), Markup(_class(i in right, cell)), cell)
            for i, cell in enumerate(cells)
        )
        return Markup("<tr>{}</tr>\n").format(join(found))

    head = Markup("<thead>{}</thead>").format(row(header, "th")) if header else ""
    return Markup('<div class="scroll"><table>{}<tbody>{}</tbody></table></div>\n').format(
        head, join(row(cells, "td") for cells in rows)
    )


def _class(right: bool, cell: Piece) -> str:
    words = (cell.striptags() if isinstance(cell, Markup) else cell).split()
    return ' class="n"' if right else ' class="long"' if max(map(len, words), default=0) > _LONG_WORD else ""


def embedded_picture(image: Image.Image) -> str:
    """A data: address of it as JPEG."""
    stream = io.BytesIO()
    image.convert("RGB").save(stream, "JPEG", quality=90)
    return _address("jpeg", stream.getvalue())


def embedded_file(path: Path, width: int) -> tuple[str, tuple[int, int]]:
    """A data: address of a PNG file, and its size: at most `width` wide, as WebP where that is smaller.

    Raises OSError or ValueError for what is no picture.
    """
    content = path.read_bytes()
    try:
        with Image.open(io.BytesIO(content), formats=["PNG"]) as image:
            if image.width * image.height > _MAX_PIXELS:
                raise ValueError(f"{image.width} x {image.height} pixels")
            small = image.convert("RGBA" if "A" in image.getbands() or "transparency" in image.info else "RGB")
    except (SyntaxError, Image.DecompressionBombError) as error:
        raise ValueError(str(error)) from None
    if small.width > width:
        small = small.resize((width, max(1, round(small.height * width / small.width))), Image.Resampling.LANCZOS)
    elif not features.check("webp"):
        return _address("png", content), small.size
    stream, kind = io.BytesIO(), "webp" if features.check("webp") else "png"
    small.save(stream, kind.upper(), quality=84, method=5)
    if small.width == width or len(stream.getvalue()) < len(content):
        return _address(kind, stream.getvalue()), small.size
    return _address("png", content), small.size


def _address(kind: str, content: bytes) -> str:
    return f"data:image/{kind};base64,{base64.b64encode(content).decode()}"
