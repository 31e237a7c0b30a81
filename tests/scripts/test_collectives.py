"""The predicted traffic is what real ranks send."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from dino_ds.models.specs.trained import TrainedPart
from dino_ds.models.trained import keep_trained
from scripts.collectives import Traffic, step_traffic
from tests.engine import harness
from tests.ranks import run_on_ranks

# torch's operator -> (ours, which of its arguments is the whole payload)
OPERATIONS = {
    "c10d::allgather_": ("all-gather", 0),
    "c10d::allgather_into_tensor_coalesced_": ("all-gather", 0),
    "c10d::allreduce_": ("all-reduce", 0),
    "c10d::_allgather_base_": ("all-gather", 0),
    "c10d::_reduce_scatter_base_": ("reduce-scatter", 1),
}


class _Collectives(TorchDispatchMode):
    """Counts payload bytes of every collective, whoever calls it."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d":
            name, place = OPERATIONS[func._schema.name]
            tensors, _ = tree_flatten(args[place])
            self.sent[name] += sum(tensor.nbytes for tensor in tensors)
            self.calls[name] += 1
        return func(*args, **(kwargs or {}))


def _sent_and_predicted(stage: int, precision: str, accumulation: int, sections: dict[str, Any], part: str = "all"):
    config, network = harness.ds_config(stage, precision, 8, accumulation, **sections), harness.tiny_network()
    keep_trained(network.backbone, TrainedPart(part))
    sizes = {name: p.numel() for name, p in network.named_parameters() if p.requires_grad}
    step = harness.build_step(config, network)
    harness.run_windows(step, 0, 2)  # ZeRO 3 learns the order of the parameters in the first
    with _Collectives() as counted:
        harness.run_windows(step, 2, 1)
    predicted: Counter[str] = Counter()
    for traffic in step_traffic(sizes, [harness.PROTOTYPES], config, torch.distributed.get_world_size()):
        predicted[traffic.operation] += traffic.payload
    return dict(counted.sent), dict(predicted)


_WHOLE = {"stage3_param_persistence_threshold": 0}


@pytest.mark.parametrize(
    ("stage", "precision", "accumulation", "sections", "part"),
    [
        (0, "fp32", 2, {}, "all"),
        (2, "bf16", 2, {}, "last 1 blocks"),
        (3, "bf16", 2, {"zero": _WHOLE}, "all"),
        *(
            pytest.param(*case, marks=pytest.mark.full)
            for case in (
                (1, "bf16", 2, {}, "all"),
                (2, "bf16", 1, {"communication_data_type": "fp32"}, "all"),
                (2, "bf16", 2, {"zero": {"overlap_comm": True}}, "all"),
                (3, "fp32", 1, {}, "all"),
                (3, "bf16", 1, {"zero": _WHOLE | {"offload_param": {"device": "cpu"}}}, "all"),
            )
        ),
    ],
)
def test_the_bytes_of_a_step_are_those_that_two_ranks_send(stage, precision, accumulation, sections, part):
    """To 16 bytes: the harness sums its loss, and offloading counts overflows apart from the norm. Frozen weights are
    not sent."""
    for sent, predicted in run_on_ranks(_sent_and_predicted, stage, precision, accumulation, sections, part):
        assert predicted.keys() == sent.keys()
        for operation, payload in predicted.items():
            assert sent[operation] == pytest.approx(payload, abs=16), operation


def test_a_ring_sends_an_all_reduce_twice():
    assert Traffic("", "all-reduce", 1000, 1, 4).sent == 1500
    assert Traffic("", "all-gather", 1000, 1, 4).sent == 750
