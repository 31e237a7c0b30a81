"""The costs of a micro-batch of a recipe, as it was rehearsed: exactly for its size, or on a line between two sizes.

No torch is loaded for what is in the cache.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from dino_ds.config.crops import CropGroup
from dino_ds.config.ds_values import DsConfig, PerformanceOptions
from dino_ds.config.recipe import Recipe
from dino_ds.costs.frozen_spec import frozen_spec
from dino_ds.costs.kept import kept
from dino_ds.costs.settings import RehearsalSettings, settings_of
from dino_ds.errors import NotEstimated, UserError, one_line
from dino_ds.method.specs.base import TeacherSpec, TermSpec
from dino_ds.method.specs.of_recipe import teachers_of, terms_of

_ELSEWHERE = {
    "length", "log_every", "save_every", "expected_hours_between_failures", "keep_checkpoints", "keep_every",
    "save_in_background", "max_bad_steps", "hang_seconds", "data", "eval", "stage_start",
}  # fmt: skip
"""Keys of a recipe that no micro-batch depends on."""
_LINES = {True: (2, 16, 32, 64), False: (2, 8, 64)}
"""Sizes of micro-batches, on a GPU or not, through which lines go. Scratch for tiles has a largest size, so that the
last line is at most too high beyond them. Off a GPU, whose tiles are so small that a rehearsal of many images takes
minutes, it is taken there for every recipe."""


@dataclass(frozen=True)
class Part:
    """The work of a part of a micro-batch. flops: of all products; flops_fp32: of those of FP32 numbers; moved: bytes
    that operators other than products read and write; moved_by_products: those of products; operators: that launch
    something; launches: kernels of a GPU. moments: bytes alive by the
    elements of gradients that are finished."""

    flops: float
    flops_fp32: float
    moved: float
    moved_by_products: float
    operators: float
    launches: float
    moments: Sequence[tuple[int, float]]


_NUMBERS = tuple(one.name for one in dataclasses.fields(Part) if one.name != "moments")


@dataclass(frozen=True)
class TeacherCosts:
    """A teacher's weights: elements of each of its backbone's tensors, bytes of all of these and of its heads, and the
    segments of its backbone."""

    elements: Sequence[int]
    backbone: int
    heads: int
    segments: int


@dataclass(frozen=True)
class StepCosts:
    """The costs of one micro-batch of `images`.

    parts: teachers by "teacher NAME", "targets", "student", "loss", "backward"; prototypes: their share of each, of the
    largest resolution and of more images where costs are means or on a line. saved: bytes that autograd keeps for
    the backward pass; held: what of teachers' outputs and targets lives until then; crops: the images; both of one
    micro-batch. window: micro-batches that were prepared together, of all that a step prepares. collectives: (part,
    operation, bytes of one rank) of what terms send. on_host: bytes that activation checkpointing keeps there.
    """

    images: int
    parts: Mapping[str, Part]
    prototypes: Mapping[str, Part]
    saved: float
    held: float
    crops: float
    on_host: float
    window: int
    teachers: Mapping[str, TeacherCosts]
    collectives: Sequence[tuple[str, str, float]]

    def sum(self, of: str) -> float:
        """A number of all parts, by its name in `Part`."""
        return sum(float(getattr(part, of)) for part in self.parts.values())


@dataclass(frozen=True)
class StudentFacts:
    """The student's weights. sizes: elements by name; frozen: names of those that are never trained; cast: names of
    those of which a low-precision teacher keeps a copy; groups: elements of each of the optimizer's parameter groups;
    statistics: elements of each running mean of the objective; whole_step: whether targets depend on all
    micro-batches."""

    sizes: Mapping[str, int]
    frozen: frozenset[str]
    cast: frozenset[str]
    groups: tuple[int, ...]
    statistics: tuple[int, ...]
    whole_step: bool

    @property
    def trained(self) -> dict[str, int]:
        """The `sizes` of what is trained."""
        return {name: size for name, size in self.sizes.items() if name not in self.frozen}


@functools.cache
def student_facts(recipe: Recipe) -> StudentFacts:
    """Raises ConfigError for a network that can't be built."""

    def make() -> Any:
        from dino_ds.costs.rehearse import describe_student

        return describe_student(recipe)

    found = kept({"student": _learned(recipe)}, make, _own_code(recipe))
    sizes = MappingProxyType(found["sizes"])
    groups, statistics = tuple(found["groups"]), tuple(found["statistics"])
    names = frozenset(found["frozen"]), frozenset(found["cast"])
    return StudentFacts(sizes, *names, groups, statistics, found["whole_step"])


def step_costs(recipe: Recipe, config: DsConfig, on_gpu: bool, exact: bool = True) -> StepCosts:
    """The costs of the config's micro-batch in the largest of the recipe's resolutions; exact: rehearsed with just its
    images, not by the line, unless they are many on a CPU. Raises NotEstimated for networks that want the values of
    tensors."""
    return _of_groups(recipe, config, recipe.groups, on_gpu, exact)


def mean_costs(recipe: Recipe, config: DsConfig, on_gpu: bool, exact: bool = True) -> StepCosts:
    """The costs of a micro-batch as of `step_costs`, in the mean over the steps of all resolutions; without moments."""
    each = [(one.share, _of_groups(recipe, config, recipe.groups_of(one), on_gpu, exact)) for one in recipe.resolutions]
    if len(each) == 1:
        return each[0][1]
    parts: dict[str, Part] = {}
    for name in each[0][1].parts:
        numbers = {of: sum(share * getattr(costs.parts[name], of) for share, costs in each) for of in _NUMBERS}
        parts[name] = Part(**numbers, moments=())
    return dataclasses.replace(each[0][1], parts=parts)


def model_flops(recipe: Recipe, images: int = 2) -> dict[str, float]:
    """FLOPs of an image by part, of micro-batches of `images`: those of the whole model, the usual base of MFU, with
    every branch and all tokens of the last block, and nothing that is computed again. Raises NotEstimated."""
    model = recipe.model.model_copy(update={"drop_path": 0.0})
    whole = recipe.model_copy(update={"model": model})
    performance = PerformanceOptions(cls_only_last_block=False)
    config = DsConfig({}, images, 1, 0, "fp32", False, 0.0, 0, False, performance)
    costs = mean_costs(whole, config, on_gpu=True)
    return {name: part.flops / images for name, part in costs.parts.items() if part.flops}


def _of_groups(recipe: Recipe, config: DsConfig, groups: tuple[CropGroup, ...], on_gpu: bool, exact: bool) -> StepCosts:
    images, sizes = config.micro_batch, _LINES[on_gpu]
    if (exact and (on_gpu or images <= sizes[-1])) or images in sizes:
        return _rehearsed(recipe, settings_of(config, on_gpu), groups, images, on_gpu)
    pair = next((pair for pair in itertools.pairwise(sizes) if images <= pair[1]), sizes[-2:])
    few, many = (
        _of_groups(recipe, dataclasses.replace(config, micro_batch=size), groups, on_gpu, True) for size in pair
    )
    return _on_line(few, many, images)


def count_parameters(recipe: Recipe) -> int:
    """Elements of the student's parameters."""
    return sum(student_facts(recipe).sizes.values())


@functools.cache
def _rehearsed(
    recipe: Recipe, settings: RehearsalSettings, groups: tuple[CropGroup, ...], images: int, on_gpu: bool
) -> StepCosts:
    # A third micro-batch costs as much as the second.
    window = min(settings.window, 2) if student_facts(recipe).whole_step else 1
    settings = dataclasses.replace(settings, window=window)

    def make() -> Any:
        from dino_ds.costs.rehearse import rehearse

        try:
            return rehearse(recipe, settings, groups, images, on_gpu)
        except UserError:
            raise
        except Exception as error:  # whatever a foreign network raises
            raise NotEstimated(f"memory and time are not estimated: {one_line(error)}") from None

    about = {
        "recipe": _learned(recipe),
        "how": dataclasses.asdict(settings),
        "groups": [dataclasses.asdict(group) for group in groups],
        "images": images,
        "on_gpu": on_gpu,
    }
    found = dict(kept(about, make, _own_code(recipe)))
    for each in ("parts", "prototypes"):
        found[each] = {name: Part(**part) for name, part in found[each].items()}
    found["teachers"] = {name: TeacherCosts(**one) for name, one in found["teachers"].items()}
    return StepCosts(images=images, **found)


def _on_line(few: StepCosts, many: StepCosts, images: int) -> StepCosts:
    """The costs of so many images on the line through those of fewer and of more."""
    along = (images - few.images) / (many.images - few.images)

    def between(a: float, b: float) -> float:
        return max(a + along * (b - a), 0.0)

    parts = {}
    for name, part in many.parts.items():
        other = few.parts[name]
        numbers = {of: between(getattr(other, of), getattr(part, of)) for of in _NUMBERS}
        if len(other.moments) != len(part.moments):
            raise NotEstimated("memory and time are not estimated: the network does other things for other batches")
        moments = [(done, between(a, b)) for (_, a), (done, b) in zip(other.moments, part.moments, strict=True)]
        parts[name] = Part(**numbers, moments=moments)
    numbers = {of: between(getattr(few, of), getattr(many, of)) for of in ("saved", "held", "crops", "on_host")}
    sent = [
        (part, operation, between(a, b))
        for (_, _, a), (part, operation, b) in zip(few.collectives, many.collectives, strict=True)
    ]
    return StepCosts(
        images=images,
        parts=parts,
        prototypes=many.prototypes,
        window=many.window,
        teachers=many.teachers,
        collectives=sent,
        **numbers,
    )


def _learned(recipe: Recipe) -> dict[str, Any]:
    """The part of a recipe that a micro-batch or the weights may depend on."""
    return recipe.model_dump(mode="json", exclude=_ELSEWHERE) | {
        "backbone": repr(recipe.model.spec()),
        "frozen": repr(frozen_spec(recipe)),
    }


def _own_code(recipe: Recipe) -> tuple[str, ...]:
    """Modules outside the package that a rehearsal runs."""
    specs: list[TermSpec | TeacherSpec] = [*terms_of(recipe), *teachers_of(recipe)]
    names = [type(spec).__module__ for spec in specs] + [spec.builder.partition(":")[0] for spec in specs]
    if ":" in recipe.model.backbone:
        names.append(recipe.model.backbone.partition(":")[0])
    return tuple(dict.fromkeys(name for name in names if not name.startswith("dino_ds.")))
