"""Converts ViTs to and from Hugging Face's ViT, Dinov2 (LayerScale), Dinov2WithRegisters and DINOv3ViT (RoPE).

The names are those on disk, which transformers 4 uses and transformers 5 converts when it loads.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dino_ds.data.normalisation import Normalisation
from dino_ds.errors import CheckpointError, ConfigError
from dino_ds.models.specs.backbones import ViTSpec
from dino_ds.weights.layouts import check_keys
from dino_ds.weights.tensors import Weights, unused


class _Names(NamedTuple):
    """Names in one of their models: of tensors outside and inside of blocks, of blocks, and of queries, keys and
    values."""

    outside: dict[str, str]
    block: str
    inside: dict[str, str]
    parts: tuple[str, ...]


_VIT = _Names(
    {
        "cls_token": "embeddings.cls_token",
        "pos_embed": "embeddings.position_embeddings",
        "reg_token": "embeddings.register_tokens",
        "patch_embed.proj": "embeddings.patch_embeddings.projection",
        "norm": "layernorm",
    },
    "encoder.layer.",
    {
        "norm1": "layernorm_before",
        "attn.proj": "attention.output.dense",
        "norm2": "layernorm_after",
        "mlp.fc1": "intermediate.dense",
        "mlp.fc2": "output.dense",
    },
    ("attention.attention.query", "attention.attention.key", "attention.attention.value"),
)
_DINOV2 = _VIT._replace(
    inside={
        "attn.proj": "attention.output.dense",
        "ls1.gamma": "layer_scale1.lambda1",
        "ls2.gamma": "layer_scale2.lambda1",
    }
)
_SWIGLU = _DINOV2._replace(inside=_DINOV2.inside | {"mlp.fc1": "mlp.weights_in", "mlp.fc2": "mlp.weights_out"})
_DINOV3 = _Names(
    {
        "cls_token": "embeddings.cls_token",
        "reg_token": "embeddings.register_tokens",
        "patch_embed.proj": "embeddings.patch_embeddings",
    },
    "layer.",
    {
        "attn.proj": "attention.o_proj",
        "attn.q_bias": "attention.q_proj.bias",
        "attn.v_bias": "attention.v_proj.bias",
        "gamma_1": "layer_scale1.lambda1",
        "gamma_2": "layer_scale2.lambda1",
        "mlp.fc1": "mlp.up_proj",
        "mlp.fc2": "mlp.down_proj",
    },
    ("attention.q_proj", "attention.k_proj", "attention.v_proj"),
)
_GATED = {key: theirs for key, theirs in _DINOV3.inside.items() if key != "mlp.fc1"}
_DINOV3_GATED = _DINOV3._replace(inside=_GATED | {"mlp.fc1_g": "mlp.gate_proj", "mlp.fc1_x": "mlp.up_proj"})
_MARKS = {
    ".mlp.gate_proj.": _DINOV3_GATED,
    ".attention.q_proj.": _DINOV3,
    ".layernorm_before.": _VIT,
    ".mlp.weights_in.": _SWIGLU,
}
"""Parts of names that only one of their models has; Dinov2 has none of them."""


def hf_config(arch: ViTSpec, image_size: int, mask_token: bool = False) -> dict[str, Any]:
    """Their config.json; mask_token: the weights have one. Raises ConfigError for an architecture that transformers has
    no model of."""
    common = {
        "hidden_size": arch.width,
        "num_hidden_layers": arch.depth,
        "num_attention_heads": arch.heads,
        "layer_norm_eps": arch.norm_eps,
        "image_size": image_size,
        "patch_size": arch.patch_size,
        "num_channels": arch.in_chans,
        "dtype": "float32",
    }
    if arch.rope is not None:
        return _dinov3_config(arch) | common
    if arch.registers and arch.layer_scale is None:
        raise ConfigError("Hugging Face has no ViT with registers and without LayerScale: export to timm or onnx")
    common |= {
        "hidden_act": "gelu",
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
        "qkv_bias": True,
    }
    if arch.layer_scale is None:
        if arch.swiglu:
            raise ConfigError("Hugging Face has no ViT with SwiGLU and without LayerScale: export to timm or onnx")
        # The pooler that AutoModel adds to a ViT: `to_huggingface` gives it weights that hand on the CLS token.
        pooler = {"pooler_act": "linear", "pooler_output_size": arch.width}
        return {
            "architectures": ["ViTModel"],
            "model_type": "vit",
            "intermediate_size": arch.mlp_widths[0],
            **common,
            **pooler,
        }
    config = {
        "architectures": ["Dinov2WithRegistersModel" if arch.registers else "Dinov2Model"],
        "model_type": "dinov2_with_registers" if arch.registers else "dinov2",
        "mlp_ratio": _mlp_ratio(arch),
        "use_swiglu_ffn": arch.swiglu,
        "layerscale_value": arch.layer_scale,
        **common,
    }
    return config | ({"num_register_tokens": arch.registers} if arch.registers else {"use_mask_token": mask_token})


def _dinov3_config(arch: ViTSpec) -> dict[str, Any]:
    unlike = {
        "periods that are given": arch.rope_max_period is not None,
        "coordinates that are not normalised by each side": arch.rope != "separate",
        "RMSNorm": arch.rms_norm,
        "a norm of its own for the CLS token": arch.cls_norm,
        "no LayerScale": arch.layer_scale is None,
    }
    if why := next((why for why, is_so in unlike.items() if is_so), None):
        raise ConfigError(f"Hugging Face's DINOv3 has no ViT with {why}: export to onnx")
    return {
        "architectures": ["DINOv3ViTModel"],
        "model_type": "dinov3_vit",
        "intermediate_size": arch.mlp_widths[1],
        "use_gated_mlp": arch.swiglu,
        "hidden_act": "silu" if arch.swiglu else "gelu",
        "query_bias": arch.qkv_bias,
        "key_bias": False,
        "value_bias": arch.qkv_bias,
        "proj_bias": True,
        "mlp_bias": True,
        "layerscale_value": arch.layer_scale,
        "num_register_tokens": arch.registers,
        "rope_theta": arch.rope_base,
        "pos_embed_shift": None,
        "pos_embed_jitter": None,
        "pos_embed_rescale": None,
        "attention_dropout": 0.0,
        "drop_path_rate": 0.0,
    }


def hf_processor(size: int, normalisation: Normalisation) -> dict[str, Any]:
    """Their preprocessor_config.json: what `dino_ds.data.cutting` does to images of `size` pixels."""
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
    packed, _ = arch.mlp_widths
    for ratio in range(1, 17):
        hidden = arch.width * ratio
        if packed == (2 * ((int(hidden * 2 / 3) + 7) // 8 * 8) if arch.swiglu else hidden):
            return ratio
    raise ConfigError(
        f"Hugging Face's Dinov2 has no MLP of width {packed} for embeddings of {arch.width}: export to timm or onnx"
    )


def to_huggingface(backbone: Mapping[str, Tensor], arch: ViTSpec, mask_token: Tensor | None) -> dict[str, Tensor]:
    """Our tensors under their names; the values are the same. With a pooler of a ViT, which is the identity.

    mask_token (1, d): left out of a ViT, whose model in transformers has none; zero where theirs wants one.
    """
    if arch.rope is not None:
        names = _DINOV3_GATED if arch.swiglu else _DINOV3
    else:
        names = _VIT if arch.layer_scale is None else _SWIGLU if arch.swiglu else _DINOV2
    out: dict[str, Tensor] = {}
    for name, tensor in backbone.items():
        match = re.fullmatch(r"blocks\.(\d+)\.(.+)", name)
        if match is None:
            out[_renamed(name, names.outside)] = tensor
        elif match[2].startswith("attn.qkv."):
            places = [f"{names.block}{match[1]}.{part}.{match[2].rpartition('.')[2]}" for part in names.parts]
            out |= {place: piece.contiguous() for place, piece in zip(places, tensor.chunk(3), strict=True)}
        else:
            out[f"{names.block}{match[1]}.{_renamed(match[2], names.inside)}"] = tensor
    cls, mask, positions = out["embeddings.cls_token"], "embeddings.mask_token", "embeddings.position_embeddings"
    if arch.rope is not None:
        out[mask] = torch.zeros_like(cls) if mask_token is None else mask_token.reshape(cls.shape)
        return {"embeddings.register_tokens": cls[:, :0], **out}
    if arch.layer_scale is None:
        return out | {"pooler.dense.weight": torch.eye(arch.width), "pooler.dense.bias": torch.zeros(arch.width)}
    if arch.registers:
        # Theirs has a position for the CLS token, ours is in the token itself; and always a mask token.
        out[positions] = torch.cat((torch.zeros_like(cls), out[positions]), dim=1)
        out[mask] = torch.zeros_like(cls[0])
    return out if mask_token is None else out | {mask: mask_token}


def is_huggingface(tensors: Mapping[str, Tensor]) -> bool:
    return any(".attention.attention.query." in n or n.endswith(".attention.q_proj.weight") for n in tensors)


def from_huggingface(theirs: Mapping[str, Tensor]) -> Weights:
    """Their tensors under our names, unknown names unchanged; without pooler and classifier.

    Raises CheckpointError where a part is missing, and for keys with a bias that ours have not.
    """
    prefix = re.compile(r"^(vit|dinov2|dinov2_with_registers|dinov3_vit|dinov3|backbone)\.")
    theirs = {prefix.sub("", name): tensor for name, tensor in theirs.items()}
    dropped = [name for name in theirs if re.search(r"(^|\.)(pooler\.|classifier\.)", name)]
    names = next((names for mark, names in _MARKS.items() if any(mark in name for name in theirs)), _DINOV2)
    inside, outside = ({theirs: ours for ours, theirs in own.items()} for own in (names.inside, names.outside))
    out: dict[str, Tensor] = {}
    for name, tensor in theirs.items():
        if name in dropped or name == "embeddings.mask_token":
            continue
        match = re.fullmatch(rf"(?:model\.)*{re.escape(names.block)}(\d+)\.(.+)", name)
        if match is None:
            out[_renamed(name, outside)] = tensor
            continue
        part, _, kind = match[2].rpartition(".")
        if part not in names.parts or match[2] in inside:
            out[f"blocks.{match[1]}.{_renamed(match[2], inside)}"] = tensor
        elif match[2] == "attention.k_proj.bias":
            check_keys(name, tensor)
        elif part == names.parts[0]:
            others = [f"{name.removesuffix(match[2])}{other}.{kind}" for other in names.parts]
            if missing := [other for other in others if other not in theirs]:
                raise CheckpointError(f"it lacks {missing[0]}")
            out[f"blocks.{match[1]}.attn.qkv.{kind}"] = torch.cat([theirs[other] for other in others])
    if "reg_token" in out and not out["reg_token"].numel():
        del out["reg_token"]
    mask = theirs.get("embeddings.mask_token")
    mask = None if mask is None else mask.reshape(1, -1)
    return Weights("huggingface", out, notes=unused(dropped), mask_token=mask)


def _renamed(name: str, names: Mapping[str, str]) -> str:
    """`name` with the known name that it begins with replaced."""
    old = next((old for old in names if name == old or name.startswith(f"{old}.")), None)
    return name if old is None else names[old] + name[len(old) :]
