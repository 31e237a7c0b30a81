"""The predictions at full size are torch's own counts. Fake tensors have shapes and no memory."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from dino_ds.config.ds_config import resolve_ds_config
from dino_ds.config.ds_values import DsConfig
from dino_ds.config.loading import load_recipe
from dino_ds.config.recipe import Recipe
from dino_ds.costs.memory import state_bytes
from dino_ds.costs.step_costs import count_parameters, student_facts
from dino_ds.engine.optim import parameter_groups
from dino_ds.models.head import DinoHead
from dino_ds.models.network import Network
from dino_ds.models.vit import VisionTransformer
from tests.reference import dino_network

IMAGES = 4
RECIPES = ("vitl16", "vith14", "vitg14", "vit7b16")


def _recipe(name: str) -> Recipe:
    return load_recipe(name, {"model.drop_path": "0"})


def _config(recipe: Recipe, checkpointing: bool = False) -> DsConfig:
    ds = {"gradient_clipping": 3.0, "bf16": {"enabled": True}, "zero_optimization": {"stage": 2}}
    ds |= {"activation_checkpointing": {}} if checkpointing else {}
    return resolve_ds_config(ds, "test.json", IMAGES, 1, parameters=count_parameters(recipe))


def _network(recipe: Recipe) -> Network:
    arch, head = recipe.model.spec(), recipe.head
    with torch.device("meta"):
        backbone = VisionTransformer(arch, recipe.crops.global_size)
        return dino_network(backbone, DinoHead(arch.width, head.hidden, head.bottleneck, head.prototypes, head.layers))


@pytest.mark.parametrize("name", ["vith14", "vit7b16"])
@pytest.mark.slow
def test_state_is_exact(name):
    """Weights in bf16, FP32 masters, what AdamW makes of them in a step, the FP32 teacher."""
    recipe = _recipe(name)
    network = _network(recipe)
    config = _config(recipe)
    with FakeTensorMode(allow_non_fake_inputs=True):
        masters = network.to_empty(device="cpu")
        optimizer = torch.optim.AdamW(parameter_groups(masters), foreach=False)
        for parameter in masters.parameters():
            parameter.grad = torch.empty_like(parameter)
        optimizer.step()
        moments = [t for state in optimizer.state.values() for name, t in state.items() if name != "step"]
        weights = [p.to(torch.bfloat16) for p in masters.parameters()]
        total = {
            "student": sum(t.nbytes for t in weights),
            "masters and moments": sum(t.nbytes for t in (*masters.parameters(), *moments)),
            "teacher": sum(p.nbytes for p in masters.parameters()),
        }
    predicted = state_bytes(student_facts(recipe).sizes, config, 1, on_gpu=True)
    assert {part: size for part, size in predicted.items() if size} == total
