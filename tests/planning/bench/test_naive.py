"""Every exact step of the ladder is the same training step; its plain parts against ours, one by one."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import pytest
import torch

from dino_ds.config.ds_values import PerformanceOptions
from dino_ds.engine.masters import WholeMasters
from dino_ds.engine.process import init_distributed
from dino_ds.method.build import build_network, build_objective
from dino_ds.method.dino import DINO
from dino_ds.method.ema import EmaTeacher
from dino_ds.models.prototypes import Prototypes
from dino_ds.planning.bench.ladder import all_steps, build_ladder_step, last_without_engine, why_skipped
from dino_ds.planning.bench.naive import (
    LoopTeacher,
    NormalisedPrototypes,
    PlainEngine,
    normalise_prototypes,
    plain_objective,
)
from dino_ds.planning.measure.trial import synthetic_inputs
from tests.costs.cnn import RESNET, cnn_recipe
from tests.planning.measure.tiny import tiny_recipe
from tests.reference import copied, product
from tests.run.own_parts import OWN

pytestmark = pytest.mark.numerical

EXACT = [step for step in all_steps() if step.exact]


@pytest.fixture(autouse=True)
def _process_group():
    init_distributed()


DINOV2 = {
    "crops__mask": "dinov2",
    "head__learned_lengths": "true",
    "ibot_head__learned_lengths": "true",
    "ibot_head__prototypes": "96",
    "ibot_head__hidden": "48",
    "ibot_head__bottleneck": "24",
    "objective__centering": "sinkhorn",
    "objective__ibot_weight": "1",
    "objective__koleo_weight": "0.1",
    "model__layer_scale": "0.1",
    "optimizer__layer_decay": "0.9",
    "optimizer__clip_by": "part",
}


@pytest.mark.slow
@pytest.mark.parametrize("way", ["softmax", "sinkhorn"])
def test_the_plain_terms_are_ours(way):
    """To 1e-5 of the largest, gradients too: sums in another order, of cosines divided by 0.04, and then through the
    whole network."""
    dinov3 = {"objective__dino_local_weight": "0.5", "head__free_prototypes": "true", "head__learned_lengths": "false"}
    recipe = tiny_recipe(**DINOV2 | {"objective__centering": way} | (dinov3 if way == "sinkhorn" else {}))
    inputs = synthetic_inputs(recipe, 4, torch.device("cpu"))
    schedule, results = SimpleNamespace(teacher_temp=0.04, weights={"dino_local": 0.5} if way == "sinkhorn" else {}), []
    for plain in (True, False):
        network = build_network(recipe, PerformanceOptions())
        objective = build_objective(recipe, torch.device("cpu"))
        if plain:
            normalise_prototypes(network)
            objective = plain_objective(recipe)
        torch.manual_seed(1)
        with torch.no_grad():
            seen = {name: [crop + torch.randn_like(crop) for crop in group] for name, group in inputs.crops.items()}
            rows_only = {name: {"rows": mask["rows"]} for name, mask in inputs.masks.items()}
            (targets,) = objective.targets([{"ema": network(seen, None, rows_only)}], [inputs.masks], schedule)
        outputs = network(inputs.crops, None, inputs.masks, {} if plain else objective.comparisons(targets))
        measured = objective.loss(outputs, targets, schedule)
        measured.loss.backward()
        gradients = [p.grad for _, p in sorted(network.named_parameters())]
        losses = torch.stack([measured.scalars[f"{name}_loss"] for name in ("dino", "ibot", "koleo")])
        results.append((losses, *gradients, *objective.pending()))
    assert (results[0][0] > 0).all()
    for plain, ours in zip(*results, strict=True):
        torch.testing.assert_close(plain, ours, rtol=0, atol=1e-5 * float(ours.abs().max()))


@pytest.mark.parametrize("learned", [False, True])
def test_normalised_prototypes_are_ours(learned):
    ours, plain = Prototypes(16, 64, learned), NormalisedPrototypes(16, 64, learned)
    plain.load_state_dict(ours.state_dict())
    z = torch.randn(6, 16)
    torch.testing.assert_close(plain(z), product(ours(z)), rtol=1e-5, atol=1e-6)


def test_the_loop_over_the_teacher_is_one_pass():
    student = build_network(tiny_recipe(), PerformanceOptions())
    masters = [WholeMasters(list(student.named_parameters()))]
    teachers = [kind(copy.deepcopy(student), masters) for kind in (LoopTeacher, EmaTeacher)]
    with torch.no_grad():
        for parameter in student.parameters():
            parameter.add_(torch.randn_like(parameter))
    states = []
    for teacher in teachers:
        teacher.move(0.9)
        states.append(teacher.state())
    for name in states[0]:
        torch.testing.assert_close(states[0][name], states[1][name], rtol=1e-6, atol=1e-7)


def _losses_and_teacher(step, more):
    """Four steps with stochastic depth, that can be compared: Adam's epsilon is as large as the gradients, so that a
    step of a weight whose gradient is nothing but rounding is not as long as the others'; and the teacher moves."""
    changes = {"optimizer__lr": "0.03", "optimizer__eps": "0.01", "teacher__momentum": "0.9", "model__drop_path": "0.3"}
    trial = build_ladder_step(step, tiny_recipe(**changes | more), 4)
    start = copied(trial.step.teachers["ema"].state())
    losses = [float(trial.run()) for _ in range(4)]
    teacher = copied(trial.step.teachers["ema"].state())
    assert max(float((teacher[name] - start[name]).abs().max()) for name in start) > 3e-4, "the weights move"
    statistics = [statistic.value for statistic in trial.step.objective.statistics.values()]
    return torch.tensor(losses), teacher, torch.cat(statistics) if statistics else torch.zeros(0)


@pytest.fixture(scope="module", params=[{}, DINOV2], ids=["dino", "dinov2"])
def plain(request):
    init_distributed()
    return request.param, _losses_and_teacher(EXACT[0], request.param)


@pytest.mark.parametrize("step", EXACT[1:], ids=lambda step: step.name)
@pytest.mark.slow
def test_exact_steps_are_the_plain_step(step, plain):
    """Four steps with clipping, stochastic depth, center and EMA. A cosine or a weight of about 1 is rounded by 6e-8 at
    each use: 1e-6 is sixteen of them. A loss has cosines divided by the temperatures, 0.04 at the least: 2.5e-5."""
    more, plain = plain
    losses, teacher, center = _losses_and_teacher(step, more)
    torch.testing.assert_close(losses, plain[0], rtol=0, atol=1e-6 / 0.04)
    torch.testing.assert_close(center, plain[2], rtol=0, atol=1e-6)
    for name in teacher:
        torch.testing.assert_close(teacher[name], plain[1][name], rtol=0, atol=1e-6)


def test_ladder_steps_grow_from_the_plain_step():
    steps = all_steps()
    plain = {"packed": False, "cls_only_last_block": False, "channels_last": False}
    assert steps[0].performance == PerformanceOptions(attention="naive", **plain)
    assert [step.exact for step in steps] == sorted((step.exact for step in steps), reverse=True)
    whole = PerformanceOptions(channels_last=True)
    assert EXACT[-1].engine and EXACT[-1].performance == whole
    assert not last_without_engine().engine and last_without_engine().performance == whole


MORE = {key.replace(".", "__"): value for key, value in OWN.items()} | {"gram__weight": "1", "gram__teacher": "ema"}


@pytest.mark.parametrize("more", [{}, MORE], ids=["DINOv2", "with Gram anchoring and a user's own"])
def test_the_last_step_is_dino_alone(more):
    trial = build_ladder_step(all_steps()[-1], tiny_recipe(**DINOV2 | more), 4)
    assert list(trial.step.objective.terms) == ["dino"] and not trial.inputs.masks
    assert trial.run().isfinite()


def test_ladder_steps_that_cannot_run_say_why(monkeypatch):
    recipe = tiny_recipe(model__drop_path="0")
    monkeypatch.setattr("dino_ds.planning.bench.ladder.on_amd", lambda: False)
    reasons = {step.name: why_skipped(step, recipe) for step in all_steps()}
    assert reasons["DeepSpeed engine, DINO alone"] == "the recipe has no other term than DINO"
    assert [step.name for step in EXACT if reasons[step.name]] == ["channels-last images", "oneDNN's products"]
    assert reasons["batched stochastic depth"] == "model.drop_path is 0"
    monkeypatch.setattr("dino_ds.planning.bench.ladder._cpu_has_bf16", lambda: False)
    if not torch.cuda.is_available():
        bf16 = next(step for step in all_steps() if step.name == "bf16")
        assert "no bf16 units" in why_skipped(bf16, recipe)


def test_steps_that_a_resnet_does_not_have_are_left_out():
    reasons = {step.name: why_skipped(step, cnn_recipe(RESNET)) for step in EXACT}
    left = ["SDPA", "packed crops", "CLS-only last block"]
    assert [name for name, why in reasons.items() if why == "resnet18 is not one of our ViTs"] == left


@pytest.mark.slow
def test_exact_steps_of_a_resnet_are_its_plain_step():
    """To 1e-4 of the loss: BatchNorm divides what is rounded by deviations of few numbers."""
    kept = [step for step in EXACT if why_skipped(step, cnn_recipe(RESNET)) is None]
    changes = {"optimizer__eps": "0.01", "teacher__momentum": "0.9"}
    losses = []
    for step in (kept[0], kept[1], kept[-1]):
        trial = build_ladder_step(step, cnn_recipe(RESNET, **changes), 4)
        losses.append(torch.tensor([float(trial.run()) for _ in range(3)]))
    assert kept[1].name == "channels-last images"
    for other in losses[1:]:
        torch.testing.assert_close(other, losses[0], rtol=1e-4, atol=0)


def test_the_plain_engine_clips_the_global_norm():
    recipe = tiny_recipe()
    engine = PlainEngine(build_network(recipe, PerformanceOptions()), recipe, 1e-3, True, torch.device("cpu"))
    seen = []
    engine._optimizer.register_step_pre_hook(
        lambda optimizer, *_: seen.append(
            torch.nn.utils.get_total_norm([p.grad for g in optimizer.param_groups for p in g["params"]])
        )
    )
    out = engine({"global": [torch.randn(2, 3, 32, 32)] * 2}, None)[DINO]
    engine.backward(product(out).square().sum())
    engine.step()
    assert float(seen[0]) == pytest.approx(1e-3, rel=1e-3)
