"""ds configs by GPU tier: which there are (CASES), and what the planner puts into them.

    python -m dino_ds.plan.tiers     rewrites ds_configs/tiers/ and the table of ds_configs/README.md

A case takes the first of `_candidates`, fastest first, that leaves room for a micro-batch worth its matrix products.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dino_ds.config import Recipe, load_recipe
from dino_ds.costs.flops import ffn_weights, tokens_of
from dino_ds.costs.memory import GIB, count_parameters
from dino_ds.ds_config import CHECKOUT
from dino_ds.plan.fit import Fit, fit_with, largest_micro_batch, micro_batches, with_batch

FOLDER = CHECKOUT / "ds_configs" / "tiers"
README = CHECKOUT / "ds_configs" / "README.md"
# GiB that torch finds on the smallest card sold under a number of GB; V100 and T4 have no bf16.
LIMITS = {"8gb": 7.6, "12gb": 11.6, "16gb": 15.6, "24gb": 22.0, "40gb": 39.4, "80gb": 79.1, "141gb": 139.7}
LIMITS |= {"t4_16gb": 14.5, "v100_16gb": 15.7, "v100_32gb": 31.7}
# What a config may be predicted to take of a card, the planner's own margins included.
FILLED = 0.97
# Assumed: rows of a matrix product from which on more images do not make it faster.
_ENOUGH_TOKENS = 4096
_BEGIN, _END = "<!-- tiers: make tiers -->", "<!-- end of tiers -->"


@dataclass(frozen=True)
class Case:
    """`gpus` cards of a tier (LIMITS) and the recipe they train. `nodes` more than one: second copies of the shards
    within each node (ZeRO++'s hpZ), so that weights are gathered inside it; `quantized`: ZeRO++'s other two."""

    tier: str
    recipe: str
    gpus: int = 1
    nodes: int = 1
    quantized: bool = False

    @property
    def precision(self) -> str:
        return "fp16" if self.tier[0] in "tv" else "bf16"

    @property
    def ranks(self) -> int:
        return self.gpus * self.nodes


CASES = [
    *(Case("8gb", recipe) for recipe in ("vitti16", "vits16", "vitb16", "vitl16")),
    *(Case("12gb", recipe) for recipe in ("vits16", "vitb16", "vitl16")),
    *(Case("16gb", recipe) for recipe in ("vits16", "vitb16", "vitl16", "vith14")),
    *(Case("t4_16gb", recipe, 4) for recipe in ("vits16", "vitb16", "vitl16")),
    *(Case("v100_16gb", recipe, 8) for recipe in ("vits16", "vitb16", "vitl16")),
    *(Case("24gb", recipe) for recipe in ("vits16", "vitb16", "vitl16", "vith14", "vitg14")),
    *(Case("24gb", recipe, 8) for recipe in ("vitl16", "vith14", "vitg14", "vit3b14", "vit7b16")),
    *(Case("v100_32gb", recipe, 8) for recipe in ("vitb16", "vitl16")),
    *(Case("40gb", recipe, 8) for recipe in ("vitb16", "vitl16", "vith14", "vitg14", "vit1b14", "vit3b14", "vit7b16")),
    *(Case("80gb", recipe, 8) for recipe in ("vitb16", "vitl16", "vith14", "vitg14", "vit1b14", "vit3b14", "vit7b16")),
    Case("80gb", "vit7b16", 8, nodes=8),
    Case("80gb", "vit7b16", 8, nodes=8, quantized=True),
    *(Case("141gb", recipe, 8) for recipe in ("vitl16", "vith14", "vitg14", "vit1b14", "vit3b14", "vit7b16")),
    Case("141gb", "vit7b16", 8, nodes=8),
]


@dataclass(frozen=True)
class TierConfig:
    """What a case came to. `ds`: the file's content; fit: on the case's GPUs."""

    case: Case
    name: str
    ds: dict[str, Any]
    fit: Fit


@dataclass(frozen=True)
class _Candidate:
    stage: int
    checkpointing: bool = False
    offload: bool = False


# Recomputing costs a forward pass of the student, stage 3 two more gathers of the weights, offload the way to the host.
_CANDIDATES = [
    _Candidate(2),
    _Candidate(2, checkpointing=True),
    _Candidate(3),
    _Candidate(3, checkpointing=True),
    _Candidate(2, checkpointing=True, offload=True),
    _Candidate(3, checkpointing=True, offload=True),
]


def plan_case(case: Case) -> TierConfig | None:
    """The config of a case; None if nothing fits."""
    recipe = load_recipe(case.recipe, {})
    best: TierConfig | None = None
    for candidate in _CANDIDATES:
        if case.nodes > 1 and candidate.stage < 3:
            continue
        found = _largest(case, recipe, candidate)
        if found is None:
            continue
        if found.fit.config.micro_batch * _tokens(recipe) >= _ENOUGH_TOKENS:
            return found
        if best is None or found.fit.config.micro_batch > best.fit.config.micro_batch:
            best = found
    return best


def _largest(case: Case, recipe: Recipe, candidate: _Candidate) -> TierConfig | None:
    """`candidate` with the largest micro-batch that divides the recipe's batch and fits."""
    ds, name, limit = _ds_json(case, recipe, candidate), _name(case, candidate), LIMITS[case.tier]
    most = largest_micro_batch(recipe, ds, name, case.ranks, FILLED * limit)
    sizes = [size for size in micro_batches(recipe.data.global_batch, case.ranks) if size <= most]
    if not sizes:
        return None
    fit = fit_with(recipe, ds, name, case.ranks, FILLED * limit, sizes[0])
    return TierConfig(case, name, with_batch(ds, sizes[0], "auto"), fit)


def _name(case: Case, candidate: _Candidate) -> str:
    parts = [case.tier, f"{case.ranks}gpu", case.recipe, f"zero{candidate.stage}", case.precision]
    parts += ["checkpointing"] * candidate.checkpointing + ["offload"] * candidate.offload
    parts += ["zeropp" if case.quantized else "hpz"] * (case.nodes > 1)
    return "_".join(parts)


def _ds_json(case: Case, recipe: Recipe, candidate: _Candidate) -> dict[str, Any]:
    ds: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": 3.0,
        case.precision: {"enabled": True},
        "zero_optimization": _zero(case, recipe, candidate),
    }
    if case.precision == "fp16":
        scale = {"loss_scale": 0, "initial_scale_power": 16, "loss_scale_window": 1000, "hysteresis": 2}
        ds["fp16"] |= scale | {"min_loss_scale": 1}
    if candidate.checkpointing:
        ds["activation_checkpointing"] = {"number_checkpoints": "auto", "cpu_checkpointing": False}
    return ds


def _zero(case: Case, recipe: Recipe, candidate: _Candidate) -> dict[str, Any]:
    zero: dict[str, Any] = {
        "stage": candidate.stage,
        "contiguous_gradients": True,
        "overlap_comm": case.ranks > 1,
        "reduce_bucket_size": "auto",
    }
    host = {"device": "cpu", "pin_memory": True}
    if candidate.stage == 2:
        zero["allgather_bucket_size"] = "auto"
    else:
        block = _block_weights(recipe)
        live = max(200_000_000, _round_up(3 * block))
        zero |= {
            "stage3_prefetch_bucket_size": max(20_000_000, _round_up(block)),
            "stage3_param_persistence_threshold": 100_000,
            "stage3_max_live_parameters": live,
            "stage3_max_reuse_distance": live,
        }
    if candidate.offload:
        zero["offload_optimizer"] = host
        if candidate.stage == 3:
            zero["offload_param"] = host
    if case.nodes > 1:
        zero["zero_hpz_partition_size"] = case.gpus
    if case.quantized:
        zero |= {"zero_quantized_weights": True, "zero_quantized_gradients": True}
    return zero


def _block_weights(recipe: Recipe) -> int:
    arch = recipe.model.architecture()
    return 4 * arch.width**2 + ffn_weights(arch)


def _round_up(elements: int, to: int = 10_000_000) -> int:
    return -(-elements // to) * to


def _tokens(recipe: Recipe) -> int:
    """Of the student, per image."""
    arch, crops = recipe.model.architecture(), recipe.crops
    return 2 * tokens_of(arch, crops.global_size) + crops.num_local * tokens_of(arch, crops.local_size)


def file_text(config: TierConfig) -> str:
    return json.dumps(config.ds, indent=2) + "\n"


def table(planned: list[tuple[Case, TierConfig | None]]) -> str:
    """Markdown: a line a case."""
    head = ["card", "GPUs", "recipe", "local crops", "micro-batch", "accumulation", "ZeRO", "precision", "recomputed"]
    head += ["offload", "GiB predicted", "of", "file"]
    lines = [f"| {' | '.join(head)} |", "|" + " --- |" * len(head)]
    return "\n".join([*lines, *(f"| {' | '.join(_cells(case, found))} |" for case, found in planned)])


def _cells(case: Case, found: TierConfig | None) -> list[str]:
    recipe = load_recipe(case.recipe, {})
    gpus = f"{case.gpus} x {case.nodes} nodes" if case.nodes > 1 else str(case.gpus)
    start = [case.tier.replace("_", " "), gpus, case.recipe, str(recipe.crops.num_local)]
    if found is None:
        teacher = 4 * count_parameters(recipe) / GIB
        return [*start, *["–"] * 6, "does not fit", f"{LIMITS[case.tier]:g}", f"the FP32 teacher alone: {teacher:.1f}"]
    config, zero = found.fit.config, found.ds["zero_optimization"]
    host = [key.removeprefix("offload_") for key in ("offload_optimizer", "offload_param") if key in zero]
    stage = f"{config.stage}{' hpZ' if case.nodes > 1 else ''}{' int8/int4' if case.quantized else ''}"
    return [
        *start,
        str(config.micro_batch),
        str(config.accumulation),
        stage,
        config.precision,
        "all blocks" if config.checkpoint_blocks == "all" else "–",
        " + ".join(host) or "–",
        f"{found.fit.memory.gib:.1f}",
        f"{LIMITS[case.tier]:g}",
        f"`{found.name}`",
    ]


def plan_all() -> Iterator[tuple[Case, TierConfig | None]]:
    for case in CASES:
        yield case, plan_case(case)


def readme_text(text: str, planned: list[tuple[Case, TierConfig | None]]) -> str:
    """`text` of ds_configs/README.md with a new table."""
    before, rest = text.split(_BEGIN)
    _, after = rest.split(_END)
    return f"{before}{_BEGIN}\n\n{table(planned)}\n\n{_END}{after}"


def write(folder: Path = FOLDER, readme: Path = README) -> None:
    planned = list(plan_all())
    folder.mkdir(exist_ok=True)
    for old in folder.glob("*.json"):
        old.unlink()
    for _, found in planned:
        if found is not None:
            (folder / f"{found.name}.json").write_text(file_text(found))
    readme.write_text(readme_text(readme.read_text(), planned))


if __name__ == "__main__":
    write()
