"""The recorded training runs of facebookresearch/dinov2 (tests/golden_v2, or DINO_DS_GOLDEN_V2) through our engine."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from dino_ds.config.ds_schema import PerformanceOptions
from dino_ds.config.loading import load_recipe
from dino_ds.data.feed import Batch
from dino_ds.data.multicrop import with_rows
from dino_ds.engine.engine import Engine, Progress
from dino_ds.method.build import build_network, build_objective, build_schedules, build_teachers
from dino_ds.method.networks import optimizer_options
from dino_ds.method.step import TrainingStep
from tests.engine.harness import ds_config, fp32_student
from tests.ranks import run_on_ranks
from tests.reference import by_group, copied
from tests.reference_v2 import from_reference_v2, golden_v2, golden_v2_meta
from tests.sample import sampled

pytestmark = pytest.mark.numerical

_HEAD = {"prototypes": "96", "hidden": "64", "bottleneck": "32", "learned_lengths": "true"}
RECIPE = {
    "data.global_batch": "4", "length": "6 steps",
    "crops.global_size": "32", "crops.local_size": "16", "crops.num_local": "2", "crops.mask": "dinov2",
    "model.patch_size": "4", "model.width": "48", "model.depth": "2", "model.heads": "3", "model.layer_scale": "1e-5",
    "model.drop_path": "0",
    **{f"{section}.{key}": value for section in ("head", "ibot_head") for key, value in _HEAD.items()},
    "objective.ibot_weight": "1", "objective.koleo_weight": "0.1",
    "objective.teacher_temp": "0.07", "objective.teacher_temp_warmup": "4 steps",
    "objective.freeze_prototypes": "4 steps", "objective.frozen_prototypes": "zero_lr",
    "optimizer.lr": "0.032", "optimizer.lr_scaling": "sqrt", "optimizer.warmup": "2 steps", "optimizer.min_lr": "1e-6",
    "optimizer.layer_decay": "0.8", "optimizer.patch_embed_lr": "0.2", "optimizer.clip_by": "part",
    "teacher.momentum": "0.9",
}  # fmt: skip
"""The toy configuration of the recorded runs, meta.json `toy_config`, as a recipe."""


RUNS = ("sinkhorn_untied", "centering_tied", "sinkhorn_tied", "centering_untied")


def _recipe(name: str) -> Any:
    run = golden_v2_meta()["trajectory_dinov2"]["runs"][name]
    changes = {"objective.centering": "sinkhorn" if run["centering"] == "sinkhorn_knopp" else "softmax"}
    changes |= {} if run["separate_heads"] else {"objective.ibot_head": "shared"}
    kept = {key: value for key, value in RECIPE.items() if run["separate_heads"] or not key.startswith("ibot_head.")}
    return load_recipe("vitti16", kept | changes)


def _initial(name: str, recorded: dict[str, Tensor]) -> dict[str, Tensor]:
    state = from_reference_v2(recorded, "init.", learned_lengths=True)
    tied = name.endswith("_tied")
    return {key: tensor for key, tensor in state.items() if not (tied and key.startswith("ibot_head."))}


def _trajectory(name: str, stage: int) -> None:
    """Train six steps and compare losses, terms, norms and the final networks."""
    meta, recorded, recipe = golden_v2_meta()["trajectory_dinov2"], golden_v2("trajectory_dinov2"), _recipe(name)
    run = meta["runs"][name]
    objective = build_objective(recipe, torch.device("cpu"))
    network = build_network(recipe, PerformanceOptions(), objective=objective)
    network.load_state_dict(_initial(name, recorded))
    config = ds_config(stage, "fp32", 4, gradient_clipping=0.5)
    options = optimizer_options(recipe.optimizer)
    engine = Engine(network, config, options)
    teachers = build_teachers(recipe, config, engine, objective)
    step = TrainingStep(engine, teachers, objective, build_schedules(recipe, 2), recipe.groups)
    for i, expected in enumerate(run["steps"]):
        views = [*recorded[f"step{i}.global"], *recorded[f"step{i}.local"]]
        out = step.micro_batch(Batch(by_group(views), None, {"global": with_rows(recorded[f"step{i}.masks"])}))
        assert out.progress is Progress.STEPPED
        assert out.loss.item() == pytest.approx(expected["total"], rel=1e-4)
        dino = expected["dino_local_crops_loss"] + expected["dino_global_crops_loss"]
        # It logs half of KoLeo, weighted, and half of iBOT.
        theirs = {"dino_loss": dino, "ibot_loss": 2 * expected["ibot_loss"], "koleo_loss": 20 * expected["koleo_loss"]}
        for term, value in theirs.items():
            assert out.scalars[term].item() == pytest.approx(value, rel=1e-4), term
        norms = expected["gradient_norms_before_clipping"].values()
        assert engine.grad_norm == pytest.approx(sum(n**2 for n in norms) ** 0.5, rel=1e-3)
    student = fp32_student(engine, build_network(recipe, PerformanceOptions(), objective=objective))
    _compare_final(run, recorded, name, {"student": student, "teacher": copied(step.teachers["ema"].state())})


def _compare_final(run: Any, recorded: dict[str, Tensor], name: str, ours: dict[str, dict[str, Tensor]]) -> None:
    """Compare final tensors to ten times what changing the initial ones by 1e-6 does to them (`sensitivity`). It does
    most in the bias of queries, keys and values: a key's has no true gradient, and Adam follows its rounding."""
    for kind, state in ours.items():
        expected = from_reference_v2(recorded, f"{name}.{kind}.", learned_lengths=True)
        for key, tensor in expected.items():
            limit = 4e-5 if key.endswith("attn.qkv.bias") else 6e-6
            assert float((state[key] - tensor).abs().max()) < 10 * limit, f"{kind} {key}"
        if not expected:  # recorded as sums of |x| only
            sums = from_reference_v2(
                {key: torch.tensor(value) for key, value in run[f"final_{kind}"].items()}, learned_lengths=True
            )
            assert sums.keys() == state.keys()
            for key, value in sums.items():
                assert float(state[key].double().abs().sum()) == pytest.approx(float(value[0]), rel=1e-4, abs=1e-3), key


@pytest.mark.parametrize(("name", "stage"), sampled(itertools.product(RUNS, (0, 2))))
def test_trajectory(name, stage):
    """The recordings are in FP32: losses to 1e-4, norms to 1e-3, final tensors to ten times their sensitivity."""
    run_on_ranks(_trajectory, name, stage, world=1)
