"""`dino-ds export`: the teacher of a run, or any file of weights, in the form another program wants."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dino_ds.basics.durable import why_not_writable
from dino_ds.basics.names import sidecar_of
from dino_ds.config.loading import load_recipe
from dino_ds.config.stages import Home, home_of
from dino_ds.errors import ConfigError
from dino_ds.evals.results import RESULTS, name_images, read_results
from dino_ds.options.model import ExportOptions

if TYPE_CHECKING:
    from dino_ds.weights.load import Backbone

_OURS = ("safetensors", "adapters")
"""Formats that dino_ds.load reads, by the ending of their files."""


def check(options: ExportOptions) -> None:
    """Whether `out` can be written; without torch, so that the answer comes at once. Raises ConfigError."""
    if options.out is not None:
        _check_place(Path(os.path.expanduser(options.model)), options.format, Path(os.path.expanduser(options.out)))


def run(options: ExportOptions) -> None:
    """Write `model` as `format`, a key of FORMATS, to `out`.

    Raises ConfigError, CheckpointError. Nothing that is there is overwritten.
    """
    from dino_ds.weights.export import FORMATS
    from dino_ds.weights.load import load

    write, ending = FORMATS[options.format]
    source = Path(os.path.expanduser(options.model))
    home = home_of(options.model)
    default = home.place("teacher", ending) if source.is_dir() else source.with_name(source.stem + ending)
    place = Path(os.path.expanduser(options.out)) if options.out else default
    _check_place(source, options.format, place)
    backbone = load(options.model, heads=options.heads, backbone=options.backbone)
    if options.adapters is not None:
        backbone.add_adapters(options.adapters)
    backbone.about |= _results(home)
    how, notes = write(backbone, place), [*backbone.notes]
    eps = backbone.vit.arch.norm_eps if backbone.is_vit else 1e-6
    if eps != 1e-6 and options.format in ("safetensors", "timm"):
        notes.append(f"LayerNorm's epsilon is {eps:g} in these weights, and 1e-6 in timm's networks")
    notes += _notes_on_images(backbone, options.format, place)
    if options.json:
        print(json.dumps({"format": options.format, "out": str(place), "load": how, "notes": notes}))
    else:
        print("\n".join([str(place), f"load it: {how}", *(f"note: {note}" for note in notes)]))


def _notes_on_images(model: Backbone, format: str, place: Path) -> list[str]:
    """A note on preparing images if the program that loads the export does not, or does it in another way."""
    if format == "timm":
        return [
            f"timm and transformers enlarge and cut images whose shorter side is {model.image_size} pixels or less, "
            "which dino_ds leaves uncut: for such images set crop_pct to 1"
        ]
    return [] if format in _OURS else [f"prepare images with {model.normalization}, as {sidecar_of(place)} says"]


def _check_place(source: Path, format: str, place: Path) -> None:
    if any(own.exists() and place.exists() and place.samefile(own) for own in (source, source / "teacher.safetensors")):
        raise ConfigError(f"{place} is what is to be exported: name another file with --out")
    if format in _OURS and place.suffix != ".safetensors":
        raise ConfigError(f"--out {place} does not end in .safetensors, by which such a file is known: name it so")
    # What an export that was killed leaves: a description, and weights that have not got their name.
    is_left_over = not place.exists() and place.with_name(f"{place.name}.tmp").exists()
    for made in (place,) if format == "timm" or is_left_over else (place, sidecar_of(place)):
        if made.exists():
            raise ConfigError(f"{made} is there already: remove it, or name another with --out")
    if reason := why_not_writable(place):
        raise ConfigError(f"{place} can't be written: {reason}; fix --out")


def _results(home: Home) -> dict[str, Any]:
    """Lines of a model card on a run or checkpoint: how its teacher was evaluated, on which images. Raises
    ConfigError."""
    if not home.is_run:
        return {}
    results = home.place(Path(RESULTS).stem, Path(RESULTS).suffix)
    try:
        evaluations = read_results(results)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{results} can't be read ({error}): fix or remove it") from None
    try:
        recipe = load_recipe(str(home.folder / "config.yaml"), {})
    except ConfigError:  # of another version
        return {"evaluations": evaluations}
    parts = [name_images("folder", part.place) for part in recipe.data.parts]
    data = " and ".join(parts) or name_images(recipe.data.source, recipe.data.root)
    return {"evaluations": evaluations, "data": data}
