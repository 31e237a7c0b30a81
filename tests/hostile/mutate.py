"""Strategies that break what was whole: a text or a file with a few cuts, flips, doublings and strange insertions."""

from __future__ import annotations

from hypothesis import strategies as st

NASTY = [
    "\0", "\x1b[2J", "\u202e", "\u2028", "\ud7ff", "﻿", "\t", "\r", "\n", " ", '"', "'", "{", "}", "[", "]", ":", ",",
    "#", "&a ", "*a", "!!python/object/apply:os.system ['true']", "<<: *a", "---\n", "...", "%", "|", ">", "../", "~",
    "-", "--", "=", "$(touch canary)", "`touch canary`", ";", "1e999", "-1", "0", "NaN", "Infinity", "null", "none",
    "true", "9" * 5000, "0x", "1_000", "é" * 50, "x" * 5000, "[" * 3000, "{a: " * 300,
]  # fmt: skip
"""Pieces that have troubled parsers."""

nasty = st.one_of(st.sampled_from(NASTY), st.text(max_size=20))


@st.composite
def broken_text(draw: st.DrawFn, whole: str) -> str:
    """`whole` with one to three faults."""
    text = whole
    for _ in range(draw(st.integers(1, 3))):
        begin = draw(st.integers(0, len(text)))
        end = min(len(text), begin + draw(st.integers(0, 12)))
        middle = draw(
            st.one_of(
                st.just(""),  # cut out
                nasty,
                st.just(text[begin:end] * 2),
                st.just(text[begin:end][::-1]),
            )
        )
        text = text[:begin] + middle + text[end:]
    return text


@st.composite
def broken_bytes(draw: st.DrawFn, whole: bytes) -> bytes:
    """`whole` with one to three faults: cut off, bits flipped, parts overwritten, doubled or taken out."""
    data = bytearray(whole)
    for _ in range(draw(st.integers(1, 3))):
        if not data:
            break
        # The beginning holds what a parser believes.
        near = min(len(data) - 1, draw(st.sampled_from([16, 64, 600, len(data) - 1])))
        begin = draw(st.integers(0, near))
        length = draw(st.integers(1, 16))
        kind = draw(st.sampled_from(["cut", "flip", "write", "double", "remove", "ones", "zeros"]))
        if kind == "cut":
            del data[begin:]
        elif kind == "flip":
            data[begin] ^= 1 << draw(st.integers(0, 7))
        elif kind == "write":
            data[begin : begin + length] = draw(st.binary(min_size=1, max_size=16))
        elif kind == "double":
            data[begin:begin] = data[begin : begin + length]
        elif kind == "remove":
            del data[begin : begin + length]
        else:
            data[begin : begin + length] = (b"\xff" if kind == "ones" else b"\0") * length
    return bytes(data)
