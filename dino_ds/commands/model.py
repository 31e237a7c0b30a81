"""The model that `dino_ds.load` returns: a trained backbone that also takes folders and files of images.

model = dino_ds.load("runs/quickstart")            # or a file of weights, a Hugging Face folder, a timm name
known = model.embed("images")                      # vectors, names, labels
model.similar("one.jpg", known)                    # the nearest of them"""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, cast

import numpy as np
import torch

from dino_ds.commands.embed import Embeddings
from dino_ds.data import encoded, multicrop
from dino_ds.data.images import Source
from dino_ds.errors import ConfigError
from dino_ds.evals.features import BATCH, LabeledImages, Reading, fill_rows, find_images, load_batches, range_for
from dino_ds.weights import load as weights
from dino_ds.weights.load import Backbone

if TYPE_CHECKING:
    from dino_ds.commands.find import Found


class Model(Backbone):
    """A Backbone with methods for images that are files."""

    def embed(
        self,
        images: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
        batch: int = BATCH,
        workers: int | None = None,
    ) -> Embeddings:
        """A vector for every image, as `dino-ds embed` writes them, in memory.

        images: as data.root, or a list of files. Warns of images that can't be read: their rows are NaN. Raises
        UserError.
        """
        if isinstance(images, str | os.PathLike):
            source: Source = find_images(self.source, "folder", os.path.expanduser(images))
        else:
            source = encoded.NamedFiles([os.path.expanduser(file) for file in images])
        value_range, notes = range_for(self, [source])
        crop, indices = multicrop.EvalCrop(self.image_size, self.normalization), list(range(len(source)))
        reading = Reading(crop, workers, value_range, batch, channels=crop.channels)
        rows, device, bad = np.full((len(source), self.width), np.nan, np.float32), self.device, list[str]()
        labeled = LabeledImages(source, indices, reading)
        with closing(load_batches(labeled, source, workers, "embed", batch_size=batch)) as batches:
            for loaded in batches:
                bad += fill_rows(rows, loaded, self.features, device)
        for note in [*notes, *(f"{text} can't be read: its row is NaN" for text in bad)]:
            warnings.warn(note, stacklevel=2)
        labels = np.full(len(source), -1) if source.labels is None else np.array(source.labels, int)
        return Embeddings(rows, [source.name(i) for i in indices], labels, list(source.classes or ()))

    def similar(self, image: str | Path | np.ndarray, features: Embeddings, top: int = 10) -> list[Found]:
        """The `top` images of `features`, which `embed` has returned, nearest to an image, the nearest first."""
        from dino_ds.commands.find import Found

        if features.features.shape[1:] != (self.width,):
            raise ConfigError(f"features have {features.features.shape[1:]} numbers a row, and this model {self.width}")
        query = self.features(self.preprocess(image)[None].to(self.device))[0].double().cpu().numpy()
        bank = features.features.astype(np.float64)
        cosines = bank @ query / np.maximum(np.linalg.norm(bank, axis=1) * np.linalg.norm(query), 1e-30)
        nearest = np.argsort(-cosines, kind="stable")[: min(top, int(np.isfinite(cosines).sum()))]
        named = str(image) if isinstance(image, str | Path) else "this image"
        return [Found(named, float(cosines[row]), int(row), features.names[row]) for row in nearest]

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device


def load(
    path: str | os.PathLike[str],
    device: str | torch.device = "cpu",
    heads: int | None = None,
    backbone: str | None = None,
) -> Model:
    """Load the teacher of a run folder, or the backbone of a file of weights, a Hugging Face folder or a timm name.

    Files: ours, facebookresearch/dino and dinov2, timm, Hugging Face (ViT, Dinov2, timm's). `heads`: number of
    attention heads, if no file states it; by default that of the known backbone of this width and depth, and `notes`
    say so. `backbone`: timm's name or MODULE:CLASS of a network that is not a ViT, if no file states it; ResNets 18 to
    152 are recognized. A MODULE:CLASS that a file names is imported only if it is named here too. A timm name downloads
    the weights if they are not in the cache. Raises CheckpointError for anything else, and where heads or the backbone
    must be named.
    """
    return cast(Model, weights.load(path, device, heads, backbone, Model))
