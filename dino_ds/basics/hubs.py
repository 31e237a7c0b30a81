"""Recognizes names of the Hugging Face Hub and torch.hub, and says how to get their weights. Nothing is fetched."""

from __future__ import annotations

import os
import re
from pathlib import Path

SIZES = {"s": "small", "b": "base", "l": "large", "h": "huge", "g": "giant", "7b": "7b"}
"""Letters of a ViT's size -> the size in timm's names."""


def hub_id(text: str) -> str | None:
    """The repository on the Hugging Face Hub, OWNER/NAME, that `text` looks like; None for another text or a path."""
    name = re.sub(r"^(hf://|hf[-_]hub:|https?://(www\.)?huggingface\.co/)?(datasets/)?", "", text).rstrip("/")
    # "runs/mine" is a run that is missing.
    looks_so = re.fullmatch(r"(?!runs/)[A-Za-z0-9][\w.-]*/[\w.-]+", name) is not None
    is_network = re.search(r"vit-(ti|s|b|l|h|g|7b)/\d+$", name.lower()) is not None  # a paper's ViT-S/16
    return name if looks_so and not is_network and not Path(name).parent.is_dir() else None


def weights_elsewhere(text: str) -> str | None:
    """How to get the weights that `text` names on a hub, in words; None if it names none, or is a path that exists."""
    if os.path.lexists(os.path.expanduser(text)):
        return None
    repository = hub_id(text)
    known = _timm_name(repository or text)
    if repository is None:
        return f"that is torch.hub's name: timm has these weights as {known}" if known else None
    fetch = f"hf download {repository} --local-dir DIR, then give DIR"
    if known:
        return f"that is a name of the Hugging Face Hub: timm has these weights as {known}; or {fetch}"
    return f"if {repository} is on the Hugging Face Hub: {fetch}"


def _timm_name(name: str) -> str | None:
    """timm's name for the released weights that the Hub (OWNER/NAME) or torch.hub calls `name`."""
    owner, _, model = name.rpartition("/")
    if owner == "timm":
        return model
    if owner not in ("", "facebook"):
        return None
    if m := re.fullmatch(r"dinov2_vit([sblg])14(_reg)?(_lc)?", model):
        return f"vit_{SIZES[m[1]]}_patch14_{'reg4_' if m[2] else ''}dinov2.lvd142m"
    if m := re.fullmatch(r"dinov2(-with-registers)?-(small|base|large|giant)", model):
        return f"vit_{m[2]}_patch14_{'reg4_' if m[1] else ''}dinov2.lvd142m"
    if m := re.fullmatch(r"dinov3[-_]vit(s|b|l|h|7b)16(plus)?(?:-pretrain-(lvd1689m|sat493m))?", model):
        return f"vit_{SIZES[m[1]]}{'_plus' if m[2] else ''}_patch16_dinov3.{m[3] or 'lvd1689m'}"
    if m := re.fullmatch(r"dinov3[-_]convnext[-_](tiny|small|base|large)(?:-pretrain-lvd1689m)?", model):
        return f"convnext_{m[1]}.dinov3_lvd1689m"
    if m := re.fullmatch(r"dino[-_]vit([sb])(8|16)", model):
        return f"vit_{SIZES[m[1]]}_patch{m[2]}_224.dino"
    return None


def advise_saved(folder: str) -> str:
    """The remedy for a folder that save_to_disk of Hugging Face's datasets has written; "" for any other folder."""
    saved = Path(folder)
    has_state, has_splits = (os.path.isfile(saved / name) for name in ("state.json", "dataset_dict.json"))
    if not has_splits and not (has_state and next(saved.glob("*.arrow"), None)):
        return ""
    saved = saved / "SPLIT" if has_splits else saved
    return (
        "was written by save_to_disk of Hugging Face's datasets, whose Arrow files are not read: type python -c "
        f"\"import datasets; datasets.load_from_disk({str(saved)!r}).to_parquet('images.parquet')\", then give "
        "images.parquet"
    )
