"""For notebooks: a trained backbone with its features, patch tokens and attention.

model = dino_ds.load("runs/quickstart")            # or a file of weights, a Hugging Face folder, a timm name
features = model.features(model.preprocess(image)[None])
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from dino_ds.backbones import BackboneOptions, BackboneSpec
from dino_ds.data.base import UnreadableImage
from dino_ds.data.images import prepared, to_rgb
from dino_ds.data.multicrop import EvalCrop
from dino_ds.errors import CheckpointError, ConfigError
from dino_ds.models.base import Backbone as AnyBackbone
from dino_ds.models.base import patches_of
from dino_ds.models.build import build_backbone
from dino_ds.models.vit import VisionTransformer
from dino_ds.weights.find import find_weights
from dino_ds.weights.fit import describe, take_weights
from dino_ds.weights.normalisation import normalisation_of
from dino_ds.weights.read import Weights, other_spec, range_of


class Backbone(nn.Module):
    """A frozen backbone. Images are (b, c, h, w), normalised as `preprocess` does, sides multiples of
    `stride`; every method works without gradients and in FP32 unless autocast says otherwise.

    `image_size` is the native side in pixels, `width` the length of a feature vector; `heads` the tensors of the
    projection heads by name: "head", and "ibot_head" where that loss had its own; `mask_token` (1, width) what stood
    for hidden patches in training, None: not known; `notes` what of the source was not taken or not stated;
    `value_range` the values that were black and white in training images deeper than 8 bits, None: there were none;
    `normalisation` the mean and standard deviation of each channel that `preprocess` removes.
    """

    mask_token: Tensor | None = None

    def __init__(
        self,
        network: AnyBackbone,
        image_size: int,
        source: str,
        about: dict[str, Any],
        heads: dict[str, dict[str, Tensor]] | None = None,
        notes: Sequence[str] = (),
    ) -> None:
        super().__init__()
        self.network = network.eval().requires_grad_(False)
        self.image_size, self.stride, self.width = image_size, network.spec.stride, network.spec.width
        self.source, self.about, self.heads, self.notes = source, about, heads or {}, notes
        self.value_range = range_of(about)
        self.normalisation = normalisation_of(about, network.spec.in_chans)
        self._crop = EvalCrop(image_size, self.normalisation)

    def preprocess(self, image: Image.Image | np.ndarray) -> Tensor:
        """An image, or (h, w, c) of other channels than RGB -> (c, image_size, image_size).

        Resized, cut to its center and normalised, as for k-NN; values deeper than 8 bits by the range of the run, whose
        limits they must not exceed. Raises ConfigError where the model knows no range.
        """
        try:
            ready = prepared(image, self.value_range, "this image")
        except UnreadableImage as error:
            known = "" if self.value_range else "; this model was trained on 8-bit images: scale it to uint8"
            raise ConfigError(f"{error}{known}") from None
        if isinstance(ready, Image.Image):
            return self._crop(to_rgb(ready))
        grey = isinstance(image, Image.Image) and ready.shape[2] == 1 and self.network.spec.in_chans == 3
        return self._crop(np.repeat(ready, 3, axis=2) if grey else ready)

    def forward(self, images: Tensor) -> Tensor:
        """As `features`."""
        return self.features(images)

    @torch.no_grad()
    def features(self, images: Tensor) -> Tensor:
        """CLS features after the final norm, (b, width)."""
        return self.network.features(self._checked(images))

    @torch.no_grad()
    def patch_tokens(self, images: Tensor) -> Tensor:
        """Tokens of the patches after the final norm, (b, height, width of the grid, width)."""
        grid = self._grid(self._checked(images))
        features: dict[str, Tensor] = self.network({"images": [images]}, patches=("images",))
        return features[patches_of("images")].unflatten(1, grid)

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

    @property
    def patch_size(self) -> int:
        """Pixels of a patch's side: the stride, by its name for ViTs."""
        return self.stride

    @property
    def vit(self) -> VisionTransformer:
        """The network, if it is a Vision Transformer. Raises ConfigError for another one."""
        if not isinstance(self.network, VisionTransformer):
            raise ConfigError(f"{type(self.network).__name__} is not a Vision Transformer: this is for those alone")
        return self.network

    def _grid(self, images: Tensor) -> tuple[int, int]:
        return images.shape[-2] // self.stride, images.shape[-1] // self.stride

    def _checked(self, images: Tensor) -> Tensor:
        """`images`. Raises ConfigError unless they are a batch of images that can be cut into patches."""
        channels, size = self.network.spec.in_chans, self.stride
        if images.ndim != 4 or images.shape[1] != channels or images.shape[-2] % size or images.shape[-1] % size:
            raise ConfigError(
                f"images of shape {list(images.shape)}: wanted are (b, {channels}, h, w) with h and w multiples of "
                f"the patch size {size}"
            )
        return images


def load(path: str | Path, device: str | torch.device = "cpu", heads: int | None = None) -> Backbone:
    """The teacher of a run folder, or a backbone from a file of weights, a Hugging Face folder or by timm's name.

    Files: ours, facebookresearch/dino and dinov2, timm, Hugging Face (ViT, Dinov2). `heads`: attention
    heads, where no file states them; without it those of the known backbone of that width and depth, and `notes` say
    so. A timm name downloads the weights if they are not in the cache. Raises CheckpointError for anything else, and
    where heads must be named.
    """
    weights = find_weights(path)
    if (spec := other_spec(weights.about)) is not None:
        return _load_other(spec, weights, str(path)).to(device)
    try:
        found = describe(weights, heads)
        if heads not in (None, found.arch.heads):
            raise CheckpointError(f"--heads {heads}, and the file says {found.arch.heads}: leave it out")
        vit = VisionTransformer(
            found.arch, found.image_size, BackboneOptions(pos_embed_interpolation=found.interpolation)
        )
        take_weights(vit, weights.backbone)
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from None
    notes = [*weights.notes, *found.notes]
    model = Backbone(vit, found.image_size, str(path), weights.about, weights.heads, notes)
    model.mask_token = weights.mask_token
    return model.to(device)


def _load_other(spec: BackboneSpec, weights: Weights, source: str) -> Backbone:
    """A backbone that is not a Vision Transformer. Raises CheckpointError where the tensors are not its own."""
    size = weights.about.get("image_size")
    if not isinstance(size, int) or size <= 0:
        raise CheckpointError(f"{source}: the JSON beside the weights does not say the image_size")
    network = build_backbone(spec, size)
    try:
        network.load_state_dict(weights.backbone)
    except RuntimeError as error:
        raise CheckpointError(f"{source}: {' '.join(str(error).split())[:200]}") from None
    return Backbone(network, size, source, weights.about)
