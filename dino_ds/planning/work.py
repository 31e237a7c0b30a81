"""The work of a GPU in a rehearsed micro-batch: products, bytes moved beside them, operators."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from dino_ds.config.ds_values import DsConfig
from dino_ds.config.recipe import Recipe
from dino_ds.costs.memory import element_bytes
from dino_ds.costs.step_costs import StepCosts, mean_costs, student_facts

ASSUMPTIONS = {
    "bucket_launches_per_tensor": 2,  # DeepSpeed copies gradients into buckets and out of them
    "optimizer_launches_per_block": 5,  # in a step, at stages 1 to 3
    "compiled_share": 0.5,  # of the bytes that operators other than products move, in compiled blocks
    "slower_in_tf32": 2,  # products of FP32 numbers, in TF32 where the engine's precision is low
}


@dataclass(frozen=True)
class Amount:
    """flops: in the engine's precision, those of FP32 numbers counted as often as they are slower; bytes `moved`;
    `operators` launched."""

    flops: float
    moved: float
    operators: float

    def less(self, other: Amount) -> Amount:
        return Amount(*(max(0.0, a - b) for a, b in zip(vars(self).values(), vars(other).values(), strict=True)))


@dataclass(frozen=True)
class Work:
    """Work of a micro-batch: `all` but what activation checkpointing computes `again`; `backward`: the share of `all`
    that is the backward pass; `executed` FLOPs, as they are, and those of them that are computed `once`; `in_step`:
    operators of an optimizer step; `kept`: bytes of the inputs of recomputed segments, where they lie on the host."""

    all: Amount
    again: Amount
    backward: float
    executed: float
    once: float
    in_step: float
    kept: float

    @staticmethod
    def of(recipe: Recipe, config: DsConfig, world_size: int, exact: bool = True) -> Work:
        """The work on each of `world_size` GPUs; exact: as of `step_costs`. Raises NotEstimated."""
        done = mean_costs(recipe, config, True, exact)
        once = mean_costs(recipe, dataclasses.replace(config, checkpoint_blocks=0), True, exact)
        amounts = [_amount(costs, config) for costs in (done, once)]
        copied = config.copies_gradients(world_size) * len(student_facts(recipe).trained)
        buckets = copied * ASSUMPTIONS["bucket_launches_per_tensor"]
        segments = recipe.model.spec().depth
        return Work(
            dataclasses.replace(amounts[1], operators=amounts[1].operators + buckets),
            amounts[0].less(amounts[1]),
            once.parts["backward"].flops / once.sum("flops"),
            done.sum("flops"),
            once.sum("flops"),
            (config.stage > 0) * segments * ASSUMPTIONS["optimizer_launches_per_block"],
            done.on_host,
        )


def _amount(costs: StepCosts, config: DsConfig) -> Amount:
    slower = ASSUMPTIONS["slower_in_tf32"] - 1 if element_bytes(config) == 2 else 0
    compiled = ASSUMPTIONS["compiled_share"] if config.performance.compile != "off" else 1.0
    flops = costs.sum("flops") + slower * costs.sum("flops_fp32")
    return Amount(flops, compiled * costs.sum("moved"), costs.sum("operators"))
