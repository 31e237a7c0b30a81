"""Runs an evaluation up to its first use of the model, so that missing data is found before hours of work."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import torch

from dino_ds import distributed
from dino_ds.data.normalisation import IMAGENET
from dino_ds.evals.context import EvalContext, NamedSources, Settings
from dino_ds.evals.suite import EVALUATIONS


def preflight_eval(name: str, settings: Settings, sources: NamedSources) -> EvalContext:
    """The context of an evaluation at its first use of the model. All ranks must call it.

    Raises ConfigError or DataError, on all ranks, where there are no images or labels for it, or no benchmark.
    """
    context = _Preflight(_NoModel(), settings, torch.device("cpu"), sources)
    with distributed.raise_on_all_ranks(), suppress(_Ready):
        EVALUATIONS[name](context)
    return context


class _Ready(Exception):
    """The evaluation has found everything that it needs before its first feature."""


class _NoModel:
    """Stands for a model; none of its methods may be called."""

    image_size = stride = side_multiple = width = 1
    is_vit, normalisation = False, IMAGENET

    def features(self, *_: Any) -> torch.Tensor:
        raise AssertionError("an evaluation calls EvalContext.begin before it uses the model")

    patch_tokens = attention = last_tokens = features


class _Preflight(EvalContext):
    def begin(self) -> None:
        if "_labelled_sources" in self.__dict__:  # labels are wanted: those of the test images too
            _ = self.test_indices
        raise _Ready
