"""The predictions at full size are torch's own counts. Fake tensors have shapes and no memory."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from dino_ds.config.ds_config import DsConfig, resolve_ds_config
from dino_ds.config.loading import load_recipe
from dino_ds.config.recipe import Recipe
from dino_ds.costs.activations import MicroBatch
from dino_ds.costs.flops import vit_of
from dino_ds.costs.memory import count_parameters, state_bytes
from dino_ds.costs.parameters import recipe_sizes
from dino_ds.engine.optim import parameter_groups
from dino_ds.models.head import DinoHead
from dino_ds.models.network import Network
from dino_ds.models.vit import VisionTransformer
from tests.reference import by_group, dino_network
from tests.sample import sampled

IMAGES = 4
RECIPES = ("vitl16", "vith14", "vitg14", "vit7b16")


def _recipe(name: str) -> Recipe:
    return load_recipe(name, {"model.drop_path": "0"})


def _config(recipe: Recipe, checkpointing: bool = False) -> DsConfig:
    ds = {"gradient_clipping": 3.0, "bf16": {"enabled": True}, "zero_optimization": {"stage": 2}}
    ds |= {"activation_checkpointing": {}} if checkpointing else {}
    return resolve_ds_config(ds, "test.json", IMAGES, 1, parameters=count_parameters(recipe))


def _network(recipe: Recipe) -> Network:
    arch, head = vit_of(recipe), recipe.head
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
    predicted = state_bytes(recipe_sizes(recipe), config, 1, on_gpu=True)
    assert {part: size for part, size in predicted.items() if size} == total


@pytest.mark.parametrize(("name", "checkpointing"), sampled(itertools.product(RECIPES, (False, True))))
@pytest.mark.slow
def test_activations_are_what_autograd_saves(name, checkpointing):
    """Within 1 %: on a CPU the norms keep their statistics in bf16, and small index tensors are kept. Logits that are
    asked for, without a comparison, keep the prototypes in FP32, which a loss does not."""
    recipe = _recipe(name)
    config = _config(recipe, checkpointing)
    network = _network(recipe).to(torch.bfloat16)
    crops, found = recipe.crops, {}
    with FakeTensorMode(allow_non_fake_inputs=True):
        network = network.to_empty(device="cpu")
        network.backbone.checkpoint_segments(None if checkpointing else 0)
        weights = {parameter.untyped_storage()._cdata for parameter in network.parameters()}

        def pack(tensor):
            storage = tensor.untyped_storage()
            if storage._cdata not in weights:
                found[storage._cdata] = storage  # kept, so that no address is used twice
            return tensor

        views = [torch.empty(IMAGES, 3, crops.global_size, crops.global_size) for _ in range(2)]
        views += [torch.empty(IMAGES, 3, crops.local_size, crops.local_size) for _ in range(crops.num_local)]
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            network(by_group(views))
        saved = sum(storage.nbytes() for storage in found.values())
    prototypes = 4 * recipe.head.prototypes * recipe.head.bottleneck
    assert MicroBatch(recipe, config).saved + prototypes == pytest.approx(saved, rel=0.01)
