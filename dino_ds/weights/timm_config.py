"""A backbone as timm builds it: its name and arguments there, and the config.json of a folder that timm reads."""

from __future__ import annotations

from typing import Any

from dino_ds.errors import ConfigError
from dino_ds.models.specs.backbones import VITS
from dino_ds.weights.find import is_timm_name
from dino_ds.weights.load import Backbone


def timm_model(model: Backbone) -> tuple[str, dict[str, Any]] | None:
    """Name and arguments with which timm builds this backbone, or None if timm does not know it."""
    if not model.is_vit:
        return model.network.spec.timm_model("", model.image_size)
    arch = model.vit.arch
    # A model of timm's whose kind of block is ours; all sizes are arguments.
    kind = "reg4_" if arch.registers else ""
    like = f"vit_{'giant' if arch.swiglu else 'small'}_patch14_{kind}dinov2"
    usual = "vit_small_patch16_224" if arch.layer_scale is None and not arch.swiglu else like
    stated = model.about.get("timm_name")
    if not is_timm_name(stated) or (stated in VITS and VITS[stated].swiglu != arch.swiglu):
        stated = usual
    known = arch.timm_model(stated, model.image_size)
    if known is None or arch.rope is not None:
        return known
    return known[0], known[1] | {"mlp_ratio": arch.mlp_ratio}


def timm_config(model: Backbone) -> dict[str, Any]:
    """config.json as on the Hugging Face hub. Raises ConfigError for a network that timm does not know."""
    known, spec = timm_model(model), model.network.spec
    if known is None:
        raise ConfigError(
            f"{spec.title} is a class of your own, which neither timm nor transformers can build: take "
            "--format safetensors or onnx"
        )
    name, arguments = known
    return {
        "architecture": name,
        "num_classes": 0,
        "num_features": spec.width,
        **({"global_pool": "token"} if model.is_vit else {}),
        "model_args": arguments,
        "pretrained_cfg": {
            "tag": "dino_ds",
            "custom_load": False,
            "input_size": [spec.in_chans, model.image_size, model.image_size],
            "fixed_input_size": model.is_vit or "img_size" in arguments,
            "interpolation": "bicubic",
            "crop_pct": 0.875,
            "crop_mode": "center",
            "mean": list(model.normalisation.mean),
            "std": list(model.normalisation.std),
            "num_classes": 0,
            "pool_size": None,
            **spec.timm_layers,
        },
    }
