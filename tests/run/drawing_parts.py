"""Users' terms and sources that draw random numbers or keep something, each in a way of its own."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from dino_ds.config.crops import Masks
from dino_ds.engine.schedules import ScheduleValues
from dino_ds.method import ema, specs
from dino_ds.method.objective import Needs, Outputs, StudentOutputs, Term, TermLoss


def drawing(*kinds: str) -> dict[str, str]:
    term = {"spec": "tests.run.drawing_parts:DrawingSpec", "weight": 0.1}
    return {"objective.terms": json.dumps({kind.lower(): term | {"kind": kind} for kind in kinds})}


@dataclass(frozen=True)
class DrawingSpec(specs.base.TermSpec):
    """The term of the class that `kind` names."""

    kind: str = ""

    def build(self, parts: Any) -> Term:
        term: Term = globals()[self.kind]()
        return term


class Drawing(Term):
    """The CLS features are to be near a point times `factor`, which each kind makes in its own way."""

    needs = Needs(student=("cls",), teachers={})

    def targets(self, window: Sequence[Outputs], masks: Sequence[Masks], schedule: ScheduleValues) -> list[Any]:
        return [None] * len(window)

    def loss(self, student: StudentOutputs, targets: Any, schedule: ScheduleValues) -> TermLoss:
        features = student["cls"]
        assert isinstance(features, Tensor)
        return TermLoss((features.float() - self.factor(features.detach().float())).square().mean(), {})

    def factor(self, features: Tensor) -> Any:
        raise NotImplementedError


class Buffer(Drawing, nn.Module):
    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(()), persistent=False)

    def factor(self, features: Tensor) -> Any:
        self.mean.lerp_(features.mean(), 0.5)
        return self.mean


class Mixed(Drawing):
    """Draws from torch, NumPy and Python when it is built, for targets, and for losses; has a generator, a module, a
    number, a tensor that is replaced, not written to, and one that is not there at first."""

    def __init__(self) -> None:
        self.point = np.random.rand() + random.random()
        self.generator, self.inside, self.calls = torch.Generator().manual_seed(3), Buffer(), 0
        self.mean = torch.zeros((), dtype=torch.float64)
        self.late: Tensor | None = None

    def targets(self, window: Sequence[Outputs], masks: Sequence[Masks], schedule: ScheduleValues) -> list[Any]:
        self.drawn = torch.rand(()).item()
        return [None] * len(window)

    def factor(self, features: Tensor) -> Any:
        self.mean, self.calls = 0.5 * self.mean + features.mean(), self.calls + 1
        self.late = self.mean if self.late is None else 0.9 * self.late + self.mean
        drawn = (
            torch.rand_like(features) + random.random() * np.random.rand() + torch.rand((), generator=self.generator)
        )
        kept = self.mean.float() * self.calls + self.late.float() + self.inside.factor(features)
        return self.point + self.drawn + drawn + kept


class ByItself(Drawing):
    """Says itself what is saved: the state of NumPy's generator."""

    def __init__(self) -> None:
        self.generator = np.random.RandomState(3)

    def factor(self, features: Tensor) -> Any:
        return self.generator.rand()

    def state_dict(self) -> dict[str, Tensor]:
        _, keys, place, *_ = self.generator.get_state(legacy=True)
        return {"keys": torch.from_numpy(keys.astype(np.int64)), "place": torch.tensor(place)}

    def load_state_dict(self, state: Any) -> None:
        self.generator.set_state(("MT19937", state["keys"].numpy().astype(np.uint32), int(state["place"])))


class Numpy(Drawing):
    """No checkpoint holds its generator."""

    def __init__(self) -> None:
        self.generator = np.random.default_rng(3)

    def factor(self, features: Tensor) -> Any:
        return self.generator.random()


class Listed(Drawing):
    """No checkpoint holds its list."""

    def __init__(self) -> None:
        self.queue: list[Tensor] = []

    def factor(self, features: Tensor) -> Any:
        self.queue.append(features.mean())
        return torch.stack(self.queue).mean()


@dataclass(frozen=True)
class DrawingEmaSpec(specs.ours.EmaSpec):
    """An EMA teacher whose momentum is drawn."""

    def build_teacher(self, parts: Any) -> Any:
        teacher: Any = ema.build_teacher(self, parts)
        teacher.update = lambda schedule: teacher.move(0.5 + 0.5 * random.random())
        return teacher


class Source:
    """Images of noise, with a flip of each that is drawn as a transform would."""

    def __init__(self, root: str | None) -> None:
        self.labels = self.classes = None
        self.generator = np.random.default_rng(0) if root == "own" else None

    def __len__(self) -> int:
        return 32

    def load(self, index: int) -> Any:
        draws = random.random(), float(np.random.rand()), float(torch.rand(()))
        draws = draws if self.generator is None else (float(self.generator.random()), 0.0, 0.0)
        noise = np.random.default_rng(index).random((40, 40, 3)) * (0.4 + 0.2 * np.array(draws))
        return (255 * noise).astype(np.uint8)

    def name(self, index: int) -> str:
        return f"noise/{index}"
