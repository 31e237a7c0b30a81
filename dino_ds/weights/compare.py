"""Compares the network of weights with that of a recipe, and finds the flags that would make the recipe's so."""

from __future__ import annotations

from dataclasses import replace

from dino_ds.config.model import ModelSection
from dino_ds.models.specs.backbones import VITS, ViTSpec
from dino_ds.weights.fit import kind_of

_NUMBERS = {
    "patch_size": "patches of {} pixels",
    "width": "width {}",
    "depth": "{} blocks",
    "heads": "{} attention heads",
}
FLAGS = (*_NUMBERS, "in_chans", "registers")


def flags_for(arch: ViTSpec, model: ModelSection) -> dict[str, str] | None:
    """The fewest changes of the recipe that make `model` build `arch`; None if no backbone is of its kind."""
    found = []
    for name, known in VITS.items():
        wanted = {} if name == model.backbone else {"model.backbone": name}
        for key in FLAGS:
            given = getattr(model, key)
            if getattr(arch, key) != (getattr(known, key) if given is None else given):
                wanted[f"model.{key}"] = str(getattr(arch, key))
        scale = known.layer_scale if model.layer_scale is None else model.layer_scale
        if arch.layer_scale is None and known.layer_scale is None and scale is not None:
            wanted["model.layer_scale"], scale = "none", None
        like = replace(known, layer_scale=scale, **{key: getattr(arch, key) for key in FLAGS})
        if (kind_of(like), _positions(like)) == (kind_of(arch), _positions(arch)):
            found.append(wanted)
    return min(found, key=len, default=None)


def differences(theirs: ViTSpec, ours: ViTSpec) -> list[str]:
    """The differences of their network from ours, such as "4 blocks, not 2"."""
    found = [
        f"{text.format(getattr(theirs, key))}, not {getattr(ours, key)}"
        for key, text in _NUMBERS.items()
        if getattr(theirs, key) != getattr(ours, key)
    ]
    kinds = [_parts(arch) for arch in (theirs, ours)]
    if kinds[0] != kinds[1]:
        found.append(f"{kinds[0]}, not {kinds[1]}")
    elif theirs.width == ours.width and kind_of(theirs) != kind_of(ours):
        found.append(f"{kind_of(theirs)[-1]} outputs of the MLP's first layer, not {kind_of(ours)[-1]}")
    places = [_positions(arch) for arch in (theirs, ours)]
    if places[0] != places[1] and None not in (theirs.rope, ours.rope):
        found.append("rotary positions {}, not {}".format(*(", ".join(map(str, place)) for place in places)))
    return found


def _positions(arch: ViTSpec) -> tuple[object, ...]:
    """Numbers of rotary positions that no tensor shows."""
    given = arch.rope_min_period, arch.rope_max_period
    return (arch.rope, arch.rope_base, *given) if arch.rope is not None else ()


def _parts(arch: ViTSpec) -> str:
    parts = ["rotary positions"] if arch.rope is not None else []
    if arch.rope is not None:
        parts += ["no biases of queries and values"] * (not arch.qkv_bias) + ["RMSNorm"] * arch.rms_norm
        parts += ["a norm of its own for CLS"] * arch.cls_norm
    parts += ["LayerScale"] if arch.layer_scale is not None else []
    parts += [f"{arch.registers} registers"] if arch.registers else []
    return " and ".join(parts + (["SwiGLU"] if arch.swiglu else [])) or "blocks of a plain ViT"


def not_built(arch: ViTSpec) -> str:
    return (
        f"dino_ds builds no network with {_parts(arch)} whose MLP has {kind_of(arch)[-1]} outputs in its first layer "
        f"for a width of {arch.width}"
    )
