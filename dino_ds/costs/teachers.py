"""What the teachers cost that do not follow the student: Gram anchoring's, and the frozen one of distillation.

Both keep their matrices in the engine's precision; a backbone of either is in memory on every rank unless the ds config
shards the distilled one.
"""

from __future__ import annotations

from collections.abc import Mapping

from dino_ds.config.crops import teacher_sizes
from dino_ds.config.ds_config import DsConfig
from dino_ds.config.recipe import Recipe
from dino_ds.costs.activations import element_bytes
from dino_ds.costs.flops import tokens_of
from dino_ds.costs.objective import HEAD, IBOT_HEAD, ObjectiveCosts, frozen_spec
from dino_ds.costs.parameters import copied_names, mlp_widths, parameter_sizes, vit_copied_names
from dino_ds.method.specs.distill import FROZEN
from dino_ds.method.specs.gram import GRAM
from dino_ds.models.specs.backbones import ViTSpec

_FP32 = 4


def frozen_sizes(recipe: Recipe) -> Mapping[str, int]:
    """Elements of the frozen teacher's parameters, heads with those sizes of the student's; {} where it is unknown."""
    spec = frozen_spec(recipe)
    if spec is None:
        return {}
    heads = ObjectiveCosts.of(recipe).heads if recipe.teacher.distill != "features" else {}
    return parameter_sizes(spec, recipe.crops.global_size, heads.get(HEAD), heads.get(IBOT_HEAD))


def teacher_bytes(recipe: Recipe, sizes: Mapping[str, int], config: DsConfig, world_size: int) -> dict[str, int]:
    """On each device, by part; sizes: elements of the student's parameters."""
    found = {}
    if has_gram_teacher(recipe):
        own = {name: n for name, n in sizes.items() if name.startswith("backbone.")}
        found["Gram teacher"] = _stored(own, copied_names(recipe), config)
    frozen = frozen_sizes(recipe)
    if frozen:
        backbone = {name: n for name, n in frozen.items() if name.startswith("backbone.")}
        heads = {name: n for name, n in frozen.items() if name not in backbone}
        copied, where = vit_copied_names(frozen), config.performance.frozen_teacher
        whole = _stored(backbone, copied, config)
        shares = {"whole": whole, "sharded": whole // world_size, "offloaded": 0}
        found["frozen teacher"] = shares[where] + _stored(heads, copied, config)
        if where != "whole":
            # The largest block that is in use, and the one that is fetched meanwhile.
            spec = frozen_spec(recipe)
            assert spec is not None
            found["gathered of the frozen teacher"] = min(whole, 2 * whole // max(1, spec.depth))
    return found


def host_bytes_of_frozen(recipe: Recipe, config: DsConfig, gpus: int, world_size: int) -> int:
    """In a node's host memory, where the ds config says that the frozen teacher lies there."""
    if config.performance.frozen_teacher != "offloaded":
        return 0
    sizes = {name: n for name, n in frozen_sizes(recipe).items() if name.startswith("backbone.")}
    return _stored(sizes, vit_copied_names(sizes), config) * gpus // world_size


def has_gram_teacher(recipe: Recipe) -> bool:
    """Whether Gram anchoring has a network of its own."""
    return bool(teacher_sizes(recipe.groups, GRAM))


def _stored(sizes: Mapping[str, int], copied: frozenset[str], config: DsConfig) -> int:
    low = element_bytes(config)
    return sum(n * (low if name in copied else _FP32) for name, n in sizes.items())


def pass_bytes(recipe: Recipe, config: DsConfig) -> int:
    """Of the fullest moment of such a teacher's forward pass over a micro-batch, which keeps nothing: in a block's MLP,
    the stream, both sides of the activation and the result."""
    most = 0
    for name, spec in ((GRAM, recipe.model.spec()), (FROZEN, frozen_spec(recipe))):
        if isinstance(spec, ViTSpec):
            tokens = sum(tokens_of(spec, side) for side in teacher_sizes(recipe.groups, name))
            packed, hidden = mlp_widths(spec)
            gate = hidden if spec.swiglu else 0  # the activated one, beside its product with the value
            most = max(most, tokens * (2 * spec.width + packed + hidden + gate))
    return most * element_bytes(config) * config.micro_batch
