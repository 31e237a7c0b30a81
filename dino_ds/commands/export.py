"""`dino-ds export`: the teacher of a run, or any file of weights, in the form another program wants."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

from dino_ds.basics import files, names
from dino_ds.config.stages import find_model_folder
from dino_ds.errors import ConfigError
from dino_ds.options.definition import ExportOptions, Result


def run(options: ExportOptions) -> Result:
    """Write `model` as `format`, a key of FORMATS, to `out`.
    Raises ConfigError, CheckpointError. No existing file is overwritten."""
    from dino_ds.evals.features import crop_pct_of
    from dino_ds.weights.export import FORMATS, timm_config
    from dino_ds.weights.load import load

    path, write = check(options), FORMATS[options.format]
    backbone = load(options.model, heads=options.heads, backbone=options.backbone)
    backbone.crop_pct = None if options.format == "safetensors" else crop_pct_of(options.model, backbone.image_size)
    how, notes = write(backbone, path), [*backbone.notes]
    eps = backbone.vit.arch.norm_eps if backbone.is_vit and backbone.vit.arch.rope is None else 1e-6
    if eps != 1e-6:
        notes.append(f"LayerNorm's epsilon is {eps:g} in these weights, and 1e-6 in timm's networks")
    if options.format == "timm":
        crop_pct = timm_config(backbone)["pretrained_cfg"]["crop_pct"]
        bound, other_crop_pct = ("more than", 0.875) if crop_pct == 1 else ("at most", 1)
        said = f"crop_pct is {crop_pct:g}: with it timm and transformers prepare images as dino_ds does"
        other = f"where the shorter side has {bound} {backbone.image_size} pixels, set it to {other_crop_pct}"
        notes.append(f"{said}; {other}")
    if options.format != "safetensors" and backbone.value_range is not None:
        notes.append("scale images deeper than 8 bits by the value_range that it holds, not by 255")
    facts = {"format": options.format, "out": str(path), "load": how, "notes": notes}
    return Result(facts, "\n".join([str(path), f"load it: {how}", *(f"note: {note}" for note in notes)]))


def check(options: ExportOptions) -> Path:
    """Check packages and the place of the export, which is returned; without torch, to be fast. Raises ConfigError."""
    source = Path(os.path.expanduser(options.model))
    ending = "-timm" if options.format == "timm" else f".{options.format}"  # of timm's folder, or of a file
    if options.out is not None:
        path = Path(os.path.expanduser(options.out))
    elif source.is_dir():
        path = find_model_folder(options.model).place("teacher", ending)
    else:
        path = source.with_name(source.stem + ending)
    exported = [file for file in (source, source / "teacher.safetensors") if file.exists()]
    if path.exists() and any(map(path.samefile, exported)):
        raise ConfigError(f"{path} is the file to export: copy it, or name another file with --out")
    if options.format != "timm" and path.suffix != f".{options.format}":
        raise ConfigError(f"--out {path} does not end in .{options.format}, as such files must: rename it")
    # An export that was killed leaves a description, and weights under a temporary name.
    is_left_over = not path.exists() and bool(files.left_over(path))
    for made in (path,) if options.format != "safetensors" or is_left_over else (path, names.sidecar_of(path)):
        files.check_absent(made)
    if reason := files.why_not_writable(path):
        raise ConfigError(f"{path} can't be written: {reason}; fix --out")
    if options.format == "onnx" and importlib.util.find_spec("onnxscript") is None:
        raise ConfigError("onnxscript is not installed: pip install 'dino_ds[onnx]'")
    return path
