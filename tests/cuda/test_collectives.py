"""Every collective of ours in a job of eight ranks, on GPUs that are not there: on the device, contiguous, its dtype.

Not seen here: DeepSpeed's reduction of gradients and, under ZeRO 3, of weights, for its engine is played; objects, as
saves and resumes exchange them, which torch moves to the device.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from dino_ds.config.crops import EMA
from dino_ds.config.ds_schema import DsConfig, PerformanceOptions
from dino_ds.config.loading import load_recipe
from dino_ds.config.recipe import Recipe
from dino_ds.costs.rehearse import _frozen_source, _inputs, _single_rank_recipe
from dino_ds.costs.step_costs import frozen_spec
from dino_ds.data.feed import Batch
from dino_ds.engine import engine as deepspeed_engine
from dino_ds.engine.engine import Progress
from dino_ds.engine.masters import FlatMasters, PartitionedMasters
from dino_ds.engine.muon import Matrix, Muon, Piece
from dino_ds.engine.optim import Lars, norm_in_one_pass
from dino_ds.engine.process import leave
from dino_ds.evals import classifiers
from dino_ds.method.build import build_objective, build_schedules
from dino_ds.method.ema import EmaTeacher, TeacherOptions, _PartitionedUpdater
from dino_ds.method.networks import build_meta
from dino_ds.method.specs.own import teachers_of
from dino_ds.method.step import TrainingStep
from dino_ds.method.teacher import Teacher, Teachers
from dino_ds.models.batch_norm import use_own_batch_norm
from dino_ds.models.network import Network
from dino_ds.run.metrics import Meter
from tests.fake_cuda import CUDA, FakeCuda, fake_cuda, needs_fake_cuda

pytestmark = [pytest.mark.slow, needs_fake_cuda]
RANKS = 8
Collective = tuple[str, tuple[tuple[torch.dtype, tuple[int, ...]], ...]]


class Collectives(TorchDispatchMode):
    """Lists collectives, as (name, dtype and shape of each tensor), and refuses what NCCL would."""

    def __init__(self) -> None:
        super().__init__()
        self.called: list[Collective] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
            name = func._schema.name.removeprefix("c10d::").strip("_")
            assert all(t.device == CUDA and t.is_contiguous() for t in tensors), (name, tensors)
            self.called.append((name, tuple((t.dtype, tuple(t.shape)) for t in tensors)))
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def rank_of_eight(rank: int) -> Iterator[Collectives]:
    leave()
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=RANKS)
    try:
        with Collectives() as collectives:
            yield collectives
    finally:
        dist.destroy_process_group()


class PlayedEngine:
    """An engine as far as a step and teachers ask, on the fake GPU; its masters are cut into shards, as at stage 2."""

    unsynced_statistics = list
    device = CUDA

    def __init__(self, network: Network, gpu: FakeCuda) -> None:
        self._network, self._gpu = network, gpu
        self.config = DsConfig({}, IMAGES, 1, 2, "bf16", False, 0.0, "0", PerformanceOptions())

    def __call__(self, *inputs: Any) -> Any:
        return self._network(*inputs)

    def masters(self) -> list[FlatMasters]:
        """Two groups, as of two learning rates."""
        names = [(name, p.numel()) for name, p in self._network.named_parameters()]
        return [self._flat(names[:10]), self._flat(names[10:])]

    def _flat(self, names: list[tuple[str, int]]) -> FlatMasters:
        layout, offset = [], 0
        for name, size in names:
            layout.append((name, offset))
            offset += size
        numel = -(-offset // RANKS) * RANKS
        return FlatMasters(numel, layout, lambda: torch.empty(numel // RANKS, device=CUDA), None)

    def buffers(self, saved: bool = False) -> dict[str, Tensor]:
        return dict(self._network.named_buffers())

    def backward(self, loss: Tensor) -> None:
        self._gpu.backward(loss)

    def step(self) -> Progress:
        return Progress.STEPPED

    def freeze_prototypes(self, frozen: bool) -> None:
        """Nothing is frozen."""

    freeze_backbone = set_groups = reset_optimizer_state = freeze_prototypes


def a_step(recipe: Recipe, rank: int) -> list[Collective]:
    recipe, performance = _single_rank_recipe(recipe), PerformanceOptions()
    with fake_cuda() as gpu, contextlib.ExitStack() as stack:
        # Fake tensors know no coalesced operators: each gather is one of its own here.
        manager = "torch.distributed.distributed_c10d._coalescing_manager"
        stack.enter_context(mock.patch(manager, contextlib.nullcontext))
        stack.enter_context(mock.patch("torch.cuda.Event"))
        collectives = stack.enter_context(rank_of_eight(rank))
        source = _frozen_source(recipe, frozen_spec(recipe))
        objective = build_objective(recipe, CUDA, source)
        features, queries = objective.student_features(), objective.queries
        student = gpu.module(build_meta(recipe, performance, queries, features), torch.bfloat16).train()
        engine: Any = PlayedEngine(student, gpu)
        teachers: dict[str, Teacher] = {}
        for spec in teachers_of(recipe):
            network = gpu.module(build_meta(recipe, performance, queries, objective.teacher_features(spec.name)))
            teachers[spec.name] = Teacher(network, torch.bfloat16)
            if spec.name == EMA:
                options = TeacherOptions(torch.bfloat16)
                teachers[EMA] = EmaTeacher(network, engine.masters(), options, engine.buffers)
        schedules = build_schedules(recipe, 10)
        step = TrainingStep(engine, Teachers(teachers, recipe.groups), objective, schedules, recipe.groups)
        step.schedule = schedules.at(schedules.steps)
        batch = _inputs(recipe, recipe.groups, IMAGES)
        there = {name: [torch.empty_like(crop, device=CUDA) for crop in group] for name, group in batch.crops.items()}
        hidden = {n: {k: torch.empty_like(t, device=CUDA) for k, t in mask.items()} for n, mask in batch.masks.items()}
        collectives.called.clear()  # of construction
        with mock.patch("torch.Tensor.is_pinned", return_value=False):
            out = step.micro_batch(Batch(there, torch.empty(IMAGES, dtype=torch.long, device=CUDA), hidden))
        assert out.progress is Progress.STEPPED and out.loss.device == CUDA
    return collectives.called


IMAGES = 4
SMALL = {"model.depth": "1", "crops.num_local": "2", "head.prototypes": "256", "data.source": "photos"}
SINKHORN = {"objective.centering": "sinkhorn", "objective.koleo_ranks": "all"}
# All-reduces: one of center and votes; Sinkhorn-Knopp makes four for each head, KoLeo's backward pass one; the coding
# rate one each way.
OBJECTIVES = {
    "coding_rate": ("small", {}, {"allreduce": 3}),
    "dinov2": ("dinov2_vits14", SINKHORN, {"allgather": 1, "allreduce": 10}),
    "dinov3": ("quickstart_gram", {}, {"allreduce": 1}),
    "distillation": ("distill_vits16", {}, {"allreduce": 9}),
}


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_collectives_of_a_step(objective):
    """FP32, whatever the precision of the networks; the same ones in the same order on other ranks."""
    name, changes, expected = OBJECTIVES[objective]
    recipe = load_recipe(name, SMALL | changes)
    first = a_step(recipe, 0)
    assert objective != "dinov2" or first == a_step(recipe, RANKS - 1)
    assert {dtype for _, tensors in first for dtype, _ in tensors} == {torch.float32}
    assert Counter(operation for operation, _ in first) == expected | {"allgather_base": 2}  # two groups of the teacher


def test_collectives_of_the_engine():
    """Ours: the teacher's under ZeRO 3, the gradient's norm, LARS, Muon, and new weights, on a resume too."""
    with values_on_gpu() as collectives:
        shard = torch.ones(10, device=CUDA)
        weights = {"a": torch.empty(10, 8, device=CUDA)}
        _PartitionedUpdater(PartitionedMasters([("a", 0, 10)], lambda: shard, None), weights, CUDA).update(0.1)
        groups = [torch.zeros(8 * n, dtype=torch.bfloat16, device=CUDA) for n in (3, 5)]
        deepspeed_engine._gather_groups(groups, [list(group.chunk(RANKS)) for group in groups], [None, None])
        zero2: Any = SimpleNamespace(
            averaged_gradients={0: [shard]}, scaled_global_norm=None, unscale_and_clip_grads=None, device=CUDA
        )
        zero2.optimizer = SimpleNamespace(param_groups=[{"part": "network"}])
        zero2.dp_process_group = None
        norm_in_one_pass(zero2)
        assert zero2.scaled_global_norm().device == CUDA
        lars = Lars([{"params": [shard], "lr": 0.1, "weight_decay": 0.1}], 0.9, 0.001)
        lars.lay_out(shard, [Piece("a", 0, 4, 0), Piece("c", 0, 6, 4)], list("abcde"), None)
        shard.grad = torch.ones(10, device=CUDA)
        lars.step()
        muon = Muon([{"params": [shard], "kind": "muon", "weight_decay": 0.1}], {}, 0.95, 1.0)
        matrices = {"a": Matrix(8, 10)}
        muon.lay_out(shard, matrices, [[Piece("a", 10 * r, 10 * (r + 1), 0)] for r in range(RANKS)], None)
        muon.step()
        of_another = [[] for _ in range(RANKS - 1)] + [[Piece("a", 0, 80, 0)]]  # this rank has nothing to send
        muon.lay_out(shard, matrices, of_another, None)
        with mock.patch("torch.distributed.all_to_all_single") as exchange:  # the fake group knows no empty tensor
            muon.step()
    assert [[t.device for t in call.args[:2]] for call in exchange.call_args_list] == [[CUDA, CUDA]] * 2
    assert [(name, tensors[0][0]) for name, tensors in collectives.called] == [
        ("allgather_base", torch.float32),
        ("allgather_into_tensor_coalesced", torch.bfloat16),
        ("allreduce", torch.float64),
        ("allreduce", torch.float64),
        ("alltoall_base", torch.float32),
        ("alltoall_base", torch.float32),
    ]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", [(64, 32, 28, 28), (640, 256)])
def test_collectives_of_batch_norm(shape, dtype):
    """FP32 whatever it normalizes; CUDA's kernels, which fake tensors do not know, are played by shapes alone."""
    sums = {"batch_norm_stats": 2, "batch_norm_gather_stats_with_counts": 2, "batch_norm_backward_reduce": 4}
    played = {name: lambda x, *_, n=n, **__: (torch.empty(x.shape[1], device=CUDA),) * n for name, n in sums.items()}
    like = {name: lambda x, *_: torch.empty_like(x) for name in ("batch_norm_elemt", "batch_norm_backward_elemt")}
    made = nn.BatchNorm2d if len(shape) == 4 else nn.BatchNorm1d
    with fake_cuda() as gpu, mock.patch.multiple("torch", **played, **like), rank_of_eight(3) as collectives:
        network = nn.Sequential(made(shape[1], device="meta"))
        use_own_batch_norm(network, True)
        x = torch.empty(shape, device=CUDA, dtype=dtype, requires_grad=True)
        gpu.backward(gpu.module(network, dtype).train()(x * 1).float().sum())
    assert [name for name, _ in collectives.called] == ["allgather_base", "allreduce"]
    assert {tensor[0] for _, tensors in collectives.called for tensor in tensors} == {torch.float32}


class OnGpu(Tensor):
    """A tensor that says it is on the GPU, and has its values on the host."""

    values: Tensor

    @staticmethod
    def __new__(cls, values: Tensor) -> OnGpu:
        made: OnGpu = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, values.size(), values.stride(), values.storage_offset(), dtype=values.dtype, device=CUDA
        )
        made.values = values
        return made

    def tolist(self) -> Any:
        return self.values.tolist()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError("only inside values_on_gpu")


class _Values(TorchDispatchMode):
    """Computes on the values; refuses operators that mix devices."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        there = any(isinstance(t, OnGpu) for t in given)
        if there and "copy" not in func._schema.name:
            assert all(isinstance(t, OnGpu) or not t.dim() for t in given), f"{func} mixes devices"
        known = {id(_values(t)): t for t in given}
        kwargs = dict(kwargs or {})
        if kwargs.get("device") is not None:
            there, kwargs["device"] = torch.device(kwargs["device"]).type == "cuda", torch.device("cpu")
        args, kwargs = tree_map_only(OnGpu, _values, (args, kwargs))
        found = func(*args, **kwargs)
        return tree_map_only(Tensor, lambda t: known.get(id(t), OnGpu(t) if there else t), found)


def _values(tensor: Tensor) -> Tensor:
    return tensor.values if isinstance(tensor, OnGpu) else tensor


@contextlib.contextmanager
def values_on_gpu(rank: int = 0) -> Iterator[Collectives]:
    """A rank of eight whose tensors on the GPU have values, which no collective changes."""
    torch._C._ensureCUDADeviceGuardSet()
    torch._C._set_only_lift_cpu_tensors(True)  # else torch.tensor(..., device=CUDA) asks the driver
    gather = mock.patch("dino_ds.engine.distributed.gather_objects", lambda value: [value] * RANKS)
    try:
        driver = {"_lazy_init": lambda: None, "get_device_capability": lambda device=None: (9, 0)}
        with gather, mock.patch.multiple("torch.cuda", **driver), _Values(), rank_of_eight(rank) as collectives:
            yield collectives
    finally:
        torch._C._set_only_lift_cpu_tensors(False)


def labeled() -> tuple[Tensor, Tensor]:
    """Features (64, 8) and labels (64,)."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(64, 8, generator=generator).to(CUDA), (torch.arange(64) % 4).to(CUDA)


def _linear(features: Tensor, labels: Tensor) -> None:
    with mock.patch.object(classifiers, "_MAX_STEPS", 2):
        classifiers.fit_linear(features, labels, 4)


def _metrics(features: Tensor, labels: Tensor) -> None:
    meter = Meter(("loss",), CUDA)
    meter.add(features[0, 0])
    assert meter.read() == {"loss": pytest.approx(float(features[0, 0]))}


INT64, FP32 = torch.int64, torch.float32
EVALUATIONS: dict[str, tuple[Callable[[Tensor, Tensor], object], list[tuple[str, torch.dtype]]]] = {
    "knn": (lambda x, y: classifiers.knn_accuracies(x, y, x, y, (1, 5), 0.07), [("allreduce", INT64)]),
    "ridge": (lambda x, y: classifiers.fit_ridge(x, y, 4), [("allreduce", FP32)]),
    "linear": (_linear, [("broadcast", FP32), ("allreduce", FP32)]),
    "metrics": (_metrics, [("allreduce", FP32)]),
}


@pytest.mark.parametrize("name", EVALUATIONS)
def test_collectives_of_evaluations(name):
    evaluate, expected = EVALUATIONS[name]
    with values_on_gpu() as collectives:
        evaluate(*labeled())
    found = [(operation, tensors[0][0]) for operation, tensors in collectives.called]
    assert set(found) == set(expected) and found[: len(expected)] == expected
