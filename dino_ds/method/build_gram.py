"""The term of Gram anchoring and its teacher, from a recipe."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dino_ds.config.crops import GRAM, CropGroup
from dino_ds.config.ds_config import DsConfig
from dino_ds.config.recipe import Recipe
from dino_ds.config.sections import SNAPSHOT
from dino_ds.data.normalisation import Normalisation
from dino_ds.engine import distributed
from dino_ds.engine.device import DTYPES, device
from dino_ds.engine.schedules import GramSchedule
from dino_ds.errors import ConfigError
from dino_ds.method.gram import GramTerm
from dino_ds.method.gram_teacher import FixedGramTeacher, GramTeacher
from dino_ds.method.place_frozen import options_of, place_frozen
from dino_ds.method.teacher import Teacher
from dino_ds.models.base import is_cast
from dino_ds.models.build import build_backbone
from dino_ds.models.network import Network
from dino_ds.models.specs.backbones import backbone_name
from dino_ds.weights.frozen import FrozenSource, find_frozen


def gram_schedule(recipe: Recipe, epoch_steps: int) -> GramSchedule:
    """When Gram anchoring begins, and when its teacher is replaced; an epoch is `epoch_steps` optimizer steps."""
    gram, batch = recipe.gram, recipe.data.global_batch
    start, every = (length.in_steps(batch, epoch_steps) for length in (gram.start, gram.refresh_every))
    return GramSchedule(start, gram.teacher == SNAPSHOT, every, gram.refreshes)


def build_gram_term(recipe: Recipe) -> GramTerm:
    """The recipe's."""
    gram = recipe.gram
    return GramTerm(gram.teacher_name, _seen(recipe.groups).name, gram.whole_batch, gram.drop_negative)


def _seen(groups: Sequence[CropGroup]) -> CropGroup:
    """The crops that its teacher sees: its own, or the student's global ones."""
    return next((group for group in groups if GRAM in group.teachers), groups[0])


def build_gram_teacher(recipe: Recipe, config: DsConfig, like: Network, ema: Network) -> Teacher:
    """`like`: the EMA teacher's backbone on the meta device, with the outputs that the term asks for.

    Raises ConfigError or CheckpointError for a recipe's gram.teacher that does not fit its crops, or that the EMA
    teacher can't replace. Every rank must call it.
    """
    gram, dtype = recipe.gram, DTYPES[config.precision]
    if gram.teacher == SNAPSHOT:
        _make_room(like, dtype)
        if config.performance.compile != "off":
            like.backbone.compile_segments(config.performance.compile)
        return GramTeacher(like, dtype, ema)
    with distributed.raise_on_all_ranks():
        source, ours = find_frozen(gram.teacher, "gram.teacher"), Normalisation.of(recipe)
        with torch.device("meta"):
            options = options_of(source, config.performance)
            network = Network(build_backbone(source.spec, source.image_size, options), {}, {}, like.features)
        _check_fits(recipe, network, source)
    if gram.refresh_every.value:
        place_frozen(like, source, config, whole=True)
        return GramTeacher(like, dtype, ema)
    about = {"source": source.place, "digest": place_frozen(network, source, config)}
    return FixedGramTeacher(network, dtype, about, source.normalisation, ours)


@torch.no_grad()
def _make_room(network: Network, dtype: torch.dtype) -> None:
    """For the snapshot, on this process's device: zeros, in `dtype` where autocast would cast to it at each use."""
    for module in network.modules():
        if is_cast(module):
            for parameter in module.parameters(recurse=False):
                parameter.data = parameter.data.to(dtype)
    network.to_empty(device=device())
    for tensor in (*network.parameters(), *network.buffers()):
        tensor.zero_()


def _check_fits(recipe: Recipe, network: Network, source: FrozenSource) -> None:
    ours = recipe.model.spec()
    source.check_channels(ours.in_chans)
    if recipe.gram.refresh_every.value:
        stays = "set gram.refresh_every 0, or take another teacher"
        if source.spec != ours:
            raise ConfigError(
                f"{source.name} is a {backbone_name(source.spec)} of other numbers than this run's "
                f"{recipe.model.backbone}, whose EMA teacher can't replace it: {stays}"
            )
        if source.normalisation != Normalisation.of(recipe):
            raise ConfigError(
                f"{source.name} was trained on images less {source.normalisation}, and this run's have "
                f"{Normalisation.of(recipe)} removed: their EMA teacher can't replace it; {stays}"
            )
    for one in recipe.resolutions:
        side = _seen(recipe.groups_of(one)).size
        try:
            network.backbone.check_image(side, side)
            network.backbone.patch_grid(side, side)
        except ConfigError as error:
            advice = f"change {'crops.resolutions' if recipe.crops.resolutions else 'gram.crop_size'} or the teacher"
            raise ConfigError(f"{source.name} can't take its crops: {error}; {advice}") from None


def notes_on_snapshot(recipe: Recipe) -> list[str]:
    """Of a run whose weights were drawn: that its snapshot would be of them."""
    gram = recipe.gram
    if not gram.weight or gram.teacher != SNAPSHOT or gram.start.value:
        return []
    return ["gram.teacher snapshot at gram.start 0 is of a network that has learned nothing yet: give gram.start"]
