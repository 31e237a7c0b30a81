"""The picture of `scripts.bench_data`: rates as bars, and one image's crops in both modes with their difference."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from dino_ds.data.normalization import MEAN, STD

_GAIN = 8
_SHOWN = {
    "pil": "DINO's own",
    "exact": "augment worker",
    "split_worker": "augment device, worker's part",
    "device": "augment device, its other part",
    "split_total": "augment device, both on a CPU",
}


def draw(result: dict[str, Any], worker: list[Tensor], device: list[Tensor]) -> Any:
    """A matplotlib Figure; `worker` and `device`: the crops (3, h, w) of one image, normalized."""
    from matplotlib.figure import Figure

    names = [*_SHOWN][::-1]
    rates = [result["pipelines"][name]["images_per_second"] for name in names]
    figure = Figure(figsize=(10, 5.4), layout="constrained")
    upper, lower = figure.subplots(2, 1, height_ratios=[1, 1.35])
    colors = ["#c98a3a" if name == "pil" else "#3b6ea5" for name in names]
    bars = upper.barh([_SHOWN[name] for name in names], rates, color=colors)
    upper.bar_label(bars, [f"{rate:.0f}  ({rate / rates[-1]:.1f}×)" for rate in rates], padding=3)
    upper.set_title("Images a second of one core (× DINO's pipeline)", fontsize=11, loc="left")
    upper.margins(x=0.12)
    upper.spines[["top", "right"]].set_visible(False)
    shown, rows = _sheet(worker, device)
    lower.imshow(shown, interpolation="nearest")
    lower.set_yticks(rows, ["crops of one image, worker", "the same, device", f"their difference × {_GAIN}"])
    lower.set_title(f"The {len(worker)} crops of one image", fontsize=11, loc="left")
    lower.set_xticks([])
    lower.tick_params(length=0)
    lower.spines[:].set_visible(False)
    return figure


def _sheet(worker: list[Tensor], device: list[Tensor]) -> tuple[np.ndarray, list[float]]:
    """(H, W, 4) in [0, 1], clear beside the crops, one row a mode and one for their difference; and the middle of each
    row in pixels."""
    mean, std = torch.tensor(MEAN).view(3, 1, 1), torch.tensor(STD).view(3, 1, 1)
    seen = [[(crop * std + mean).clamp(0, 1) for crop in crops] for crops in (worker, device)]
    seen.append([((a - b).abs() * _GAIN).clamp(0, 1) for a, b in zip(*seen, strict=True)])
    cell = max(crop.shape[-1] for crop in worker) + 4
    sheet = torch.zeros(4, len(seen) * cell, sum(crop.shape[-1] + 4 for crop in worker))
    for row, crops in enumerate(seen):
        left = 0
        for crop in crops:
            side = crop.shape[-1]
            sheet[:, row * cell : row * cell + side, left : left + side] = torch.cat([crop, torch.ones_like(crop[:1])])
            left += side + 4
    return sheet.permute(1, 2, 0).numpy(), [(row + 0.5) * cell for row in range(len(seen))]
