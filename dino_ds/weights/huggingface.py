"""Converts backbones to and from Hugging Face's ViT, Dinov2 (LayerScale) and Dinov2WithRegisters.

The names are those on disk, which transformers 4 uses and transformers 5 converts when it loads.
"""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor

from dino_ds.backbones import ViTSpec
from dino_ds.data.normalisation import Normalisation
from dino_ds.errors import CheckpointError, ConfigError
from dino_ds.weights.reference import unused

_VIT = {
    "norm1": "layernorm_before",
    "attn.proj": "attention.output.dense",
    "norm2": "layernorm_after",
    "mlp.fc1": "intermediate.dense",
    "mlp.fc2": "output.dense",
}
_DINOV2 = {
    "norm1": "norm1",
    "attn.proj": "attention.output.dense",
    "ls1.gamma": "layer_scale1.lambda1",
    "norm2": "norm2",
    "mlp.fc1": "mlp.fc1",
    "mlp.fc2": "mlp.fc2",
    "ls2.gamma": "layer_scale2.lambda1",
}
_SWIGLU = _DINOV2 | {"mlp.fc1": "mlp.weights_in", "mlp.fc2": "mlp.weights_out"}
_OUTSIDE = {
    "cls_token": "embeddings.cls_token",
    "pos_embed": "embeddings.position_embeddings",
    "reg_token": "embeddings.register_tokens",
    "patch_embed.proj": "embeddings.patch_embeddings.projection",
    "norm": "layernorm",
}


def hf_config(arch: ViTSpec, image_size: int, mask_token: bool = False) -> dict[str, Any]:
    """Their config.json; mask_token: the weights have one. Raises ConfigError for an architecture that transformers has
    no model of."""
    if arch.registers and arch.layer_scale is None:
        raise ConfigError("Hugging Face has no ViT with registers and without LayerScale: export to timm or onnx")
    common = {
        "hidden_size": arch.width,
        "num_hidden_layers": arch.depth,
        "num_attention_heads": arch.heads,
        "hidden_act": "gelu",
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
        "layer_norm_eps": arch.norm_eps,
        "image_size": image_size,
        "patch_size": arch.patch_size,
        "num_channels": arch.in_chans,
        "qkv_bias": True,
        "dtype": "float32",
    }
    hidden = int(arch.width * arch.mlp_ratio)
    if arch.layer_scale is None:
        if arch.swiglu:
            raise ConfigError("Hugging Face has no ViT with SwiGLU and without LayerScale: export to timm or onnx")
        # The pooler that AutoModel adds to a ViT: `to_huggingface` gives it weights that hand on the CLS token.
        pooler = {"pooler_act": "linear", "pooler_output_size": arch.width}
        return {"backbones": ["ViTModel"], "model_type": "vit", "intermediate_size": hidden, **common, **pooler}
    kind = "dinov2_with_registers" if arch.registers else "dinov2"
    config = {
        "backbones": ["Dinov2WithRegistersModel" if arch.registers else "Dinov2Model"],
        "model_type": kind,
        "mlp_ratio": _mlp_ratio(arch),
        "use_swiglu_ffn": arch.swiglu,
        "layerscale_value": arch.layer_scale,
        **common,
    }
    return config | ({"num_register_tokens": arch.registers} if arch.registers else {"use_mask_token": mask_token})


def hf_processor(size: int, normalisation: Normalisation) -> dict[str, Any]:
    """Their preprocessor_config.json: what `dino_ds.data.eval_crops` does to images of `size` pixels."""
    return {
        "image_processor_type": "BitImageProcessor",
        "do_resize": True,
        "size": {"shortest_edge": int(size * 256 / 224)},
        "resample": 3,
        "do_center_crop": True,
        "crop_size": {"height": size, "width": size},
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "do_convert_rgb": len(normalisation.mean) == 3,
        "image_mean": list(normalisation.mean),
        "image_std": list(normalisation.std),
    }


def _mlp_ratio(arch: ViTSpec) -> int:
    """The whole number that gives their model our MLP width."""
    packed = int(arch.width * arch.mlp_ratio)
    for ratio in range(1, 17):
        hidden = arch.width * ratio
        if packed == (2 * ((int(hidden * 2 / 3) + 7) // 8 * 8) if arch.swiglu else hidden):
            return ratio
    raise ConfigError(
        f"Hugging Face's Dinov2 has no MLP of width {packed} for embeddings of {arch.width}: export to timm or onnx"
    )


def to_huggingface(backbone: dict[str, Tensor], arch: ViTSpec, mask_token: Tensor | None = None) -> dict[str, Tensor]:
    """Our tensors under their names; the values are the same. With a pooler of a ViT, which is the identity.

    mask_token (1, d): left out of a ViT, whose model in transformers has none.
    """
    names = _VIT if arch.layer_scale is None else _SWIGLU if arch.swiglu else _DINOV2
    out: dict[str, Tensor] = {}
    for name, tensor in backbone.items():
        match = re.fullmatch(r"blocks\.(\d+)\.(.+)", name)
        if match is None:
            out[_rename(name, _OUTSIDE)] = tensor
            continue
        prefix, rest = f"encoder.layer.{match[1]}.", match[2]
        if rest.startswith("attn.qkv."):
            kind = rest.removeprefix("attn.qkv.")
            for part, piece in zip(("query", "key", "value"), tensor.chunk(3), strict=True):
                out[f"{prefix}attention.attention.{part}.{kind}"] = piece.contiguous()
        else:
            out[prefix + _rename(rest, names)] = tensor
    if arch.layer_scale is None:
        out |= {"pooler.dense.weight": torch.eye(arch.width), "pooler.dense.bias": torch.zeros(arch.width)}
    if arch.registers:
        # Theirs has a position for the CLS token, ours is in the token itself; and always a mask token.
        positions = out["embeddings.position_embeddings"]
        out["embeddings.position_embeddings"] = torch.cat((positions.new_zeros(1, 1, arch.width), positions), dim=1)
        out["embeddings.mask_token"] = positions.new_zeros(1, arch.width)
    if arch.layer_scale is not None and mask_token is not None:
        out["embeddings.mask_token"] = mask_token
    return out


def from_huggingface(theirs: dict[str, Tensor]) -> tuple[dict[str, Tensor], Tensor | None, list[str]]:
    """Their tensors under our names, unknown names unchanged; the mask token (1, d) or None; and a note on what is left
    out: pooler and classifier."""
    masks = [name for name in theirs if re.search(r"(^|\.)embeddings\.mask_token$", name)]
    mask_token = theirs[masks[0]].reshape(1, -1) if masks else None
    theirs = {name: tensor for name, tensor in theirs.items() if name not in masks}
    dropped = re.compile(r"(^|\.)(pooler\.|classifier\.)")
    notes = unused([name for name in theirs if dropped.search(name)])
    theirs = {
        re.sub(r"^(vit|dinov2|dinov2_with_registers)\.", "", name): tensor
        for name, tensor in theirs.items()
        if not dropped.search(name)
    }
    swiglu = any(".mlp.weights_in." in name for name in theirs)
    vit = any(".layernorm_before." in name for name in theirs)
    names = {v: k for k, v in (_VIT if vit else _SWIGLU if swiglu else _DINOV2).items()}
    outside = {v: k for k, v in _OUTSIDE.items()}
    out: dict[str, Tensor] = {}
    for name, tensor in theirs.items():
        match = re.fullmatch(r"encoder\.layer\.(\d+)\.(.+)", name)
        if match is None:
            out[_rename(name, outside)] = tensor
            continue
        prefix, rest = f"blocks.{match[1]}.", match[2]
        if rest.startswith("attention.attention.query."):
            kind = rest.rpartition(".")[2]
            place = f"encoder.layer.{match[1]}.attention.attention"
            others = [f"{place}.{part}.{kind}" for part in ("query", "key", "value")]
            if missing := [other for other in others if other not in theirs]:
                raise CheckpointError(f"it lacks {missing[0]}")
            out[f"{prefix}attn.qkv.{kind}"] = torch.cat([theirs[other] for other in others])
        elif not rest.startswith("attention.attention."):
            out[prefix + _rename(rest, names)] = tensor
    return out, mask_token, notes


def _rename(name: str, names: dict[str, str]) -> str:
    """`name` with its longest known prefix replaced."""
    for old in sorted(names, key=len, reverse=True):
        if name == old or name.startswith(f"{old}."):
            return names[old] + name[len(old) :]
    return name
