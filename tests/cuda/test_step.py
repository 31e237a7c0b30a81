"""The training step of ViT-S/16 and the evaluations on a GPU that is not there: launches, traffic, waits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException

from dino_ds.basics.seeds import sample_keys
from dino_ds.config.crops import EMA
from dino_ds.config.ds_schema import PerformanceOptions
from dino_ds.config.recipe import Recipe
from dino_ds.engine.distributed import RankFlags
from dino_ds.engine.masters import WholeMasters
from dino_ds.evals.classifiers import nearest
from dino_ds.evals.features import raw_pixels
from dino_ds.method.build import build_meta, build_objective, build_schedules
from dino_ds.method.ema import EmaTeacher, TeacherOptions
from dino_ds.method.step import FLAGS
from dino_ds.method.teacher import Teachers
from dino_ds.models.base import CLS
from dino_ds.models.drop_path import step_key
from dino_ds.run.metrics import Meter
from dino_ds.weights.load import Backbone
from tests.fake_cuda import CUDA, FakeCuda, fake_cuda

pytestmark = pytest.mark.slow
IMAGES = 64


def step(
    gpu: FakeCuda, model: dict[str, object], performance: PerformanceOptions, dtype: torch.dtype, checkpoint: int = 0
) -> None:
    """What `TrainingStep.micro_batch` does, by parts, without DeepSpeed's own. "loss": with the prototypes' own part of
    the student's forward pass, and the larger part of their gradient."""
    recipe = Recipe.model_validate({"model": {"backbone": "vit_small_patch16_224", "drop_path": 0.0} | model})
    objective = build_objective(recipe, torch.device(CUDA))
    queries = objective.queries
    student = gpu.module(build_meta(recipe, performance, queries, objective.student_features()), dtype).train()
    student.backbone.checkpoint_segments(checkpoint)
    compare = student.head.prototypes.forward

    def compare_as_loss(*inputs: Any) -> Any:
        with gpu.part("loss"):
            return compare(*inputs)

    student.head.prototypes.forward = compare_as_loss
    with gpu.part("start"):
        masters = [(name, torch.empty(p.shape, device=CUDA)) for name, p in student.named_parameters()]
        network = gpu.module(build_meta(recipe, performance, queries, objective.teacher_features(EMA)))
        options = TeacherOptions(dtype, bool(performance.teacher_copy))
        ema = EmaTeacher(network, [WholeMasters(masters)], options, lambda: dict(student.named_buffers()))
        teachers = Teachers({EMA: ema}, recipe.groups)
        flags, meter = RankFlags(FLAGS, CUDA), Meter(("loss", "entropy"), CUDA)
        if hasattr(student.backbone, "_positions") and student.backbone.pos_embed is not None:
            student.backbone._positions(6, 6)  # makes its matrix
        schedule = build_schedules(recipe, 10).at(0)
    gpu.problems.clear()
    crops = {
        group.name: [torch.empty(IMAGES, 3, group.size, group.size, device=CUDA) for _ in range(group.count)]
        for group in recipe.groups
    }
    with gpu.part("student"):
        drops = student.backbone.options.drop_path > 0
        keys = sample_keys(0, 0, torch.empty(IMAGES, dtype=torch.long, device=CUDA)) if drops else None
    with gpu.part("teacher"):
        outputs = teachers(crops, {}, schedule)
    with gpu.part("loss"):
        (targets,) = objective.targets([outputs], [{}], schedule)
    with gpu.part("student"):
        student_outputs = student(crops, keys, {}, objective.comparisons(targets), step_key(0, 0))
    with gpu.part("loss"):
        loss, scalars = objective.loss(student_outputs, targets, schedule)
    with gpu.part("backward"):
        gpu.backward(loss)
    assert all(p.grad is not None and p.grad.dtype == p.dtype for p in student.parameters())
    with gpu.part("ema"):
        total = torch.cat((*objective.pending(), flags.tensor_to_sum()))
        objective.commit(total[: recipe.head.prototypes + 1])
        teachers.update(schedule)
        meter.add(loss.detach(), *scalars.values())


COPY = PerformanceOptions(teacher_copy=True)  # as on a GPU where nothing is stated

# At most (launches, GB) of a part, counted with torch 2.15.
BF16 = {
    "teacher": (168, 7.6),
    "student": (169, 8.4),
    "loss": (50, 1.2),
    "backward": (431, 19.8),  # GELU is computed again: 3.0 GB here for 1.5 GB of memory
    "ema": (13, 0.6),
}


def test_step_in_bf16():
    with fake_cuda() as gpu:
        step(gpu, {}, COPY, torch.bfloat16)
    gpu.check(BF16)


def test_fp32_is_exact_and_the_same_in_every_run():
    """No convolution of cuDNN, which is TF32 unless told otherwise; no bicubic gradient, which adds up in any order."""
    with fake_cuda() as gpu:
        step(gpu, {"depth": 1}, PerformanceOptions(), torch.float32)
    operators = {name for counts in gpu.parts.values() for name in counts.kernels}
    assert not [name for name in operators if "convolution" in name or ("upsample" in name and "backward" in name)]


# SwiGLU, LayerScale and biases too. Of each size q and k are rotated by one kernel, forward and backward; the tables,
# of all blocks where coordinates are changed, are made by some 50.
ROTARY = {"backbone": "vit_small_plus_patch16_dinov3_qkvb"}


PLAIN, LOW = PerformanceOptions(), torch.bfloat16
OTHERWISE = {
    "fp16 drop path": (313, {"drop_path": 0.1}, COPY, torch.float16),
    "fp32": (274, {}, PLAIN, torch.float32),
    "no teacher copy": (314, {}, PerformanceOptions(teacher_copy=False), LOW),
    "batched depth": (376, {"drop_path": 0.1, "stochastic_depth": "batched"}, PLAIN, LOW),
    "checkpointing": (339, {}, PLAIN, LOW, 2),
    "varlen": (297, {}, PerformanceOptions(attention="varlen"), LOW),
    "rotary": (332, ROTARY, COPY, LOW),
    "rotary, changed": (391, ROTARY | {"rope_rescale": 2.0, "local_cls_norm": True}, COPY, LOW),
}


@pytest.mark.parametrize("case", OTHERWISE)
def test_two_blocks_otherwise(case):
    launches, model, *how = OTHERWISE[case]
    with fake_cuda() as gpu:
        step(gpu, {"depth": 2} | model, *how)
    gpu.check({})
    total = sum(gpu.parts[part].launches for part in BF16)
    assert total <= launches, "\n".join(f"{part}: {gpu.parts[part]}" for part in BF16)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_backbone_s_outputs(dtype: torch.dtype):
    with fake_cuda() as gpu:
        network = gpu.module(build_meta(Recipe(), PerformanceOptions(), {}, [CLS]))
        backbone = Backbone(network.backbone, 224, "here", {})
        images, large = (torch.empty(8, 3, side, side, device=CUDA) for side in (224, 384))
        with torch.autocast("cuda", dtype=dtype, enabled=dtype != torch.float32), gpu.part("features"):
            assert backbone.features(images).device == CUDA
        with torch.autocast("cuda", dtype=dtype, enabled=dtype != torch.float32):
            for output in (backbone.attention(images), backbone.patch_tokens(large), backbone.last_tokens(images, 4)):
                assert output.float().isfinite().device == CUDA
    gpu.check({"features": (277, 0.8)})


def test_what_is_made_of_features():
    with fake_cuda() as gpu:
        bank, queries = torch.empty(5000, 384, device=CUDA), torch.empty(1000, 384, device=CUDA)
        nearest(queries, bank, 20)
        raw_pixels(torch.empty(64, 3, 224, 224, device=CUDA))
    gpu.check({})


def test_the_fake_gpu_notices_what_a_real_one_would_have_to_wait_for():
    with fake_cuda() as gpu:
        x, host = torch.empty(4, 4, device=CUDA), torch.empty(4, 4)
        with gpu.part("copy"):
            host.to(CUDA)
        with gpu.part("mix"), pytest.raises(RuntimeError):
            x + host
        with gpu.part("read"), pytest.raises(DataDependentOutputException):
            float(x.sum())
        with gpu.part("mask"), pytest.raises(Exception, match="nonzero"):
            x[x > 0]
    assert {problem.split(":")[0] for problem in gpu.problems} == {"copy", "mix", "read", "mask"}
    with pytest.raises(AssertionError, match="copy: _to_copy between host and device"):
        gpu.check({})
