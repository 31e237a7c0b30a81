"""The steps that `bench ladder` measures: one optimization more each, the engine's ZeRO stages, memory settings."""

from __future__ import annotations

import copy
import dataclasses
import json
import shutil
from dataclasses import dataclass
from typing import Any

import torch

from dino_ds.config.crops import EMA
from dino_ds.config.ds_values import PerformanceOptions
from dino_ds.config.loading import change_recipe
from dino_ds.config.recipe import Recipe
from dino_ds.engine.device import device
from dino_ds.engine.products import on_amd
from dino_ds.method.backbone_checks import fitting_levers
from dino_ds.method.build import build_network, build_objective, build_schedules
from dino_ds.method.ema import EmaTeacher, TeacherOptions
from dino_ds.method.specs.dino import DINO
from dino_ds.method.specs.of_recipe import terms_of
from dino_ds.method.step import TrainingStep
from dino_ds.method.teacher import Teachers
from dino_ds.planning.bench.naive import LoopTeacher, PlainEngine, normalise_prototypes, plain_objective
from dino_ds.planning.measure.trial import EPOCH_STEPS, Trial, begin_training, build_trial, resolve, synthetic_inputs

CLIPPING = 3.0
STAGES = (0, 1, 3)
_PLAIN = PerformanceOptions(attention="naive", packed=False, cls_only_last_block=False, channels_last=False)
_OF_VITS = ("SDPA", "packed crops", "CLS-only last block", "batched stochastic depth")
_OF_OTHERS = ("channels-last images",)


@dataclass(frozen=True)
class LadderStep:
    """The make of a training step. exact: the result stays the same up to rounding. stage: of ZeRO; None for the
    one that the shipped files take."""

    name: str
    exact: bool = True
    performance: PerformanceOptions = _PLAIN
    tiled_loss: bool = False
    fused_adamw: bool = False
    one_pass_ema: bool = False
    onednn: bool = False
    engine: bool = False
    precision: str = "fp32"
    stage: int | None = None
    checkpointing: bool = False
    batched_stochastic_depth: bool = False
    dino_alone: bool = False


def all_steps() -> list[LadderStep]:
    """The steps from the plain one upwards, each with all optimizations of those before it; last, the exact step
    without iBOT and KoLeo."""
    steps = [LadderStep("plain step")]

    def add(name: str, **changes: Any) -> None:
        steps.append(dataclasses.replace(steps[-1], name=name, **changes))

    def with_option(**changes: Any) -> PerformanceOptions:
        return dataclasses.replace(steps[-1].performance, **changes)

    add("SDPA", performance=with_option(attention="sdpa"))
    add("packed crops", performance=with_option(packed=True))
    add("CLS-only last block", performance=with_option(cls_only_last_block=True))
    add("channels-last images", performance=with_option(channels_last=True))
    add("prototypes and loss in tiles", tiled_loss=True)
    add("fused AdamW", fused_adamw=True)
    add("one-pass EMA", one_pass_ema=True)
    add("oneDNN's products", onednn=True)
    add("DeepSpeed engine", engine=True)
    add("bf16", exact=False, precision="bf16")
    add("torch.compile", performance=with_option(compile="default"))
    add("batched stochastic depth", performance=with_option(compile="off"), batched_stochastic_depth=True)  # not both
    exact = next(step for step in steps if step.engine)
    steps.append(dataclasses.replace(exact, name="DeepSpeed engine, DINO alone", exact=False, dino_alone=True))
    return steps


def last_without_engine() -> LadderStep:
    """All exact optimizations, and torch's AdamW alone."""
    return [step for step in all_steps() if not step.engine][-1]


def engine_steps() -> list[LadderStep]:
    """The same step with torch's AdamW alone, then in DeepSpeed's engine at three stages."""
    plain = dataclasses.replace(last_without_engine(), name="plain torch AdamW")
    return [plain, *(dataclasses.replace(plain, name=f"ZeRO {n}", engine=True, stage=n) for n in STAGES)]


def memory_steps() -> list[LadderStep]:
    """FP32 and bf16, with and without activation checkpointing."""
    base = dataclasses.replace(last_without_engine(), engine=True, stage=1)
    return [
        dataclasses.replace(
            base,
            name=f"{precision}, checkpointing {'on' if checkpointing else 'off'}",
            exact=precision == "fp32",
            precision=precision,
            checkpointing=checkpointing,
        )
        for precision in ("fp32", "bf16")
        for checkpointing in (False, True)
    ]


SELECTIONS = {"all": all_steps, "engine": engine_steps, "memory": memory_steps}


def why_skipped(step: LadderStep, recipe: Recipe) -> str | None:
    """Why this step can't be measured here; None if it can."""
    cuda, is_vit = torch.cuda.is_available(), "packed" in recipe.model.spec().obeys
    if step.name in (_OF_OTHERS if is_vit else _OF_VITS):
        kind = "one of our ViTs, which have no such convolutions" if is_vit else "not one of our ViTs"
        return f"{recipe.model.backbone} is {kind}"
    if step.name == "oneDNN's products" and not (on_amd() and not cuda):
        return "they pay on AMD's CPUs with AVX-512 only"
    if step.name == "bf16" and not cuda and not _cpu_has_bf16():
        return "this CPU has no bf16 units"
    if step.name == "torch.compile" and not cuda:
        return "it pays on a GPU only: a CPU has few kernels to fuse and no launches to save"
    if step.name == "torch.compile" and not (shutil.which("cc") or shutil.which("gcc")):
        return "there is no C compiler"
    if step.batched_stochastic_depth and recipe.model.drop_path == 0:
        return "model.drop_path is 0"
    if step.dino_alone and len(terms_of(recipe)) == 1:
        return "the recipe has no other term than DINO"
    return None


def build_ladder_step(step: LadderStep, recipe: Recipe, batch: int) -> Trial:
    """A trial of this step with `batch` images, on one process."""
    if step.batched_stochastic_depth:
        recipe = change_recipe(recipe, {"model.stochastic_depth": "batched"})
    if step.dino_alone:
        recipe = _dino_alone(recipe)
    if step.engine:
        return build_trial(*resolve(recipe, _ds_config(step, recipe), "bench ladder", batch))
    recipe = change_recipe(recipe, {"data.global_batch": str(batch)})
    built = build_plain_step(recipe, step)
    begin_training(built)
    return Trial(built, 1, synthetic_inputs(recipe, batch, device()))


def _dino_alone(recipe: Recipe) -> Recipe:
    """The recipe without the terms beside DINO, and without what is theirs."""
    own = json.loads(recipe.objective.terms)
    others = [term.name for term in terms_of(recipe) if term.name != DINO and term.name not in own]
    kept = {name: v for name, v in recipe.model_dump(mode="json").items() if name not in ("ibot_head", *others)}
    theirs = ("terms", *(f"{name}_" for name in others))  # options of a term begin with its name
    kept["objective"] = {key: v for key, v in kept["objective"].items() if not key.startswith(theirs)}
    kept["teacher"] |= {"others": "{}"}
    kept["crops"] |= {"mask": "none"}
    return Recipe.model_validate(kept)


def build_plain_step(recipe: Recipe, step: LadderStep) -> TrainingStep:
    """A training step without an engine: FP32, one process."""
    network = build_network(recipe, fitting_levers(recipe, step.performance))
    objective = build_objective(recipe, device()) if step.tiled_loss else plain_objective(recipe)
    if not step.tiled_loss:
        normalise_prototypes(network)
    copied = copy.deepcopy(network).to(device())
    engine: Any = PlainEngine(network, recipe, CLIPPING, step.fused_adamw, device())
    options = TeacherOptions(batch_norm=recipe.teacher.batch_norm)
    teacher = (EmaTeacher if step.one_pass_ema else LoopTeacher)(copied, engine.masters(), options, engine.buffers)
    teachers, groups = Teachers({EMA: teacher}, recipe.groups), recipe.groups
    return TrainingStep(engine, teachers, objective, build_schedules(recipe, EPOCH_STEPS), groups)


def _ds_config(step: LadderStep, recipe: Recipe) -> dict[str, Any]:
    stage = step.stage if step.stage is not None else 0 if step.precision == "fp32" else 1
    ds = {
        "gradient_clipping": CLIPPING,
        "zero_optimization": {"stage": stage},
        "dino_ds": dataclasses.asdict(fitting_levers(recipe, step.performance)),
    }
    ds |= {} if step.precision == "fp32" else {step.precision: {"enabled": True}}
    return ds | ({"activation_checkpointing": {"number_checkpoints": "auto"}} if step.checkpointing else {})


def _cpu_has_bf16() -> bool:
    probes = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")  # private: absent in other versions of torch
    return any(getattr(torch.cpu, probe, lambda: False)() for probe in probes)
