"""A step small enough for tests, made from a recipe as the commands get it."""

from __future__ import annotations

from typing import Any

from dino_ds.config.loading import load_recipe
from dino_ds.config.recipe import Recipe

TINY = {
    "crops.global_size": "32", "crops.local_size": "16", "crops.num_local": "2", "model.patch_size": "8",
    "model.width": "32", "model.heads": "2", "model.depth": "3", "head.prototypes": "64", "head.hidden": "48",
    "head.bottleneck": "16",
}  # fmt: skip
DS: dict[str, Any] = {"gradient_clipping": 3.0, "zero_optimization": {"stage": 0}}


def tiny_recipe(**changes: str) -> Recipe:
    return load_recipe("vitti16", TINY | {key.replace("__", "."): value for key, value in changes.items()})


def tiny_ds(stage: int, **sections: Any) -> dict[str, Any]:
    return DS | {"zero_optimization": {"stage": stage}} | sections


RESNET = {"model.backbone": "resnet18", "model.arguments": '{"channels": [16, 24, 32, 48]}'}
CONVNEXT = {"model.backbone": "convnext_atto", "model.arguments": '{"depths": [1, 1, 2, 1], "dims": [16, 32, 48, 64]}'}


def cnn_recipe(network: dict[str, str], **changes: str) -> Recipe:
    """A narrow network of timm's with the crops, made larger, and the head of the tiny recipe."""
    base = {key: value for key, value in TINY.items() if not key.startswith("model.")}
    crops = {"crops.global_size": "64", "crops.local_size": "32", "model.drop_path": "0"}
    more = {key.replace("__", "."): value for key, value in changes.items()}
    return load_recipe("vitti16", base | crops | network | more)
