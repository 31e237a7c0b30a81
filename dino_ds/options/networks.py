"""Networks as papers and other projects name them, such as ViT-S/16, where a recipe or timm's name is wanted."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

from dino_ds.config.recipe_files import recipe_names
from dino_ds.errors import ConfigError
from dino_ds.hubs import weights_elsewhere
from dino_ds.text_file import is_file

_SIZES = {"ti": "tiny", "s": "small", "b": "base", "l": "large", "h": "huge", "g": "giant"}
_VIT = re.compile(
    r"(facebook/)?((?P<project>dino(v2|v3)?)[-_ ]?)?(vit|deit)[-_ ]?"
    r"(?P<size>tiny|ti|t|small|s|base|b|large|l|huge|h|giant|g|7b)([-_/ ]?(patch|p)?(?P<patch>8|14|16))?"
    r"([-_.](224|dino(v2|v3)?|reg4|qkvb|lvd142m|lvd1689m))*"
)


class _Vit(NamedTuple):
    """A ViT as a paper or another project names it; size: ti, s, b, l, h, g or 7b; project and patch may be unsaid."""

    project: str
    size: str
    patch: int | None


def _vit_named(text: str) -> _Vit | None:
    """What ViT-S/16, vit_small or dino_vits16 are, or None for any other text."""
    if (found := _VIT.fullmatch(text.lower())) is None:
        return None
    project = re.search(r"dino(v2|v3)?", text.lower())
    short = {
        "tiny": "ti",
        "t": "ti",
        "giant": "g",
        **{long: letter for letter, long in _SIZES.items()},
    }
    size = short.get(found["size"], found["size"])
    return _Vit(project[0] if project else "", size, int(found["patch"]) if found["patch"] else None)


def _timm_vit(text: str) -> str | None:
    """timm's name of a ViT that a paper or another project calls `text`; None for any other text."""
    if (vit := _vit_named(text)) is None or vit.size == "7b":
        return None
    size = _SIZES[vit.size]
    if vit.project in ("dinov2", "dinov3"):
        return f"vit_{size}_patch{vit.patch or (14 if vit.project == 'dinov2' else 16)}_{vit.project}"
    return f"vit_{size}_patch{vit.patch or (14 if vit.size in 'hg' else 16)}_224"


def _recipe_of_network(name: str) -> str | None:
    """The options that train the ViT which papers or other projects call `name`; None if it is none of them."""
    if (vit := _vit_named(name)) is None:
        return None
    prefix = f"{vit.project}_" if vit.project in ("dinov2", "dinov3") else ""
    start = f"{prefix}vit{vit.size}"
    found = [recipe for recipe in recipe_names() if re.fullmatch(rf"{start}\d+", recipe)]
    if not found:
        return None
    if vit.patch is None or f"{start}{vit.patch}" in found:
        return found[-1] if vit.patch is None else f"{start}{vit.patch}"
    return f"{found[-1]} --model.patch_size {vit.patch}"


def check_networks(recipes: Iterable[str], backbone: str | None) -> None:
    """Raises ConfigError where a network is named in the place of a recipe, or not by timm's name as the backbone."""
    for name in recipes:
        if name not in recipe_names() and not is_file(name) and (recipe := _recipe_of_network(name)):
            weights = weights_elsewhere(name)
            weights = f"; are weights meant? --model.init_from: {weights}" if weights else ""
            raise ConfigError(f"no recipe is named {name!r}: write --config {recipe}{weights}")
    # Names with "patch" are timm's way; the backbones' own check knows which there are.
    if backbone and "patch" not in backbone and not weights_elsewhere(backbone) and (found := _timm_vit(backbone)):
        raise ConfigError(f"--model.backbone: {backbone!r} is {found} here")
