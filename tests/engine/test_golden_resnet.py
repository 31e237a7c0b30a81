"""The recorded runs of facebookresearch/dino on a ResNet (tests/golden_v2, or DINO_DS_GOLDEN_V2) through our engine."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dino_ds.config.ds_schema import PerformanceOptions
from dino_ds.config.loading import load_recipe
from dino_ds.data.feed import Batch
from dino_ds.engine.engine import Engine, Progress
from dino_ds.engine.optim import Lars
from dino_ds.method.build import build_network, build_objective, build_schedules, build_teachers
from dino_ds.method.ema import EmaTeacher
from dino_ds.method.networks import optimizer_options
from dino_ds.method.step import TrainingStep
from tests.engine.harness import ds_config
from tests.ranks import run_on_ranks
from tests.reference import by_group, copied, from_reference_v2, golden_v2, golden_v2_meta
from tests.sample import sampled

pytestmark = pytest.mark.numerical

RUNS = ("plain_head_sgd", "bn_head_sgd", "plain_head_adamw", "plain_head_lars")
RECIPE = {
    "data.global_batch": "4", "length": "4 steps", "optimizer.warmup": "2 steps",
    "crops.global_size": "32", "crops.local_size": "16", "crops.num_local": "2",
    "model.backbone": "tests.narrow_resnet:NarrowResNet", "model.drop_path": "0",
    "head.prototypes": "96", "head.hidden": "64", "head.bottleneck": "32",
    "objective.freeze_prototypes": "1 steps",
}  # fmt: skip
TEACHER_TEMPS = (0.04, 0.055, 0.07, 0.07)


def _recorded_schedules(recipe: Any, run: dict[str, Any]) -> Any:
    """Ours, but for what the recorded run was given by step."""
    ours, values = build_schedules(recipe, 1), []
    for i, temp in enumerate(TEACHER_TEMPS):
        given = {"lr": run["lr"][i], "weight_decay": run["weight_decay_first_group"][i], "teacher_temp": temp}
        values.append(replace(ours.at(i), teacher_momentum=run["teacher_momentum"][i], **given))
    return SimpleNamespace(at=lambda step: values[min(step, 3)])


def _initial(name: str, recorded: dict[str, Tensor]) -> dict[str, Tensor]:
    plain = from_reference_v2(recorded, "plain_head_sgd.init.")
    if not name.startswith("bn_head"):
        return plain
    backbone = {key: tensor for key, tensor in plain.items() if key.startswith("backbone.")}
    return backbone | from_reference_v2(recorded, "bn_head_sgd.init.")


def _trajectory(name: str, stage: int) -> None:
    """Four steps; compares losses, statistics of the first BatchNorm, and what was recorded of both final networks."""
    run, recorded = golden_v2_meta()["resnet"]["runs"][name], golden_v2("resnet")
    changes = {"optimizer.kind": run["optimizer"], "head.batch_norm": str(run["use_bn_in_head"]).lower()}
    recipe = load_recipe(None, RECIPE | changes)
    network, fresh = (build_network(recipe, PerformanceOptions()) for _ in range(2))
    missing, unexpected = network.load_state_dict(_initial(name, recorded), strict=False)
    assert not unexpected and all(".running_" in key or "num_batches" in key for key in missing)
    config, objective = ds_config(stage, "fp32", 4), build_objective(recipe, torch.device("cpu"))
    engine = Engine(network, config, optimizer_options(recipe.optimizer))
    teachers = build_teachers(recipe, config, engine, objective)
    step = TrainingStep(engine, teachers, objective, _recorded_schedules(recipe, run), recipe.groups)
    loss_limit = 10 * max(run["sensitivity"]["relative_change_of_total_by_step"])
    for i, expected in enumerate(run["losses"]):
        views = [*recorded[f"step{i}.global"], *recorded[f"step{i}.local"]]
        out = step.micro_batch(Batch(by_group(views)))
        assert out.progress is Progress.STEPPED
        assert out.loss.item() == pytest.approx(expected, rel=loss_limit)
        found = {"student": engine.buffers(), "teacher": step.teachers["ema"].state()}
        for key, value in run["sums_of_bn1_after_each_step"][i].items():
            kind, _, name_in_backbone = key.partition(".")
            total = float(found[kind][f"backbone.{name_in_backbone}"].sum())
            assert total == pytest.approx(value, rel=1e-5, abs=1e-6), f"{key} after step {i}"
    if f"{name}.centre" in recorded:
        center = step.objective.statistics["center"].value
        torch.testing.assert_close(center, recorded[f"{name}.centre"][0], rtol=1e-4, atol=1e-5)
    student = copied(EmaTeacher(fresh, engine.masters(), buffers=engine.buffers).state())
    teacher = copied(step.teachers["ema"].state())
    for kind, state in {"student": student, "teacher": teacher}.items():
        _compare(name, kind, state, recorded)
        key = f"{name}.{kind}.eval_features"
        if key in recorded:
            fresh.load_state_dict(state)
            features = fresh.eval().backbone.features(recorded["step0.global"][0])
            torch.testing.assert_close(features, recorded[key], rtol=1e-4, atol=1e-4)


def _compare(name: str, kind: str, state: dict[str, Tensor], recorded: dict[str, Tensor]) -> None:
    """Tensors to ten times what a change of the initial weights by 1e-6 does to them; of the others sums of |x|."""
    run = golden_v2_meta()["resnet"]["runs"][name]
    limit = 10 * max(run["sensitivity"]["largest_changes_of_final_student"].values())
    whole = from_reference_v2(recorded, f"{name}.{kind}.buffers.")
    whole |= from_reference_v2({key: t for key, t in recorded.items() if "buffers" not in key}, f"{name}.{kind}.")
    whole.pop("eval_features", None)
    for key, tensor in whole.items():
        assert float((state[key] - tensor).abs().max()) <= limit, f"{kind} {key}"
    final = run.get(f"final_{kind}", {})  # of some runs the student's alone
    sums = from_reference_v2({key: torch.tensor(value) for key, value in final.items() if not key.endswith("weight_g")})
    assert kind == "teacher" or sums.keys() == state.keys()
    for key, value in sums.items():
        assert float(state[key].double().abs().sum()) == pytest.approx(float(value[0]), rel=1e-4, abs=1e-3), key


@pytest.mark.parametrize(("name", "stage"), sampled([(name, stage) for name in RUNS for stage in (0, 2)]))
def test_trajectory(name: str, stage: int) -> None:
    """Recorded in FP32 on one process: ten times its own sensitivity, which meta.json has."""
    run_on_ranks(_trajectory, name, stage, world=1)


def test_lars_is_dino_s() -> None:
    """Three steps of a matrix, a bias and a matrix of zeros. Norms in FP64, rounded once: 1e-6."""
    recorded, settings = golden_v2("lars"), golden_v2_meta()["resnet"]["lars"]
    parameters = {name: nn.Parameter(recorded[f"init.{name}"].clone()) for name in ("w", "b", "zero")}
    optimizer = Lars(parameters.values(), settings["momentum"], settings["eta"])
    optimizer.param_groups[0].update(lr=settings["lr"], weight_decay=settings["weight_decay"])
    for i in range(3):
        for name, parameter in parameters.items():
            parameter.grad = recorded[f"step{i}.grad.{name}"].clone()
        optimizer.step()
        for name, parameter in parameters.items():
            torch.testing.assert_close(parameter.data, recorded[f"step{i}.{name}"], rtol=1e-6, atol=1e-7)
