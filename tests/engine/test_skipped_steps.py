"""At every stage a skipped step changes nothing, and clipping by part is that of torch on one process."""

from __future__ import annotations

from collections import OrderedDict

import pytest
import torch
from torch import nn

from dino_ds.data.feed import Batch
from dino_ds.engine import distributed
from dino_ds.engine.engine import Engine, Progress
from dino_ds.engine.optim import WHOLE, OptimizerOptions
from dino_ds.errors import ConfigError
from dino_ds.models.base import CLS
from dino_ds.models.network import Network, Query
from tests.engine import harness
from tests.engine.harness import build_step, crops, ds_config, fp32_student, max_difference, run_windows, tiny_network
from tests.ranks import run_on_ranks
from tests.reference import copied
from tests.sample import sampled

BATCH = 8


def _state(step):
    student = fp32_student(step.engine, tiny_network())
    state = {f"student.{name}": tensor for name, tensor in student.items()}
    state.update({f"teacher.{name}": tensor for name, tensor in copied(step.teachers["ema"].state()).items()})
    state.update({name: tensor.clone() for name, tensor in step.engine.state().tensors.items()})  # moments too
    state["center"] = step.objective.statistics["center"].value.clone()
    return state


def _fp16_run(stage, initial_scale_power):
    settings = {"initial_scale_power": initial_scale_power, "hysteresis": 1, "loss_scale_window": 1000}
    step = build_step(ds_config(stage, "fp16", BATCH, 2, fp16_settings=settings))
    before, schedule, scales, window = _state(step), step.schedule, [step.engine.loss_scale], 0
    while step.applied_steps == 0 and window < 40:
        run_windows(step, window, 1, BATCH)
        if step.applied_steps == 0:
            assert step.schedule == schedule and max_difference(before, _state(step)) == 0.0
            assert not step.objective.statistics["center"].pending().any()
        scales.append(step.engine.loss_scale)
        window += 1
    losses = run_windows(step, window, 2, BATCH)
    after = {name: tensor for name, tensor in _state(step).items() if name in before}  # without moments, as yet
    return window - 1, scales, losses, step.applied_steps, max_difference(before, after)


@pytest.mark.parametrize("stage", [2, 3, pytest.param(1, marks=pytest.mark.full)])
def test_fp16_overflow_moves_nothing_then_training_goes_on(stage):
    for skipped, scales, losses, applied, moved in run_on_ranks(_fp16_run, stage, 12):
        assert skipped >= 2
        assert scales[0] == 2.0**12 and scales[-1] < scales[0]
        assert applied == 3 and moved > 0
        assert all(loss == loss for loss in losses)


def _nan_on_rank_one(stage, precision, kind="adamw", **sections):
    options = harness.OPTIMIZERS[kind]
    step = build_step(ds_config(stage, precision, BATCH, 2, gradient_clipping=1.0, **sections), options=options)
    run_windows(step, 0, 1, BATCH)
    before, schedule = _state(step), step.schedule
    for m in range(2):
        views = crops(torch.arange(2) + 100 + 2 * distributed.rank())
        if m == 0 and distributed.rank() == 1:
            views["local"][0][0, 0, 0, 0] = float("nan")
        out = step.micro_batch(Batch(views))
    skipped = out.progress is Progress.SKIPPED
    unmoved = max_difference(before, _state(step)) == 0.0 and step.schedule == schedule and step.applied_steps == 1
    after = run_windows(step, 1, 2, BATCH)
    # The same run without the bad window in between.
    clean = build_step(ds_config(stage, precision, BATCH, 2, gradient_clipping=1.0, **sections), options=options)
    straight = run_windows(clean, 0, 3, BATCH)[1:]
    return skipped, unmoved, after, straight


# DeepSpeed's BF16_Optimizer has a way of its own to skip.
BF16_OPTIMIZER = {"data_types": {"grad_accum_dtype": "fp32"}}
NAN_CELLS = [
    (0, "fp32", "sgd", {}), (1, "bf16", "adamw", {}), (1, "bf16", "adamw", BF16_OPTIMIZER), (2, "bf16", "lars", {}),
    (0, "fp32", "muon", {}), (3, "bf16", "muon", {}), (3, "fp32", "adamw", {}),
]  # fmt: skip


@pytest.mark.parametrize(
    ("stage", "precision", "kind", "sections"), sampled(NAN_CELLS, lambda cell: (cell[0], cell[2], [*cell[3]]))
)
def test_nan_on_one_rank_skips_on_all_and_leaves_no_trace(stage, precision, kind, sections):
    """The run after the bad window equals a run that never met it, bit for bit, momentum included."""
    for skipped, unmoved, after, straight in run_on_ranks(_nan_on_rank_one, stage, precision, kind, **sections):
        assert skipped and unmoved
        assert after == straight


IMAGES_A_STEP, LIMIT, STEPS = 8, 0.5, 2
PARTS = ("backbone", "head", "ibot_head")
# So large an epsilon makes Adam's first steps those of gradient descent at learning rate 1: clipping shows in them.
LR = EPS = 1e3
SCHEDULE = harness.tiny_schedules(lr=LR, constant=True, warmup_steps=0, weight_decay=0.0, weight_decay_end=0.0).at(0)
SUB_GROUPS = {"zero": {"sub_group_size": 3000, "stage3_param_persistence_threshold": 10}}


def _network() -> Network:
    torch.manual_seed(5)
    heads = {name: _Head() for name in PARTS[1:]}
    return Network(tiny_network(drop_path=0.0).backbone, heads, {name: Query(name, CLS) for name in heads})


class _Head(nn.Sequential):
    """Has parameters of every group, and gives plain tensors."""

    def __init__(self) -> None:
        super().__init__(OrderedDict(mlp=nn.Linear(32, 16), prototypes=nn.Linear(16, 40, bias=False)))

    def forward(self, features: torch.Tensor, comparison: None = None) -> torch.Tensor:
        return super().forward(features)


def _loss(outputs):
    return 0.05 * outputs["head"].square().sum(-1).mean() + 8e-3 * outputs["ibot_head"].sum(-1).mean()


def _part(name: str) -> str:
    return name.partition(".")[0]


def _by_torch(clip_by):
    """(weights, norms of the parts in the first step) on one process: the slow, obvious way."""
    network = _network()
    optimizer = torch.optim.AdamW(network.parameters(), lr=LR, eps=EPS, weight_decay=0.0)
    first = {}
    for i in range(STEPS):
        optimizer.zero_grad()
        _loss(network(crops(torch.arange(IMAGES_A_STEP) + i * IMAGES_A_STEP), None)).backward()
        parts = {"network": list(network.parameters())}
        if clip_by == "part":
            parts = {part: [p for name, p in network.named_parameters() if _part(name) == part] for part in PARTS}
        norms = {part: float(torch.nn.utils.clip_grad_norm_(own, LIMIT)) for part, own in parts.items()}
        first = first or norms
        optimizer.step()
    return {name: p.detach().clone() for name, p in network.named_parameters()}, first


def _by_engine(stage, precision, clip_by, accumulation=1, **sections):
    """Weights at the start, after each step, and the norm that the engine tells in the first."""
    sections = {"gradient_clipping": LIMIT, **sections}
    config = ds_config(stage, precision, IMAGES_A_STEP, accumulation, **sections)
    engine = Engine(_network(), config, OptimizerOptions(clip_by=clip_by, eps=EPS))
    engine.set_groups(SCHEDULE)
    weights, norms = [fp32_student(engine, _network())], []
    for i in range(STEPS):
        for m in range(accumulation):
            start = i * IMAGES_A_STEP + config.micro_batch * (m * distributed.world_size() + distributed.rank())
            engine.backward(_loss(engine(crops(torch.arange(start, start + config.micro_batch)), None)))
            progress = engine.step()
        assert progress is Progress.STEPPED
        norms.append(engine.grad_norm)
        weights.append(fp32_student(engine, _network()))
    return weights, norms[0]


@pytest.mark.parametrize("clip_by", ["part", WHOLE])
def test_stages_clip_as_torch_does(clip_by):
    """fp32, weights to 1e-6: sums over ranks in another order; gradients are at most 0.5 long."""
    expected, norms = _by_torch(clip_by)
    total = sum(norm**2 for norm in norms.values()) ** 0.5
    runs = [(0, 1, {}), (1, 1, {}), (2, 2, {}), (3, 1, {}), (3, 1, SUB_GROUPS)]
    for stage, accumulation, sections in runs if clip_by == "part" else runs[:1]:
        for weights, norm in run_on_ranks(_by_engine, stage, "fp32", clip_by, accumulation, **sections):
            assert max_difference(weights[-1], expected) < 1e-6, (stage, sections)
            assert norm == pytest.approx(total, rel=1e-5), "of the whole network, before clipping"
    assert max_difference(expected, _by_torch("part" if clip_by == WHOLE else WHOLE)[0]) > 1e-3


LOW = [(1, "bf16", {}), (1, "bf16", BF16_OPTIMIZER), (2, "bf16", {}), (3, "bf16", {})]
LOW += [(stage, "fp16", {"fp16_settings": {"initial_scale_power": 7}}) for stage in (1, 2, 3)]


@pytest.mark.parametrize(("stage", "precision", "sections"), sampled(LOW))
def test_low_precision_clips_each_part_to_the_limit(stage, precision, sections):
    """A step is the clipped gradient to |g| / EPS, so its norm is the limit to 1e-3, whatever rounded the gradient; the
    norm before it is that of FP32 to 5 %, gradients of 2 ranks being summed in the low precision."""
    _, norms = _by_torch("part")
    total = sum(norm**2 for norm in norms.values()) ** 0.5
    for (before, after, _), norm in run_on_ranks(_by_engine, stage, precision, "part", **sections):
        assert norm == pytest.approx(total, rel=0.05)
        for part in PARTS:
            moved = [(after[name] - before[name]).square().sum() for name in after if _part(name) == part]
            length = float(torch.stack(moved).sum().sqrt())
            clipped = min(norms[part], LIMIT)
            assert length == pytest.approx(clipped, rel=1e-3 if norms[part] > LIMIT else 0.05), part


def _refused(sections, message):
    with pytest.raises(ConfigError, match=rf"^[^\n]*{message}[^\n]*$"):
        Engine(_network(), ds_config(1, "bf16", IMAGES_A_STEP, **sections), OptimizerOptions(clip_by="part"))


def test_where_it_cannot_act_it_is_refused():
    offload = {"gradient_clipping": 1.0, "zero": {"offload_optimizer": {"device": "cpu"}}}
    run_on_ranks(_refused, {}, "clips nothing with gradient_clipping 0", world=1)
    run_on_ranks(_refused, offload, "does not go with zero_optimization.offload_optimizer", world=1)
