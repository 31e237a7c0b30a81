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
from dino_ds.planning.measure.trial import build_trial, resolve
from scripts.collectives import Traffic, recipe_traffic, step_traffic
from tests.engine import harness
from tests.planning.measure.tiny import tiny_ds, tiny_recipe
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
        (1, "fp32", 2, {}, "all"),
        (1, "bf16", 2, {}, "all"),
        (2, "bf16", 1, {"communication_data_type": "fp32"}, "all"),
        (2, "bf16", 2, {"zero": {"overlap_comm": True}}, "all"),
        (2, "bf16", 2, {"zero": {"offload_optimizer": {"device": "cpu"}}}, "all"),
        (0, "fp32", 1, {}, "norms_and_biases"),
        (2, "bf16", 2, {}, "last 1 blocks"),
        (3, "fp32", 1, {}, "all"),
        (3, "bf16", 2, {"zero": _WHOLE}, "all"),
        (3, "bf16", 1, {"zero": {"stage3_param_persistence_threshold": 1000}}, "all"),
        (3, "bf16", 1, {"zero": _WHOLE | {"offload_param": {"device": "cpu"}}}, "all"),
    ],
)
def test_the_bytes_of_a_step_are_those_that_two_ranks_send(stage, precision, accumulation, sections, part):
    """To 16 bytes: the harness sums its loss, and offloading counts overflows apart from the norm. Frozen weights are
    not sent."""
    for sent, predicted in run_on_ranks(_sent_and_predicted, stage, precision, accumulation, sections, part):
        assert predicted.keys() == sent.keys()
        for operation, payload in predicted.items():
            assert sent[operation] == pytest.approx(payload, abs=16), operation


@pytest.mark.parametrize(("reuse", "recompute"), [(60000, {}), (30000, {"activation_checkpointing": {}})])
def test_weights_that_are_not_kept_are_gathered_twice(reuse, recompute):
    """Within 10 % of the weights: where it begins to keep them depends on the order of the modules."""
    ahead = {"stage3_prefetch_bucket_size": 5000, "stage3_max_live_parameters": 10000}
    sections = {"zero": _WHOLE | ahead | {"stage3_max_reuse_distance": reuse}, **recompute}
    for sent, predicted in run_on_ranks(_sent_and_predicted, 3, "bf16", 1, sections):
        weights = predicted["reduce-scatter"]
        assert predicted["all-gather"] > 3.1 * weights  # once, and 4 bytes for the teacher
        assert sent["all-gather"] == pytest.approx(predicted["all-gather"], abs=0.1 * weights)


def _step_with_rates_by_layer(sections: dict[str, Any]):
    """Collectives of a step and of one more move of the teacher, the optimizer's parameter groups, whether the teacher
    equals the masters, and all weights."""
    import deepspeed

    changes = {"optimizer.layer_decay": "0.9", "model.depth": "6"}
    trial = build_trial(*resolve(tiny_recipe(**changes), tiny_ds(**sections), "test.json", 4))
    trial.run()
    with _Collectives() as of_step:
        trial.run()
    ema, masters = trial.step.teachers["ema"], trial.step.engine.masters()
    weights = {name: p.detach().clone() for name, p in trial.step.engine._engine.module.named_parameters()}
    weights |= {f"teacher.{name}": tensor.clone() for name, tensor in ema.state().items()}
    with _Collectives() as of_teacher:
        ema.move(momentum=0.0)
    (rank, ranks), equal = (torch.distributed.get_rank(), torch.distributed.get_world_size()), True
    for own in masters:
        pieces = {offset: ema.state()[name].flatten() for name, offset in own.layout}
        whole = torch.zeros(own.numel)
        for offset, piece in pieces.items():
            whole[offset : offset + len(piece)] = piece
        equal &= torch.equal(whole.chunk(ranks)[rank], own.shard())
    deepspeed.comm.configure(enabled=False)  # its logger stays for all engines of a process, and waits for each call
    return of_step.calls, of_teacher.calls, len(masters), equal, weights


BF16 = {"bf16": {"enabled": True}}
FP32_SUMS = {"data_types": {"grad_accum_dtype": "fp32"}}  # DeepSpeed's BF16_Optimizer
LOGGED = {"comms_logger": {"enabled": True, "verbose": False, "prof_all": True, "debug": False}}


@pytest.mark.parametrize("sections", [{"stage": 1, **BF16, **FP32_SUMS}, {"stage": 2, **BF16}])
def test_weights_and_teacher_are_gathered_at_once_however_many_parameter_groups_there_are(sections):
    """Learning rates by layer make a dozen of these six blocks. DeepSpeed's own gathers, one a group, which stay where
    its logger counts collectives, give the same weights to the bit."""
    ours, theirs = (run_on_ranks(_step_with_rates_by_layer, sections | logged) for logged in ({}, LOGGED))
    for mine, other in zip(ours, theirs, strict=True):
        calls, of_teacher, groups, equal, weights = mine
        assert (calls["all-gather"], of_teacher) == (2, {"all-gather": 1}) and groups >= 12 and equal
        assert other[0]["all-gather"] == groups + 1
        assert all(torch.equal(tensor, other[-1][name]) for name, tensor in weights.items())


def _of_a_recipe(changes: dict[str, str], stage: int) -> tuple[Counter[str], Counter[str], list[Traffic]]:
    ranks = torch.distributed.get_world_size()
    ds = tiny_ds(stage, gradient_accumulation_steps=2)
    recipe, config = resolve(tiny_recipe(**changes), ds, "test.json", 4)
    trial = build_trial(recipe, config)
    with _Collectives() as counted:
        trial.run()
    return counted.sent, counted.calls, recipe_traffic(recipe, config, ranks, on_gpu=False)


IBOT = {"crops.mask": "dinov3", "objective.ibot_weight": "1", "ibot_head.prototypes": "48"}
SINKHORN = {"objective.centering": "sinkhorn"}
KOLEO = {"objective.koleo_weight": "0.1", "objective.koleo_ranks": "all"}


@pytest.mark.parametrize("changes", [IBOT, IBOT | SINKHORN | KOLEO, SINKHORN], ids=["softmax", "all", "sinkhorn"])
def test_the_terms_send_what_is_predicted(changes):
    """To a byte, and in as many calls; without ZeRO, where DeepSpeed's own part is one all-reduce of the gradients."""
    for sent, calls, traffic in run_on_ranks(_of_a_recipe, changes, 0):
        for operation in ("all-reduce", "all-gather"):
            own = [one for one in traffic if one.operation == operation]
            assert sent[operation] == sum(one.payload for one in own)
            assert calls[operation] == sum(one.calls for one in own)
    names = {one.name for one in traffic}
    assert ("sums for targets" in names) == ("objective.centering" in changes)
    assert ("votes" in names) == ("objective.centering" in changes)  # no center


@pytest.mark.parametrize("stage", [1, 2])
def test_clipping_by_part_is_one_collective(stage):
    """To 16 bytes, as above."""
    for sent, _, traffic in run_on_ranks(_of_a_recipe, IBOT | {"optimizer.clip_by": "part"}, stage):
        assert next(one.payload for one in traffic if one.name == "gradient norm") == 8 * 3
        for operation in ("all-reduce", "all-gather"):
            predicted = sum(one.payload for one in traffic if one.operation == operation)
            assert sent[operation] == pytest.approx(predicted, abs=16)


def test_a_ring_sends_an_all_reduce_twice():
    assert Traffic("", "all-reduce", 1000, 1, 4).sent == 1500
    assert Traffic("", "all-gather", 1000, 1, 4).sent == 750
