"""Converts ViTs with rotary positions to and from Hugging Face's DINOv3ViTModel, in its names on disk."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from dino_ds.backbones import ViTSpec
from dino_ds.errors import CheckpointError, ConfigError
from dino_ds.weights.dinov3 import check_keys
from dino_ds.weights.reference import unused

_OUTSIDE = {
    "cls_token": "embeddings.cls_token",
    "reg_token": "embeddings.register_tokens",
    "patch_embed.proj": "embeddings.patch_embeddings",
    "norm": "norm",
}
_BLOCK = {
    "norm1": "norm1",
    "norm2": "norm2",
    "attn.proj": "attention.o_proj",
    "attn.q_bias": "attention.q_proj.bias",
    "attn.v_bias": "attention.v_proj.bias",
    "gamma_1": "layer_scale1.lambda1",
    "gamma_2": "layer_scale2.lambda1",
    "mlp.fc2": "mlp.down_proj",
}
_MLP, _GATED = {"mlp.fc1": "mlp.up_proj"}, {"mlp.fc1_g": "mlp.gate_proj", "mlp.fc1_x": "mlp.up_proj"}
_LAYER = re.compile(r"(?:model\.)*layer\.(\d+)\.(.+)")
_PARTS = ("q_proj", "k_proj", "v_proj")


def hf_config_dinov3(arch: ViTSpec, image_size: int) -> dict[str, Any]:
    """Their config.json. Raises ConfigError for an architecture that transformers has no model of."""
    unlike = {
        "rope_max_period" if arch.rope_max_period is not None else "": "periods that are given",
        f"rope {arch.rope}" if arch.rope != "separate" else "": "coordinates that are not normalised by each side",
        "rms_norm" if arch.rms_norm else "": "RMSNorm",
        "cls_norm" if arch.cls_norm else "": "a norm of its own for the CLS token",
        "layer_scale none" if arch.layer_scale is None else "": "no LayerScale",
    }
    unlike.pop("", None)
    if unlike:
        raise ConfigError(f"Hugging Face's DINOv3 has no ViT with {next(iter(unlike.values()))}: export to onnx")
    return {
        "architectures": ["DINOv3ViTModel"],
        "model_type": "dinov3_vit",
        "hidden_size": arch.width,
        "num_hidden_layers": arch.depth,
        "num_attention_heads": arch.heads,
        "intermediate_size": int(arch.width * arch.mlp_ratio) // (2 if arch.swiglu else 1),
        "use_gated_mlp": arch.swiglu,
        "hidden_act": "silu" if arch.swiglu else "gelu",
        "query_bias": arch.qkv_bias,
        "key_bias": False,
        "value_bias": arch.qkv_bias,
        "proj_bias": True,
        "mlp_bias": True,
        "layerscale_value": arch.layer_scale,
        "layer_norm_eps": arch.norm_eps,
        "num_register_tokens": arch.registers,
        "rope_theta": arch.rope_base,
        "pos_embed_shift": None,
        "pos_embed_jitter": None,
        "pos_embed_rescale": None,
        "attention_dropout": 0.0,
        "drop_path_rate": 0.0,
        "image_size": image_size,
        "patch_size": arch.patch_size,
        "num_channels": arch.in_chans,
        "dtype": "float32",
    }


def to_huggingface_dinov3(backbone: Mapping[str, Tensor], mask_token: Tensor | None = None) -> dict[str, Tensor]:
    """Our tensors under their names, the values the same; mask_token (1, d): zero where there is none."""
    names = _BLOCK | (_GATED if "blocks.0.mlp.fc1_g.weight" in backbone else _MLP)
    out: dict[str, Tensor] = {}
    for name, tensor in backbone.items():
        match = re.fullmatch(r"blocks\.(\d+)\.(.+)", name)
        if match is None:
            out[_renamed(name, _OUTSIDE)] = tensor
        elif match[2] == "attn.qkv.weight":
            place = f"layer.{match[1]}.attention"
            out |= {f"{place}.{n}.weight": t.contiguous() for n, t in zip(_PARTS, tensor.chunk(3), strict=True)}
        else:
            out[f"layer.{match[1]}.{_renamed(match[2], names)}"] = tensor
    cls = out["embeddings.cls_token"]
    mask = cls.new_zeros(cls.shape) if mask_token is None else mask_token.reshape(cls.shape)
    return out | {
        "embeddings.mask_token": mask,
        "embeddings.register_tokens": out.get("embeddings.register_tokens", cls[:, :0]),
    }


def is_huggingface_dinov3(tensors: Mapping[str, Tensor]) -> bool:
    return any(name.endswith(".attention.q_proj.weight") for name in tensors)


def from_huggingface_dinov3(theirs: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], Tensor | None, list[str]]:
    """Their tensors under our names, unknown names unchanged; the mask token (1, d) or None; what is left out.

    Raises CheckpointError where a part is missing, and for keys with a bias.
    """
    theirs = {re.sub(r"^(dinov3_vit|dinov3|backbone)\.", "", name): tensor for name, tensor in theirs.items()}
    dropped = [name for name in theirs if name.startswith("classifier.")]
    gated = any(".mlp.gate_proj." in name for name in theirs)
    names = {theirs: ours for ours, theirs in (_BLOCK | (_GATED if gated else _MLP)).items()}
    outside = {theirs: ours for ours, theirs in _OUTSIDE.items()}
    out: dict[str, Tensor] = {}
    for name, tensor in theirs.items():
        match = _LAYER.fullmatch(name)
        if name in dropped or name == "embeddings.mask_token":
            continue
        if match is None:
            out[_renamed(name, outside)] = tensor
        elif match[2] == "attention.q_proj.weight":
            others = [name.replace("q_proj", part) for part in _PARTS]
            if missing := [other for other in others if other not in theirs]:
                raise CheckpointError(f"it lacks {missing[0]}")
            out[f"blocks.{match[1]}.attn.qkv.weight"] = torch.cat([theirs[other] for other in others])
        elif match[2] == "attention.k_proj.bias":
            check_keys(name, tensor)
        elif match[2] not in ("attention.k_proj.weight", "attention.v_proj.weight"):
            out[f"blocks.{match[1]}.{_renamed(match[2], names)}"] = tensor
    if "reg_token" in out and not out["reg_token"].numel():
        del out["reg_token"]
    mask = theirs.get("embeddings.mask_token")
    return out, None if mask is None else mask.reshape(1, -1), unused(dropped)


def _renamed(name: str, names: Mapping[str, str]) -> str:
    """`name` with its longest known beginning replaced."""
    for old in sorted(names, key=len, reverse=True):
        if name == old or name.startswith(f"{old}."):
            return names[old] + name[len(old) :]
    return name
