"""The recorded training runs of facebookresearch/dinov2 and dinov3 (tests/golden_v2, or DINO_DS_GOLDEN_V2) through our
engine. FP32, on one process."""

from __future__ import annotations

import itertools
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from dino_ds.config.crops import EMA, FROZEN
from dino_ds.config.ds_schema import PerformanceOptions
from dino_ds.config.loading import load_recipe
from dino_ds.data.feed import Batch
from dino_ds.data.multicrop import with_rows
from dino_ds.data.normalization import Normalization
from dino_ds.engine.engine import Engine, Progress
from dino_ds.method import gram
from dino_ds.method.build import build_by_spec, build_network, build_objective, build_schedules, build_teachers
from dino_ds.method.dino import DinoTerm, IbotTerm, SinkhornKnopp
from dino_ds.method.networks import TeacherParts, optimizer_options
from dino_ds.method.objective import Objective
from dino_ds.method.specs.ours import DINO, HEAD, IBOT, IBOT_HEAD
from dino_ds.method.specs.own import teachers_of
from dino_ds.method.step import TrainingStep
from dino_ds.method.teacher import Teacher, Teachers
from dino_ds.models.network import Network
from dino_ds.models.prototypes import DinoHead
from dino_ds.models.specs.backbones import ViTSpec
from dino_ds.models.specs.base import BackboneOptions
from dino_ds.models.vit import VisionTransformer
from dino_ds.weights.frozen import FrozenSource
from tests.engine.harness import ds_config, fp32_student
from tests.ranks import run_on_ranks
from tests.reference import by_group, copied, from_reference_v2, golden_v2, golden_v2_meta, our_name
from tests.sample import sampled

pytestmark = pytest.mark.numerical

_HEAD = {"prototypes": "96", "hidden": "64", "bottleneck": "32", "learned_lengths": "true"}
DINOV2 = {
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
DINOV3 = {
    "data.global_batch": "4", "length": "4 steps",
    "crops.global_size": "32", "crops.local_size": "16", "crops.num_local": "2", "crops.mask": "dinov3",
    "model.backbone": "vit_tiny_patch16_dinov3_qkvb", "model.patch_size": "4", "model.width": "48", "model.depth": "2",
    "model.heads": "3", "model.registers": "2", "model.local_cls_norm": "true", "model.drop_path": "0",
    "head.prototypes": "96", "head.hidden": "64", "head.bottleneck": "32", "head.free_prototypes": "true",
    "ibot_head.prototypes": "80", "ibot_head.hidden": "64", "ibot_head.bottleneck": "24",
    "ibot_head.free_prototypes": "true",
    "objective.centering": "sinkhorn", "objective.ibot_weight": "1", "objective.koleo_weight": "0.1",
    "objective.dino_local_weight": "0.5", "objective.freeze_prototypes": "2 steps",
    "objective.frozen_prototypes": "zero_lr", "optimizer.warmup": "2 steps", "optimizer.layer_decay": "0.8",
    "optimizer.patch_embed_lr": "0.2", "optimizer.clip_by": "part", "optimizer.beta2": "0.99",
}  # fmt: skip
"""The toy configurations of the recorded runs, meta.json `toy_config`, as recipes."""
DINOV2_RUNS = ("sinkhorn_untied", "centering_tied", "sinkhorn_tied", "centering_untied")
DINOV3_RUNS = {
    "plain": {},
    "gram": {
        "gram.weight": "1", "gram.teacher": "recorded", "gram.crop_size": "40", "gram.refresh_every": "3 steps",
        "gram.refreshes": "1",
    },
    "gram_ema_teacher": {"gram.weight": "1", "gram.teacher": "ema"},
    "distillation": {"crops.mask_hides": "false", "teacher.source": "recorded"},
}  # fmt: skip


def _recorded_schedules(recipe: Any, name: str) -> Any:
    """Our schedules, except for values that the recorded run was given step by step."""
    runs, ours, values = golden_v2_meta()["trajectory_dinov3"]["runs"], build_schedules(recipe, 2), []
    for i, recorded in enumerate(runs[name]["steps"]):
        kinds = ("lr", "weight_decay", "teacher_momentum", "teacher_temp")
        given = {kind: runs["gram"]["schedules"][kind][i] for kind in kinds}
        assert recorded["teacher_temp"] == given["teacher_temp"]
        weights = {"dino_local": recorded["dino_local_loss_weight"], "gram": recorded.get("gram_loss_weight", 0.0)}
        values.append(replace(ours.at(i), **given, weights=ours.at(i).weights | weights))
    return SimpleNamespace(at=lambda step: values[min(step, 3)])


def _teachers_of(name: str, recipe: Any, config: Any, engine: Engine, objective: Objective) -> Teachers:
    """The recorded run's teachers, with its weights."""
    recorded = golden_v2("trajectory_dinov3")
    backbone = {
        key.removeprefix("backbone."): 0.75 * tensor
        for key, tensor in from_reference_v2(recorded, "init.", dinov3=True).items()
        if key.startswith("backbone.")
    }
    place = "recorded", recipe.model.spec(), 32, "dino", backbone, {}
    found = FrozenSource(*place, Normalization.of(recipe), key="gram.teacher")
    if name == "distillation":
        ema = build_by_spec(teachers_of(recipe)[0], TeacherParts(recipe, config, engine, objective))
        return Teachers({EMA: ema, FROZEN: Teacher(_frozen_network(objective))}, recipe.groups)
    with mock.patch.object(gram, "find_frozen", return_value=found):
        return build_teachers(recipe, config, engine, objective)


def _frozen_network(objective: Objective) -> Network:
    """The recorded frozen teacher: another width and depth than the student's, heads of as many prototypes."""
    weights = from_reference_v2(golden_v2("trajectory_dinov3"), "frozen.", dinov3=True)
    width = weights["backbone.cls_token"].shape[-1]
    depth = 1 + max(int(key.split(".")[2]) for key in weights if key.startswith("backbone.blocks."))
    arch = replace(load_recipe(None, DINOV3).model.spec(), width=width, depth=depth, heads=width // 16)
    heads = {}
    for head in (HEAD, IBOT_HEAD):
        prototypes, bottleneck = weights[f"{head}.prototypes.weight"].shape
        hidden = weights[f"{head}.mlp.0.weight"].shape[0]
        heads[head] = DinoHead(width, hidden, bottleneck, prototypes, 3).free_prototypes()
    assert isinstance(arch, ViTSpec)
    network = Network(VisionTransformer(arch, 32, BackboneOptions(mask_token=True)), heads, objective.queries)
    network.load_state_dict(weights)
    return network


def _objective(name: str, recipe: Any) -> Objective:
    if name != "distillation":
        return build_objective(recipe, torch.device("cpu"))
    ours = build_objective(load_recipe(None, DINOV3), torch.device("cpu")).terms
    dino = DinoTerm(96, 0.1, SinkhornKnopp(), 2, teacher=FROZEN, weighs_local=True)
    return Objective({DINO: dino, IBOT: IbotTerm(80, 0.1, SinkhornKnopp(), teacher=FROZEN), "koleo": ours["koleo"]})


_MASK_TOKEN = "backbone.mask_token"
"""Key of the mask token. The reference has one even where nothing is masked, and only weight decay moves it."""


def _dinov3(name: str, stage: int) -> None:
    """Train four steps and compare losses, terms, norms and the final networks."""
    run, recipe = golden_v2_meta()["trajectory_dinov3"]["runs"][name], load_recipe(None, DINOV3 | DINOV3_RUNS[name])
    recorded, images = golden_v2("trajectory_dinov3"), golden_v2("trajectory_dinov2")
    objective = _objective(name, recipe)
    network, fresh = (build_network(recipe, PerformanceOptions(), objective=objective) for _ in range(2))
    initial = from_reference_v2(recorded, "init.", dinov3=True)
    if name == "distillation":
        del initial[_MASK_TOKEN]
    network.load_state_dict(initial)
    config = ds_config(stage, "fp32", 4, gradient_clipping=0.5)
    engine = Engine(network, config, optimizer_options(recipe.optimizer))
    teachers = _teachers_of(name, recipe, config, engine, objective)
    step = TrainingStep(engine, teachers, objective, _recorded_schedules(recipe, name), recipe.groups)
    frozen = copied(teachers[FROZEN].network.state_dict()) if name == "distillation" else {}
    for i, expected in enumerate(run["steps"]):
        crops = {"global": [*images[f"step{i}.global"]], "local": [*images[f"step{i}.local"]]}
        crops |= {"gram": [*recorded[f"step{i}.gram"]]} if name == "gram" else {}
        out = step.micro_batch(Batch(crops, None, {"global": with_rows(recorded[f"step{i}.masks"])}))
        assert out.progress is Progress.STEPPED
        _compare_step(out, engine.grad_norm, expected)
    student = fp32_student(engine, fresh)
    finals = {"student": student, "teacher": teachers[EMA].state()}
    for kind, state in (finals | ({"gram_teacher": teachers["gram"].state()} if name == "gram" else {})).items():
        _compare_final(name, kind, state, recorded)
    after = teachers[FROZEN].network.state_dict() if frozen else {}
    assert all(torch.equal(tensor, after[key]) for key, tensor in frozen.items())


def _compare_step(out: Any, norm: float | None, expected: dict[str, Any]) -> None:
    """Compare one step's losses. The reference logs the CLS loss as means over local and global pairs: 4 and 2 of 6."""
    assert out.loss.item() == pytest.approx(expected["total"], rel=1e-6)
    local = expected["dino_local_loss_weight"] * expected["dino_local_crops_loss"]
    theirs = {
        "dino_loss": (4 * local + 2 * expected["dino_global_crops_loss"]) / 6,
        "ibot_loss": expected["ibot_loss"],
        "koleo_loss": 2 * expected["koleo_loss"],
    }
    theirs |= {"gram_loss": expected["gram_loss"]} if "gram_loss" in expected else {}
    for term, value in theirs.items():
        assert out.scalars[term].item() == pytest.approx(value, rel=5e-6), term
    norms = expected["gradient_norms_before_clipping"].values()
    assert norm == pytest.approx(sum(n**2 for n in norms) ** 0.5, rel=1e-5)


def _compare_final(name: str, kind: str, ours: dict[str, Tensor], recorded: dict[str, Tensor]) -> None:
    """Compare final tensors to ten times what changing the initial ones by 1e-6 does to them (`sensitivity`)."""
    run = golden_v2_meta()["trajectory_dinov3"]["runs"]
    limit = 10 * max(run["gram"]["sensitivity"]["largest_changes_of_final_student"].values())
    expected = from_reference_v2(recorded, f"{name}.{kind}.", dinov3=True)
    assert (_MASK_TOKEN in ours) == (name != "distillation")
    for key, tensor in expected.items():
        assert float((ours[key] - tensor).abs().max()) < limit, f"{kind} {key}"
    for theirs, (total, _) in run[name][f"final_{kind}"].items():
        key = our_name(theirs, dinov3=True)
        if key.endswith("attn.qkv.bias"):  # its keys' third is masked, and stays as it was
            kept = recorded[f"init.{theirs}"].chunk(3)[1]
            parts = [ours[key.replace("qkv.bias", f"{part}_bias")] for part in "qv"]
            assert _sum(kept, *parts) == pytest.approx(total, rel=1e-5), key
        elif not key.endswith(("attn.qkv.bias_mask", "rope_embed.periods")) and key in ours:
            assert _sum(ours[key]) == pytest.approx(total, rel=1e-5), key


def _sum(*tensors: Tensor) -> float:
    return sum(float(tensor.double().abs().sum()) for tensor in tensors)


@pytest.mark.parametrize(("name", "stage"), sampled(itertools.product(DINOV3_RUNS, (0, 2))))
def test_dinov3(name, stage):
    run_on_ranks(_dinov3, name, stage, world=1)


def dinov2_recipe(name: str) -> Any:
    run = golden_v2_meta()["trajectory_dinov2"]["runs"][name]
    changes = {"objective.centering": "sinkhorn" if run["centering"] == "sinkhorn_knopp" else "softmax"}
    changes |= {} if run["separate_heads"] else {"objective.ibot_head": "shared"}
    kept = {key: value for key, value in DINOV2.items() if run["separate_heads"] or not key.startswith("ibot_head.")}
    return load_recipe("vitti16", kept | changes)


def _dinov2(name: str, stage: int) -> None:
    """Train six steps and compare losses, terms, norms and the final networks."""
    meta, recorded, recipe = golden_v2_meta()["trajectory_dinov2"], golden_v2("trajectory_dinov2"), dinov2_recipe(name)
    run = meta["runs"][name]
    objective = build_objective(recipe, torch.device("cpu"))
    network = build_network(recipe, PerformanceOptions(), objective=objective)
    initial, tied = from_reference_v2(recorded, "init.", learned_lengths=True), name.endswith("_tied")
    network.load_state_dict({key: t for key, t in initial.items() if not (tied and key.startswith("ibot_head."))})
    config = ds_config(stage, "fp32", 4, gradient_clipping=0.5)
    engine = Engine(network, config, optimizer_options(recipe.optimizer))
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
    # Final tensors, to ten times what changing the initial ones by 1e-6 does to them (`sensitivity`): most in the bias
    # of queries, keys and values, as a key's has no true gradient, and Adam follows its rounding.
    for kind, state in (("student", student), ("teacher", step.teachers["ema"].state())):
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


@pytest.mark.parametrize(("name", "stage"), sampled(itertools.product(DINOV2_RUNS, (0, 2))))
def test_dinov2(name, stage):
    """Losses to 1e-4, norms to 1e-3, final tensors to ten times their sensitivity."""
    run_on_ranks(_dinov2, name, stage, world=1)
