"""Pictures of what the teacher sees while it trains, always of the same training images."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dino_ds.basics.durable import replace_file
from dino_ds.basics.names import step_name
from dino_ds.config.recipe import Recipe
from dino_ds.data.base import Source, UnreadableImage
from dino_ds.data.cutting import EvalCrop
from dino_ds.data.decode import load_image
from dino_ds.data.images import ValueRange, evenly_spaced_indices
from dino_ds.data.normalisation import Normalisation
from dino_ds.engine import distributed
from dino_ds.errors import ConfigError, DataError
from dino_ds.evals.context import live_teacher
from dino_ds.evals.features import keep_generators
from dino_ds.report.draw import draw_patches, figure_png, figure_tensor
from dino_ds.run.run import AtStep, Moment
from dino_ds.weights.load import Backbone

_IMAGES = 4
_PATCHES = 16
"""Along a side, at least: crops that are cut into fewer patches are enlarged."""
_DPI = 60


class PeriodicPictures(AtStep):
    """Attention of each head and PCA of the patches, of the evaluation crops of a few images spread over `source`.

    A network without attention has the PCA of its map, one without a map nothing. Drawn every `every`
    steps, 0 for never, into RUN/pictures/step_00001500/.
    """

    def __init__(
        self,
        source: Source,
        every: int,
        image_size: int,
        normalisation: Normalisation,
        value_range: ValueRange | None = None,
    ) -> None:
        self._source, self._every, self._image_size = source, every, image_size
        self._normalisation = normalisation
        self._range = value_range
        self._images: Tensor | None = None

    @classmethod
    def build(cls, recipe: Recipe, source: Source, epoch_steps: int) -> PeriodicPictures:
        every = recipe.eval.pictures_every.in_steps(recipe.data.global_batch, epoch_steps)
        return cls(source, every, recipe.crops.global_size, Normalisation.of(recipe), recipe.data.known_range)

    def due(self, step: int, last: bool) -> bool:
        return self._every > 0 and (last or step % self._every == 0)

    def run(self, moment: Moment) -> bool:
        """Draw on rank 0, which has the whole teacher; the others wait."""
        if distributed.rank() == 0:
            try:
                self._draw(moment)
            except Exception as error:  # a full disk, too little memory, a library: training is worth more
                reason = error or type(error).__name__
                moment.log.info(f"warning  no pictures of step {moment.step}: {reason}; training continues")
        distributed.barrier()
        return True

    def _draw(self, moment: Moment) -> None:
        """PNG files, and the same for TensorBoard."""
        pictures, device = moment.run_dir / "pictures", moment.device
        folder = pictures / step_name(moment.step)
        teacher = live_teacher(moment.teacher, self._image_size, self._normalisation)
        with keep_generators(device), teacher as model:
            figures = draw_patches(model, *self._read(model, device)) if model.has_patches else {}
            for name, figure in figures.items():
                moment.log.picture(name, figure_tensor(figure, _DPI), moment.step)
                pictures.mkdir(exist_ok=True)  # not its parents: a run folder that is gone must not come back
                folder.mkdir(exist_ok=True)
                replace_file(folder / f"{name}.png", figure_png(figure, _DPI, palette=True))

    def _read(self, model: Backbone, device: torch.device) -> tuple[Tensor, Sequence[float], Sequence[float]]:
        """Images (b, c, side, side) as the network takes them, read once; the mean and deviation of their channels."""
        if self._images is None:
            crop, rows = EvalCrop(self._side(model), self._normalisation), list[Tensor]()
            for index in evenly_spaced_indices(len(self._source), _IMAGES):
                try:
                    rows.append(crop(load_image(self._source, index, self._range, crop.channels)))
                except UnreadableImage:
                    continue
            if not rows:
                raise DataError("none of the chosen images can be read")
            self._images = torch.stack(rows)
        return self._images.to(device), self._normalisation.mean, self._normalisation.std

    def _side(self, model: Backbone) -> int:
        """Pixels of a side that give patches to see, or the only size that a network takes."""
        side = max(self._image_size, _PATCHES * model.stride)
        try:
            model.network.check_image(side, side)
        except ConfigError:
            return self._image_size
        return side
