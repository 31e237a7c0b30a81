"""Our head against the numbers recorded from the DINOHeads of facebookresearch/dinov2 and dinov3."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dino_ds.models.head import DinoHead
from dino_ds.weights.layouts import head_to_ours
from tests.reference import product
from tests.reference_v2 import golden_v2, golden_v2_meta

pytestmark = pytest.mark.numerical

# FP32 sums of other kernels in another order; logits are of the size of 1, the gradients of 0.1 to 1.
CLOSE = {"rtol": 1e-5, "atol": 1e-6}


def _recorded(kind: str) -> tuple[dict[str, Tensor], DinoHead]:
    """Recorded numbers of the head of `kind`, and our head with its weights, after backward of sum(logits^2)."""
    numbers = {name.removeprefix(f"{kind}."): t for name, t in golden_v2("heads").items() if name.startswith(kind)}
    weights = {name.removeprefix("weights."): t for name, t in numbers.items() if name.startswith("weights.")}
    sizes = golden_v2_meta()["head"]
    head = DinoHead(
        sizes["in_dim"], sizes["hidden_dim"], sizes["bottleneck_dim"], sizes["out_dim"], sizes["nlayers"], True
    )
    head.load_state_dict(head_to_ours(weights))
    product(head(numbers["input"])).square().sum().backward()
    return numbers, head


@pytest.mark.parametrize("kind", ["dinov2", "dinov3"])
def test_logits_are_the_reference_s(kind):
    numbers, head = _recorded(kind)
    torch.testing.assert_close(product(head(numbers["input"])).detach(), numbers["output"], **CLOSE)


def test_the_gradient_of_weight_normed_prototypes_is_the_reference_s():
    numbers, head = _recorded("dinov2")
    torch.testing.assert_close(head.prototypes.weight.grad, numbers["grad.last_layer"], **CLOSE)


def test_free_prototypes_are_dinov3_s():
    """Logits, and the gradient of the last layer; it begins as a normal distribution of width 0.02."""
    numbers = {name.removeprefix("dinov3."): t for name, t in golden_v2("heads").items() if name.startswith("dinov3.")}
    sizes = golden_v2_meta()["head"]
    head = DinoHead(sizes["in_dim"], sizes["hidden_dim"], sizes["bottleneck_dim"], sizes["out_dim"], sizes["nlayers"])
    head = head.free_prototypes()
    assert head.prototypes.weight.std().item() == pytest.approx(0.02, rel=0.05)
    weights = head_to_ours(
        {name.removeprefix("weights."): t for name, t in numbers.items() if name.startswith("weights.")}
    )
    weights["prototypes.weight"] = numbers["weights.last_layer.weight"]
    del weights["prototypes.lengths"]
    head.load_state_dict(weights)
    logits = product(head(numbers["input"]))
    logits.square().sum().backward()
    torch.testing.assert_close(logits.detach(), numbers["output"], **CLOSE)
    torch.testing.assert_close(head.prototypes.weight.grad, numbers["grad.last_layer"], **CLOSE)
