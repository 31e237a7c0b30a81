"""The bytes that ranks send each other in one optimizer step, by arithmetic, as DeepSpeed 0.19 and our teacher do it.

`python -m scripts.collectives --config C --ds_config FILE --ranks N`. Tested against every collective that two real
ranks call. What surprises: at stages 1 and 2 DeepSpeed all-reduces the gradients
(`use_multi_rank_bucket_allreduce`), at stage 2 after each micro-batch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import fire

from dino_ds.config.ds_config import load_ds_config, resolve_ds_config
from dino_ds.config.ds_values import DsConfig, offloads_optimizer
from dino_ds.config.loading import load_recipe
from dino_ds.config.recipe import Recipe
from dino_ds.costs.memory import element_bytes, persistent_below
from dino_ds.costs.step_costs import count_parameters, student_facts
from dino_ds.method.specs.of_recipe import teachers_of
from dino_ds.planning.measure.tables import markdown_table
from scripts.counting import StepCounts, count_step

_FP32, _FP64 = 4, 8
# DeepSpeed's defaults, elements.
_BUCKET = 500_000_000
_MAX_REUSE = 1_000_000_000
_PREFETCH = 50_000_000
# As in teacher.py.
_TEACHER_CHUNK = 128 * 2**20
# As in engine/optim.py, for DINO's recipe, and method/step.py.
_GROUPS = 3
_VOTES = 3


@dataclass(frozen=True)
class Traffic:
    """One kind of collective. `payload`: bytes of what is all-reduced, of a gathered result or of what is scattered,
    summed over its `calls` in a step; `ranks` take part in each."""

    name: str
    operation: str
    payload: int
    calls: int
    ranks: int

    @property
    def sent(self) -> int:
        """Bytes that leave each rank, in rings: what its link must carry."""
        passes = 2 if self.operation == "all-reduce" else 1
        return passes * self.payload * (self.ranks - 1) // self.ranks


def main(config: str, ds_config: str, ranks: int) -> None:
    """Print a table of the collectives of a step."""
    recipe = load_recipe(config, {})
    ds, batch = load_ds_config(ds_config, {}), recipe.data.global_batch
    resolved = resolve_ds_config(ds, ds_config, batch, ranks, parameters=count_parameters(recipe))
    rows = [
        (one.name, one.operation, f"{one.payload / 2**20:.1f}", f"{one.sent / 2**20:.1f}", str(one.calls))
        for one in recipe_traffic(recipe, resolved, ranks)
    ]
    header = ("collectives of a step", "", "payload MiB", "sent by a rank, MiB", "calls")
    print(markdown_table(header, rows))


def recipe_traffic(recipe: Recipe, config: DsConfig, world_size: int, on_gpu: bool = True) -> list[Traffic]:
    """The collectives of each rank in one optimizer step of a recipe; none on one rank."""
    if world_size == 1:
        return []
    facts, costs = student_facts(recipe), count_step(recipe, config, recipe.groups, on_gpu)
    heads = {name.partition(".")[0] for name in facts.sizes}
    parts = len(heads) if recipe.optimizer.clip_by == "part" else 1
    of_engine = step_traffic(facts.trained, facts.statistics, config, world_size, len(facts.groups), parts)
    if config.stage == 3 and facts.frozen:  # which are gathered as all weights are
        whole = _gathers(facts.sizes, config, config.raw["zero_optimization"], world_size)
        of_engine = [one for one in of_engine if one.name not in _IN_PASSES]
        of_engine += [one for one in whole if one.name in _IN_PASSES]
    others = [one.name for one in teachers_of(recipe) if one.follows][1:]
    averages = [one for one in of_engine if one.name == "teacher"]
    return [
        *of_engine,
        *(dataclasses.replace(one, name=f"teacher {name}") for name in others for one in averages),
        *_of_terms(costs, facts.whole_step, config, world_size),
    ]


_IN_PASSES = "weights, forward", "weights, backward"


def _of_terms(costs: StepCounts, whole_step: bool, config: DsConfig, world_size: int) -> list[Traffic]:
    """The collectives of the terms in one optimizer step: once with targets of a whole step, else by micro-batch."""
    found: dict[tuple[str, str], Traffic] = {}
    for part, operation, size in costs.sent:
        times = 1 if part == "targets" and whole_step else config.accumulation
        gathered = operation != "all-reduce"
        kind = "all-gather" if operation == "all-gather" else "all-reduce"
        name = f"the {part}'s {'gradient' if operation == 'all-reduce of gathered' else 'sums'}"
        name = _NAMES.get((part, operation), name)
        before = found.get((name, kind), Traffic(name, kind, 0, 0, world_size))
        payload = before.payload + round(times * size) * (world_size if gathered else 1)
        found[name, kind] = Traffic(name, kind, payload, before.calls + times, world_size)
    return list(found.values())


_NAMES = {
    ("targets", "all-reduce"): "sums for targets",
    ("loss", "all-gather"): "features for the loss",
    ("backward", "all-reduce of gathered"): "gradient of these features",
}


def step_traffic(
    sizes: Mapping[str, int],
    centers: Sequence[int],
    config: DsConfig,
    world_size: int,
    groups: int = _GROUPS,
    parts: int = 1,
) -> list[Traffic]:
    """The collectives of each rank in one optimizer step, without those of the terms; none on one rank.

    sizes: elements of every parameter; centers: of each running mean; groups: their number in the optimizer; parts: the
    number of those that are clipped each by its norm.
    """
    if world_size == 1:
        return []
    zero = config.raw["zero_optimization"]
    parameters = _gathers(sizes, config, zero, world_size) if config.stage == 3 else []
    if config.stage in (1, 2):
        parameters = [Traffic("new weights", "all-gather", element_bytes(config) * sum(sizes.values()), 1, world_size)]
    if offloads_optimizer(zero):  # DeepSpeed's own norms, of each group
        norms = Traffic("gradient norm", "all-reduce", groups * (8 if config.stage == 3 else 4), groups, world_size)
    else:
        norms = Traffic("gradient norm", "all-reduce", _FP64 * parts, 1, world_size)
    votes = Traffic(
        "center and votes" if centers else "votes",
        "all-reduce",
        _FP32 * (sum(n + 1 for n in centers) + _VOTES),
        1,
        world_size,
    )
    return [
        _gradients(sum(sizes.values()), config, zero, world_size),
        *([norms] if config.stage else []),
        *parameters,
        *_teacher(sum(sizes.values()), groups, config, world_size),
        votes,
    ]


def _gradients(total: int, config: DsConfig, zero: Mapping[str, Any], world_size: int) -> Traffic:
    """Stages 0 and 1 reduce once a window; stage 0 in FP32, as it trains."""
    on_wire = {"fp32": 4, "bf16": 2, "fp16": 2}[config.raw.get("communication_data_type", config.precision)]
    times = config.accumulation if config.stage >= 2 else 1
    calls = times * -(-total // int(zero.get("reduce_bucket_size", _BUCKET)))
    payload = times * on_wire * total
    if config.stage < 3:
        return Traffic("gradients", "all-reduce", payload, calls, world_size)
    if zero.get("zero_quantized_gradients"):
        payload //= 2 * on_wire  # int4
    return Traffic("gradients", "reduce-scatter", payload, calls, world_size)


def _gathers(sizes: Mapping[str, int], config: DsConfig, zero: Mapping[str, Any], world_size: int) -> list[Traffic]:
    """ZeRO 3: weights for the forward pass, and again for the backward pass but for those kept, which are the last:
    those used again within `stage3_max_reuse_distance` elements, or already fetched ahead."""
    least = persistent_below(config)
    whole = [n for n in sizes.values() if n <= least]
    sharded = sum(sizes.values()) - sum(whole)
    ahead = int(zero.get("stage3_prefetch_bucket_size", _PREFETCH))
    again = max(0, sharded - max(ahead, int(zero.get("stage3_max_reuse_distance", _MAX_REUSE)) // 2))
    element, times = element_bytes(config), config.accumulation
    on_wire = 1 if zero.get("zero_quantized_weights") else element
    second = int(zero.get("zero_hpz_partition_size", 1))
    calls = times * -(-sharded // max(ahead, 1_000_000))
    forward = Traffic("weights, forward", "all-gather", times * on_wire * sharded, calls, world_size)
    if second > 1:  # ZeRO++: from a second copy, whole among these ranks
        backward = Traffic("weights, backward", "all-gather", times * element * again, calls, second)
    else:
        backward = Traffic("weights, backward", "all-gather", times * on_wire * again, calls, world_size)
    small = Traffic("new small weights", "all-gather", element * sum(whole), len(whole), world_size)
    return [traffic for traffic in (forward, backward, small) if traffic.payload]


def _teacher(total: int, groups: int, config: DsConfig, world_size: int) -> list[Traffic]:
    """The FP32 masters, unless every rank has them: without ZeRO, and at stages 1 and 2 in FP32."""
    if config.stage == 0 or (config.stage < 3 and config.precision == "fp32"):
        return []
    calls = groups + total // _TEACHER_CHUNK if config.stage == 3 else 1
    return [Traffic("teacher", "all-gather", _FP32 * total, calls, world_size)]


if __name__ == "__main__":
    fire.Fire(main)
