"""Networks as papers and other projects name them, such as ViT-S/16, where a recipe or timm's name is wanted."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

from dino_ds.basics.hubs import SIZES, weights_elsewhere
from dino_ds.basics.text_file import is_file
from dino_ds.config.recipe_files import recipe_names
from dino_ds.errors import ConfigError

_NAMES = {"ti": "tiny", **SIZES}
_SIZES = {"t": "ti", **{name: size for size, name in _NAMES.items()}}
"""timm's name of a size -> the letters in recipes' names."""
_VIT = re.compile(
    r"(facebook/)?(dino(v2|v3)?[-_ ]?)?(vit|deit)[-_ ]?"
    r"(?P<size>tiny|ti|t|small|s|base|b|large|l|huge|h|giant|g|7b)([-_/ ]?(patch|p)?(?P<patch>8|14|16))?"
    r"([-_.](224|dino(v2|v3)?|reg4|qkvb|lvd142m|lvd1689m))*"
)


class _Vit(NamedTuple):
    """A ViT as a paper or another project names it: the project dinov2, dinov3 or ""; the size ti, s, b, l, h, g or 7b;
    the patch size, or None where it is not said."""

    project: str
    size: str
    patch: int | None


def _vit_named(text: str) -> _Vit | None:
    """The ViT that ViT-S/16, vit_small or dino_vits16 is, or None for any other text."""
    if (found := _VIT.fullmatch(text.lower())) is None:
        return None
    project = re.search(r"dinov[23]", text.lower())
    size = _SIZES.get(found["size"], found["size"])
    return _Vit(project[0] if project else "", size, int(found["patch"]) if found["patch"] else None)


def _timm_vit(text: str) -> str | None:
    """timm's name of a ViT that a paper or another project calls `text`, or None for any other text."""
    if (vit := _vit_named(text)) is None or vit.size == "7b":
        return None
    size = _NAMES[vit.size]
    if vit.project:
        return f"vit_{size}_patch{vit.patch or (14 if vit.project == 'dinov2' else 16)}_{vit.project}"
    return f"vit_{size}_patch{vit.patch or (14 if vit.size in 'hg' else 16)}_224"


def _recipe_of_network(name: str) -> str | None:
    """The options that train the ViT which papers or other projects call `name`, or None if it is none of them."""
    if (vit := _vit_named(name)) is None:
        return None
    start = f"{vit.project and f'{vit.project}_'}vit{vit.size}"
    found = [recipe for recipe in recipe_names() if re.fullmatch(rf"{start}\d+", recipe)]
    if not found or vit.patch is None:
        return found[-1] if found else None
    exact = f"{start}{vit.patch}"
    return exact if exact in found else f"{found[-1]} --model.patch_size {vit.patch}"


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
