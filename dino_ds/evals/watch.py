"""k-NN of the teacher while it trains, beside the baselines that make the number mean something."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dino_ds.config.recipe import Recipe
from dino_ds.data.multicrop import EvalCrop
from dino_ds.data.sources import Source, build_source
from dino_ds.errors import DataError
from dino_ds.evals.features import extract_features, raw_pixels, spread_indices
from dino_ds.evals.knn import knn_accuracies
from dino_ds.teacher import Teacher


class KnnWatch:
    """Evaluates every `every` steps on fixed subsets of labelled images: a bank to compare with, and test images.

    Keeps the accuracy (percent) of raw pixels, of the untrained network and of the newest teacher.
    """

    def __init__(
        self,
        bank: Source,
        test: Source,
        every: int,
        size: int,
        k: int,
        temperature: float,
        limits: tuple[int, int],
        workers: int | None,
    ) -> None:
        assert bank.labels is not None and test.labels is not None
        labelled = np.flatnonzero(np.asarray(bank.labels) >= 0)
        self._bank, self._test = bank, test
        self._bank_indices = [int(labelled[i]) for i in spread_indices(len(labelled), limits[0])]
        self._test_indices = spread_indices(len(test), limits[1])
        self._every, self._crop, self._k, self._temperature = every, EvalCrop(size), k, temperature
        self._workers = workers
        self.chance = 100.0 / len(set(test.labels))
        self._unreadable: dict[str, bool] = {}  # text -> whether it has been said
        self.raw: float | None = None
        self.untrained: float | None = None
        self.latest: float | None = None

    @classmethod
    def build(cls, recipe: Recipe, train: Source, epoch_steps: int) -> KnnWatch | None:
        """None where evaluation is switched off or there is nothing labelled to evaluate on.

        Raises DataError if the test images are named but do not fit the training images.
        """
        settings = recipe.eval
        every = settings.every.in_steps(recipe.data.global_batch, epoch_steps)
        own = recipe.data.own_files
        if every == 0 or (own and settings.root is None):
            return None
        if train.labels is None:
            raise DataError(
                f"eval.root is given, but the images of {recipe.data.root} have no classes to compare with; "
                "sort both into class folders, or leave eval.root out"
            )
        root = settings.root if own else recipe.data.root
        test = build_source(recipe.data.source, root, "test", recipe.data.download)
        if test.labels is None or test.classes != train.classes:
            raise DataError(
                f"eval.root {root} has the classes {_few(test.classes)}, data.root {_few(train.classes)}; "
                "they must be the same classes"
            )
        return cls(
            train,
            test,
            every,
            recipe.crops.global_size,
            settings.k,
            settings.temperature,
            (settings.bank_images, settings.test_images),
            recipe.data.workers,
        )

    def due(self, step: int) -> bool:
        return step % self._every == 0

    def evaluate(
        self, teacher: Teacher, step: int, device: torch.device, give_up: Callable[[], bool] = lambda: False
    ) -> dict[str, float] | None:
        """All ranks must call it. At step 0 the teacher is the untrained network.

        `give_up` is asked every batch; where it has said yes on any rank nothing is evaluated: None, on all ranks.
        """
        latest = self._accuracy(teacher.features, device, give_up)
        raw = self._accuracy(raw_pixels, device, give_up) if latest is not None and self.raw is None else self.raw
        if latest is None or raw is None:
            return None
        self.latest, self.raw = latest, raw
        if step == 0:
            self.untrained = latest
        return {"knn_top1": latest, "knn_raw_pixels": raw, "knn_chance": self.chance}

    def _accuracy(
        self, describe: Callable[[Tensor], Tensor], device: torch.device, give_up: Callable[[], bool]
    ) -> float | None:
        parts = []
        for source, indices in ((self._bank, self._bank_indices), (self._test, self._test_indices)):
            found = extract_features(describe, source, indices, self._crop, device, self._workers, give_up)
            if found is None:
                return None
            for text in found[2]:
                self._unreadable.setdefault(text, False)
            parts.append(found[:2])
        bank, test = parts
        return knn_accuracies(*bank, *test, [self._k], self._temperature)[self._k]

    def new_unreadable(self) -> list[str]:
        """Texts that name images left out of the evaluation, each said once; the same on all ranks."""
        new = [text for text, said in self._unreadable.items() if not said]
        self._unreadable.update(dict.fromkeys(new, True))
        return new

    def verdict(self) -> str:
        """The honest line: what pixels and chance give, before and after."""
        untrained = f", untrained network {self.untrained:.1f} %" if self.untrained is not None else ""
        return f"raw pixels {self.raw:.1f} %{untrained}, teacher {self.latest:.1f} % (chance {self.chance:.1f} %)"

    def state_dict(self) -> dict[str, Any]:
        return {"raw": self.raw, "untrained": self.untrained, "latest": self.latest}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.raw, self.untrained, self.latest = state["raw"], state["untrained"], state["latest"]


def _few(classes: list[str] | None) -> str:
    if not classes:
        return "none"
    return ", ".join(classes[:3]) + (f" ... ({len(classes)})" if len(classes) > 3 else "")
