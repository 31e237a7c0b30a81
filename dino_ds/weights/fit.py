"""Makes weights that were read fit a network: which architecture they are of, and which tensors can be taken."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from dino_ds.architectures import ARCHITECTURES, Architecture
from dino_ds.errors import CheckpointError


def architecture_of(backbone: dict[str, Tensor], heads: int | None = None) -> tuple[Architecture, int]:
    """The architecture that the tensors are of, and the pixels of its native image.

    `heads` can't be seen in them: None takes those of the backbone we know of that width and depth, else width / 64.
    Raises CheckpointError where tensors of a ViT are missing.
    """
    try:
        width, in_chans, patch, _ = backbone["patch_embed.proj.weight"].shape
        depth = 1 + max(int(m[1]) for name in backbone if (m := re.match(r"blocks\.(\d+)\.", name)))
        packed = backbone["blocks.0.mlp.fc1.weight"].shape[0]
        hidden = backbone["blocks.0.mlp.fc2.weight"].shape[1]
        registers = backbone["reg_token"].shape[1] if "reg_token" in backbone else 0
        positions = backbone["pos_embed"].shape[1] - (0 if registers else 1)
    except (KeyError, ValueError) as error:
        raise CheckpointError(f"these are not the weights of a Vision Transformer: {error} is missing") from None
    arch = Architecture(
        patch,
        width,
        depth,
        heads or _usual_heads(width, depth),
        mlp_ratio=packed / width,
        swiglu=packed == 2 * hidden,
        layer_scale=1e-5 if "blocks.0.ls1.gamma" in backbone else None,
        registers=registers,
        in_chans=in_chans,
    )
    if int(width * arch.mlp_ratio) != packed:  # the quotient was rounded down
        arch = replace(arch, mlp_ratio=math.nextafter(arch.mlp_ratio, math.inf))
    return arch, math.isqrt(positions) * patch


def _usual_heads(width: int, depth: int) -> int:
    known = (arch.heads for arch in ARCHITECTURES.values() if (arch.width, arch.depth) == (width, depth))
    return next(known, max(1, width // 64))


@dataclass(frozen=True)
class Taken:
    """What `take_weights` did: names taken, resized (name -> old and new shape), left as they were, and not used."""

    taken: list[str]
    resized: dict[str, str]
    kept: list[str]
    unused: list[str]

    def __str__(self) -> str:
        parts = [f"{len(self.taken)} tensors taken"]
        parts += [f"{name} resized {change}" for name, change in self.resized.items()]
        if self.kept:
            parts.append(f"{len(self.kept)} not in the file stay as initialised ({_few(self.kept)})")
        if self.unused:
            parts.append(f"{len(self.unused)} of the file not used ({_few(self.unused)})")
        return "; ".join(parts)


@torch.no_grad()
def take_weights(network: nn.Module, tensors: dict[str, Tensor], whole: bool = True) -> Taken:
    """Copy `tensors` into `network` by name; a position embedding of another size is resized (bicubic, antialiased).

    Raises CheckpointError for other shapes, and, with `whole`, where a tensor of the network is not in the file.
    """
    own = dict(network.named_parameters())
    resized: dict[str, str] = {}
    wrong = []
    for name in own.keys() & tensors.keys():
        mine, theirs = own[name], tensors[name]
        if name == "pos_embed" and theirs.ndim == 3 and theirs.shape[-1] == mine.shape[-1]:
            theirs = _resize_positions(theirs, mine)
            if theirs.shape == mine.shape and tensors[name].shape != mine.shape:
                resized[name] = f"{list(tensors[name].shape)} -> {list(mine.shape)}"
        if theirs.shape != mine.shape:
            wrong.append(f"{name} {list(theirs.shape)} vs {list(mine.shape)}")
        elif not wrong:
            mine.copy_(theirs.to(mine.dtype))
    missing = sorted(own.keys() - tensors.keys())
    if wrong:
        raise CheckpointError(f"the weights are of another architecture: {len(wrong)} tensors, first {min(wrong)}")
    if whole and missing:
        raise CheckpointError(f"the weights lack {len(missing)} of {len(own)} tensors: {_few(missing)}")
    return Taken(sorted(own.keys() & tensors.keys()), resized, missing, sorted(tensors.keys() - own.keys()))


def _resize_positions(theirs: Tensor, mine: Tensor) -> Tensor:
    """(1, special + n, d) to the grid of `mine`; as it is where the numbers of special tokens differ."""
    special = [shape - math.isqrt(shape) ** 2 for shape in (theirs.shape[1], mine.shape[1])]
    if theirs.shape == mine.shape or special[0] != special[1] or special[0] > 1:
        return theirs
    sides = [math.isqrt(p.shape[1]) for p in (theirs, mine)]
    grid = rearrange(theirs[:, special[0] :].float(), "1 (h w) d -> 1 d h w", h=sides[0])
    resized = F.interpolate(grid, size=(sides[1], sides[1]), mode="bicubic", antialias=True)
    return torch.cat((theirs[:, : special[0]].float(), rearrange(resized, "1 d h w -> 1 (h w) d")), dim=1)


def _few(names: list[str]) -> str:
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
