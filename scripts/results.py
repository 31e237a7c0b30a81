"""Writing of what a script has measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def write_result(place: Path, result: dict[str, Any], page: str, figure: Any = None) -> None:
    """Print `page`, and write `place`.json, .md and, with a matplotlib Figure, .png."""
    place.parent.mkdir(parents=True, exist_ok=True)
    place.with_suffix(".json").write_text(json.dumps(result, indent=1) + "\n")
    place.with_suffix(".md").write_text(page + "\n")
    if figure is not None:
        figure.savefig(place.with_suffix(".png"), dpi=85, pil_kwargs={"optimize": True})
    print(page)
