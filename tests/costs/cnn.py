"""Narrow networks of timm's for tests of what they cost."""

from __future__ import annotations

from dino_ds.config.loading import load_recipe
from dino_ds.config.recipe import Recipe
from tests.planning.measure.tiny import TINY

RESNET = {"model.backbone": "resnet18", "model.arguments": '{"channels": [16, 24, 32, 48]}'}
CONVNEXT = {"model.backbone": "convnext_atto", "model.arguments": '{"depths": [1, 1, 2, 1], "dims": [16, 32, 48, 64]}'}
SWIN = {
    "model.backbone": "swin_tiny_patch4_window7_224",
    "model.arguments": '{"depths": [1, 1, 1, 1], "embed_dim": 24}',
}
NETWORKS = {"resnet": RESNET, "convnext": CONVNEXT}


def cnn_recipe(network: dict[str, str], **changes: str) -> Recipe:
    """With the crops and the head of the tiny recipe, made larger."""
    base = {key: value for key, value in TINY.items() if not key.startswith("model.")}
    crops = {"crops.global_size": "64", "crops.local_size": "32", "model.drop_path": "0"}
    more = {key.replace("__", "."): value for key, value in changes.items()}
    return load_recipe("vitti16", base | crops | network | more)
