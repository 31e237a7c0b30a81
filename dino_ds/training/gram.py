"""The teacher of Gram anchoring, from a recipe."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

from dino_ds.backbones import BackboneOptions, BackboneSpec, backbone_name
from dino_ds.config.crops import GRAM, CropGroup
from dino_ds.config.ds_config import DsConfig
from dino_ds.config.recipe import Recipe
from dino_ds.config.sections import SNAPSHOT
from dino_ds.engine.device import DTYPES, device
from dino_ds.errors import CheckpointError, ConfigError
from dino_ds.models.base import Backbone
from dino_ds.models.build import build_backbone
from dino_ds.models.network import Network
from dino_ds.objectives.gram import GramTerm
from dino_ds.teachers.gram import GramTeacher, store_low
from dino_ds.weights.find import find_weights
from dino_ds.weights.fit import describe, fit_tensors


def seen_by_gram(recipe: Recipe) -> CropGroup:
    """The crops that the teacher of Gram anchoring sees: its own, or the student's global ones."""
    return next((group for group in recipe.groups if GRAM in group.teachers), recipe.groups[0])


def build_gram_term(recipe: Recipe) -> GramTerm:
    gram = recipe.gram
    return GramTerm(gram.teacher_name, seen_by_gram(recipe).name, "global", gram.whole_batch, gram.drop_negative)


def build_gram_teacher(recipe: Recipe, config: DsConfig, like: Network, ema: Network) -> GramTeacher:
    """`like`: the EMA teacher's backbone on the meta device, with the outputs that the term asks for.

    Raises ConfigError or CheckpointError for a recipe's gram.teacher that does not fit its crops, or that the EMA
    teacher can't replace.
    """
    gram, dtype = recipe.gram, DTYPES[config.precision]
    moves = gram.teacher == SNAPSHOT or gram.refresh_every.value > 0
    network, tensors = like, dict[str, Tensor]()
    if gram.teacher != SNAPSHOT:
        spec, image_size, interpolation, tensors = read_backbone(gram.teacher)
        if not moves:
            with torch.device("meta"):
                options = BackboneOptions(
                    pos_embed_interpolation=interpolation,
                    attention=config.performance.attention,
                    attention_backend=config.performance.attention_backend,
                    packed=config.performance.packed,
                    channels_last=config.performance.channels_last,
                )
                network = Network(build_backbone(spec, image_size, options), {}, {}, like.features)
        _check_fits(recipe, network.backbone, spec, moves)
    network = store_low(network, dtype).to_empty(device=device())
    if tensors:
        _take(network.backbone, tensors, f"gram.teacher {gram.teacher}")
    if config.performance.compile != "off":
        network.backbone.compile_segments(config.performance.compile)
    if not moves:
        return GramTeacher(network, dtype, None, gram.teacher, digest_of(tensors))
    with torch.no_grad():
        for tensor in (*network.parameters(), *network.buffers()) if not tensors else ():
            tensor.zero_()  # until the snapshot is taken
    return GramTeacher(network, dtype, ema)


def notes_on_snapshot(recipe: Recipe) -> list[str]:
    """Of a run whose weights were drawn: that its snapshot would be of them."""
    gram = recipe.gram
    if not gram.weight or gram.teacher != SNAPSHOT or gram.start.value:
        return []
    return ["gram.teacher snapshot at gram.start 0 is of a network that has learned nothing yet: give gram.start"]


def _check_fits(recipe: Recipe, backbone: Backbone, spec: BackboneSpec, moves: bool) -> None:
    who, side = f"gram.teacher {recipe.gram.teacher}", seen_by_gram(recipe).size
    ours = recipe.model.spec()
    if moves and spec != ours:
        raise ConfigError(
            f"{who} is a {backbone_name(spec)} of other numbers than this run's {recipe.model.backbone}, whose EMA "
            "teacher can't replace it: set gram.refresh_every 0, or take another teacher"
        )
    if spec.in_chans != ours.in_chans:
        raise ConfigError(f"{who} takes images of {spec.in_chans} channels, and this run's have {ours.in_chans}")
    try:
        backbone.check_image(side, side)
        backbone.patch_grid(side, side)
    except ConfigError as error:
        raise ConfigError(f"{who} can't take its crops: {error}; change gram.crop_size or the teacher") from None


@torch.no_grad()
def _take(backbone: Backbone, tensors: dict[str, Tensor], who: str) -> None:
    """Copy `tensors` into a backbone; what is of no use for features, such as a mask token, is 0."""
    own = {**dict(backbone.named_parameters()), **backbone.state_dict()}
    shapes = {name: tuple(t.shape) for name, t in own.items() if name not in backbone.training_only}
    theirs = {name: t for name, t in tensors.items() if name not in backbone.training_only}
    interpolation = getattr(getattr(backbone, "options", None), "pos_embed_interpolation", "dino")
    fitting = fit_tensors(theirs, shapes, interpolation, f"{who} lacks", f"{who} is")
    for name, tensor in own.items():
        tensor.copy_(fitting[name]) if name in fitting else tensor.zero_()


def read_backbone(place: str) -> tuple[BackboneSpec, int, str, dict[str, Tensor]]:
    """Of weights: the network, the side of its native images, how its positions are resized, tensors under our names.

    Raises CheckpointError for anything else.
    """
    try:
        weights = find_weights(place)
        if weights.spec is not None:
            return weights.spec, weights.image_size, "dino", weights.backbone
        found = describe(weights)
    except CheckpointError as error:
        raise CheckpointError(f"gram.teacher {place}: {error}") from None
    return found.arch, found.image_size, found.interpolation, weights.backbone


def digest_of(tensors: dict[str, Tensor]) -> str:
    """Hexadecimal SHA-256 of names, shapes and values in FP32, whatever file and precision they come from."""
    found = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        found.update(f"{name} {tuple(tensor.shape)}".encode())
        found.update(tensor.detach().cpu().float().contiguous().numpy().tobytes())
    return found.hexdigest()
