"""For notebooks: a trained backbone with its features, patch tokens and attention.

model = dino_ds.load("runs/quickstart")            # or a file of weights, a Hugging Face folder, a timm name
features = model.features(model.preprocess(image)[None])
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from dino_ds.architectures import Architecture
from dino_ds.data.images import UnreadableImage
from dino_ds.data.multicrop import EvalCrop
from dino_ds.data.value_range import ValueRange, prepared
from dino_ds.errors import CheckpointError, ConfigError
from dino_ds.models.vit import VisionTransformer
from dino_ds.weights.fit import architecture_of, take_weights
from dino_ds.weights.read import Weights, find_weights


class Backbone(nn.Module):
    """A frozen Vision Transformer. Images are (b, c, h, w), normalised as `preprocess` does, sides multiples of
    `patch_size`; every method works without gradients and in FP32 unless autocast says otherwise.

    `image_size` is the native side in pixels, `width` the length of a feature vector; `head` the projection head's
    tensors under our names, empty where there is none; `notes` what of the source was not taken, for people;
    `value_range` the values that were black and white in training images deeper than 8 bits, None: there were none.
    """

    def __init__(
        self,
        vit: VisionTransformer,
        image_size: int,
        source: str,
        about: dict[str, Any],
        head: dict[str, Tensor] | None = None,
        notes: Sequence[str] = (),
    ) -> None:
        super().__init__()
        self.vit = vit.eval().requires_grad_(False)
        self.image_size, self.patch_size, self.width = image_size, vit.arch.patch_size, vit.arch.width
        self.source, self.about, self.head, self.notes = source, about, head or {}, notes
        self.value_range = _range_of(about)
        self._crop = EvalCrop(image_size)

    def preprocess(self, image: Image.Image | np.ndarray) -> Tensor:
        """An image, or (h, w, c) of other channels than RGB -> (c, image_size, image_size).

        Resized, cut to its centre and normalised, as for k-NN; values deeper than 8 bits by the range of the run, whose
        limits they must not exceed. Raises ConfigError where the model knows no range.
        """
        try:
            ready = prepared(image, self.value_range, "this image")
        except UnreadableImage as error:
            raise ConfigError(f"{error}: scale it to uint8 as the model's training images were") from None
        if isinstance(ready, Image.Image):
            return self._crop(ready.convert("RGB"))
        grey = isinstance(image, Image.Image) and ready.shape[2] == 1
        return self._crop(np.repeat(ready, 3, axis=2) if grey else ready)

    def forward(self, images: Tensor) -> Tensor:
        """As `features`."""
        return self.features(images)

    @torch.no_grad()
    def features(self, images: Tensor) -> Tensor:
        """CLS features after the final norm, (b, width)."""
        return self.vit([self._checked(images)])

    @torch.no_grad()
    def patch_tokens(self, images: Tensor) -> Tensor:
        """Tokens of the patches after the final norm, (b, height, width of the grid, width)."""
        rows, columns = self._grid(self._checked(images))
        tokens = self.vit.tokens(images)[:, -rows * columns :]
        return tokens.unflatten(1, (rows, columns))

    @torch.no_grad()
    def last_tokens(self, images: Tensor, blocks: int) -> Tensor:
        """After each of the last `blocks` blocks (of fewer, all) and the final norm: (blocks, b, 1 + patches, width).

        CLS first; registers are left out.
        """
        rows, columns = self._grid(self._checked(images))
        tokens = torch.stack(self.vit.last_tokens(images, blocks))
        return torch.cat((tokens[:, :, :1], tokens[:, :, -rows * columns :]), dim=2)

    def attention(self, images: Tensor) -> Tensor:
        """How much the CLS token of the last block looks at each patch, (b, heads, height, width of the grid).

        Over all tokens the weights of a head sum to 1; those of CLS and registers are left out.
        """
        rows, columns = self._grid(self._checked(images))
        weights = self.vit.last_attention(images, cls_only=True)[:, :, 0, -rows * columns :]
        return weights.unflatten(2, (rows, columns))

    def _grid(self, images: Tensor) -> tuple[int, int]:
        return images.shape[-2] // self.patch_size, images.shape[-1] // self.patch_size

    def _checked(self, images: Tensor) -> Tensor:
        """Raises ConfigError for what is no batch of images that the network can cut into patches."""
        channels, size = self.vit.arch.in_chans, self.patch_size
        if images.ndim != 4 or images.shape[1] != channels or images.shape[-2] % size or images.shape[-1] % size:
            raise ConfigError(
                f"images of shape {list(images.shape)}: wanted are (b, {channels}, h, w) with h and w multiples of "
                f"the patch size {size}"
            )
        return images


def load(path: str | Path, device: str | torch.device = "cpu", heads: int | None = None) -> Backbone:
    """The teacher of a run folder, or a backbone from a file of weights, a Hugging Face folder or by timm's name.

    Files: ours, facebookresearch/dino and dinov2, timm, Hugging Face (ViT, Dinov2). `heads`: of a file that does not
    say it, where it is not width / 64. A timm name downloads the weights if they are not in the cache.
    Raises CheckpointError for what is no such thing.
    """
    weights = find_weights(path)
    try:
        arch, size, interpolation = _described(weights, heads)
        vit = VisionTransformer(arch, size, pos_embed_interpolation=interpolation)
        take_weights(vit, weights.backbone)
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from None
    return Backbone(vit, size, str(path), weights.about, weights.head, weights.notes).to(device)


def _described(weights: Weights, heads: int | None) -> tuple[Architecture, int, str]:
    """Architecture, native pixels and the way to resize the position embedding: as the file says, else as is usual."""
    if weights.kind == "dino_ds":
        described = _described_by_us(weights)
    else:
        said = weights.about.get("num_attention_heads")
        arch, size = architecture_of(weights.backbone, said or heads)
        described = arch, size, "antialias" if arch.registers or weights.kind == "timm" else "dino"
    if heads not in (None, described[0].heads):
        raise CheckpointError(f"--heads {heads}, and the file says {described[0].heads}: leave it out")
    return described


def _described_by_us(weights: Weights) -> tuple[Architecture, int, str]:
    """What the JSON says, where the tensors bear it out: a network is built from it before they are looked at."""
    about = weights.about
    try:
        arch = Architecture(**about["architecture"])
        size, resizing = int(about["timm_arguments"]["img_size"]), about["pos_embed_interpolation"]
        seen, seen_size = architecture_of(weights.backbone, arch.heads)
        agree = _visible(arch) == _visible(seen) and size == seen_size and resizing in ("dino", "antialias")
        agree = agree and 1 <= arch.heads <= arch.width and arch.width % arch.heads == 0
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise CheckpointError(f"the JSON beside the weights can't be used: {type(error).__name__}: {error}") from None
    if not agree:
        raise CheckpointError("the JSON beside the weights describes another network than theirs: remove or fix it")
    return arch, size, resizing


def _range_of(about: dict[str, Any]) -> ValueRange | None:
    """Raises CheckpointError for what is no range."""
    if "value_range" not in about:
        return None
    try:
        low, high = (float(value) for value in about["value_range"])
        if not (math.isfinite(low) and math.isfinite(high) and low < high):
            raise ValueError
    except (TypeError, ValueError, OverflowError):
        raise CheckpointError(
            f"the JSON beside the weights has a value_range that is no range: {str(about['value_range'])[:80]}"
        ) from None
    return low, high


def _visible(arch: Architecture) -> tuple[object, ...]:
    """What the shapes of the tensors tell of an architecture."""
    hidden = int(arch.width * arch.mlp_ratio)
    return (arch.patch_size, arch.width, arch.depth, arch.in_chans, arch.registers, arch.swiglu, hidden)
