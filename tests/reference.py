"""Slow, obvious forms of what the project computes fast, and the reader of the numbers recorded from facebookresearch's
dino, dinov2 and dinov3, with their names as ours."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from dino_ds.config.crops import CropGroup, Resolution
from dino_ds.method.dino import DinoTerm, RunningCenter
from dino_ds.method.specs.ours import DINO, GRAM, HEAD, GramTeacherSpec
from dino_ds.models.base import CLS, Backbone
from dino_ds.models.network import Network, Query
from dino_ds.models.prototypes import Compared, Comparison, DinoHead, Logits, _TiledCrossEntropy
from dino_ds.models.specs.backbones import ViTSpec
from dino_ds.models.specs.base import BackboneOptions
from dino_ds.models.vit import VisionTransformer

_NAMES = (
    (r"(^|\.)dino_head\.", r"\1head."),
    (r"last_layer\.weight_v$", "prototypes.weight"),
    (r"last_layer\.weight_g$", "prototypes.lengths"),
    (r"last_layer\.weight$", "prototypes.weight"),
    (r"(^|\.)blocks\.\d+\.(\d+)\.", r"\1blocks.\2."),  # in chunks: blocks.CHUNK.BLOCK
    (r"\.mlp\.w12\.", ".mlp.fc1."),
    (r"\.mlp\.w3\.", ".mlp.fc2."),
    (r"(^|\.)register_tokens$", r"\1reg_token"),
)
_DINOV3_NAMES = (
    (r"\.ls([12])\.gamma$", r".gamma_\1"),
    (r"\.mlp\.w1\.", ".mlp.fc1_g."),
    (r"\.mlp\.w2\.", ".mlp.fc1_x."),
    (r"(^|\.)storage_tokens$", r"\1reg_token"),
)


def golden_folder() -> Path:
    return Path(os.environ.get("DINO_DS_GOLDEN") or Path(__file__).parent / "golden")


def golden_meta() -> dict[str, Any]:
    return json.loads((golden_folder() / "meta.json").read_text())


def golden(name: str) -> dict[str, Tensor]:
    return load_file(golden_folder() / f"{name}.safetensors")


def loss_of_term(term: DinoTerm, student: Tensor, teacher: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Student logits (v * b, k) and teacher logits (2 * b, k) -> the term's loss and the entropy of its targets."""
    schedule: Any = SimpleNamespace(teacher_temp=temperature)
    (targets,) = term.targets([{"ema": {DINO: as_logits(teacher)}}], [{}], schedule)
    loss, scalars = term.loss({DINO: compare(student, targets)}, targets, schedule)
    return loss, scalars["teacher_entropy"]


def as_logits(values: Tensor) -> Logits:
    """Logits (n, k) as a head with the axes as prototypes would give them."""
    k = values.shape[1]
    return Logits(values, torch.eye(k), torch.ones(k))


def product(logits: Logits) -> Tensor:
    """The logits (n, k) multiplied out, with their gradient."""
    return logits.rows @ logits.weight.t() * logits.scale


def compare(student: Tensor, comparison: Comparison) -> Compared:
    """The comparison that a head with the axes as prototypes makes of the student's logits (v * n, k)."""
    axes = torch.eye(student.shape[1])
    found = _TiledCrossEntropy.apply(student, axes, None, (comparison, False, False, False))
    return Compared(*found, comparison.share(len(student)))


def centered(prototypes: int, student_temp: float, center_momentum: float, teacher_crops: int = 2) -> DinoTerm:
    """DINO's term of 2021, its running mean called "center"."""
    center = RunningCenter("center", prototypes, center_momentum)
    return DinoTerm(prototypes, student_temp, center, teacher_crops)


def by_group(crops: list[Tensor]) -> dict[str, list[Tensor]]:
    """Sort a list of crops into DINO's groups: the first two are the global ones."""
    return {"global": crops[:2], "local": crops[2:]} if len(crops) > 2 else {"global": crops}


def dino_network(backbone: Backbone, head: DinoHead) -> Network:
    """A network with DINO's head alone."""
    return Network(backbone, {HEAD: head}, {DINO: Query(HEAD, CLS)})


def copied(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A copy of a state whose tensors change in place."""
    return {name: tensor.detach().cpu().clone() for name, tensor in state.items()}


def golden_network(meta: dict[str, Any], state: dict[str, Tensor], prefix: str, **options: Any) -> Network:
    """Our network with the reference's weights (keys under `prefix`)."""
    vit, head = meta["vit"], meta["head"]
    arch = ViTSpec(vit["patch_size"], vit["embed_dim"], vit["depth"], vit["num_heads"], vit["mlp_ratio"])
    network = dino_network(
        VisionTransformer(arch, vit["img_size"], BackboneOptions(**options)),
        DinoHead(arch.width, head["hidden_dim"], head["bottleneck_dim"], head["out_dim"], head["n_layers"]),
    )
    network.load_state_dict(from_reference_names(state, prefix))
    return network


def from_reference_names(state: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    ours = {}
    for name, tensor in state.items():
        if not name.startswith(prefix):
            continue
        name = name.removeprefix(prefix)
        if name.endswith("last_layer.weight_g"):
            assert torch.all(tensor == 1)
            continue
        ours[name.replace("head.last_layer.weight_v", "head.prototypes.weight")] = tensor
    return ours


def gram_crops(like: CropGroup, size: int) -> CropGroup:
    """The crops of a Gram teacher: those of `like` in another size, without colors."""
    found = GramTeacherSpec(GRAM).own_group(like, Resolution(like.size, like.size, size))
    assert found is not None
    return found


def golden_v2_folder() -> Path:
    return Path(os.environ.get("DINO_DS_GOLDEN_V2") or Path(__file__).parent / "golden_v2")


def golden_v2_meta() -> dict[str, Any]:
    return json.loads((golden_v2_folder() / "meta.json").read_text())


def golden_v2(name: str) -> dict[str, Tensor]:
    """The arrays of one file, ready for use: FP16 as FP32, int8 images as what they stand for."""
    return {key: _value(tensor) for key, tensor in load_file(golden_v2_folder() / f"{name}.safetensors").items()}


def _value(stored: Tensor) -> Tensor:
    if stored.dtype == torch.int8:
        return stored.float() / 32
    return stored.float() if stored.dtype == torch.float16 else stored


def our_name(theirs: str, dinov3: bool = False) -> str:
    """A parameter's name in the reference -> ours: timm's in the backbone; its "dino_head" is "head" here. dinov3: of a
    network with rotary positions, whose names are those of timm's Eva."""
    for pattern, ours in (*_NAMES, *(_DINOV3_NAMES if dinov3 else ())):
        theirs = re.sub(pattern, ours, theirs)
    return theirs


def from_reference_v2(
    tensors: Mapping[str, Tensor], prefix: str = "", learned_lengths: bool = False, dinov3: bool = False
) -> dict[str, Tensor]:
    """The tensors below `prefix` under our names; prototypes' lengths are all 1 and left out unless learned. With
    registers the place of the CLS token is added to it: our position embedding covers the patches alone then. dinov3:
    of its networks, whose bias of queries, keys and values is cut in three; "attn.k_bias" is left out where its mask
    makes it zero."""
    ours = {our_name(name.removeprefix(prefix), dinov3): t for name, t in tensors.items() if name.startswith(prefix)}
    for name in [name for name in ours if name.endswith("prototypes.lengths") and not learned_lengths]:
        assert torch.all(ours.pop(name) == 1)
    if dinov3:
        return _in_three(ours)
    for name in [name for name in ours if name.endswith("reg_token")]:
        positions, cls = (name.replace("reg_token", other) for other in ("pos_embed", "cls_token"))
        ours[cls] = ours[cls] + ours[positions][:, :1]
        ours[positions] = ours[positions][:, 1:]
    return ours


def _in_three(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Split `attn.qkv.bias` into q_bias, k_bias and v_bias, masked as `bias_mask` says, and drop rotary periods."""
    found = {}
    for name, tensor in tensors.items():
        if name.endswith("attn.qkv.bias"):
            mask = tensors.get(f"{name}_mask")
            parts = dict(zip("qkv", tensor.chunk(3), strict=True))
            if mask is not None:
                q, k, v = mask.chunk(3)
                assert torch.all(q == 1) and torch.all(v == 1) and torch.all(k == 0)
                del parts["k"]
            found |= {name.replace("qkv.bias", f"{part}_bias"): bias for part, bias in parts.items()}
        elif not name.endswith(("bias_mask", "rope_embed.periods")):
            found[name] = tensor
    return found
