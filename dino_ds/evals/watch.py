"""Evaluations of the teacher while it trains; for k-NN with the baselines that make the number mean something."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dino_ds import distributed
from dino_ds.config import Recipe
from dino_ds.data.sources import Source, build_source
from dino_ds.errors import ConfigError, DataError, UserError
from dino_ds.evals.features import raw_pixels
from dino_ds.evals.live import LiveTeacher
from dino_ds.evals.results import describe_result
from dino_ds.evals.subject import GaveUp, Labelled, Settings, Subject, check_labels, labelled_indices
from dino_ds.evals.suite import EVALUATIONS, evaluate
from dino_ds.teacher import Teacher

Results = dict[str, dict[str, Any]]
"""By evaluation, as RUN/evaluations.json keeps them."""


class Watch:
    """Evaluates every `every` steps by `names` of EVALUATIONS, always on the same images, `train` and `test`.

    Of k-NN it keeps the accuracy (percent) of raw pixels, of the untrained network and of the newest teacher. All ranks
    must make one. Raises ConfigError or DataError, on all ranks, for an evaluation that can't be made.
    """

    def __init__(
        self,
        names: Sequence[str],
        every: int,
        train: Source,
        test: Source | None,
        settings: Settings,
        image_size: int,
    ) -> None:
        self._names, self._every, self._settings, self._size = names, every, settings, image_size
        self._sources = (train, test)
        self.chance, self._images = 0.0, [0, 0]
        self._said: set[str] = set()
        self.raw: float | None = None
        self.untrained: float | None = None
        self.latest: float | None = None
        for name in names:
            with distributed.together():
                self._check(name)

    @classmethod
    def build(cls, recipe: Recipe, train: Source, epoch_steps: int) -> Watch | None:
        """None where evaluation is switched off, or by itself and there is nothing labelled to evaluate on.

        All ranks must call it. Raises ConfigError or DataError, on all ranks, for an evaluation that can't be made.
        """
        settings, data = recipe.eval, recipe.data
        every = settings.every.in_steps(data.global_batch, epoch_steps)
        named = not data.own_files or settings.root is not None
        names = (("knn",) if named else ()) if settings.evals == "auto" else settings.evals
        if every == 0 or not names:
            return None
        test = None
        with distributed.together():
            if named:
                root = settings.root if data.own_files else data.root
                test = build_source(data.source, root, "test", data.download)
        how = Settings(
            ks=(settings.k,),
            temperature=settings.temperature,
            images=settings.bank_images,
            test_images=settings.test_images,
            workers=data.workers,
            root=Path(settings.protocol_root).expanduser() if settings.protocol_root else None,
        )
        return cls(names, every, train, test, how, recipe.crops.global_size)

    def _check(self, name: str) -> None:
        """Goes through an evaluation until it wants the first feature. Raises ConfigError, DataError."""
        train, test = self._sources
        try:
            EVALUATIONS[name](_Rehearsal(_NoModel(self._size), self._settings, _CPU, lambda: (train, test)))
        except _Ready:
            pass
        except UserError as error:
            if test is None and isinstance(error, DataError):
                raise ConfigError(
                    f"eval.evals {name} needs labelled test images: name them with --eval.root DIR, or leave it out"
                ) from None
            raise type(error)(f"eval.evals {name}: {error}") from None
        if name == "knn" and test is not None:
            self._images = [
                len(labelled_indices(source, limit))
                for source, limit in ((train, self._settings.images), (test, self._settings.test_images))
            ]
            self.chance = 100.0 / len({label for label in test.labels or () if label >= 0})
            if self._settings.ks[0] > self._images[0]:
                raise DataError(
                    f"eval.k {self._settings.ks[0]} is more than the {self._images[0]} labelled training images: lower it"
                )

    def due(self, step: int) -> bool:
        return step % self._every == 0

    def evaluate(
        self,
        teacher: Teacher,
        step: int,
        images: int,
        device: torch.device,
        give_up: Callable[[], bool] = lambda: False,
    ) -> Results | None:
        """After `step` steps, 0 for the untrained network, of `images` images; all ranks must call it.

        `give_up` is asked every batch; where it has said yes on any rank nothing is evaluated: None, on all ranks.
        What can't be evaluated is an error of the data at step 0; later it is left out and noted. Training's random
        numbers stay as they are.
        """
        with _generators_kept(device):
            try:
                return self._evaluate(LiveTeacher(teacher, self._size), step, images, device, give_up)
            except GaveUp:
                return None
