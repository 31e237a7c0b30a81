"""The rungs of the ladder: one lever more on each, in a fixed order."""

from __future__ import annotations

import copy
import dataclasses
import shutil
from dataclasses import dataclass
from typing import Any

import torch

from dino_ds.bench.naive import LoopTeacher, PairwiseTerm, PlainEngine, normalise_prototypes
from dino_ds.config.crops import EMA
from dino_ds.config.ds_config import PerformanceOptions
from dino_ds.config.loading import change_recipe
from dino_ds.config.recipe import Recipe
from dino_ds.engine.device import device
from dino_ds.measure.trial import (
    EPOCH_STEPS,
    Trial,
    begin_training,
    build_trial,
    resolve,
    synthetic_crops,
    synthetic_keys,
)
from dino_ds.objectives.base import Objective
from dino_ds.objectives.dino import DinoTerm
from dino_ds.teachers.base import Teachers
from dino_ds.teachers.ema import EmaTeacher
from dino_ds.training.build import build_network, build_schedules
from dino_ds.training.step import TrainingStep

CLIPPING = 3.0
_PLAIN = PerformanceOptions(attention="naive", packed=False, cls_only_last_block=False)


@dataclass(frozen=True)
class Rung:
    """exact: what is learned stays the same, to rounding. The rest says which parts its step is made of."""

    name: str
    exact: bool = True
    performance: PerformanceOptions = _PLAIN
    lean_prototypes: bool = False
    minimal_loss: bool = False
    fused_adamw: bool = False
    one_pass_ema: bool = False
    engine: bool = False
    precision: str = "fp32"
    batched_stochastic_depth: bool = False
    data_workers: bool = False


def all_rungs() -> list[Rung]:
    """From the plain step upwards; each has all that those before it have."""
    rung, rungs = Rung("plain step"), list[Rung]()

    def add(name: str, **changes: Any) -> None:
        nonlocal rung
        rungs.append(rung)
        rung = dataclasses.replace(rung, name=name, **changes)

    def lever(**changes: Any) -> PerformanceOptions:
        return dataclasses.replace(rung.performance, **changes)

    add("SDPA", performance=lever(attention="sdpa"))
    add("packed crops", performance=lever(packed=True))
    add("CLS-only last block", performance=lever(cls_only_last_block=True))
    add("minimal-pass loss", minimal_loss=True)
    add("lean prototypes", lean_prototypes=True)
    add("fused AdamW", fused_adamw=True)
    add("one-pass EMA", one_pass_ema=True)
    add("DeepSpeed engine", engine=True)
    add("bf16", exact=False, precision="bf16")
    add("torch.compile", performance=lever(compile="default"))
    add("batched stochastic depth", performance=lever(compile="off"), batched_stochastic_depth=True)  # one or the other
    add("data workers", data_workers=True)
    return [*rungs, rung]


def last_without_engine() -> Rung:
    """All exact levers, and torch's AdamW alone."""
    rungs = all_rungs()
    return rungs[next(i for i, rung in enumerate(rungs) if rung.engine) - 1]


def why_skipped(rung: Rung, recipe: Recipe) -> str | None:
    """Why this rung can't be stood on here; None if it can."""
    cuda = torch.cuda.is_available()
    if rung.data_workers:
        return "the crops are synthetic, nothing is waited for; dino-ds bench step --data has real ones"
    if rung.name == "bf16" and not cuda and not _cpu_has_bf16():
        return "this CPU has no bf16 units"
    if rung.name == "torch.compile" and not cuda:
        return "pays on a GPU only: without one there are few kernels to fuse and no launches to save"
    if rung.name == "torch.compile" and not (shutil.which("cc") or shutil.which("gcc")):
        return "there is no C compiler"
    if rung.batched_stochastic_depth:
        return "model.drop_path is 0" if recipe.model.drop_path == 0 else None
    return None


def build_rung(rung: Rung, recipe: Recipe, batch: int) -> Trial:
    """A trial of this rung's step; `batch` images. One process."""
    if rung.batched_stochastic_depth:
        recipe = change_recipe(recipe, {"model.stochastic_depth": "batched"})
    if rung.engine:
        return build_trial(*resolve(recipe, _ds_config(rung), "bench ladder", batch))
    recipe = change_recipe(recipe, {"data.global_batch": str(batch)})
    step = build_plain_step(recipe, rung)
    begin_training(step)
    return Trial(step, 1, synthetic_crops(recipe, batch, device()), synthetic_keys(recipe, batch, device()))


def build_plain_step(recipe: Recipe, rung: Rung) -> TrainingStep:
    """The step of a rung that has no engine: FP32, one process."""
    network = build_network(recipe, rung.performance)
    if not rung.lean_prototypes:
        normalise_prototypes(network)
    copied, head, objective = copy.deepcopy(network).to(device()), recipe.head, recipe.objective
    engine = PlainEngine(network, recipe, CLIPPING, rung.fused_adamw, device())
    teacher = (EmaTeacher if rung.one_pass_ema else LoopTeacher)(copied, engine.masters())
    dino = (DinoTerm if rung.minimal_loss else PairwiseTerm)(
        head.prototypes, objective.student_temp, objective.center_momentum, device=device()
    )
    as_engine: Any = engine
    teachers, groups = Teachers({EMA: teacher}, recipe.crops.groups), recipe.crops.groups
    return TrainingStep(as_engine, teachers, Objective({"dino": dino}), build_schedules(recipe, EPOCH_STEPS), groups)


def _ds_config(rung: Rung) -> dict[str, Any]:
    low = {} if rung.precision == "fp32" else {rung.precision: {"enabled": True}}
    performance = dataclasses.asdict(rung.performance)
    stage = 0 if rung.precision == "fp32" else 1  # the shipped files' choice: stage 0 is FP32's
    return {"gradient_clipping": CLIPPING, "zero_optimization": {"stage": stage}, "dino_ds": performance, **low}


def _cpu_has_bf16() -> bool:
    probes = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")  # private: absent in other versions of torch
    return any(getattr(torch.cpu, probe, lambda: False)() for probe in probes)
