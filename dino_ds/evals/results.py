"""RUN/evaluations.json: the newest result of each evaluation, and of which teacher it is.

{"knn": {"step": 1500, "images": 96000, "date": "2026-11-21", "data": null, "train_images": 2880,
"test_images": 936, "seconds": 3.1, "results": {"knn_10": 76.2, ...}}, ...}; a value is null where it is not known.
`images`: number of images that the teacher had seen; `data`: images of the evaluation, if not those of the run.
"""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

from dino_ds.basics.durable import replace_file
from dino_ds.basics.text_file import read_object

RESULTS = "evaluations.json"
SHARED, MOST_SHARED = "shared", 0.5
"""Key of the part of the test images that is trained on, if any; from which part on k-NN tells nothing."""


def name_images(source: str, root: str | None) -> str:
    """The public name of images: without the folders above them."""
    if root is None or (source != "folder" and ":" not in source):
        return source
    folder = Path(os.path.abspath(root))
    return f"{folder.parent.name}/{folder.name}" if folder.name in ("train", "val", "test") else folder.name


def read_results(path: Path) -> dict[str, dict[str, Any]]:
    """Results by evaluation, none if the file is absent. Raises OSError, ValueError."""
    return read_object(path) if path.is_file() else {}


def write_results(path: Path, new: dict[str, dict[str, Any]]) -> None:
    """Replace the results of the evaluations in `new`, and keep all others. Raises OSError, ValueError."""
    kept = {**read_results(path), **as_json(new)}
    replace_file(path, json.dumps(kept, indent=1) + "\n")


def as_json(results: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The results with None for numbers that are not finite, such as the precision of a query without positives."""
    return {
        name: {**kept, "results": {key: v if math.isfinite(v) else None for key, v in kept["results"].items()}}
        for name, kept in results.items()
    }
