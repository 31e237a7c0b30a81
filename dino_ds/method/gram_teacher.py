"""Gram anchoring's own teachers: one that the EMA teacher replaces now and then, and one that never moves.

Source: DINOv3, section 4 (arXiv 2508.10104); facebookresearch/dinov3 `gram.rep_update`.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from dino_ds.config.crops import teacher_sizes
from dino_ds.config.recipe import Recipe
from dino_ds.data.normalization import Normalization
from dino_ds.engine import distributed
from dino_ds.engine.device import DTYPES
from dino_ds.engine.schedules import ScheduleValues
from dino_ds.errors import ConfigError
from dino_ds.method.frozen import FixedTeacher, allocate, meta_network, place_frozen
from dino_ds.method.networks import build_meta
from dino_ds.method.parts import TeacherParts
from dino_ds.method.specs.gram import GRAM, SNAPSHOT, GramTeacherSpec
from dino_ds.method.teacher import Teacher
from dino_ds.models.network import Network
from dino_ds.weights.frozen import FrozenSource, find_frozen


class GramTeacher(Teacher):
    """A backbone, whole on every rank, that copies the EMA teacher's at the steps that the schedule names.

    Its matrices may have a lower precision than the EMA teacher's. A checkpoint holds all its tensors.
    """

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


class FixedGramTeacher(FixedTeacher):
    """A backbone that is loaded from a file and never changes."""

    term, key = GRAM, "gram.teacher"


def _tensors(network: Network) -> dict[str, Tensor]:
    """The tensors of the backbone by name, without gradients."""
    backbone = network.backbone
    return {name: tensor.detach() for name, tensor in (*backbone.named_parameters(), *backbone.named_buffers())}


def build_teacher(spec: GramTeacherSpec, parts: TeacherParts) -> Teacher:
    """The teacher, on this process's device; every rank must call it.

    Raises ConfigError or CheckpointError for a recipe's gram.teacher that does not fit its crops, or that the EMA
    teacher can't replace.
    """
    config, ema = parts.config, parts.ema
    dtype, ours = DTYPES[config.precision], Normalization.of(parts.recipe)
    assert ema is not None
    if spec.source == SNAPSHOT:
        like = _like_student(spec, parts)
        allocate(like, dtype)
        for tensor in (*like.parameters(), *like.buffers()):
            tensor.data.zero_()
        if config.performance.compile != "off":
            like.backbone.compile_segments(config.performance.compile)
        return GramTeacher(like, dtype, ema)
    network, source = _of_file(spec, parts)
    if spec.refreshed:
        like = _like_student(spec, parts)
        place_frozen(like, source, config)
        return GramTeacher(like, dtype, ema)
    about = {"source": source.path, "digest": place_frozen(network, source, config)}
    return FixedGramTeacher(network, dtype, about, source.normalization, ours)


def _like_student(spec: GramTeacherSpec, parts: TeacherParts) -> Network:
    return build_meta(parts.recipe, parts.config.performance, {}, parts.objective.teacher_features(spec.name))


def _of_file(spec: GramTeacherSpec, parts: TeacherParts) -> tuple[Network, FrozenSource]:
    """The backbone of the spec's file, on the meta device, after checking that it fits the recipe; and that file."""
    with distributed.raise_on_all_ranks():
        source = find_frozen(spec.source, "gram.teacher")
        network = meta_network(source, parts.config.performance, parts.objective.teacher_features(spec.name))
        _check_fits(spec, parts.recipe, network, source)
    return network, source


def _check_fits(spec: GramTeacherSpec, recipe: Recipe, network: Network, source: FrozenSource) -> None:
    ours = recipe.model.spec()
    source.check_channels(ours.in_chans)
    if spec.refreshed:
        stays = "set gram.refresh_every 0, or take another teacher"
        if source.spec != ours:
            raise ConfigError(
                f"{source.name} is a {source.spec.title} of other numbers than this run's "
                f"{recipe.model.backbone}, whose EMA teacher can't replace it: {stays}"
            )
        if source.normalization != Normalization.of(recipe):
            raise ConfigError(
                f"{source.name} was trained on images less {source.normalization}, and this run's have "
                f"{Normalization.of(recipe)} removed: their EMA teacher can't replace it; {stays}"
            )
    for resolution in recipe.resolutions:
        (side,) = dict.fromkeys(teacher_sizes(recipe.groups_of(resolution), spec.name))
        try:
            network.backbone.check_image(side, side)
            network.backbone.patch_grid(side, side)
        except ConfigError as error:
            advice = f"change {'crops.resolutions' if recipe.crops.resolutions else 'gram.crop_size'} or the teacher"
            raise ConfigError(f"{source.name} can't take its crops: {error}; {advice}") from None
