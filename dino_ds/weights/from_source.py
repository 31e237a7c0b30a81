"""`model.backbone from_source`: the network of the weights that a run starts from, compared with a recipe's."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from dino_ds.config.crop_checks import fitting_sizes
from dino_ds.config.loading import change_recipe, recorded_recipe
from dino_ds.config.model import ModelSection
from dino_ds.config.recipe import Recipe
from dino_ds.config.sections import CropsSection
from dino_ds.errors import CheckpointError, ConfigError, naming
from dino_ds.models.specs.backbones import FROM_SOURCE, VITS, ViTSpec
from dino_ds.models.specs.base import BackboneSpec
from dino_ds.weights.find import find_weights
from dino_ds.weights.fit import describe

FLAGS = ("patch_size", "width", "depth", "heads", "in_chans", "registers")


def as_source(recipe: Recipe, run_dir: str | None, notes: list[str] | None = None) -> Recipe:
    """`recipe`, whose model.backbone is from_source, with the architecture of the weights that it starts from.

    It replaces the recipe's numbers, except for heads that the weights do not state, and channels that the recipe sets:
    the weights are adapted to them. Crop sizes that nobody has set follow the weights' native images, and positions are
    resized as in their project; `notes` gets a line on sizes that are not the defaults. A run that exists and began
    with the same weights has all this in its config.yaml: their file may be gone. Raises CheckpointError for a network
    that dino_ds does not build, ConfigError where the recipe does not fit it.
    """
    model = recipe.model
    assert model.init_from is not None
    path = Path(run_dir or "", "config.yaml")
    if run_dir is not None and path.is_file():
        begun = recorded_recipe(path)
        before = begun.model
        if before.init_from == model.init_from:
            values = {key: getattr(before, key) for key in ("backbone", "arguments", "layer_scale", *FLAGS)}
            return change_recipe(
                recipe,
                {f"model.{key}": "none" if value is None else str(value) for key, value in values.items()}
                | {f"crops.{key}": str(getattr(begun.crops, key)) for key in _sizes_not_given(recipe.crops)}
                | _resizing_for(model, before.pos_embed_interpolation),
            )
    with naming(f"model.init_from {model.init_from}"):
        weights = find_weights(model.init_from)
        if weights.spec is not None:
            sizes = _sizes_for(recipe.crops, weights.image_size, weights.spec.side_multiple)
            return _changed(recipe, _flags_for_other(weights.spec, model), sizes, notes)
        description = describe(weights, model.heads)
        arch = replace(description.arch, in_chans=_channels_for(model, description.arch))
    flags = flags_for(arch, model)
    if flags is None:
        raise CheckpointError(f"model.backbone {FROM_SOURCE}, {model.init_from}: {not_built(arch)}")
    flags |= _resizing_for(model, description.interpolation) if arch.rope is None else {}
    return _changed(recipe, flags, _sizes_for(recipe.crops, description.image_size, arch.side_multiple), notes)


def _changed(recipe: Recipe, flags: dict[str, str], sizes: dict[str, str], notes: list[str] | None) -> Recipe:
    """`recipe` with these flags and crop sizes; adds a note on sizes that are not the defaults."""
    usual = CropsSection()
    if notes is not None and any(value != str(getattr(usual, key.split(".")[1])) for key, value in sizes.items()):
        said = " and ".join(f"{key} {value}" for key, value in sizes.items())
        notes.append(f"{said}, for the images and patches that model.init_from {recipe.model.init_from} knows")
    return change_recipe(recipe, flags | sizes)


def _sizes_not_given(crops: CropsSection) -> list[str]:
    """Keys of the crop sizes that neither the recipe nor the command line sets."""
    set_keys = crops.model_fields_set | ({"global_size", "local_size"} if crops.resolutions else set())
    return [key for key in ("global_size", "local_size") if key not in set_keys]


def _sizes_for(crops: CropsSection, side: int, patch: int) -> dict[str, str]:
    """Values of the crop sizes that are not set, for weights of images of `side` pixels: the defaults, unless these are
    too large or not multiples of the patch."""
    missing = _sizes_not_given(crops)
    usual = CropsSection().global_size
    large = min(usual, side) if "global_size" in missing else crops.global_size
    sizes = dict(zip(("global_size", "local_size"), fitting_sizes(large, patch, large), strict=True))
    return {f"crops.{key}": str(sizes[key]) for key in missing}


def _channels_for(model: ModelSection, source: BackboneSpec) -> int:
    """The number of channels that the recipe sets, or else that of the weights."""
    return model.in_chans if "in_chans" in model.model_fields_set else source.in_chans


def _resizing_for(model: ModelSection, interpolation: str) -> dict[str, str]:
    """The change that resizes positions as in the weights' own project, unless the recipe sets how."""
    is_set = "pos_embed_interpolation" in model.model_fields_set
    return {} if is_set else {"model.pos_embed_interpolation": interpolation}


def _flags_for_other(spec: BackboneSpec, model: ModelSection) -> dict[str, str]:
    arguments = {}
    if "arguments" in spec.obeys:
        arguments = {"model.arguments": spec.arguments}
        if model.arguments not in ("{}", spec.arguments):
            raise ConfigError(
                f"model.arguments {model.arguments} has no effect: model.backbone {FROM_SOURCE} takes those of the "
                "weights; set --model.arguments {}"
            )
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


def differences(source: ViTSpec, ours: ViTSpec) -> list[str]:
    """The differences of the weights' network from ours, such as "depth 4, not 2"."""
    stated, wanted = _traits(source), _traits(ours)
    differ = [name for name in stated if name in wanted and stated[name] != wanted[name]]
    if len(differ) > 1 and "MLP outputs" in differ:  # they follow from the others
        differ.remove("MLP outputs")
    return [f"{name} {stated[name]}, not {wanted[name]}" for name in differ]


def _traits(arch: ViTSpec) -> dict[str, object]:
    """The numbers and parts in which architectures differ, by name, except for channels."""
    rotary = ("rope_base", "rope_min_period", "rope_max_period", "qkv_bias", "rms_norm", "cls_norm")
    names = ("patch_size", "width", "depth", "heads", "registers", "swiglu", "rope", *(rotary if arch.rope else ()))
    traits = {name: getattr(arch, name) for name in names}
    return traits | {"layer scale": arch.layer_scale is not None, "MLP outputs": arch.mlp_widths[0]}


def not_built(arch: ViTSpec) -> str:
    """A line for an architecture that no recipe describes."""
    return f"dino_ds builds no network with {', '.join(f'{name} {value}' for name, value in _traits(arch).items())}"
