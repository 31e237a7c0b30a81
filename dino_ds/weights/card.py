"""The model card of an exported folder: README.md with the metadata that the Hugging Face hub reads."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import yaml
from huggingface_hub import EvalResult, ModelCardData

from dino_ds import __version__
from dino_ds.basics.digits import range_text
from dino_ds.models.specs.backbones import BACKBONES
from dino_ds.weights.load import Backbone

_USE = {
    "timm": """import timm

model = timm.create_model("local-dir:{folder}", pretrained=True).eval()
features = model(images)  # (b, {width})""",
    "transformers": """from transformers import AutoImageProcessor, AutoModel

processor, model = AutoImageProcessor.from_pretrained("{folder}"), AutoModel.from_pretrained("{folder}")
features = model(**processor(images, return_tensors="pt")).{output}  # (b, {width})""",
}
_UNCUT = {
    "timm": "; so does timm's transform with crop_pct 1",
    "transformers": "; so does `processor(images, size={{'shortest_edge': {side}}})`",
}
"""Advice on how another program prepares small images as dino_ds does."""
_CARD = """---
{metadata}
---
# {name}, trained with {objective} by dino_ds

{sizes}, native images of {side} pixels. The {whose} backbone, FP32, without the projection head.{training}

```python
{use}
```

Images: shorter side to {enlarged} pixels (bicubic), center crop, {normalisation}; dino_ds leaves images whose shorter \
side is {side} pixels or less uncut{uncut}.{on_sizes}{value_range}
{results}
Made by dino_ds {version}. License: not stated; its owner adds `license:` to the metadata.
"""
_ON_SIZES = (
    " Position embeddings of other sizes were resized as {!r} in training; other libraries have their own way, so "
    "features at other sizes may differ a little."
)


def model_card(model: Backbone, library: str, folder: str) -> str:
    """Text of the card: what the model is, how `library` (timm or transformers) loads `folder`, and what it scored.

    Results are `model.about["evaluations"]`, as in RUN/evaluations.json; `model.about["data"]` names their images,
    "recipe" has the settings of the training.
    """
    spec, about, side = model.network.spec, model.about, model.image_size
    versions = ", ".join(f"{name} {version}" for name, version in about.get("versions", {}).items())
    return _CARD.format(
        metadata=_metadata(model, library).to_yaml(),
        name=_name(model),
        objective=_objective(model),
        sizes=spec.sizes.capitalize() if model.is_vit else f"{model.title}, width {spec.width}, stride {spec.stride}",
        side=side,
        whose="student's" if about.get("network") == "student" else "EMA teacher's",
        training=_training(about),
        use=_USE[library].format(
            folder=folder,
            width=spec.width,
            output="last_hidden_state[:, 0]" if model.is_vit else "pooler_output",
        ),
        enlarged=int(side * 256 / 224),
        normalisation=f"mean {list(model.normalisation.mean)}, std {list(model.normalisation.std)}",
        uncut=_UNCUT[library if model.is_vit else "timm"].format(side=side),
        on_sizes=_ON_SIZES.format(model.vit.options.pos_embed_interpolation)
        if model.is_vit and model.vit.arch.rope is None
        else "",
        value_range=_value_range(model),
        results=_table(about),
        version=__version__ + (f" ({versions})" if versions else ""),
    )


def _training(about: dict[str, Any]) -> str:
    """Text on the training: how long, on which images, and the settings that are not the defaults."""
    images = f" of {about['data']}" if "data" in about else ""
    text = f"\nTrained for {about['step']} steps = {about['images']} images{images}." if "step" in about else ""
    if not about.get("recipe"):
        return text
    settings = yaml.safe_dump(about["recipe"], sort_keys=False, allow_unicode=True).rstrip()
    return f"{text}\n\nSettings that differ from dino_ds's defaults:\n\n```yaml\n{settings}\n```"


def _name(model: Backbone) -> str:
    """timm's name, where the model has the sizes that it stands for."""
    if not model.is_vit:
        return model.title
    arch, name = model.vit.arch, model.about.get("timm_name")
    is_known = name is not None and BACKBONES.get(name) == arch
    return str(name) if is_known else f"ViT/{arch.patch_size} {arch.width} x {arch.depth}"


def _objective(model: Backbone) -> str:
    """Losses of the training; only a run with iBOT hides patches."""
    return "DINO" if model.mask_token is None and "ibot_head" not in model.heads else "DINO and iBOT"


def _value_range(model: Backbone) -> str:
    if model.value_range is None:
        return ""
    text = range_text(model.value_range).replace(",", " is black and ")
    return f"\n\nOf training images deeper than 8 bits {text} is white: scale such images by it, not by 255."


def _metadata(model: Backbone, library: str) -> ModelCardData:
    """Metadata with a model-index, where there are results of this very teacher."""
    about = model.about
    results = [
        EvalResult(
            task_type="image-feature-extraction",
            task_name=f"{evaluation} of frozen features",
            dataset_type=(data := str(kept.get("data") or about.get("data", "images"))),
            dataset_name=data,
            metric_type=metric,
            metric_name=metric,
            metric_value=float(f"{value:.6g}"),
        )
        for evaluation, kept, metric, value in _results(about)
        if kept.get("step") in (None, about.get("step"))
    ]
    return ModelCardData(
        library_name=library,
        pipeline_tag="image-feature-extraction",
        tags=["dino", "self-supervised", *(["vision-transformer"] if model.is_vit else []), "image-feature-extraction"],
        model_name=f"{_name(model)}, {_objective(model)}" if results else None,
        eval_results=results or None,
    )


def _table(about: dict[str, Any]) -> str:
    rows = ""
    for evaluation, kept, metric, value in _results(about):
        data = kept.get("data") or evaluation
        name = evaluation if data == evaluation else f"{evaluation} of {data}".replace("|", "/")
        step, train, test = ("–" if kept.get(k) is None else kept[k] for k in ("step", "train_images", "test_images"))
        rows += f"| {name} | {metric} | {value:.4g} | {step} | {train} / {test} |\n"
    header = "| evaluation | metric | value | step | images, training / test |\n|---|---|---:|---:|---:|\n"
    return f"\n## Results\n\n{header}{rows}" if rows else ""


def _results(about: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any], str, float]]:
    """(evaluation, what is kept of it, metric, value) of all results that are numbers."""
    for evaluation, kept in about.get("evaluations", {}).items():
        for metric, value in kept["results"].items():
            if isinstance(value, int | float) and math.isfinite(value):
                yield evaluation, kept, metric, value
