"""Gram anchoring: keeps the similarities between the patches of an image close to those of a teacher, which the EMA
teacher replaces now and then, or which never moves. Source: DINOv3, section 4 (arXiv 2508.10104);
facebookresearch/dinov3 `gram.rep_update`. Only similarities are compared: the teacher may have another width, features
may rotate."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dino_ds.basics.ranges import device_kind
from dino_ds.config.crops import GLOBAL, Masks, teacher_sizes
from dino_ds.config.recipe import Recipe
from dino_ds.data.normalization import Normalization
from dino_ds.engine import distributed, process
from dino_ds.engine.schedules import ScheduleValues
from dino_ds.errors import ConfigError
from dino_ds.method.frozen import FixedTeacher, allocate, meta_network, place_frozen
from dino_ds.method.networks import TeacherParts, TermParts, build_meta
from dino_ds.method.objective import Needs, Outputs, StudentOutputs, Term, TermLoss
from dino_ds.method.specs.ours import GRAM, SNAPSHOT, GramSpec, GramTeacherSpec
from dino_ds.method.teacher import Teacher
from dino_ds.models.base import patches_of, resized_patches
from dino_ds.models.network import Network
from dino_ds.models.prototypes import tf32
from dino_ds.weights.frozen import FrozenSource, find_frozen

# Bytes of the student's similarities in memory at a time; the teacher's take as much again.
_PIECE = {"cpu": 4 * 2**20, "cuda": 128 * 2**20}


def gram_loss(student: Tensor, teacher: Tensor) -> Tensor:
    """The formula of the paper: the mean squared difference of student's and teacher's cosines over all pairs of rows.
    student (matrices, n, d), teacher (matrices, n, d')."""
    cosines, wanted = (unit @ unit.mT for unit in (_unit(student), _unit(teacher)))
    return (cosines - wanted).square().mean()


class GramTerm(Term):
    """`gram_loss` of the patches of each image, in tiles. FP32.

    The student's patches are those of its global crops, hidden ones too. Where the schedule's weight is 0 nothing is
    computed, and the loss is 0.

    Args:
        teacher: name of the teacher that gives the patches to compare with.
        seen: group of the teacher's crops, the same image regions in this size or another.
    """

    def __init__(self, teacher: str, seen: str) -> None:
        self._teacher, self._seen, self._own = teacher, patches_of(seen), patches_of("global")
        self.needs = Needs(student=(self._own,), teachers={teacher: (self._seen,)})

    def targets(self, window: Sequence[Outputs], masks: Sequence[Masks], schedule: ScheduleValues) -> list[Any]:
        """The teacher's patches (images, n, d) of each micro-batch, on its own grid; None while the weight is 0."""
        if not schedule.weights[GRAM]:
            return [None] * len(window)
        return [teachers[self._teacher][self._seen] for teachers in window]

    def loss(self, student: StudentOutputs, targets: Tensor | None, schedule: ScheduleValues) -> TermLoss:
        features = student[self._own]
        assert isinstance(features, Tensor)
        with torch.autocast(features.device.type, enabled=False):
            if targets is None:  # every parameter must have a gradient: ZeRO 3 would repeat an old one
                return TermLoss(0.0 * features.float().sum(), {})
            wanted = resized_patches(targets, features.shape[1])
            return TermLoss(tiled_gram_loss(features, wanted), {})


def build_gram(spec: GramSpec, parts: TermParts) -> GramTerm:
    groups = (group.name for group in parts.recipe.groups if GRAM in group.teachers)
    return GramTerm(spec.teacher, next(groups, GLOBAL))


def tiled_gram_loss(student: Tensor, teacher: Tensor) -> Tensor:
    """`gram_loss`, with its gradient, which only the student has, in the same pass, in pieces of `_PIECE` bytes."""
    return _GramLoss.apply(_unit(student), _unit(teacher.detach()), student.dtype != torch.float32)


def _unit(rows: Tensor) -> Tensor:
    return F.normalize(rows.float(), dim=-1)


class _GramLoss(torch.autograd.Function):
    """The loss of unit rows x, L = sum (x x^T - y y^T)^2 / count; its gradient is 4 (x x^T - y y^T) x / count."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, low: bool) -> Tensor:
        matrices, n, _ = x.shape
        size = max(1, _PIECE.get(device_kind(x.device.type), _PIECE["cuda"]) // (4 * n))  # rows of similarities
        together, rows = max(1, size // n), min(size, n)
        grad = torch.empty_like(x) if ctx.needs_input_grad[0] else None
        total, scale = x.new_zeros(()), 4 / (matrices * n * n)
        with tf32(low):
            for first in range(0, matrices, together):
                part = slice(first, min(first + together, matrices))
                for start in range(0, n, rows):
                    block = slice(start, min(start + rows, n))
                    difference = (x[part, block] @ x[part].mT).sub_(y[part, block] @ y[part].mT)
                    total += torch.linalg.vecdot(difference, difference).sum()
                    if grad is not None:
                        grad[part, block] = (difference @ x[part]).mul_(scale)
        ctx.save_for_backward(grad)
        return total * (scale / 4)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = ctx.saved_tensors
        return grad * grad_outputs[0], None, None


class GramTeacher(Teacher):
    """A backbone, whole on every rank, that copies the EMA teacher's at the steps that the schedule names. Its matrices
    may have a lower precision than the EMA teacher's. A checkpoint holds all its tensors."""

    def __init__(self, network: Network, dtype: torch.dtype, ema: Network) -> None:
        super().__init__(network, dtype)
        self._ema = ema

    def rests(self, schedule: ScheduleValues) -> bool:
        return not schedule.weights[GRAM]

    @torch.no_grad()
    def begin_step(self, schedule: ScheduleValues) -> None:
        if GRAM in schedule.replaced:
            tensors, averaged = _tensors(self.network), _tensors(self._ema)
            torch._foreach_copy_(list(tensors.values()), [averaged[name] for name in tensors])

    def state(self) -> dict[str, Tensor]:
        return self.network.state_dict()

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Keep this teacher's weights if `state` is empty: it comes from a run without a Gram teacher."""
        if state:
            super().load_state(state)


def _tensors(network: Network) -> dict[str, Tensor]:
    backbone = network.backbone
    return {name: tensor.detach() for name, tensor in (*backbone.named_parameters(), *backbone.named_buffers())}


def build_teacher(spec: GramTeacherSpec, parts: TeacherParts) -> Teacher:
    """Raises ConfigError or CheckpointError for a gram.teacher that does not fit, or that the EMA teacher can't
    replace."""
    performance, ema, dtype = parts.config.performance, parts.ema, process.DTYPES[parts.config.precision]
    features = parts.objective.teacher_features(spec.name)
    assert ema is not None
    if spec.source != SNAPSHOT:
        with distributed.raise_on_all_ranks():
            source = find_frozen(spec.source, "gram.teacher")
            network = meta_network(source, performance, features)
            _check_fits(spec, parts.recipe, network, source)
        if not spec.refreshed:
            return FixedTeacher(network, source, parts, GRAM, "gram.teacher")
    like = build_meta(parts.recipe, performance, {}, features)
    if spec.source != SNAPSHOT:
        place_frozen(like, source, parts.config)
        return GramTeacher(like, dtype, ema)
    allocate(like, dtype)
    for tensor in (*like.parameters(), *like.buffers()):
        tensor.data.zero_()
    if performance.compile != "off":
        like.backbone.compile_segments(performance.compile)
    return GramTeacher(like, dtype, ema)


def _check_fits(spec: GramTeacherSpec, recipe: Recipe, network: Network, source: FrozenSource) -> None:
    ours = recipe.model.spec()
    source.check_channels(ours.in_chans)
    if spec.refreshed:
        stays = "set gram.refresh_every 0, or take another teacher"
        if source.spec != ours:
            other = f"{source.name} is a {source.spec.title} of other numbers than this run's {recipe.model.backbone}"
            raise ConfigError(f"{other}, whose EMA teacher can't replace it: {stays}")
        if source.normalization != (normalization := Normalization.of(recipe)):
            trained = f"{source.name} was trained on images with {source.normalization}, and this run's have"
            raise ConfigError(f"{trained} {normalization}: the EMA teacher can't replace it; {stays}")
    for resolution in recipe.resolutions:
        (side,) = dict.fromkeys(teacher_sizes(recipe.groups_of(resolution), spec.name))
        try:
            network.backbone.check_image(side, side)
            network.backbone.patch_grid(side, side)
        except ConfigError as error:
            advice = f"change {'crops.resolutions' if recipe.crops.resolutions else 'gram.crop_size'} or the teacher"
            raise ConfigError(f"{source.name} can't take its crops: {error}; {advice}") from None
