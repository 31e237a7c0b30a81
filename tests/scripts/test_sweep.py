"""The picture of which model trains on which cards."""

from __future__ import annotations

from dino_ds.report.draw import INK
from scripts.results import in_ink
from scripts.sweep import PLACES, draw_sweep


def test_the_picture_counts_what_it_shows_and_is_read_on_light_and_dark_pages():
    sizes = [(12, 40), (0, 3), (0, 0), (300, 900)]
    cells = [
        {"backbone": "vit", "weights": 44e6, "card_gb": 8, "place": place}
        | {"largest": plain, "largest_with_checkpointing": checked}
        for place, (plain, checked) in zip(PLACES, sizes, strict=True)
    ]
    figure = in_ink(draw_sweep({"gpus": 8, "crops": "2x224", "cells": cells}))
    (legend,), (axes,) = figure.legends, figure.axes
    said = [text.get_text() for text in legend.get_texts()]
    assert said == ["fits: 2 of 4", "fits with activation checkpointing: 1 of 4", "does not fit: 1 of 4"]
    assert [text.get_text() for text in axes.texts] == ["12", "3", "-", "300", "8 GB"]
    words = [figure._suptitle, *legend.get_texts(), *axes.get_yticklabels(), axes.texts[2], axes.texts[4]]
    assert {text.get_color() for text in words} == {INK}
