"""An evaluation without a model, up to where it would use one: what it lacks is found before hours of work."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import torch

from dino_ds import distributed
from dino_ds.evals.subject import EvalContext, NamedSources, Settings
from dino_ds.evals.suite import EVALUATIONS


def preflight_eval(name: str, settings: Settings, sources: NamedSources) -> EvalContext:
    """What an evaluation of EVALUATIONS was given, once it wants the first feature. All ranks must call it.

    Raises ConfigError or DataError, on all ranks, where there are no images or labels for it, or no benchmark.
    """
    subject = _Rehearsal(_NoModel(), settings, torch.device("cpu"), sources)
    with distributed.raise_on_all_ranks(), suppress(_Ready):
        EVALUATIONS[name](subject)
    return subject


class _Ready(Exception):
    """Everything is there that an evaluation asks for before its first feature."""


class _NoModel:
    """Nothing of it is used."""

    image_size = patch_size = width = 1

    def features(self, *_: Any) -> torch.Tensor:
        raise AssertionError("an evaluation calls Subject.begin before it uses the model")

    patch_tokens = attention = last_tokens = features


class _Rehearsal(EvalContext):
    def begin(self) -> None:
        if "_labelled_sources" in self.__dict__:  # labels are wanted: those of the test images too
            _ = self.test_indices
        raise _Ready
