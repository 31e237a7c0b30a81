"""The model card of an exported folder: README.md with the metadata that the Hugging Face hub reads."""

from __future__ import annotations

import math
from typing import Any

from dino_ds import __version__
from dino_ds.basics.digits import range_text
from dino_ds.models.specs.backbones import BACKBONES
from dino_ds.weights.load import Backbone

_CARD = """---
library_name: timm
pipeline_tag: image-feature-extraction
tags: {tags}
---
# {name}, trained with {objective} by dino_ds

{sizes}, native images of {side} pixels. The EMA teacher's backbone, FP32, without the projection head.{training}

```python
import timm

model = timm.create_model("local-dir:{folder}", pretrained=True).eval()
features = model(images)  # (b, {width})
```

`AutoModel.from_pretrained("{folder}")` of transformers builds the same network (`.pooler_output`).

Images: shorter side to {enlarged} pixels (bicubic), center crop, {normalization}; dino_ds leaves images whose shorter \
side is {side} pixels or less uncut; so does timm's transform with crop_pct 1.{on_sizes}{value_range}
{results}
Made by dino_ds {version}. License: not stated; its owner adds `license:` to the metadata.
"""
_ON_SIZES = (
    " Position embeddings of other sizes were resized as {!r} in training; other libraries have their own way, so "
    "features at other sizes may differ a little."
)


def model_card(model: Backbone, folder: str) -> str:
    """The text of the card: what the model is, how timm and transformers load `folder`, and results of evaluations.

    Results are `model.about["evaluations"]`, as in RUN/evaluations.json; `model.about["data"]` names their images.
    """
    spec, about, side = model.network.spec, model.about, model.image_size
    versions = ", ".join(f"{name} {version}" for name, version in about.get("versions", {}).items())
    name, sizes = model.title, f"{model.title}, width {spec.width}, stride {spec.stride}"
    if model.is_vit:
        arch, stated = model.vit.arch, about.get("timm_name")
        is_known = stated is not None and BACKBONES.get(stated) == arch  # else the name stands for other sizes
        name = str(stated) if is_known else f"ViT/{arch.patch_size} {arch.width} x {arch.depth}"
        sizes = spec.sizes.capitalize()
    images = f" of {about['data']}" if "data" in about else ""
    hides_patches = model.mask_token is not None or "ibot_head" in model.heads
    has_positions = model.is_vit and model.vit.arch.rope is None
    return _CARD.format(
        tags=["dino", "self-supervised", *(["vision-transformer"] if model.is_vit else []), "image-feature-extraction"],
        name=name,
        objective="DINO and iBOT" if hides_patches else "DINO",
        sizes=sizes,
        side=side,
        training=f"\nTrained for {about['step']} steps = {about['images']} images{images}." if "step" in about else "",
        folder=folder,
        width=spec.width,
        enlarged=int(side * 256 / 224),
        normalization=f"mean {list(model.normalization.mean)}, std {list(model.normalization.std)}",
        on_sizes=_ON_SIZES.format(model.vit.options.pos_embed_interpolation) if has_positions else "",
        value_range=_value_range(model),
        results=_table(about),
        version=__version__ + (f" ({versions})" if versions else ""),
    )


def _value_range(model: Backbone) -> str:
    """The range of values of training images deeper than 8 bits, as a paragraph."""
    if model.value_range is None:
        return ""
    text = range_text(model.value_range).replace(",", " is black and ")
    return f"\n\nOf training images deeper than 8 bits {text} is white: scale such images by it, not by 255."


def _table(about: dict[str, Any]) -> str:
    """A table of all results that are numbers."""
    rows = ""
    for evaluation, kept in about.get("evaluations", {}).items():
        data = kept.get("data") or evaluation
        name = evaluation if data == evaluation else f"{evaluation} of {data}".replace("|", "/")
        step, train, test = ("–" if kept.get(k) is None else kept[k] for k in ("step", "train_images", "test_images"))
        for metric, value in kept["results"].items():
            if isinstance(value, int | float) and math.isfinite(value):
                rows += f"| {name} | {metric} | {value:.4g} | {step} | {train} / {test} |\n"
    header = "| evaluation | metric | value | step | images, training / test |\n|---|---|---:|---:|---:|\n"
    return f"\n## Results\n\n{header}{rows}" if rows else ""
