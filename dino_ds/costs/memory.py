"""The memory that a step needs on one device: tensors of a rehearsed micro-batch, and of the engine beside it. Only
tensors count, as in a GPU's allocator; libraries, the GPU's context and fragmentation come on top. The engine's part is
arithmetic. Tests compare both with the tensors of a DeepSpeed engine and of a real step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from dino_ds.config.crops import EMA
from dino_ds.config.ds_schema import ORTHOGONALIZED_ELEMENTS, DsConfig, offloads_optimizer, offloads_weights
from dino_ds.config.recipe import Recipe
from dino_ds.costs.step_costs import StudentFacts, step_costs, student_facts
from dino_ds.method.specs.own import teachers_of

GIB = 2**30
_FP32 = 4
_MOMENT_BYTES = {"adamw": 8, "sgd": 4, "lars": 4, "muon": 4}  # of a weight, by kind of optimizer
_MOMENTS = {"targets": "the targets", "student": "the loss", "loss": "the loss", "backward": "the backward pass"}
"""The moment of a step in words, by part; heads compute their losses in the student's part."""


class Memory(NamedTuple):
    """Bytes on one device at the moment of a step that needs the most. As text, without parts of less than 1 %."""

    moment: str
    parts: dict[str, int]

    @property
    def gib(self) -> float:
        return sum(self.parts.values()) / GIB

    def __str__(self) -> str:
        parts = sorted(((n / GIB, name) for name, n in self.parts.items()), reverse=True)
        shown = ", ".join(f"{name} {gib:.2f}" for gib, name in parts if gib >= 0.01 * self.gib)
        return f"{self.gib:.2f} GiB at {self.moment}: {shown}"


def element_bytes(config: DsConfig) -> int:
    return _FP32 if config.precision == "fp32" else 2


def estimate_memory(
    recipe: Recipe, config: DsConfig, world_size: int, on_gpu: bool, libraries: int = 0, exact: bool = True
) -> Memory:
    """Estimate the peak memory of a step on each of `world_size` devices; exact: as in `step_costs`. Without a GPU,
    offloaded tensors count too, and so do `libraries`: the process's bytes before the engine. Raises NotEstimated."""
    facts, costs = student_facts(recipe), step_costs(recipe, config, on_gpu, exact)
    sizes, trained = facts.sizes, facts.trained
    total = sum(trained.values())
    gradients, buckets = gradient_bytes(trained, config, world_size, on_gpu), bucket_bytes(config, world_size)
    held = gradients if config.accumulation > 1 or config.stage == 3 else 0
    # Stage 1 reduces after the backward pass; on a CPU, buckets take no memory before they are written.
    late = config.stage == 1 and not config.raw["zero_optimization"].get("overlap_comm")
    whole = _gradient_element(config) * total if late else gradients
    scratch = _optimizer_scratch(facts, config, world_size, on_gpu)
    of_stage3 = buckets if config.stage == 3 else 0
    at_end = {"gradients": gradients + scratch, "buckets": of_stage3, "targets": round(costs.held)}
    window = config.accumulation if facts.whole_step else 1
    beyond = costs.held * max(0, costs.window - window)  # prepared in the rehearsal but not in this step
    moments = [Memory("the optimizer", at_end)]
    for name, part in costs.parts.items():
        for done, size in part.moments:
            here = {"gradients": held, "buckets": of_stage3 if name in ("student", "loss") else 0}
            if name == "backward":
                unwritten = late and not on_gpu and done < total
                here = {"gradients": max(held, round(whole * done / total)), "buckets": 0 if unwritten else buckets}
            alive = max(size - beyond, 0.0)
            if name in ("student", "loss", "backward"):
                targets = min(alive, costs.held * min(costs.window, window))
                saved = min(alive - targets, costs.saved)
                here |= {"targets": round(targets), "activations": round(saved)}
                working = "activations' gradients" if name == "backward" else "head and loss"
                here[working] = round(alive - targets - saved)
            else:
                here["making targets" if name == "targets" else "teacher's activations"] = round(alive)
            moments.append(Memory(_MOMENTS.get(name, "a teacher's forward pass"), here))
    peak = max(moments, key=lambda moment: moment.gib)
    common = state_bytes(facts, config, world_size, on_gpu)
    copies = config.keeps_teacher_copy(on_gpu, sum(sizes.values()))
    common["teacher copy"] = 2 * sum(sizes[name] for name in facts.cast) if copies else 0
    titles = {spec.name: spec.title for spec in teachers_of(recipe)}
    common |= {titles[name]: size for name, size in costs.teachers.items() if name != EMA} | {
        "gathered parameters": gathered_bytes(sizes, config, world_size),
        "crops": round(costs.crops * (window + on_gpu)),  # a GPU also holds the next batch while it uses this one
        "targets": round(costs.held * max(0, window - costs.window)),
        "libraries": 0 if on_gpu else libraries,
    }
    parts = {name: common.get(name, 0) + peak.parts.get(name, 0) for name in {**common, **peak.parts}}
    return Memory(peak.moment, {name: n for name, n in parts.items() if n})


def state_bytes(facts: StudentFacts, config: DsConfig, world_size: int, on_gpu: bool) -> dict[str, int]:
    """The bytes that stay on a device from step to step. ZeRO 1 and 2 copy even FP32 weights as masters; stage 0 trains
    FP32 weights in place. Frozen FP32 weights are the teacher's own tensors where they are not sharded."""
    zero, element, sizes = config.raw["zero_optimization"], element_bytes(config), facts.sizes
    total, trained = sum(sizes.values()), sum(facts.trained.values())
    copied = trained if config.precision == "fp32" and config.stage < 3 else total
    student = element * copied // (world_size if config.stage == 3 else 1)
    if config.stage == 3 and world_size > 1:
        student += element * sum(n for n in sizes.values() if n <= _persistent_below(config))
    learning = sum(_MOMENT_BYTES[kind] * elements for kind, elements in facts.groups)
    if config.stage:  # ZeRO 1 to 3 have masters, and shard them with the moments
        learning = (_FP32 * trained + learning) // world_size
    # ZeRO++: each node keeps a second copy of the weights, sharded over its ranks.
    node = min(int(zero.get("zero_hpz_partition_size", 1)), world_size)
    return {
        "student": 0 if on_gpu and offloads_weights(zero) else student,
        "second copy of the student": element * total // node if node > 1 else 0,
        "masters and moments": 0 if on_gpu and offloads_optimizer(zero) else learning,
        "teacher": _FP32 * total,
    }


def gradient_bytes(sizes: Mapping[str, int], config: DsConfig, world_size: int, on_gpu: bool) -> int:
    """Bytes of the gradients at the end of a backward pass, in the dtype in which they are accumulated."""
    zero, total = config.raw["zero_optimization"], sum(sizes.values())
    if on_gpu and config.stage and offloads_optimizer(zero):
        return 0  # each is copied to the host at once
    if config.stage == 3:
        return _gradient_element(config) * total // world_size
    if config.stage == 0 or (config.stage == 1 and config.accumulation > 1):
        return _gradient_element(config) * total
    # A tensor that spans the shards of two ranks is whole on both: a head's prototypes are one tensor.
    prototypes = (n for name, n in sizes.items() if name.endswith("prototypes.weight"))
    whole = sum(prototypes) if world_size > 1 else 0
    return _gradient_element(config) * ((total - whole) // world_size + whole)


def bucket_bytes(config: DsConfig, world_size: int) -> int:
    """Bytes of the buffers in which gradients are reduced: two with overlap at stages 1 and 2."""
    zero = config.raw["zero_optimization"]
    if not config.copies_gradients(world_size) or not zero.get("contiguous_gradients", True):
        return 0
    buffers = 2 if config.stage < 3 and zero.get("overlap_comm") else 1
    return buffers * int(zero["reduce_bucket_size"]) * element_bytes(config)


def gathered_bytes(sizes: Mapping[str, int], config: DsConfig, world_size: int) -> int:
    """ZeRO 3: bytes of the parameters that are gathered for use, at most `stage3_max_live_parameters` elements."""
    zero = config.raw["zero_optimization"]
    if config.stage < 3 or (world_size == 1 and not offloads_weights(zero)):
        return 0
    sharded = sum(n for n in sizes.values() if n > _persistent_below(config))
    return element_bytes(config) * min(sharded, zero.get("stage3_max_live_parameters", 1_000_000_000))


def _optimizer_scratch(facts: StudentFacts, config: DsConfig, world_size: int, on_gpu: bool) -> int:
    """Bytes of Muon's tensors or, if more, DeepSpeed's flat copy of the largest group's gradients and its FP32 cast."""
    orthogonalized = max((_muon_elements(group, config.stage > 0, world_size) for group in facts.matrices), default=0)
    if config.stage == 0 or (on_gpu and offloads_optimizer(config.raw["zero_optimization"])):
        return _FP32 * orthogonalized
    element = _gradient_element(config)
    flat = max(elements for _, elements in facts.groups) * (element + (_FP32 if element < _FP32 else 0)) // world_size
    return max(flat, _FP32 * orthogonalized)


def _muon_elements(group: Sequence[tuple[int, int, int]], sharded: bool, ranks: int) -> int:
    """Most elements that Muon holds at once for a group of `StudentFacts.matrices`; a shard adds a flat gradient."""
    numbers = Counter[tuple[int, int]]()
    for rows, columns, number in group:
        numbers[rows, columns] += number
    batch = 0
    for (rows, columns), number in numbers.items():
        at_once = min(-(-number // ranks), max(1, ORTHOGONALIZED_ELEMENTS // (rows * columns)))
        batch = max(batch, 2 * at_once * rows * (rows + columns))  # two of the matrices, and two of their squares
    updates = sum(rows * columns * number for rows, columns, number in group) // (ranks if sharded else 1)
    exchanged = updates if sharded and ranks > 1 else 0  # slices arrive, are joined, and go back by a second exchange
    return updates * (1 + sharded) + 2 * exchanged + max(batch, 2 * exchanged)


def _gradient_element(config: DsConfig) -> int:
    wide = config.raw.get("data_types", {}).get("grad_accum_dtype") == "fp32"
    return _FP32 if wide else element_bytes(config)


def _persistent_below(config: DsConfig) -> int:
    """ZeRO 3: parameters of this many elements or fewer stay whole."""
    return int(config.raw["zero_optimization"].get("stage3_param_persistence_threshold", 100_000))
