"""LoRA adapters in a file of their own: taken out of a run, and added again to the weights they were trained on.

A file holds both matrices of each adapted layer, `LAYER.lora_a` and `LAYER.lora_b`, and the JSON next to it their
`alpha` and the SHA-256 of the weights of these layers, so that they can't be added to other weights.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError
from torch import Tensor

from dino_ds.checkpoint.manifest import WHOLE
from dino_ds.checkpoint.opening import open_checkpoint
from dino_ds.config.model import ModelSection
from dino_ds.errors import CheckpointError
from dino_ds.models.trained import A, B, adapters_in, merged
from dino_ds.weights.find import checkpoint_of, is_checkpoint, unmerged_parts
from dino_ds.weights.frozen import digest
from dino_ds.weights.read import read_file
from dino_ds.weights.sidecar import recipe_of
from dino_ds.weights.tensors import check_numbers, few

ALPHA, BASE = "lora_alpha", "base_sha256"


@dataclass(frozen=True)
class Adapters:
    """Matrices by name, whose products are scaled by `alpha` / rank, and the digest of the weights they belong to."""

    tensors: dict[str, Tensor]
    alpha: float
    base: str

    @property
    def facts(self) -> dict[str, Any]:
        """The content of the JSON next to their file."""
        return {ALPHA: self.alpha, BASE: self.base}


def find_adapters(source: str) -> Adapters:
    """The adapters of a run or a checkpoint at `source`. Raises CheckpointError where there are none."""
    path = Path(os.path.expanduser(source))
    folder = path if is_checkpoint(path) else checkpoint_of(path)
    if folder is None:
        raise CheckpointError(
            f"{source}: adapters lie in checkpoints: give a run that still has that of its teacher, or RUN/checkpoints/"
            "step_N; take another --format for weights without any"
        )
    saved = open_checkpoint(folder, WHOLE)
    backbone, model = unmerged_parts(saved)["backbone"], recipe_of(saved.manifest).model
    tensors = adapters_in(backbone)
    if not tensors:
        raise CheckpointError(
            f"{source} has no adapters: it was trained with model.train {model.train}, and lora makes some; take "
            "another --format"
        )
    return Adapters(tensors, model.lora_alpha, digest(_adapted(backbone, tensors)))


def put_on(backbone: Mapping[str, Tensor], file: str, name: str) -> dict[str, Tensor]:
    """The weights `backbone`, which were loaded from `name`, with the adapters of a file added to them.

    Raises CheckpointError.
    """
    path = Path(os.path.expanduser(file))
    tensors, facts = read_file(path)
    base = facts.get(BASE)
    if not isinstance(base, str) or ALPHA not in facts or adapters_in(tensors).keys() != tensors.keys():
        raise CheckpointError(
            f"{path} is not a file of adapters with the JSON next to it, as dino-ds export --format adapters writes"
        )
    alpha = _checked_alpha(path, facts[ALPHA])
    check_numbers(path, tensors)
    strange = [key for key in tensors if not _fits(key, tensors, backbone)]
    if strange:
        raise CheckpointError(f"{path}: {name} has no layers that these adapters fit: {few(sorted(strange))}")
    if digest(_adapted(backbone, tensors)) != base:
        raise CheckpointError(
            f"{path}: these adapters were trained on other weights than those of {name}: give the weights that their "
            "run began with (model.init_from)"
        )
    adapted = merged({**backbone, **tensors}, alpha)
    check_numbers(path, {name: adapted[name] for name in _adapted(backbone, tensors)})
    return adapted


def _checked_alpha(path: Path, alpha: object) -> float:
    """`alpha` of a file of adapters, checked as a value of model.lora_alpha. Raises CheckpointError."""
    try:
        checked: float = TypeAdapter(ModelSection.model_fields[ALPHA].rebuild_annotation()).validate_python(alpha)
    except ValidationError as error:
        wrong = f"the JSON beside it has {ALPHA} {str(alpha)[:20]} ({error.errors()[0]['msg']})"
        raise CheckpointError(f"{path}: {wrong}: bring it back") from None
    return checked


def _fits(name: str, tensors: Mapping[str, Tensor], backbone: Mapping[str, Tensor]) -> bool:
    """Whether the two matrices of a layer are there and their product has the shape of its weight."""
    layer = name.rpartition(".")[0]
    a, b, weight = tensors.get(f"{layer}.{A}"), tensors.get(f"{layer}.{B}"), backbone.get(f"{layer}.weight")
    if a is None or b is None or weight is None or a.ndim != 2 or b.ndim != 2:
        return False
    return a.shape[0] == b.shape[1] and (b.shape[0], a.shape[1]) == tuple(weight.shape)


def _adapted(backbone: Mapping[str, Tensor], adapters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weights of the layers that have adapters."""
    names = {f"{name.rpartition('.')[0]}.weight" for name in adapters}
    return {name: backbone[name] for name in names}
