"""Every exact step of the ladder is the same training step; its plain parts against ours, one by one."""

from __future__ import annotations

import pytest
import torch

from dino_ds.config.ds_schema import PerformanceOptions
from dino_ds.engine.process import init_distributed
from dino_ds.planning.bench.ladder import all_steps, build_ladder_step, last_exact, why_skipped
from tests.planning.measure.tiny import tiny_recipe
from tests.reference import copied

EXACT = [step for step in all_steps() if step.exact]


@pytest.fixture(autouse=True)
def _process_group():
    init_distributed()


DINOV2 = {
    "crops__mask": "dinov2", "head__free_prototypes": "true", "objective__dino_local_weight": "0.5",
    "ibot_head__learned_lengths": "true", "ibot_head__prototypes": "96", "ibot_head__hidden": "48",
    "ibot_head__bottleneck": "24", "objective__centering": "sinkhorn", "objective__ibot_weight": "1",
    "objective__koleo_weight": "0.1", "model__layer_scale": "0.1", "optimizer__layer_decay": "0.9",
    "optimizer__clip_by": "part",
}  # fmt: skip


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


@pytest.fixture(scope="module", params=[pytest.param({}, marks=pytest.mark.full), DINOV2], ids=["dino", "dinov2"])
def plain(request):
    init_distributed()
    return request.param, _losses_and_teacher(EXACT[0], request.param)


@pytest.mark.parametrize(
    "step", [step for step in EXACT[1:] if step.name != "channels-last images"], ids=lambda step: step.name
)
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
    assert steps[0].performance == PerformanceOptions(**plain)
    assert [step.exact for step in steps] == sorted((step.exact for step in steps), reverse=True)
    whole = PerformanceOptions(channels_last=True)
    assert EXACT[-1] == last_exact() and last_exact().performance == whole and last_exact().tiled_loss


def test_ladder_steps_that_cannot_run_say_why(monkeypatch):
    recipe = tiny_recipe(model__drop_path="0")
    monkeypatch.setattr("dino_ds.planning.bench.ladder.on_amd", lambda: False)
    reasons = {step.name: why_skipped(step, recipe) for step in all_steps()}
    assert [step.name for step in EXACT if reasons[step.name]] == ["channels-last images", "oneDNN's products"]
    assert reasons["batched stochastic depth"] == "model.drop_path is 0"
    monkeypatch.setattr("torch.cpu.get_capabilities", lambda: {})
    if not torch.cuda.is_available():
        bf16 = next(step for step in all_steps() if step.name == "bf16")
        assert "no bf16 units" in why_skipped(bf16, recipe)
