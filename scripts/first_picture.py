"""The README's picture: patches of the photographs by features of the untrained quickstart and of a run of it.

`python -m scripts.first_picture RUN [docs/first-minute.png]`, with RUN as `make train` leaves it.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import torch

import dino_ds
from dino_ds.config.loading import load_recipe
from dino_ds.data.images import evenly_spaced_indices
from dino_ds.data.sources import PhotoPatches
from scripts.small_data import untrained

PATCHES = 360


def main(run: str, out: str = "docs/first-minute.png") -> None:
    import matplotlib.pyplot as plt

    source = PhotoPatches("test")
    rows = evenly_spaced_indices(len(source), PATCHES)
    images, labels = [source.load(row) for row in rows], [(source.labels or [])[row] for row in rows]
    evaluated = [line for line in dino_ds.Run(run).metrics if "knn_top1" in line]
    figure, axes = plt.subplots(1, 2, figsize=(11, 4.6), dpi=90)
    models = (untrained(load_recipe("quickstart", {})), dino_ds.load(run))
    for axis, model, line in zip(axes, models, (evaluated[0], evaluated[-1]), strict=True):
        when = f"after {line['step']} steps" if line["step"] else "before training"
        with torch.inference_mode():
            features = model.features(torch.stack([model.preprocess(image) for image in images]))
        _draw(axis, features.numpy(), images, labels)
        axis.set_title(f"{when}: {line['knn_top1']:.0f} % of patches find their photograph", fontsize=12)
    figure.tight_layout()
    figure.savefig(out, pil_kwargs={"optimize": True})


def _draw(axis: Any, features: np.ndarray, images: list[Any], labels: list[int]) -> None:
    """Patches at their places in t-SNE, in the color of their photograph."""
    import matplotlib.pyplot as plt
    from matplotlib.offsetbox import AnnotationBbox, OffsetImage
    from sklearn.manifold import TSNE

    places = TSNE(2, init="pca", perplexity=25, random_state=0, metric="cosine").fit_transform(features)
    for place, image, label in zip(places, images, labels, strict=True):
        color = plt.get_cmap("tab20")(label)
        frame = {"edgecolor": color, "facecolor": color, "linewidth": 1.6}
        pixels = np.asarray(image.convert("RGB").resize((32, 32)))
        axis.add_artist(AnnotationBbox(OffsetImage(pixels, zoom=0.42), tuple(place), pad=0.13, bboxprops=frame))
    (left, bottom), (right, top) = places.min(0) - 4, places.max(0) + 4
    axis.set(xlim=(left, right), ylim=(bottom, top))
    axis.axis("off")


if __name__ == "__main__":
    main(*sys.argv[1:])
