"""A trained backbone in Python: its features, patch tokens and attention.

model = dino_ds.load("runs/quickstart")            # or a file of weights, a Hugging Face folder, a timm name
features = model.features(model.preprocess(image)[None])
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from dino_ds.basics.names import MODEL_FORMS
from dino_ds.basics.own_code import allow_code
from dino_ds.data.base import UnreadableImage
from dino_ds.data.cutting import EvalCrop
from dino_ds.data.decode import load_image, prepared
from dino_ds.data.encoded import NamedFiles
from dino_ds.data.images import pillow_values
from dino_ds.errors import CheckpointError, ConfigError
from dino_ds.models.base import Backbone as AnyBackbone
from dino_ds.models.base import patches_of
from dino_ds.models.build import build_backbone, tensor_shapes
from dino_ds.models.specs.backbones import BACKBONES
from dino_ds.models.specs.base import BackboneOptions
from dino_ds.models.specs.foreign_backbones import ForeignSpec, foreign_spec
from dino_ds.models.vit import VisionTransformer
from dino_ds.weights.find import find_weights
from dino_ds.weights.fit import Description, describe, fit_tensors
from dino_ds.weights.normalization import normalization_of, range_of


class Backbone(nn.Module):
    """A frozen backbone. Images are (b, c, h, w), normalized as by `preprocess`, with sides that are multiples of
    `side_multiple`; every method computes without gradients, and in FP32 unless autocast is on.

    `image_size` is the native side in pixels; `width` the length of a feature vector; `heads` the tensors of the
    projection heads by name: "head", and "ibot_head" where that loss had its own; `mask_token` (1, width) the token for
    hidden patches in training, or None if unknown; `notes` what the source does not state and what was left out of it;
    `value_range` the values of black and white in training images deeper than 8 bits, or None without such images;
    `normalization` the mean and standard deviation of each channel that `preprocess` removes; `crop_pct` timm's for the
    images of the run, if they are known.
    """

    mask_token: Tensor | None = None
    crop_pct: float | None = None

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
        self.side_multiple, self.title = network.spec.side_multiple, network.spec.title
        self.is_vit = isinstance(network, VisionTransformer)
        self.source, self.about, self.heads, self.notes = source, about, heads or {}, notes
        self.value_range = range_of(about)
        self.normalization = normalization_of(about, network.spec.in_chans)
        self._crop = EvalCrop(image_size, self.normalization)

    def preprocess(self, image: Image.Image | np.ndarray | str | Path) -> Tensor:
        """An image, an array (h, w) or (h, w, c), or a file as runs train on -> (c, image_size, image_size).

        The image is resized, center-cropped and normalized, as for k-NN; values deeper than 8 bits are scaled by the
        run's value range, which they must not exceed. A file is turned upright, Pillow's image is not. Raises
        ConfigError for such values without a known range, and for a file that can't be read.
        """
        channels, name = self.network.spec.in_chans, "this image"
        try:
            if isinstance(image, str | Path):
                name = str(image)
                return self._crop(load_image(NamedFiles([name]), 0, self.value_range, channels))
            if not isinstance(image, Image.Image | np.ndarray):
                raise ConfigError(
                    f"a {type(image).__name__} is not an image: give Pillow's, an array (h, w, c) or a file"
                )
            values = pillow_values(image, channels, name) if isinstance(image, Image.Image) else image
            return self._crop(prepared(values.reshape(*values.shape[:2], -1), self.value_range, name))
        except UnreadableImage as error:
            known = "" if self.value_range else "; this model was trained on 8-bit images: scale it to uint8"
            raise ConfigError(f"{error}{known if 'deeper' in error.reason else ''}") from None

    def forward(self, images: Tensor) -> Tensor:
        """The same as `features`."""
        return self.features(images)

    @torch.no_grad()
    def features(self, images: Tensor) -> Tensor:
        """Features of whole images (b, width): a ViT's CLS tokens after the final norm, else pooled ones."""
        with self._explained(images):
            return self.network.features(images)

    @torch.no_grad()
    def patch_tokens(self, images: Tensor) -> Tensor:
        """Tokens of the patches after the final norm, (b, height, width of the grid, width).

        Networks other than ViTs return the feature map before pooling, with its own width. Raises ConfigError for a
        network without such a map.
        """
        with self._explained(images):
            grid = self.network.patch_grid(*images.shape[-2:])
            features: dict[str, Tensor] = self.network({"images": [images]}, patches=("images",))
        return features[patches_of("images")].unflatten(1, grid)

    @torch.no_grad()
    def last_tokens(self, images: Tensor, blocks: int) -> Tensor:
        """Tokens after the last `blocks` blocks (or all, if fewer) and the final norm: (blocks, b, 1 + n, width).

        n patches follow the CLS token; registers are left out.
        """
        vit = self.vit
        with self._explained(images):
            rows, columns = vit.patch_grid(*images.shape[-2:])
            tokens = torch.stack(vit.last_tokens(images, blocks))
        return torch.cat((tokens[:, :, :1], tokens[:, :, -rows * columns :]), dim=2)

    def attention(self, images: Tensor) -> Tensor:
        """The attention of the last block's CLS token to each patch, (b, heads, height, width of the grid).

        Over all tokens the weights of a head sum to 1; those of CLS and registers are left out.
        """
        vit = self.vit
        with self._explained(images):
            rows, columns = vit.patch_grid(*images.shape[-2:])
            weights = vit.last_attention(images, cls_only=True)[:, :, 0, -rows * columns :]
        return weights.unflatten(2, (rows, columns))

    @property
    def has_patches(self) -> bool:
        """Whether the backbone has features of patches."""
        return self.network.spec.patch_width > 0

    @property
    def patch_size(self) -> int:
        """Pixels of a patch's side: the stride, by its name for ViTs."""
        return self.stride

    @property
    def vit(self) -> VisionTransformer:
        """The network, if it is a Vision Transformer of dino_ds. Raises ConfigError for another one."""
        if not isinstance(self.network, VisionTransformer):
            raise ConfigError(
                f"{self.title} is not a Vision Transformer that dino_ds builds: attention and "
                "the tokens of single blocks are of those alone"
            )
        return self.network

    @contextmanager
    def _explained(self, images: Tensor) -> Iterator[None]:
        """Raises ConfigError unless `images` are a batch that the network can take."""
        channels = self.network.spec.in_chans
        if not isinstance(images, Tensor):
            raise ConfigError(f"a {type(images).__name__} is not a tensor of images: stack what preprocess gives")
        if images.ndim != 4 or images.shape[1] != channels:
            raise ConfigError(f"images of shape {list(images.shape)}: wanted are (b, {channels}, h, w)")
        if self.side_multiple > 1:
            self.network.check_image(*images.shape[-2:])
        try:
            yield
        except torch.OutOfMemoryError:
            raise
        except Exception:  # whatever a foreign network raises
            self.network.check_image(*images.shape[-2:])
            raise


def load(
    path: str | os.PathLike[str],
    device: str | torch.device = "cpu",
    heads: int | None = None,
    backbone: str | None = None,
) -> Backbone:
    """Load the teacher of a run folder, or the backbone of a file of weights, a Hugging Face folder or a timm name.

    Files: ours, facebookresearch/dino and dinov2, timm, Hugging Face (ViT, Dinov2, timm's). `heads`: number of
    attention heads, if no file states it; by default that of the known backbone of this width and depth, and `notes`
    say so. `backbone`: timm's name or MODULE:CLASS of a network that is not a ViT, if no file states it; ResNets 18 to
    152 are recognized. A MODULE:CLASS that a file names is imported only if it is named here too. A timm name downloads
    the weights if they are not in the cache. Raises CheckpointError for anything else, and where heads or the backbone
    must be named.
    """
    if not isinstance(path, str | os.PathLike):
        raise CheckpointError(f"a {type(path).__name__} is not the name of a model; give {MODEL_FORMS}")
    path = os.fspath(path)
    loaded = find_weights(path, None if backbone is None else _asked(str(backbone)))
    named = "Vision Transformer" if loaded.spec is None else loaded.spec.title
    try:
        if backbone not in (None, named):
            raise CheckpointError(f"--backbone {backbone}, and the file is of a {named}: leave it out")
        if heads is not None and loaded.spec is not None:
            raise CheckpointError(f"--heads {heads}: a {named} is not a ViT; leave it out")
        description = describe(loaded, heads)
        if loaded.spec is None and heads not in (None, description.arch.heads):
            raise CheckpointError(f"--heads {heads}, and the file says {description.arch.heads}: leave it out")
        filled = _filled(description, loaded.backbone)
    except (CheckpointError, ConfigError) as error:
        raise CheckpointError(f"{path}: {error}") from None
    notes = [*loaded.notes, *description.notes]
    model = Backbone(filled, description.image_size, path, loaded.about, loaded.heads, notes)
    model.mask_token = loaded.mask_token
    return model.to(device)


def _asked(name: str) -> ForeignSpec:
    """The spec of timm's name or of a class. Raises CheckpointError for any other name, and for a backbone of ours."""
    if name in BACKBONES:
        raise CheckpointError(f"--backbone {name}: Vision Transformers are known by their tensors; leave it out")
    allow_code([name])
    try:
        return foreign_spec(name)
    except ValueError as error:
        raise CheckpointError(f"--backbone {error}") from None


def _filled(description: Description, tensors: dict[str, Tensor]) -> AnyBackbone:
    """Build the network with these tensors. Raises CheckpointError if they do not fit, before it takes memory."""
    how = description.spec, description.image_size, BackboneOptions(pos_embed_interpolation=description.interpolation)
    fitting = fit_tensors(
        tensors, tensor_shapes(*how), description.interpolation, "the weights lack", "the weights are"
    )
    network = build_backbone(*how)
    network.load_state_dict(fitting)
    return network
