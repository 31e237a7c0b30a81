"""Starts a run from existing weights: checks that they fit the recipe's network, or takes the network from them, and
loads them while the network is built."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dino_ds.config import loading, stages
from dino_ds.config.model import ModelSection
from dino_ds.config.recipe import Recipe
from dino_ds.config.sections import CropsSection, fitting_sizes
from dino_ds.data.images import ValueRange
from dino_ds.errors import CheckpointError, ConfigError, naming
from dino_ds.models import foreign, trained
from dino_ds.models.base import Placer
from dino_ds.models.network import Network
from dino_ds.models.specs.backbones import FROM_SOURCE, VITS, ViTSpec
from dino_ds.models.specs.base import BackboneSpec
from dino_ds.models.specs.foreign import ForeignSpec
from dino_ds.weights.layouts import LOCAL_NORM, Weights, split_local_norm, with_biases
from dino_ds.weights.load import describe, fit_tensors
from dino_ds.weights.read import find_weights
from dino_ds.weights.sidecar import notes_on_mean, notes_on_range, range_of

FLAGS = ("patch_size", "width", "depth", "heads", "in_chans", "registers")
_MASK_TOKEN = "backbone.mask_token"
_PATCHES = "patch_embed.proj.weight"


def as_source(recipe: Recipe, run_dir: str | None, notes: list[str] | None = None) -> Recipe:
    """`recipe`, whose model.backbone is from_source, with the architecture of the weights that it starts from. It
    replaces the recipe's numbers, except for heads that the weights do not state, and channels that the recipe sets:
    the weights are adapted to them. Crop sizes that nobody has set follow the weights' native images, and positions are
    resized as in their project; `notes` gets a line on sizes that are not the defaults. A run that exists and began
    with the same weights has all this in its config.yaml: their file may be gone. Raises CheckpointError for a network
    that dino_ds does not build, ConfigError where the recipe does not fit it."""
    model = recipe.model
    assert model.init_from is not None
    path = Path(run_dir or "", "config.yaml")
    if run_dir is not None and path.is_file():
        begun = stages.load_run_recipe(path.parent)
        before = begun.model
        if before.init_from == model.init_from:
            values = {key: getattr(before, key) for key in ("backbone", "arguments", "layer_scale", *FLAGS)}
            return loading.change_recipe(
                recipe,
                {f"model.{key}": "none" if value is None else str(value) for key, value in values.items()}
                | {f"crops.{key}": str(getattr(begun.crops, key)) for key in _sizes_not_given(recipe.crops)}
                | _resizing_for(model, before.pos_embed_interpolation),
            )
    with naming(f"model.init_from {model.init_from}"):
        weights = find_weights(model.init_from)
        if (spec := weights.spec) is not None:
            return _changed(recipe, _flags_for_other(spec, model), weights.image_size, spec.side_multiple, notes)
        description = describe(weights, model.heads)
        arch = replace(description.arch, in_chans=_channels_for(model, description.arch))
    flags = flags_for(arch, model)
    if flags is None:
        raise CheckpointError(f"model.backbone {FROM_SOURCE}, {model.init_from}: {not_built(arch)}")
    flags |= _resizing_for(model, description.interpolation) if arch.rope is None else {}
    return _changed(recipe, flags, description.image_size, arch.side_multiple, notes)


def _changed(recipe: Recipe, flags: dict[str, str], side: int, patch: int, notes: list[str] | None) -> Recipe:
    """`recipe` with `flags`, and with crop sizes where it sets none: the defaults, unless they are larger than `side`,
    the weights' native one, or no multiples of `patch`. Adds to `notes` a line on sizes that are not the defaults."""
    usual, missing = CropsSection(), _sizes_not_given(recipe.crops)
    large = min(usual.global_size, side) if "global_size" in missing else recipe.crops.global_size
    fitting = zip(("global_size", "local_size"), fitting_sizes(large, patch, large), strict=True)
    sizes = {key: size for key, size in fitting if key in missing}
    if notes is not None and any(size != getattr(usual, key) for key, size in sizes.items()):
        said = " and ".join(f"crops.{key} {size}" for key, size in sizes.items())
        notes.append(f"{said}, for the images and patches that model.init_from {recipe.model.init_from} knows")
    return loading.change_recipe(recipe, flags | {f"crops.{key}": str(size) for key, size in sizes.items()})


def _sizes_not_given(crops: CropsSection) -> list[str]:
    set_keys = crops.model_fields_set | ({"global_size", "local_size"} if crops.resolutions else set())
    return [key for key in ("global_size", "local_size") if key not in set_keys]


def _channels_for(model: ModelSection, source: BackboneSpec) -> int:
    return model.in_chans if "in_chans" in model.model_fields_set else source.in_chans


def _resizing_for(model: ModelSection, interpolation: str) -> dict[str, str]:
    is_set = "pos_embed_interpolation" in model.model_fields_set
    return {} if is_set else {"model.pos_embed_interpolation": interpolation}


def _flags_for_other(spec: BackboneSpec, model: ModelSection) -> dict[str, str]:
    arguments = {}
    if "arguments" in spec.obeys:
        arguments = {"model.arguments": spec.arguments}
        if model.arguments not in ("{}", spec.arguments):
            why = f"model.arguments {model.arguments} has no effect"
            more = f"model.backbone {FROM_SOURCE} takes those of the weights"
            raise ConfigError(f"{why}: {more}; set --model.arguments {{}}")
    return {"model.backbone": spec.title, "model.in_chans": str(_channels_for(model, spec)), **arguments}


def flags_for(arch: ViTSpec, model: ModelSection) -> dict[str, str] | None:
    """The fewest changes of the recipe that make `model` build `arch`; None if no backbone is of its kind."""
    candidates = []
    for name, known in VITS.items():
        wanted = {} if name == model.backbone else {"model.backbone": name}
        for key in FLAGS:
            value = getattr(model, key)
            if getattr(arch, key) != (getattr(known, key) if value is None else value):
                wanted[f"model.{key}"] = str(getattr(arch, key))
        scale = known.layer_scale if model.layer_scale is None else model.layer_scale
        if arch.layer_scale is None and known.layer_scale is None and scale is not None:
            wanted["model.layer_scale"], scale = "none", None
        like = replace(known, layer_scale=scale, **{key: getattr(arch, key) for key in FLAGS})
        if _traits(like) == _traits(arch):
            candidates.append(wanted)
    return min(candidates, key=len, default=None)


def _traits(arch: ViTSpec) -> dict[str, object]:
    """The numbers and parts in which architectures differ, by name, except for channels."""
    rotary = ("rope_base", "rope_min_period", "rope_max_period", "qkv_bias", "rms_norm", "cls_norm")
    names = ("patch_size", "width", "depth", "heads", "registers", "swiglu", "rope", *(rotary if arch.rope else ()))
    traits = {name: getattr(arch, name) for name in names}
    return traits | {"layer scale": arch.layer_scale is not None, "MLP outputs": arch.mlp_widths[0]}


def not_built(arch: ViTSpec) -> str:
    return f"dino_ds builds no network with {', '.join(f'{name} {value}' for name, value in _traits(arch).items())}"


def find_start(model: ModelSection, value_range: ValueRange | None = None) -> Weights:
    """Find the weights of `model.init_from`, adapted to the channels of `model`; their notes say how, what files do not
    state, and what differs in this run. value_range: of this run's images deeper than 8 bits. Raises CheckpointError,
    naming flags that would fit, if the weights have another architecture than `model`."""
    ours, weights = model.spec(), read_start(model)
    with naming(f"model.init_from {model.init_from}"):
        if isinstance(ours, ViTSpec) and weights.spec is None:
            weights, notes = _fit_vit(weights, model, ours)
        elif weights.spec is None or weights.spec.title != ours.title:
            name = "Vision Transformer" if weights.spec is None else weights.spec.title
            flag = FROM_SOURCE if weights.spec is None else name
            raise CheckpointError(f"it is a {name}, not a {ours.title}; start with --model.backbone {flag}")
        else:
            made_with = f"it was made with model.arguments {weights.spec.arguments}, this run's are {ours.arguments}"
            notes = [made_with] if weights.spec.arguments != ours.arguments else []
        notes = [*weights.notes, *notes, *notes_on_mean(weights.about, channels_of(weights))]
        if weights.kind == "dino_ds" or "mean" in weights.about:
            notes += notes_on_range(range_of(weights.about), value_range)
        if channels_of(weights) != ours.in_chans:
            weights, how = adapt_channels(weights, ours.in_chans)
            notes = [how, *notes]
    return replace(weights, notes=notes)


def read_start(model: ModelSection) -> Weights:
    assert model.init_from is not None
    ours = model.spec()
    return find_weights(model.init_from, ours if isinstance(ours, ForeignSpec) else None)


def _fit_vit(weights: Weights, model: ModelSection, ours: ViTSpec) -> tuple[Weights, list[str]]:
    notes: list[str] = []
    if ours.rope is not None:
        backbone, notes = with_biases(weights.backbone, ours.qkv_bias)
        weights = replace(weights, backbone=backbone)
    description = describe(weights, ours.heads)
    source = replace(description.arch, in_chans=ours.in_chans)  # adapted later
    stated, wanted = _traits(source), _traits(ours)
    if differ := [name for name in stated if name in wanted and stated[name] != wanted[name]]:
        if len(differ) > 1 and "MLP outputs" in differ:  # they follow from the others
            differ.remove("MLP outputs")
        others = ", ".join(f"{name} {stated[name]}, not {wanted[name]}" for name in differ)
        flags = flags_for(source, model)
        fitting = " ".join(f"--{key} {value}" for key, value in (flags or {}).items())
        advice = f"start with {fitting}, or with --model.backbone {FROM_SOURCE}" if flags else not_built(source)
        raise CheckpointError(f"it is of another architecture: it has {others}; {advice}")
    if not description.heads_stated:
        notes.append(f"no file says how many attention heads it has: {ours.heads} are assumed, as in this model")
    if description.arch.norm_eps != ours.norm_eps:
        notes.append(f"LayerNorm's epsilon is {ours.norm_eps:g} here and {description.arch.norm_eps:g} there")
    if ours.rope is None and description.interpolation != model.pos_embed_interpolation:
        notes.append(
            f"positions of other sizes are made as {model.pos_embed_interpolation!r} here and as "
            f"{description.interpolation!r} there (--model.pos_embed_interpolation)"
        )
    return weights, notes


class InitialWeights:
    """A `Placer` that copies the tensors of `weights`, buffers too, over the initial ones, then hands the module on to
    `placer`. The backbone must match tensor by tensor; a position embedding of another size is resized as the network
    does. If a head has other shapes or `weights` lack the mask token, the run's own stays as initialized."""

    def __init__(self, network: Network, weights: Weights, source: str, placer: Placer, interpolation: str) -> None:
        self._prefix = {module: name for name, module in network.named_modules()}
        self._place, self._source, self._kind, self._notes = placer, source, weights.kind, weights.notes
        self._said: list[str] = []
        shapes = {name: tuple(tensor.shape) for name, tensor in network.state_dict().items()}
        self._backbone = self._fit_backbone(weights, shapes, interpolation)
        self.tensors = dict(self._backbone)
        for name in network.head_names:
            wanted = {key: shape for key, shape in shapes.items() if key.startswith(f"{name}.")}
            self.tensors |= self._fit_head(name, weights.heads.get(name, {}), wanted)
        self._said += [f"its {name} is not used" for name in weights.heads if name not in network.head_names]

    def _fit_head(self, name: str, tensors: dict[str, Tensor], wanted: dict[str, tuple[int, ...]]) -> dict[str, Tensor]:
        """The tensors of the head `name` if they fit, else {}; prototypes without lengths get lengths of 1."""
        if not tensors:
            self._said.append(f"it has no {name}: our own starts anew")
            return {}
        head, lengths = {f"{name}.{key}": t for key, t in tensors.items()}, f"{name}.prototypes.lengths"
        if lengths in wanted and lengths not in head:
            head[lengths] = torch.ones(wanted[lengths])
        left_out = head.pop(lengths) if lengths in head and lengths not in wanted else None
        stored = {key: tuple(t.shape) for key, t in head.items()}
        if stored != wanted:
            other = min(key for key in wanted.keys() | stored.keys() if wanted.get(key) != stored.get(key))
            shapes = f"{other} {stored.get(other)} vs {wanted.get(other)}"
            self._said.append(f"its {name} does not fit ({shapes}): our own starts anew")
            return {}
        self._said.append(f"the {name} too ({len(wanted)} tensors)")
        if left_out is not None:
            shortest, longest = left_out.float().aminmax()
            self._said.append(
                f"its prototypes' lengths ({shortest:.3g} to {longest:.3g}) are left out: they are 1 here "
                f"(--{name}.learned_lengths)"
            )
        return head

    def _fit_backbone(
        self, weights: Weights, known_shapes: dict[str, tuple[int, ...]], interpolation: str
    ) -> dict[str, Tensor]:
        backbone, local_norm = split_local_norm(weights.backbone)  # some backbones include the norm
        local_norm = local_norm or weights.local_norm
        tensors = {f"backbone.{name}": t for name, t in backbone.items()}
        shapes = {name: shape for name, shape in known_shapes.items() if name.startswith("backbone.")}
        for name in trained.adapters_in(shapes):
            del shapes[name]  # their product begins at zero
        if _MASK_TOKEN in shapes and weights.mask_token is not None:
            tensors[_MASK_TOKEN] = weights.mask_token
        elif shapes.pop(_MASK_TOKEN, None) is not None:
            self._said.append("it has no mask token: our own starts at zero")
        elif weights.mask_token is not None:
            self._said.append("its mask token is left out: this run hides no patches")
        wanted = [name for name in shapes if name.startswith(f"backbone.{LOCAL_NORM}")]
        if wanted and local_norm:
            tensors |= {f"backbone.{name}": tensor for name, tensor in local_norm.items()}
        elif wanted:
            self._said.append("it has no norm for CLS tokens of local crops: our own starts anew")
            shapes = {name: shape for name, shape in shapes.items() if name not in wanted}
        elif local_norm:
            self._said.append("its norm for CLS tokens of local crops is left out")
        start = f"model.init_from {self._source}"
        fitting = fit_tensors(tensors, shapes, interpolation, f"{start} lacks", f"{start} is")
        positions = "backbone.pos_embed"
        if positions in fitting and fitting[positions].shape != tensors[positions].shape:
            self._said.append(f"position embedding resized to {shapes[positions][1]} places")
        return fitting

    @torch.no_grad()
    def __call__(self, module: nn.Module) -> None:
        prefix = self._prefix[module]
        for name, parameter in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)):
            tensor = self.tensors.get(f"{prefix}.{name}")
            if tensor is not None:
                parameter.copy_(tensor.to(parameter.dtype))
        self._place(module)

    def __str__(self) -> str:
        """A line on the tensors that were taken and those that were not."""
        summary = f"{self._source} ({self._kind}): {len(self._backbone)} tensors of the backbone"
        return "; ".join([summary, *self._said, *self._notes])


def channels_of(weights: Weights) -> int:
    return weights.backbone[_PATCHES].shape[1] if weights.spec is None else weights.spec.in_chans


def adapt_channels(weights: Weights, channels: int) -> tuple[Weights, str]:
    """Adapt the weights of a backbone to images of `channels` channels; returns them, and a text on how this was done.
    A gray image, which is equal in all channels, keeps its features, unless a network other than our ViTs standardizes
    its weights. Raises CheckpointError where another tensor depends on the number of channels."""
    before, spec = channels_of(weights), weights.spec
    if before < 1:
        raise CheckpointError(f"its {_PATCHES} is for images without channels")
    names = [_PATCHES] if spec is None else first_convolutions(spec, channels, weights.image_size)
    backbone = dict(weights.backbone)
    for name in names:
        if name in backbone and backbone[name].ndim == 4 and backbone[name].shape[1] == before:
            backbone[name] = adapt_convolution(backbone[name], channels)
    adapted = replace(weights, backbone=backbone, spec=None if spec is None else _with_channels(spec, channels))
    how = f"they repeat the {before} in order, each divided by the number of its copies"
    if channels < before:
        how = f"each is the sum of the {before}, divided by {channels}" if channels > 1 else f"the sum of the {before}"
    how = f"its channels are adapted from {before} to {channels} ({', '.join(names)}): {how}"
    if not names:
        how = f"it was made for {before} channels, and none of its tensors depends on their number"
    unless = "" if spec is None else " unless it standardizes its weights"
    return adapted, f"{how}; gray images keep their features{unless}"


def adapt_convolution(weight: Tensor, channels: int) -> Tensor:
    """A convolution's weight (outputs, c, h, w) for images of `channels` channels instead of c, in FP32. More channels
    repeat the c in order, each divided by the number of its copies; fewer channels are each the sum of the c, divided
    by their number. The sum over channels, by which a gray image is multiplied, stays. For one channel and multiples of
    c this is timm's `adapt_input_conv`, which else divides by channels / c and changes the sum."""
    weight, before = weight.float(), weight.shape[1]
    if channels < before:
        return weight.sum(1, keepdim=True).repeat(1, channels, 1, 1) / channels
    copied = torch.arange(channels) % before
    return weight[:, copied] / copied.bincount()[copied].view(1, -1, 1, 1)


def first_convolutions(spec: BackboneSpec, channels: int, image_size: int) -> list[str]:
    """Names of the convolutions' weights whose shape depends on the number of channels of the images. timm's
    `first_conv` names them for its own models; this finds them in a user's class too."""
    try:
        before, after = (foreign.tensor_shapes(kind, image_size) for kind in (spec, _with_channels(spec, channels)))
    except ConfigError as error:
        raise CheckpointError(str(error)) from None
    names = sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))
    for name in names:
        old, new = before.get(name, ()), after.get(name, ())
        is_convolution = len(old) == 4 and old[1] == spec.in_chans and new == (old[0], channels, *old[2:])
        if not is_convolution:
            why = f"it is for images of {spec.in_chans} channels, this run's have {channels} (model.in_chans)"
            more = f"and its {name} {list(old)} can't be adapted to {list(new)}"
            raise CheckpointError(f"{why}, {more}: start without it, or from weights for as many")
    return names


def _with_channels(spec: Any, channels: int) -> Any:
    return replace(spec, in_chans=channels)
