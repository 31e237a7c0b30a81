"""Weights that were read from files, under our names, which are timm's; and the maps from names of facebookresearch's
dino, dinov2, dinov3 and of Hugging Face's ViTs. Sources for dinov3: timm's own converter (timm/models/eva.py), and
facts of the released files. timm's `checkpoint_filter_fn` can't be used here: it needs a model of the right sizes
first, drops heads and mask tokens, and checks neither periods nor biases of keys."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dino_ds.errors import CheckpointError
from dino_ds.models.specs.base import BackboneSpec

USUAL_SIZE, MOST_SIZE = 224, 16384
"""Sides of native images in pixels: the default if no file states it, and the largest that a file may state."""
_OURS = re.compile(
    r"cls_token|pos_embed|reg_token|(patch_embed\.proj|norm)\.(weight|bias)|"
    r"blocks\.\d+\.((norm1|norm2|attn\.qkv|attn\.proj|mlp\.fc1|mlp\.fc2)\.(weight|bias)|ls[12]\.gamma)"
)
_OURS_ROTARY = re.compile(
    r"cls_token|reg_token|(patch_embed\.proj|norm|cls_norm|local_cls_norm)\.(weight|bias)|"
    r"blocks\.\d+\.((norm1|norm2|attn\.proj|mlp\.(fc1|fc1_g|fc1_x|fc2))\.(weight|bias)|"
    r"attn\.(qkv\.weight|q_bias|v_bias)|gamma_[12])"
)
_PATCHES = "patch_embed.proj.weight"
_DROPPED = re.compile(r"(mask_token|masked_embed|decoder_(pos_embed|(embed|blocks|norm|pred)\..*)|(head|fc)\..*)")
"""Tensors next to a backbone that are of no use for features: mask tokens, classifiers, the decoder of an MAE."""
_HEADS = {"head": "head", "dino_head": "head", "ibot_head": "ibot_head"}
"""Our names of dino's and dinov2's projection heads."""
HEAD = re.compile(r"(head)\.((?:mlp|last_layer|prototypes)\..+)")
"""A tensor of facebookresearch/dino's projection head, next to a "backbone."; not a classifier, such as "head.fc"."""
_PROTOTYPES = {  # names of a head's prototypes, of which only the directions count -> names of their lengths
    "prototypes.weight": "prototypes.lengths",
    "last_layer.weight_v": "last_layer.weight_g",
    "last_layer.parametrizations.weight.original1": "last_layer.parametrizations.weight.original0",
}
_PLAIN = "last_layer.weight"
"""Prototypes whose rows contain the lengths: dinov3's, or those of a weight norm that was merged."""
BASE = 100.0  # base of the rotary periods of all released networks; files have only the periods
EPS = 1e-5  # epsilon of the norms of all released networks
LOCAL_NORM = "local_cls_norm."
PERIODS, _BIAS, _MASK = "rope_embed.periods", ".attn.qkv.bias", ".attn.qkv.bias_mask"
_ROUNDED = 1e-2
"""Largest relative error of a period: rounding to bfloat16 is off by up to 1/256, rounding twice by twice that."""
_NAMES = {
    "storage_tokens": "reg_token",
    ".ls1.gamma": ".gamma_1",
    ".ls2.gamma": ".gamma_2",
    ".mlp.w1.": ".mlp.fc1_g.",
    ".mlp.w2.": ".mlp.fc1_x.",
    ".mlp.w3.": ".mlp.fc2.",
}
_HF_OUTSIDE = {
    "embeddings.cls_token": "cls_token",
    "embeddings.position_embeddings": "pos_embed",
    "embeddings.register_tokens": "reg_token",
    "embeddings.patch_embeddings.projection": "patch_embed.proj",
    "embeddings.patch_embeddings": "patch_embed.proj",
    "layernorm": "norm",
}
_HF_INSIDE = {
    "layernorm_before": "norm1",
    "layernorm_after": "norm2",
    "attention.output.dense": "attn.proj",
    "attention.o_proj": "attn.proj",
    "attention.q_proj.bias": "attn.q_bias",
    "attention.v_proj.bias": "attn.v_bias",
    "intermediate.dense": "mlp.fc1",
    "output.dense": "mlp.fc2",
    "mlp.weights_in": "mlp.fc1",
    "mlp.weights_out": "mlp.fc2",
    "mlp.gate_proj": "mlp.fc1_g",
    "mlp.up_proj": "mlp.fc1",
    "mlp.down_proj": "mlp.fc2",
    "layer_scale1.lambda1": "ls1.gamma",
    "layer_scale2.lambda1": "ls2.gamma",
}
"""Names in transformers' ViT, Dinov2, Dinov2WithRegisters and DINOv3ViT -> ours, outside and inside of blocks."""
_HF_ROTARY = {"layer_scale1.lambda1": "gamma_1", "layer_scale2.lambda1": "gamma_2"}
_HF_GATED = {"mlp.up_proj": "mlp.fc1_x"}
_HF_BLOCK = re.compile(r"(?:model\.)*(?:encoder\.)?layer\.(\d+)\.(.+)")
_HF_QUERIES = re.compile(r"attention\.(?:attention\.)?(query|key|value|q_proj|k_proj|v_proj)\.(weight|bias)")
_HF_PREFIX = re.compile(r"^(vit|dinov2|dinov2_with_registers|dinov3_vit|dinov3|backbone)\.")


@dataclass(frozen=True)
class Weights:
    """Tensors under our (timm's) names. kind: the project whose file it was. heads: projection heads by their names in
    a `Network`. about: the JSON next to the file, like teacher.json. notes: what was left out, and why. mask_token (1,
    d): for hidden patches, None if the file has none. local_norm: the norm of local crops' CLS tokens, by its names in
    a backbone; `backbone` lacks it. spec: None for our ViTs, else the network, made for images of `image_size` pixels a
    side; `backbone` then has that network's names and buffers."""

    kind: str
    backbone: dict[str, Tensor]
    heads: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    about: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    mask_token: Tensor | None = None
    local_norm: dict[str, Tensor] = field(default_factory=dict)
    spec: BackboneSpec | None = None
    image_size: int = 0

    def check_numbers(self, path: Path) -> None:
        """Call `check_numbers` on all tensors; in a network that is not one of our ViTs, integers may be buffers."""
        backbone = {name: t for name, t in self.backbone.items() if self.spec is None or t.is_floating_point()}
        mask = {} if self.mask_token is None else {"mask_token": self.mask_token}
        check_numbers(path, backbone, *self.heads.values(), self.local_norm, mask)


def has_rope(backbone: Mapping[str, Tensor]) -> bool:
    """Whether tensors under our names are those of a ViT with rotary positions."""
    return "pos_embed" not in backbone and "blocks.0.attn.qkv.bias" not in backbone and "norm.weight" in backbone


def checked(backbone: dict[str, Tensor]) -> dict[str, Tensor]:
    """`backbone` with learned positions in our form. Raises CheckpointError for names that our ViTs do not have."""
    backbone = {name: tensor for name, tensor in backbone.items() if name != "reg_token" or tensor.numel()}
    rope = has_rope(backbone)
    known, which = (_OURS_ROTARY, "ViT with rotary positions") if rope else (_OURS, "ViT")
    if unknown := sorted(name for name in backbone if not known.fullmatch(name)):
        raise CheckpointError(f"it is another kind of network: dino_ds's {which} has no {few(unknown)}")
    if rope and "cls_token" in backbone:
        return backbone
    cls, positions = backbone.get("cls_token"), backbone.get("pos_embed")
    if cls is None or positions is None:
        raise CheckpointError(f"it lacks {'a class token' if cls is None else 'learned positions: pos_embed'}")
    if positions.ndim != 3 or cls.shape != (1, 1, positions.shape[2]):
        raise CheckpointError(f"it has a class token of {list(cls.shape)} and positions of {list(positions.shape)}")
    only_patches = math.isqrt(positions.shape[1]) ** 2 == positions.shape[1]
    if "reg_token" in backbone and not only_patches:
        # As in timm: the class token's position is added to the token itself.
        return backbone | {"cls_token": cls + positions[:, :1], "pos_embed": positions[:, 1:]}
    if "reg_token" not in backbone and only_patches:
        return backbone | {"pos_embed": torch.cat((torch.zeros_like(cls), positions), dim=1)}
    return backbone


def check_numbers(path: Path, *groups: Mapping[str, Tensor]) -> None:
    """Raises CheckpointError for NaN, infinity and integers that are not BatchNorm's counters."""
    for tensors in groups:
        weights = {name: t for name, t in tensors.items() if not name.endswith("num_batches_tracked")}
        wrong = [name for name, t in weights.items() if not (t.is_floating_point() and torch.isfinite(t.float()).all())]
        if wrong:
            raise CheckpointError(f"{path} has NaN, infinity or whole numbers for weights in {few(wrong)}")


def unused(names: list[str]) -> list[str]:
    return [f"{len(names)} tensors not used ({few(sorted(names))})"] if names else []


def few(names: list[str]) -> str:
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")


def split_network(tensors: dict[str, Tensor]) -> Weights:
    """The teacher's backbone and heads among the tensors of a file. Prefixes of DDP and torch.compile are dropped. The
    backbone is the network with the patch embedding; its heads are `head` or dinov2's `dino_head` next to it, and
    `ibot_head`. Raises CheckpointError unless there is one ViT, or one called teacher."""
    tensors = {re.sub(r"(?<![^.])(module|_orig_mod)\.", "", name): t for name, t in tensors.items()}
    prefixes = sorted(name.removesuffix(_PATCHES) for name in tensors if re.search(rf"(^|\.){_PATCHES}$", name))
    if not prefixes:
        why = "it holds no Vision Transformer that dino_ds knows"
        more = f"its tensors are {few(sorted(tensors))}; name another network of timm's or your own"
        raise CheckpointError(f"{why}: {more}: --backbone of dino-ds export, backbone= in Python")
    chosen = [prefix for prefix in prefixes if "teacher" in prefix] if len(prefixes) > 1 else prefixes
    if len(chosen) != 1:
        why = f"it holds several networks, and not one teacher: {few(prefixes)}; save one of them alone"
        raise CheckpointError(why)
    prefix = chosen[0]
    owner = prefix.removesuffix("backbone.")
    mask, cls = tensors.get(f"{prefix}mask_token"), tensors.get(f"{prefix}cls_token")
    if mask is not None and cls is not None and mask.numel() == cls.numel():
        del tensors[f"{prefix}mask_token"]
    else:
        mask = None
    backbone: dict[str, Tensor] = {}
    heads: dict[str, dict[str, Tensor]] = {}
    others = []
    for name, tensor in tensors.items():
        beside = re.fullmatch(rf"{re.escape(owner)}({'|'.join(_HEADS)})\.((?:mlp|last_layer|prototypes)\..+)", name)
        inside = name.removeprefix(prefix)
        if beside:
            heads.setdefault(_HEADS[beside[1]], {})[beside[2]] = tensor
        elif name.startswith(prefix) and not _DROPPED.fullmatch(inside):
            # dinov2's blocks may lie in chunks: blocks.CHUNK.BLOCK.
            inside = re.sub(r"^blocks\.\d+\.(\d+)\.", r"blocks.\1.", inside)
            inside = inside.replace(".mlp.w12.", ".mlp.fc1.").replace(".mlp.w3.", ".mlp.fc2.")
            backbone["reg_token" if inside == "register_tokens" else inside] = tensor
        else:
            others.append(name)
    heads = {name: head_to_ours(head) for name, head in heads.items()}
    kind = "dinov2" if any(".ls1." in name for name in backbone) else "dino or timm"
    mask = None if mask is None else mask.reshape(1, -1)
    return Weights(kind, backbone, heads, notes=unused(others), mask_token=mask)


def head_to_ours(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """A head under our names, from our names or facebookresearch's, where an MLP of one layer has "mlp.weight". Without
    "prototypes.lengths" all prototypes have length 1: lengths that are all 1 are left out."""
    out = {re.sub(r"^mlp\.(weight|bias)$", r"mlp.0.\1", name): t for name, t in tensors.items() if name[:4] == "mlp."}
    for name, of_lengths in _PROTOTYPES.items():
        if name in tensors:
            return out | {"prototypes.weight": tensors[name]} | _lengths(tensors.get(of_lengths))
    if _PLAIN in tensors:
        rows = tensors[_PLAIN]
        return out | {"prototypes.weight": rows} | _lengths(rows.float().norm(dim=-1, keepdim=True))
    return out


def _lengths(lengths: Tensor | None) -> dict[str, Tensor]:
    return {} if lengths is None or torch.all(lengths == 1) else {"prototypes.lengths": lengths}


def from_dinov3(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Any], list[str]]:
    """dinov3's tensors under our names, with unknown names unchanged; further facts, as in a config.json; and notes.
    Raises CheckpointError for keys with a bias, and for periods that are not those of the released networks."""
    out, facts, notes = dict[str, Tensor](), dict[str, Any](), list[str]()
    if PERIODS in tensors and "cls_token" in tensors:  # from which the number of attention heads follows
        periods, width = tensors[PERIODS].float().flatten(), tensors["cls_token"].shape[-1]
        heads, rest = divmod(width, 4 * max(1, len(periods)))
        if rest or not heads:
            raise CheckpointError(f"{PERIODS} has {len(periods)} values, which no head of a width of {width} has")
        wanted = BASE ** (torch.arange(len(periods)) / len(periods))
        off = ((periods - wanted).abs() / wanted).max()
        if not off <= _ROUNDED:
            ends = f"{periods[0]:.4g} to {periods[-1]:.4g}, not {wanted[0]:.4g} to {wanted[-1]:.4g}"
            raise CheckpointError(f"{PERIODS} are {ends}: dino_ds reads files of base {BASE:g} only")
        if off > 1e-6:
            notes = [f"its periods of rotary positions are rounded, by up to {100 * off:.1g} %: ours are in FP32"]
        facts = {"num_attention_heads": heads}
    for name, tensor in tensors.items():
        if name == PERIODS or name.endswith(_MASK):
            continue
        if name.endswith(_BIAS):
            mask = tensors.get(name.replace(_BIAS, _MASK))
            q, k, v = (tensor if mask is None else tensor * mask).chunk(3)
            check_keys(name, k)
            attention = name.removesuffix(".qkv.bias")
            out |= {f"{attention}.q_bias": q.contiguous(), f"{attention}.v_bias": v.contiguous()}
            continue
        for old, new in _NAMES.items():
            name = name.replace(old, new)
        out[name] = tensor
    return out, facts, notes


def check_keys(name: str, bias: Tensor) -> None:
    """Raises CheckpointError for a bias of keys that is not zero."""
    if torch.count_nonzero(bias):
        raise CheckpointError(f"its keys have a bias ({name}), and those of dino_ds's ViT with rotary positions none")


def with_biases(backbone: Mapping[str, Tensor], wanted: bool) -> tuple[dict[str, Tensor], list[str]]:
    """The network with zeros added as biases of queries and values if `wanted`, else without if all are zero; notes."""
    names = [name for name in backbone if name.endswith((".attn.q_bias", ".attn.v_bias"))]
    if not has_rope(backbone) or bool(names) == wanted:
        return dict(backbone), []
    if wanted:
        rows = {name: len(t) // 3 for name, t in backbone.items() if name.endswith(".attn.qkv.weight")}
        zeros = {name.replace("qkv.weight", f"{x}_bias"): torch.zeros(n) for x in "qv" for name, n in rows.items()}
        return {**backbone, **zeros}, ["it has no biases of queries and values: ours start at zero"]
    if any(torch.count_nonzero(backbone[name]) for name in names):
        return dict(backbone), []
    kept = {name: tensor for name, tensor in backbone.items() if name not in names}
    return kept, ["its biases of queries and values, all zero, are left out"]


def split_local_norm(backbone: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """A backbone without the norm of local crops' CLS tokens, which is of use in training only; and that norm."""
    local = {name: tensor for name, tensor in backbone.items() if name.startswith(LOCAL_NORM)}
    return {name: tensor for name, tensor in backbone.items() if name not in local}, local


def from_huggingface(tensors: Mapping[str, Tensor]) -> Weights:
    """Hugging Face's tensors under our names, with unknown names unchanged, without pooler and classifier. Raises
    CheckpointError where a part is missing, and for keys with a bias, which our rotary ViTs lack."""
    tensors = {_HF_PREFIX.sub("", name): tensor for name, tensor in tensors.items()}
    dropped = [name for name in tensors if re.search(r"(^|\.)(pooler\.|classifier\.)", name)]
    inside = _HF_INSIDE | (_HF_ROTARY if any(name.endswith(".attention.q_proj.weight") for name in tensors) else {})
    inside |= _HF_GATED if any(".mlp.gate_proj." in name for name in tensors) else {}
    out: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if name in dropped or name == "embeddings.mask_token":
            continue
        match = _HF_BLOCK.fullmatch(name)
        if match is None:
            out[_renamed(name, _HF_OUTSIDE)] = tensor
            continue
        part = _HF_QUERIES.fullmatch(match[2])
        if part is None or match[2] in inside:
            out[f"blocks.{match[1]}.{_renamed(match[2], inside)}"] = tensor
        elif match[2] == "attention.k_proj.bias":
            check_keys(name, tensor)
        elif part[1] in ("query", "q_proj"):
            others = ("q_proj", "k_proj", "v_proj") if part[1] == "q_proj" else ("query", "key", "value")
            names = [name.replace(f".{part[1]}.", f".{other}.") for other in others]
            if missing := [other for other in names if other not in tensors]:
                raise CheckpointError(f"it lacks {missing[0]}")
            out[f"blocks.{match[1]}.attn.qkv.{part[2]}"] = torch.cat([tensors[other] for other in names])
    mask = tensors.get("embeddings.mask_token")
    mask = None if mask is None else mask.reshape(1, -1)
    return Weights("huggingface", out, notes=unused(dropped), mask_token=mask)


def _renamed(name: str, names: Mapping[str, str]) -> str:
    """`name` with its beginning replaced, if that is one of `names`."""
    old = next((old for old in names if name == old or name.startswith(f"{old}.")), None)
    return name if old is None else names[old] + name[len(old) :]
