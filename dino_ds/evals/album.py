"""What the teacher sees, drawn every so often while it trains, always of the same training images."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from dino_ds.config.recipe import Recipe
from dino_ds.data.base import Source, UnreadableImage
from dino_ds.data.decode import load_image
from dino_ds.data.images import ValueRange, evenly_spaced_indices
from dino_ds.data.multicrop import EvalCrop, channel_statistics
from dino_ds.durable import replace_file
from dino_ds.errors import DataError
from dino_ds.evals.features import generators_kept
from dino_ds.evals.live import LiveTeacher
from dino_ds.pictures.canvas import figure_png, figure_tensor
from dino_ds.pictures.draw import draw_patches
from dino_ds.teacher import Teacher

_IMAGES = 4
_PATCHES = 16
"""Along a side, at least: crops that are cut into fewer patches are enlarged."""
_DPI = 60


class PeriodicPictures:
    """Attention of each head and PCA of the patches, of the evaluation crops of a few images spread over `source`.

    Every `every` steps, 0 for never, into `folder`/step_00001500/. Only rank 0 draws, the others need not call it.
    """

    def __init__(
        self, source: Source, every: int, folder: Path, image_size: int, value_range: ValueRange | None = None
    ) -> None:
        self._source, self._every, self._folder, self._image_size = source, every, folder, image_size
        self._range = value_range
        self._images: Tensor | None = None

    @classmethod
    def build(cls, recipe: Recipe, source: Source, epoch_steps: int, folder: Path) -> PeriodicPictures:
        every = recipe.eval.pictures_every.in_steps(recipe.data.global_batch, epoch_steps)
        return cls(source, every, folder, recipe.crops.global_size, recipe.data.known_range)

    def due(self, step: int, last: bool = False) -> bool:
        return self._every > 0 and (last or step % self._every == 0)

    def draw(
        self, teacher: Teacher, step: int, device: torch.device, show: Callable[[str, Tensor, int], None]
    ) -> str | None:
        """PNG files, and `show` (name, uint8 (3, h, w), step) for TensorBoard; what went wrong, in words, or None."""
        folder = self._folder / f"step_{step:08d}"
        try:
            with generators_kept(device):
                model = LiveTeacher(teacher, self._image_size)
                figures = draw_patches(model, *self._read(model.patch_size, device))
                for name, figure in figures.items():
                    show(name, figure_tensor(figure, _DPI), step)
                    self._folder.mkdir(exist_ok=True)  # not its parents: a run folder that is gone must not come back
                    folder.mkdir(exist_ok=True)
                    replace_file(folder / f"{name}.png", figure_png(figure, _DPI, palette=True))
        except Exception as error:  # a full disk, too little memory, a library: training is worth more than pictures
            return f"no pictures of step {step}: {error or type(error).__name__}; training goes on"
        return None

    def _read(self, patch_size: int, device: torch.device) -> tuple[Tensor, Sequence[float], Sequence[float]]:
        """Images (b, c, side, side) as the network takes them, read once; the mean and deviation of their channels."""
        if self._images is None:
            crop, rows = EvalCrop(max(self._image_size, _PATCHES * patch_size)), []
            for index in evenly_spaced_indices(len(self._source), _IMAGES):
                try:
                    rows.append(crop(load_image(self._source, index, self._range)))
                except UnreadableImage:
                    continue
            if not rows:
                raise DataError("none of the images chosen for them can be read")
            self._images = torch.stack(rows)
        return self._images.to(device), *channel_statistics(self._images.shape[1])
