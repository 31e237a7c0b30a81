"""Speed without a trace in what is learned: one read of the device a step; levers, compiled blocks give the same."""

from __future__ import annotations

import functools
import gc
from typing import Any
from unittest import mock

import pytest
import torch
from torch._dynamo.utils import counters
from torch.utils._python_dispatch import TorchDispatchMode

from dino_ds.basics.seeds import sample_keys
from dino_ds.config.ds_schema import PerformanceOptions
from dino_ds.config.loading import load_recipe
from dino_ds.data.feed import Batch
from dino_ds.engine.engine import Progress
from dino_ds.errors import ConfigError
from dino_ds.method.networks import build_meta
from dino_ds.models.base import Backbone
from dino_ds.planning.measure import build_trial, resolve
from tests.engine.harness import build_step, crops, ds_config, run_step, run_windows
from tests.planning.measure.tiny import TINY, tiny_ds
from tests.ranks import run_on_ranks
from tests.reference import copied
from tests.sample import sampled

_CASES = [(0, "fp32")] + [(stage, precision) for stage in (1, 2, 3) for precision in ("fp32", "bf16", "fp16")]


class HostReads(TorchDispatchMode):
    """Counts what makes the host wait for a device: `.item()`, `float()`, `bool()`, `.tolist()`, `nonzero`."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += any(name in str(function) for name in ("_local_scalar_dense", "nonzero", "is_nonzero"))
        return function(*args, **(kwargs or {}))


def _reads_of_a_window(stage: int, precision: str) -> list[int]:
    """Reads of each of the two micro-batches of a window, after two windows that fill what is made lazily. And
    DeepSpeed's own waits for all that the device has to do, which do nothing on a CPU."""
    from deepspeed.accelerator import get_accelerator

    settings = {"fp16_settings": {"initial_scale_power": 4}} if precision == "fp16" else {}
    step = build_step(ds_config(stage, precision, 8, accumulation=2, gradient_clipping=1.0, **settings))
    run_windows(step, 0, 2)
    indices = torch.arange(step.engine.config.micro_batch)
    inputs = Batch(crops(indices), sample_keys(0, 0, indices))
    counts = []
    cpu = get_accelerator()
    gc.collect()  # an engine of an earlier test waits for the device when it is freed
    for _ in range(2):
        with HostReads() as reads, mock.patch.object(cpu, "synchronize", wraps=cpu.synchronize) as waits:
            out = step.micro_batch(inputs)
        counts.append(reads.count + waits.call_count)
    assert out.progress is Progress.STEPPED
    return counts


@pytest.mark.parametrize(("world", "stage", "precision"), sampled([(w, *c) for c in _CASES for w in (2, 1)]))
def test_the_host_reads_the_device_once_a_step(stage: int, precision: str, world: int):
    """Whether the step is applied decides EMA, center and schedules. Nothing else is read, and nothing in between."""
    for counts in run_on_ranks(_reads_of_a_window, stage, precision, world=world):
        assert counts == [0, 1]


def _teacher(stage: int, copy: bool) -> tuple[dict[str, torch.Tensor], list[float]]:
    section = {"dino_ds": {"teacher_copy": True}} if copy else {}
    step = build_step(ds_config(stage, "bf16", 8, **section))
    losses = run_windows(step, 0, 3)
    state = copied(step.teachers["ema"].state())
    step.teachers["ema"].load_state({name: value * 1.01 for name, value in state.items()})
    return state, [*losses, *run_windows(step, 3, 1)]


@pytest.mark.parametrize(("stage", "world"), [(1, 2), (3, 1)])
def test_a_teacher_with_its_matrices_in_bf16_is_the_same_to_the_bit(stage: int, world: int):
    for plain, cast in zip(*(run_on_ranks(_teacher, stage, copy, world=world) for copy in (False, True)), strict=True):
        assert plain[1] == cast[1]
        assert all(torch.equal(plain[0][name], cast[0][name]) for name in plain[0])


def test_batched_depth_is_compiled_where_all_blocks_keep_as_many_crops():
    performance = PerformanceOptions(compile="default")
    settings = {"data.source": "photos", "model.stochastic_depth": "batched", "model.drop_path": "0.3"}
    with pytest.raises(ConfigError, match=r"take model\.drop_path_growth uniform"):
        build_meta(load_recipe("vits16", settings), performance, {}, ["cls"])
    build_meta(load_recipe("vits16", settings | {"model.drop_path_growth": "uniform"}), performance, {}, ["cls"])


# KoLeo, which is not compiled, takes the logarithm of distances between the nearly equal features of four images: it
# makes of a rounding half a percent of the loss.
CHANGES = {
    "data.source": "photos", "ibot_head.prototypes": "48", "ibot_head.hidden": "48", "ibot_head.bottleneck": "16",
    "objective.koleo_weight": "0",
}  # fmt: skip


def _steps(name: str, stage: int, backend: str) -> tuple[list[float], list[int], dict[str, int]]:
    """Losses of three steps, graphs of Dynamo after each, and graph breaks; without `backend` nothing is compiled."""
    torch._dynamo.reset()
    counters.clear()
    recipe = load_recipe(name, TINY | CHANGES)
    ds = tiny_ds(stage, dino_ds={"compile": "default" if backend else "off"})
    compiled = functools.partialmethod(Backbone.compile_segments, backend=backend)
    with mock.patch.object(Backbone, "compile_segments", compiled):
        trial = build_trial(*resolve(recipe, ds, "test.json", 4))
    losses, graphs = [], []
    for window in range(3):
        losses += [float(out.loss) for out in run_step(trial.step, recipe, window, 4)]
        graphs.append(counters["stats"]["unique_graphs"])
    return losses, graphs, dict(counters["graph_break"])


@pytest.mark.parametrize(
    ("name", "stage"),
    [("dinov3_vitl16", 2), *(pytest.param("dinov2_vitl14", stage, marks=pytest.mark.full) for stage in (0, 1))],
)
def test_compiled_blocks(name, stage):
    """All are made in the first step, whatever masks and crops the next ones have. Losses to 1e-5: FP32 sums in another
    order, which Adam makes larger in three steps."""
    ((plain, *_),) = run_on_ranks(_steps, name, stage, "", world=1)
    ((losses, graphs, breaks),) = run_on_ranks(_steps, name, stage, "aot_eager", world=1)
    assert graphs == [graphs[0]] * 3 and graphs[0] <= 4 and not breaks
    assert losses == pytest.approx(plain, rel=1e-5)
