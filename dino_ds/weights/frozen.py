"""Finds a teacher that is never trained: a run or checkpoint of ours with its heads, or any weights."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor

from dino_ds.checkpoint.manifest import WHOLE
from dino_ds.config.recipe import Recipe
from dino_ds.config.sections import HeadSection
from dino_ds.data.images import ValueRange
from dino_ds.data.normalization import Normalization, Stated
from dino_ds.errors import CheckpointError, ConfigError, naming
from dino_ds.models.specs.base import BackboneSpec
from dino_ds.weights import layouts, load, sidecar, start
from dino_ds.weights.read import checkpoint_of, find_weights, is_checkpoint, network_parts


@dataclass(frozen=True)
class FrozenSource:
    """A network that was trained earlier; its tensors are on the CPU, under our names.

    Attributes:
        path: as the user gave it, by the recipe's `key`.
        image_size: side of its native images in pixels.
        heads: tensors by the heads' names in a `Network`.
        range: of the values of its images deeper than 8 bits.
        centers: running means of its logits, if it was trained with them.
        free_prototypes: names of the heads whose prototypes are plain weights, not normalized.
    """

    path: str
    spec: BackboneSpec
    image_size: int
    interpolation: str
    backbone: dict[str, Tensor]
    heads: dict[str, dict[str, Tensor]]
    normalization: Normalization
    range: ValueRange | None = None
    centers: dict[str, Tensor] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    free_prototypes: tuple[str, ...] = ()
    key: str = "teacher.source"

    @property
    def name(self) -> str:
        return f"{self.key} {self.path}"

    def check_channels(self, ours: int) -> None:
        """Raises ConfigError where the images of this run have other channels: a frozen teacher is not adapted."""
        if self.spec.in_chans != ours:
            raise ConfigError(
                f"{self.name} is for images of {self.spec.in_chans} channels, and this run's have {ours} "
                "(model.in_chans): take a teacher for as many, such as a run on these images that started with "
                f"--model.init_from {self.path}, which adapts its weights"
            )

    def head(self, name: str) -> HeadSection:
        """The shape of a head, as a recipe describes it. Raises CheckpointError for tensors that are not a head's."""
        tensors = self.heads[name]
        try:
            in_order = sorted(tensors.items(), key=lambda entry: [int(n) for n in re.findall(r"\d+", entry[0])])
            linear = [t for key, t in in_order if key[:4] == "mlp." and t.ndim == 2]
            prototypes, bottleneck = tensors["prototypes.weight"].shape
            return HeadSection(
                prototypes=prototypes,
                bottleneck=bottleneck,
                hidden=linear[0].shape[0],
                layers=len(linear),
                batch_norm=any(key.endswith("running_mean") for key in tensors),
                learned_lengths="prototypes.lengths" in tensors,
                free_prototypes=name in self.free_prototypes,
            )
        except (KeyError, ValueError, IndexError) as error:
            raise CheckpointError(f"{self.name}: its {name} can't be used: {error}") from None


def find_frozen(source: str, key: str = "teacher.source", heads: int | None = None) -> FrozenSource:
    """Find a frozen teacher: the EMA teacher of a run's newest or of one checkpoint, or what `find_weights` finds. key:
    the recipe's key that names `source`. heads: attention heads, for a file that does not say how many. Raises
    CheckpointError for anything else."""
    path = Path(os.path.expanduser(source))
    folder = path if is_checkpoint(path) else checkpoint_of(path)
    with naming(f"{key} {source}"):
        if folder:
            return replace(_of_checkpoint(source, folder), key=key)
        weights = find_weights(source)
        network = load.describe(weights, heads)
        channels = network.spec.in_chans
        return FrozenSource(
            source,
            network.spec,
            network.image_size,
            network.interpolation,
            weights.backbone,
            weights.heads,
            sidecar.normalization_of(weights.about, channels),
            sidecar.range_of(weights.about),
            notes=[*weights.notes, *network.notes, *sidecar.notes_on_mean(weights.about, channels)],
            key=key,
        )


def _of_checkpoint(source: str, folder: Path) -> FrozenSource:
    saved = sidecar.open_checkpoint(folder, WHOLE)
    manifest, whole, recipe = saved.manifest, saved.whole(), sidecar.recipe_of(saved.manifest)
    heads = network_parts(saved)
    backbone = heads.pop("backbone")
    layouts.check_numbers(folder, {name: t for name, t in backbone.items() if t.is_floating_point()}, *heads.values())
    free = [name for name in heads if name in ("head", "ibot_head") and getattr(recipe, name).free_prototypes]
    return FrozenSource(
        source,
        recipe.model.spec(),
        recipe.crops.global_size,
        recipe.model.pos_embed_interpolation,
        backbone,
        heads,
        Normalization.of(recipe),
        recipe.data.known_range,
        {name: whole[name] for name in ("center", "ibot_center") if name in whole},
        [f"the EMA teacher of step {manifest.step}"],
        tuple(free),
    )


def stated_images(recipe: Recipe) -> Stated:
    """Mean, deviation and value range of the images that the weights of model.init_from were trained on, else those of
    teacher.source, as the weights state them. Raises CheckpointError for weights that can't be read."""
    model, teacher = recipe.model, recipe.teacher.source
    for key, source in (("model.init_from", model.init_from), ("teacher.source", teacher)):
        if source is None:
            continue
        with naming(f"{key} {source}"):
            weights = start.read_start(model) if key == "model.init_from" else find_weights(source)
            if stated := sidecar.stated_normalization(weights.about, start.channels_of(weights)):
                ours, values = stated.for_channels(model.in_chans), sidecar.range_of(weights.about)
                return Stated(f"{key} {source}", ours, values)
    return Stated()


@torch.no_grad()
def digest(tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 of names, shapes and values: the same on any device and in any file format."""
    sha256 = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu()
        tensor = (tensor.float() if tensor.is_floating_point() else tensor.long()).contiguous()
        sha256.update(f"{name} {list(tensor.shape)};".encode())
        sha256.update(tensor.view(-1).numpy().tobytes())
    return sha256.hexdigest()
