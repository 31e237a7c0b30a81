"""Slow, obvious forms of what the project computes fast, and the reader of the reference's recorded numbers."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

from dino_ds.architectures import Architecture
from dino_ds.models.head import DinoHead
from dino_ds.models.network import DinoNetwork
from dino_ds.models.vit import VisionTransformer


def golden_folder() -> Path:
    return Path(os.environ.get("DINO_DS_GOLDEN") or Path(__file__).parent / "golden")


def golden_meta() -> dict[str, Any]:
    return json.loads((golden_folder() / "meta.json").read_text())


def golden(name: str) -> dict[str, Tensor]:
    return load_file(golden_folder() / f"{name}.safetensors")


def dino_loss_by_pairs(student: Tensor, teacher_probs: Tensor, temperature: float) -> Tensor:
    """The double loop of the paper's algorithm 1: student (v, b, k) logits, teacher (2, b, k) probabilities."""
    total, pairs = torch.zeros((), dtype=student.dtype), 0
    for t in range(2):
        for s in range(len(student)):
            if s != t:
                total = total - (teacher_probs[t] * F.log_softmax(student[s] / temperature, dim=-1)).sum(-1).mean()
                pairs += 1
    return total / pairs


def golden_network(meta: dict[str, Any], state: dict[str, Tensor], prefix: str, **kwargs: Any) -> DinoNetwork:
    """Our network with the reference's weights (keys under `prefix`)."""
    vit, head = meta["vit"], meta["head"]
    arch = Architecture(vit["patch_size"], vit["embed_dim"], vit["depth"], vit["num_heads"], vit["mlp_ratio"])
    network = DinoNetwork(
        VisionTransformer(arch, vit["img_size"], **kwargs),
        DinoHead(arch.width, head["hidden_dim"], head["bottleneck_dim"], head["out_dim"], head["n_layers"]),
    )
    network.load_state_dict(from_reference_names(state, prefix))
    return network


def from_reference_names(state: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """facebookresearch/dino's names -> ours."""
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
