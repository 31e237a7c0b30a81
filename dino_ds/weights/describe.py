"""Which network weights are of, as far as files and shapes say it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from dino_ds.architectures import Architecture
from dino_ds.errors import CheckpointError
from dino_ds.weights.fit import architecture_of
from dino_ds.weights.read import Weights


@dataclass(frozen=True)
class Description:
    """Architecture, native pixels of a side, how positions of other sizes are made ("dino" or "antialias").

    heads_stated: some file says the number of attention heads; `notes` say for people what was taken to be so.
    """

    arch: Architecture
    image_size: int
    interpolation: str
    heads_stated: bool = True
    notes: list[str] = field(default_factory=list)


def describe(weights: Weights, heads: int | None = None) -> Description:
    """The network that `weights` are of; `heads`: its attention heads where no file states them.

    Without either they are those of the known backbone of that width and depth, and a note says so.
    Raises CheckpointError where there is none, and for descriptions that the tensors do not bear out.
    """
    if weights.kind == "dino_ds":
        return _described_by_us(weights)
    about = weights.about
    stated = about.get("num_attention_heads")
    arch, size = architecture_of(weights.backbone, stated or heads)
    notes = []
    if not stated and heads is None:
        notes = [f"no file says its attention heads: taken for {arch.heads}, usual for this width and depth"]
    eps = about.get("layer_norm_eps", arch.norm_eps)
    if not isinstance(eps, float) or not 0 < eps < 1:
        raise CheckpointError(f"config.json: layer_norm_eps {str(eps)[:20]} is not a number above 0 and below 1")
    interpolation = "antialias" if arch.registers or weights.kind == "timm" else "dino"
    return Description(replace(arch, norm_eps=eps), size, interpolation, bool(stated), notes)


def _described_by_us(weights: Weights) -> Description:
    """What the JSON says, where the tensors bear it out: a network is built from it before they are looked at."""
    about = weights.about
    try:
        arch = Architecture(**about["architecture"])
        size, resizing = int(about["timm_arguments"]["img_size"]), about["pos_embed_interpolation"]
        seen, seen_size = architecture_of(weights.backbone, arch.heads)
        agree = _visible(arch) == _visible(seen) and size == seen_size and resizing in ("dino", "antialias")
        agree = agree and 1 <= arch.heads <= arch.width and arch.width % arch.heads == 0 and 0 < arch.norm_eps < 1
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise CheckpointError(f"the JSON beside the weights can't be used: {type(error).__name__}: {error}") from None
    if not agree:
        raise CheckpointError("the JSON beside the weights describes another network than theirs: remove or fix it")
    return Description(arch, size, resizing)


def _visible(arch: Architecture) -> tuple[object, ...]:
    """What the shapes of the tensors tell of an architecture."""
    return (arch.patch_size, arch.width, arch.depth, arch.in_chans, *kind_of(arch))


def kind_of(arch: Architecture) -> tuple[bool, int, bool, int]:
    """What no number of a recipe changes: LayerScale, registers, SwiGLU, outputs of the first MLP layer."""
    return arch.layer_scale is not None, arch.registers, arch.swiglu, int(arch.width * arch.mlp_ratio)
