"""Our numbers against the reference implementation's recorded ones (tests/golden, or DINO_DS_GOLDEN)."""

from __future__ import annotations

import copy

import pytest
import torch

from dino_ds.data.feed import Batch
from dino_ds.engine import distributed
from dino_ds.engine.engine import Engine, Progress
from dino_ds.engine.schedules import Schedules, cosine_schedule, warmup_schedule
from dino_ds.method.ema import EmaTeacher
from dino_ds.method.objective import Objective
from dino_ds.method.step import TrainingStep
from dino_ds.method.teacher import Teachers
from dino_ds.models.prototypes import DinoHead
from dino_ds.models.specs.backbones import ViTSpec
from dino_ds.models.vit import VisionTransformer
from dino_ds.weights.load import load
from tests.engine.harness import GROUPS, ds_config, fp32_student
from tests.ranks import run_on_ranks
from tests.reference import (
    by_group,
    centered,
    copied,
    dino_network,
    from_reference_names,
    golden,
    golden_meta,
    golden_network,
    loss_of_term,
    product,
)
from tests.sample import sampled

pytestmark = pytest.mark.numerical

META = golden_meta()


@pytest.mark.parametrize("case", META["schedules"])
def test_cosine_schedules(case):
    """Double precision on both sides: equal to rounding."""
    per_epoch = case["niter_per_ep"]
    for step, expected in enumerate(case["values"]):
        length, warmup = case["epochs"] * per_epoch, case.get("warmup_epochs", 0) * per_epoch
        ends = case["base_value"], case["final_value"]
        value = cosine_schedule(step, *ends, length, warmup, case.get("start_warmup_value", 0.0))
        assert value == pytest.approx(expected, rel=1e-12, abs=1e-15)


def _temperature(settings, epoch):
    return warmup_schedule(
        epoch, settings["warmup_teacher_temp"], settings["teacher_temp"], settings["warmup_teacher_temp_epochs"]
    )


def test_loss_gradient_and_center_over_epochs():
    """The loss over five steps with a moving center and temperature; FP32 sums in another order: 1e-5 relative."""
    settings, recorded = META["loss"], golden("loss")
    objective = centered(settings["out_dim"], settings["student_temp"], settings["center_momentum"])
    for epoch in range(settings["epochs"]):
        student = recorded[f"epoch{epoch}.student"].clone().requires_grad_()
        loss, _ = loss_of_term(objective, student, recorded[f"epoch{epoch}.teacher"], _temperature(settings, epoch))
        loss.backward()
        objective.centering.center.commit(objective.centering.center.pending())
        torch.testing.assert_close(loss, recorded[f"epoch{epoch}.loss"][0], rtol=1e-5, atol=0)
        torch.testing.assert_close(student.grad, recorded[f"epoch{epoch}.student_grad"], rtol=1e-4, atol=1e-7)
        torch.testing.assert_close(objective.centering.center.value, recorded[f"epoch{epoch}.center_after"][0])


def _two_rank_losses():
    settings, recorded = META["loss_two_ranks"], golden("loss_two_ranks")
    temperatures = {**META["loss"], **settings}
    prefix = f"rank{distributed.rank()}."
    objective = centered(META["loss"]["out_dim"], META["loss"]["student_temp"], META["loss"]["center_momentum"])
    values = []
    steps = sorted({int(key.split(".")[1].removeprefix("step")) for key in recorded})
    for step in steps:
        student, teacher = recorded[f"{prefix}step{step}.student"], recorded[f"{prefix}step{step}.teacher"]
        loss, _ = loss_of_term(objective, student, teacher, _temperature(temperatures, step))
        objective.centering.center.commit(distributed.sum_across_ranks(objective.centering.center.pending()))
        torch.testing.assert_close(loss, recorded[f"{prefix}step{step}.loss"][0], rtol=1e-5, atol=0)
        torch.testing.assert_close(objective.centering.center.value, recorded[f"{prefix}step{step}.center"][0])
        values.append(loss.item())
    return values


def test_loss_on_two_ranks_shares_one_center():
    assert all(len(losses) >= 2 for losses in run_on_ranks(_two_rank_losses))


def test_a_file_of_the_reference_s_is_read(tmp_path):
    """A checkpoint of the reference gives our features, attention and logits: 1e-5 (FP32, other kernels)."""
    recorded = golden("model")
    state = {name.removeprefix("weights."): t for name, t in recorded.items() if name.startswith("weights.")}
    torch.save({"teacher": state}, tmp_path / "theirs.pth")
    model = load(tmp_path / "theirs.pth", heads=META["vit"]["num_heads"])
    head = golden_network(META, recorded, "weights.").head
    head.load_state_dict(model.heads["head"])
    attention = model.vit.last_attention(recorded["global.input"])
    torch.testing.assert_close(attention, recorded["global.last_attention"], rtol=1e-4, atol=1e-6)
    for size in ("global", "local"):
        features = model.features(recorded[f"{size}.input"])
        torch.testing.assert_close(features, recorded[f"{size}.cls"], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(product(head(features)).detach(), recorded[f"{size}.logits"], rtol=1e-4, atol=1e-5)


def test_fresh_weights_are_distributed_as_the_reference_s():
    torch.manual_seed(0)
    ours = dict(golden_network(META, golden("model"), "weights.").named_parameters())
    fresh = dino_network(
        VisionTransformer(ViTSpec(4, 48, 2, 3), META["vit"]["img_size"]),
        DinoHead(48, META["head"]["hidden_dim"], META["head"]["bottleneck_dim"], META["head"]["out_dim"], 3),
    )
    reference = from_reference_names(golden("trajectory"), "init.")
    for name, parameter in fresh.named_parameters():
        assert parameter.shape == ours[name].shape
        expected = reference[name].std().item() if reference[name].numel() > 1 else 0.0
        if parameter.ndim > 1 and "patch_embed" not in name:
            assert parameter.std().item() == pytest.approx(expected, rel=0.15), name
        elif "patch_embed" not in name:
            assert torch.equal(parameter, reference[name]), name
    prototypes = fresh.head.prototypes.weight
    assert prototypes.abs().max() <= prototypes.shape[1] ** -0.5


def _trajectory(stage, freeze):
    """Run six of the reference's steps through the real engine and compare everything."""
    settings, recorded = META["trajectory"], golden("trajectory")
    run = settings[freeze]
    per_epoch = settings["iterations_per_epoch"]
    network = golden_network(META, recorded, "init.")
    teacher_network = copy.deepcopy(network)
    schedules = _RecordedSchedules(settings, run["freeze_last_layer_epochs"] * per_epoch)
    config = ds_config(stage, "fp32", settings["batch"])
    engine = Engine(network, config)
    teacher = EmaTeacher(teacher_network, engine.masters())
    dino = centered(META["head"]["out_dim"], META["loss"]["student_temp"], META["loss"]["center_momentum"])
    step = TrainingStep(engine, Teachers({"ema": teacher}, GROUPS), Objective({"dino": dino}), schedules, GROUPS)
    for i, expected in enumerate(run["losses"]):
        views = [recorded[f"step{i}.crop{c}"] for c in range(len(settings["crops"]))]
        out = step.micro_batch(Batch(by_group(views)))
        assert out.progress is Progress.STEPPED
        assert out.loss.item() == pytest.approx(expected, rel=1e-4)
        center = recorded[f"{freeze}.step{i}.center_after"][0]
        torch.testing.assert_close(dino.centering.center.value, center, rtol=1e-4, atol=1e-6)
    student = fp32_student(engine, golden_network(META, recorded, "init."))
    for kind, state in (("student", student), ("teacher", copied(teacher.state()))):
        expected_state = from_reference_names(recorded, f"{freeze}.{kind}.")
        assert state.keys() == expected_state.keys()
        for name, tensor in expected_state.items():
            ours, theirs = without_key_bias(name, state[name]), without_key_bias(name, tensor)
            # Adam turns rounding into parts of a step of size lr where a gradient is all but zero.
            torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=2e-5, msg=lambda m, n=name: f"{n}: {m}")


def without_key_bias(name, tensor):
    """The keys' bias moves every score of a row alike, so its true gradient is 0 and Adam follows the rounding."""
    if not name.endswith("attn.qkv.bias"):
        return tensor
    queries, _, values = tensor.chunk(3)
    return torch.cat((queries, values))


class _RecordedSchedules(Schedules):
    """The reference's schedules of this run, through ours: the constructor's numbers, not recorded values."""

    def __init__(self, settings, freeze_steps):
        per_epoch = settings["iterations_per_epoch"]
        super().__init__(
            steps=settings["epochs"] * per_epoch,
            lr=max(settings["lr"]),
            min_lr=1e-5,
            warmup_steps=per_epoch,
            weight_decay=0.04,
            weight_decay_end=0.4,
            momentum=settings["teacher_momentum"][0],
            momentum_end=1.0,
            teacher_temp=settings["teacher_temp"],
            warmup_teacher_temp=settings["warmup_teacher_temp"],
            teacher_temp_treads=settings["warmup_teacher_temp_epochs"],
            teacher_temp_tread_steps=per_epoch,
            freeze_steps=freeze_steps,
        )
        for i in range(settings["epochs"] * per_epoch):
            knobs = self.at(i)
            assert knobs.lr == pytest.approx(settings["lr"][i], rel=1e-9, abs=1e-12)
            assert knobs.weight_decay == pytest.approx(settings["weight_decay"][i], rel=1e-9)
            assert knobs.teacher_momentum == pytest.approx(settings["teacher_momentum"][i], rel=1e-9)


@pytest.mark.parametrize(("stage", "freeze"), sampled([(0, "freeze0"), (2, "freeze1"), (0, "freeze1"), (2, "freeze0")]))
def test_training_trajectory_through_deepspeed(stage, freeze):
    """Losses agree to 1e-4, and final student, teacher and center; prototypes free, and frozen for an epoch."""
    run_on_ranks(_trajectory, stage, freeze, world=1)
