"""A third group of crops, a second backbone, loss term and teacher, each as small as the contracts allow."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar
from unittest import mock

import torch
from torch import Tensor, nn

from dino_ds.config.crops import CropGroup, Masks, dino_groups
from dino_ds.config.recipe import Recipe
from dino_ds.engine import distributed
from dino_ds.engine.engine import Engine
from dino_ds.engine.schedules import ScheduleValues
from dino_ds.method import build
from dino_ds.method.objective import Measured, Needs, Objective, Outputs, StudentOutputs, Term
from dino_ds.method.running import RunningMean
from dino_ds.method.teacher import Teacher, Teachers
from dino_ds.models.base import CLS, Backbone, Crops, cls_of, patches_of
from dino_ds.models.build import build_backbone
from dino_ds.models.network import Network, Output
from dino_ds.models.specs.backbones import BACKBONES
from dino_ds.models.specs.base import BackboneOptions, BackboneSpec


@dataclass(frozen=True)
class ToySpec(BackboneSpec):
    """A linear layer on the means of patches."""

    builder: ClassVar[str] = "tests.run.toys:ToyBackbone"
    width: int = 24
    depth: int = 1
    stride: int = 8
    in_chans: int = 3


class RunningScale(nn.Module):
    """Divides by a running mean of the features' size, a buffer that is equal on all ranks; counts its calls."""

    scale: Tensor
    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.empty(()))
        self.register_buffer("calls", torch.empty((), dtype=torch.long))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.ones_(self.scale)
        self.calls.zero_()

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            size = distributed.sum_across_ranks(x.detach().float().abs().mean()) / distributed.world_size()
            self.scale.lerp_(size, 0.1)
            self.calls += 1
        return x / self.scale.to(x.dtype)


class ToyBackbone(Backbone):
    def __init__(self, spec: ToySpec, image_size: int, options: BackboneOptions) -> None:
        super().__init__(spec)
        self.embed = nn.Linear(spec.in_chans, spec.width)
        self.mix = nn.Linear(spec.width, spec.width)
        self.scale = RunningScale()

    def segments(self) -> Sequence[nn.Module]:
        return [self.mix]

    def forward(
        self,
        crops: Crops,
        drop_keys: Tensor | None = None,
        patches: Sequence[str] = (),
        masks: Mapping[str, Tensor] = MappingProxyType({}),
        step_key: int | None = None,
    ) -> dict[str, Tensor]:
        cls, found = [], {}
        for name, group in crops.items():
            means = nn.functional.avg_pool2d(torch.cat(list(group)), self.spec.stride)
            tokens = self.embed(means.flatten(2).transpose(1, 2).to(self.embed.weight.dtype))
            tokens = tokens + self.run_segment(0, self.mix, nn.functional.gelu(tokens))
            cls.append(tokens.mean(dim=1))
            if name in patches:
                found[patches_of(name)] = tokens
        return {CLS: self.scale(torch.cat(cls)), **found}


class ToyTerm(Term):
    """Pulls the student's CLS features to the frozen teacher's, less their running mean; patches to be small."""

    needs = Needs(student=(cls_of("global"), patches_of("global")), teachers={"frozen": (CLS,)})
    scalars = ("toy_distance",)

    def __init__(self, width: int, device: torch.device) -> None:
        self.mean = RunningMean(width, 0.5, device)
        self.statistics = {"toy_mean": self.mean}

    def targets(self, window: Sequence[Outputs], masks: Sequence[Masks], schedule: ScheduleValues) -> list[Tensor]:
        features = [_tensor(teachers["frozen"][CLS]).float() for teachers in window]
        for rows in features:
            self.mean.gather(rows)
        return [rows - self.mean.value for rows in features]

    def loss(self, student: StudentOutputs, targets: Tensor, schedule: ScheduleValues) -> Measured:
        distance = (_tensor(student[cls_of("global")]).float() - targets).square().mean()
        size = _tensor(student[patches_of("global")]).float().square().mean()
        return Measured(distance + 0.1 * size, {"toy_distance": distance.detach()})


def _tensor(output: Output) -> Tensor:
    assert isinstance(output, Tensor)
    return output


@contextlib.contextmanager
def installed() -> Iterator[list[Any]]:
    """Runs in this process have the term, the frozen teacher and larger crops that it alone sees; "toy" is a backbone.

    Gives a list of (frozen teacher, its state at the start).
    """
    made: list[Any] = []
    objective_of, teachers_of = build.build_objective, build.build_teachers

    def build_objective(recipe: Any, device: torch.device, frozen: Any = None) -> Objective:
        terms = objective_of(recipe, device, frozen).terms
        return Objective({**terms, "toy": ToyTerm(recipe.model.spec().width, device)})

    def build_teachers(recipe: Any, config: Any, engine: Engine, objective: Objective, *others: Any) -> Teachers:
        ema = teachers_of(recipe, config, engine, objective)["ema"]
        torch.manual_seed(7)
        spec = ToySpec(width=recipe.model.spec().width)
        backbone = build_backbone(spec, recipe.crops.global_size)
        frozen = Teacher(Network(backbone, {}, {}, objective.teacher_features("frozen")))
        made.append((frozen, copy.deepcopy(frozen.network.state_dict())))
        return Teachers({"ema": ema, "frozen": frozen}, recipe.groups)

    def groups(recipe: Recipe) -> tuple[CropGroup, ...]:
        large = CropGroup("large", 2, 48, (0.5, 1.0), teachers=("frozen",), student=False, augmented=False)
        crops = recipe.crops
        sizes = crops.global_size, crops.global_scale, crops.local_size, crops.local_scale
        return (*dino_groups(*sizes, crops.num_local), large)

    with (
        mock.patch.object(Recipe, "groups", property(groups)),
        mock.patch.dict(BACKBONES, {"toy": ToySpec()}),
        mock.patch.object(build, "build_objective", build_objective),
        mock.patch.object(build, "build_teachers", build_teachers),
    ):
        yield made
