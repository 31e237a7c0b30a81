"""Slow, obvious forms of what the project computes fast, and the reader of the reference's recorded numbers."""

from __future__ import annotations

import json
import os
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
