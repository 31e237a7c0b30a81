"""The model card of an exported folder: README.md with the metadata that the Hugging Face hub reads."""

from __future__ import annotations

import math
from typing import Any

import yaml

from dino_ds import __version__
from dino_ds.basics.digits import range_text
from dino_ds.models.specs.backbones import BACKBONES
from dino_ds.weights.load import Backbone

_WHOSE = {None: "EMA teacher's", "student": "student's"}
_USE = {
    "timm": """import timm

model = timm.create_model("{place}:{folder}", pretrained=True).eval()
features = model(images)  # (b, {width})""",
    "transformers": """from transformers import AutoImageProcessor, AutoModel

processor, model = AutoImageProcessor.from_pretrained("{folder}"), AutoModel.from_pretrained("{folder}")
features = model(**processor(images, return_tensors="pt")).{output}  # (b, {width})""",
}

_UNCUT = {
    "timm": "; so does timm's transform with crop_pct 1",
    "transformers": "; so does `processor(images, size={{'shortest_edge': {size}}})`",
}
"""Advice on how another program prepares small images as dino_ds does."""


def model_card(model: Backbone, library: str, folder: str) -> str:
    """Text of the card: what the model is, how `library` (timm or transformers) loads `folder`, and what it scored.

    Results are `model.about["evaluations"]`, as in RUN/evaluations.json; `model.about["data"]` names their images,
    "recipe" has the settings of the training, "hub" the repository that the folder is for.
    """
    spec, about = model.network.spec, model.about
    place, folder = ("hf-hub", about["hub"]) if "hub" in about else ("local-dir", folder)
    output = "last_hidden_state[:, 0]" if model.is_vit else "pooler_output"
    mean, std = list(model.normalisation.mean), list(model.normalisation.std)
    versions = ", ".join(f"{name} {version}" for name, version in about.get("versions", {}).items())
    return "\n".join(
        [
            "---",
            yaml.safe_dump(_metadata(model, library), sort_keys=False).rstrip(),
            "---",
            f"# {_name(model)}, trained with {_objective(model)} by dino_ds",
            "",
            f"{_sizes(model)}, native images of {model.image_size} pixels. The {_WHOSE[about.get('network')]} "
            "backbone, FP32, without the projection head.",
            *_training(about),
            "",
            "```python",
            _USE[library].format(place=place, folder=folder, width=spec.width, output=output),
            "```",
            "",
            f"Images: shorter side to {int(model.image_size * 256 / 224)} pixels (bicubic), center crop, mean {mean}, "
            f"std {std}; dino_ds leaves images whose shorter side is {model.image_size} pixels or less uncut"
            f"{_UNCUT[library if model.is_vit else 'timm'].format(size=model.image_size)}.{_on_sizes(model)}",
            *_range_lines(model),
            "",
            *_table(about),
            f"Made by dino_ds {__version__}" + (f" ({versions})." if versions else "."),
            *([] if "hub" not in about else ["", "License: not stated; its owner adds `license:` to the metadata."]),
            "",
        ]
    )


def _training(about: dict[str, Any]) -> list[str]:
    """Lines on the training: how long, on which images, and the settings that are not the defaults."""
    images = f" of {about['data']}" if "data" in about else ""
    lines = [f"Trained for {about['step']} steps = {about['images']} images{images}."] if "step" in about else []
    if not about.get("recipe"):
        return lines
    settings = yaml.safe_dump(about["recipe"], sort_keys=False, allow_unicode=True).rstrip()
    return [*lines, "", "Settings that differ from dino_ds's defaults:", "", "```yaml", settings, "```"]


def _sizes(model: Backbone) -> str:
    spec = model.network.spec
    if not model.is_vit:
        return f"{model.title}, width {spec.width}, stride {spec.stride}"
    return spec.sizes.capitalize()


def _on_sizes(model: Backbone) -> str:
    if not model.is_vit or model.vit.arch.rope is not None:
        return ""
    return (
        f" Position embeddings of other sizes were resized as {model.vit.options.pos_embed_interpolation!r} in "
        "training; other libraries have their own way, so features at other sizes may differ a little."
    )


def _name(model: Backbone) -> str:
    """timm's name, where the model has the sizes that it stands for."""
    if not model.is_vit:
        return model.title
    arch, name = model.vit.arch, model.about.get("timm_name")
    if name is not None and BACKBONES.get(name) == arch:
        return str(name)
    return f"ViT/{arch.patch_size} {arch.width} x {arch.depth}"


def _objective(model: Backbone) -> str:
    """Losses of the training; only a run with iBOT hides patches."""
    return "DINO" if model.mask_token is None and "ibot_head" not in model.heads else "DINO and iBOT"


def _range_lines(model: Backbone) -> list[str]:
    if model.value_range is None:
        return []
    text = range_text(model.value_range).replace(",", " is black and ")
    return ["", f"Of training images deeper than 8 bits {text} is white: scale such images by it, not by 255."]


def _metadata(model: Backbone, library: str) -> dict[str, Any]:
    """Metadata with a model-index, where there are results of this very teacher."""
    about = model.about
    metadata: dict[str, Any] = {
        "library_name": library,
        "pipeline_tag": "image-feature-extraction",
        "tags": [
            "dino",
            "self-supervised",
            *(["vision-transformer"] if model.is_vit else []),
            "image-feature-extraction",
        ],
    }
    results = [
        {
            "task": {"type": "image-feature-extraction", "name": f"{evaluation} of frozen features"},
            "dataset": dict.fromkeys(("type", "name"), str(kept.get("data") or about.get("data", "images"))),
            "metrics": [
                {"type": metric, "name": metric, "value": float(f"{value:.6g}")} for metric, value in known.items()
            ],
        }
        for evaluation, kept in about.get("evaluations", {}).items()
        if (known := _known(kept)) and kept.get("step") in (None, about.get("step"))
    ]
    return metadata | (
        {"model-index": [{"name": f"{_name(model)}, {_objective(model)}", "results": results}]} if results else {}
    )


def _table(about: dict[str, Any]) -> list[str]:
    rows = []
    for evaluation, kept in about.get("evaluations", {}).items():
        data = kept.get("data") or evaluation
        name = evaluation if data == evaluation else f"{evaluation} of {data}".replace("|", "/")
        step, train, test = ("–" if kept.get(k) is None else kept[k] for k in ("step", "train_images", "test_images"))
        rows += [f"| {name} | {metric} | {x:.4g} | {step} | {train} / {test} |" for metric, x in _known(kept).items()]
    header = "| evaluation | metric | value | step | images, training / test |"
    return ["## Results", "", header, "|---|---|---:|---:|---:|", *rows, ""] if rows else []


def _known(kept: dict[str, Any]) -> dict[str, float]:
    found = kept["results"].items()
    return {metric: value for metric, value in found if isinstance(value, (int, float)) and math.isfinite(value)}
