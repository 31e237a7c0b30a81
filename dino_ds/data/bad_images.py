"""How many unreadable images a run may meet before its data is given up."""

from __future__ import annotations

import math

_DEVIATIONS = 4.0


def allowed_bad_images(fraction: float, drawn: int, images: int) -> int:
    """The most unreadable images among the first `drawn` different ones of `images`.

    Images are drawn at random, so this is what data with exactly `fraction` of unreadable images shows, plus 4 standard
    deviations (of the hypergeometric distribution, with p for p (1 - p)), rounded up. It is ceil(fraction * images)
    once all are drawn. Data twice as bad as allowed is found out after about 16 / fraction images, rubbish at once,
    and one bad file among the first is no reason to stop unless `fraction` is 0.
    """
    drawn = min(drawn, images)
    expected = fraction * drawn
    return math.ceil(expected + _DEVIATIONS * math.sqrt(expected * (1 - drawn / images)))
