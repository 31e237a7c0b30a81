"""The costs of a recipe's micro-batch, FLOPs and memory, by rehearsals of its exact size or of two sizes with a line
through them. Results stay in the user's cache folder; reading them needs no torch."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar, cast

from pydantic import ConfigDict, TypeAdapter, with_config

from dino_ds.basics.files import MAX_JSON_BYTES, cache_folder, hash_code, read_bytes, read_object, replace_file
from dino_ds.basics.own_code import check_allowed
from dino_ds.config.crops import CropGroup
from dino_ds.config.ds_schema import DsConfig, PerformanceOptions
from dino_ds.config.recipe import Recipe
from dino_ds.config.stages import find_model_folder
from dino_ds.errors import NotEstimated, UserError, one_line
from dino_ds.method.specs.base import TeacherSpec, TermSpec
from dino_ds.method.specs.own import teachers_of, terms_of
from dino_ds.models.specs.backbones import BACKBONES, ViTSpec

_UNUSABLE = OSError, RuntimeError  # of a cache folder that can't be used: a container's user may have no home
_T = TypeVar("_T")
_known: dict[str, Any] = {}  # the values in the cache that this process has read or made, by the names of their files
_ELSEWHERE: dict[str, Any] = {  # keys of a recipe on which the costs of a micro-batch do not depend
    **dict.fromkeys(("seed", "length", "log_every", "save_every", "keep_checkpoints", "keep_every"), True),
    **dict.fromkeys(("save_in_background", "hang_seconds", "data", "eval", "stage_start"), True),
    "crops": {"global_scale", "local_scale", "augment", "jitter", "blur", "grayscale", "flip", "solarize", "rotation"},
    "model": {"init_from", "freeze_backbone"},
    "objective": {"student_temp", "teacher_temp", "warmup_teacher_temp", "teacher_temp_warmup", "freeze_prototypes"},
    "optimizer": {"lr", "lr_scaling", "schedule", "min_lr", "warmup", "warmup_shape", "weight_decay"},
    "teacher": {"momentum", "momentum_end"},
}
_LINES = {True: (4, 32, 64), False: (8, 64)}
"""Micro-batch sizes, on a GPU (True) or not, through which the lines go: within 3 % of a rehearsal for shipped recipes.
Beyond the largest size the last line is never too low, since scratch for tiles has a maximum. Without a GPU, tiles are
so small that rehearsing many images takes minutes: there larger sizes always use the last line."""


def step_costs(
    recipe: Recipe, config: DsConfig, on_gpu: bool, exact: bool = True, groups: tuple[CropGroup, ...] | None = None
) -> StepCosts:
    """The costs of the config's micro-batch with the crops `groups`, by default those of the largest resolution. exact:
    rehearse its number of images, unless that is large on a CPU. Otherwise costs are read off a line, and a step that
    may prepare several micro-batches is rehearsed with two. Raises NotEstimated where tensors' values are read."""
    groups = groups or recipe.groups
    images, sizes = config.micro_batch, _LINES[on_gpu]
    exact = exact and (on_gpu or images <= sizes[-1])
    window = 1
    if student_facts(recipe).whole_step:  # a third micro-batch costs as much as the second
        window = min(config.accumulation, 2) if exact else 2
    settings = RehearsalSettings.of(recipe, config, window)
    if exact or images in sizes:
        return _rehearsed(recipe, settings, groups, images, on_gpu)
    pair = sizes[:2] if images <= sizes[1] else sizes[-2:]
    few, many = (_rehearsed(recipe, settings, groups, size, on_gpu) for size in pair)
    along = (images - few.images) / (many.images - few.images)

    def between(a: float, b: float) -> float:
        return max(a + along * (b - a), 0.0)

    parts = {}
    for name, part in many.parts.items():
        other = few.parts[name]
        if len(other.moments) != len(part.moments):
            raise NotEstimated("memory is not estimated: the network does other things for other batches")
        moments = [(done, between(a, b)) for (_, a), (done, b) in zip(other.moments, part.moments, strict=True)]
        parts[name] = PartCosts(between(other.flops, part.flops), moments)
    numbers: dict[str, Any] = {of: between(getattr(few, of), getattr(many, of)) for of in ("saved", "held", "crops")}
    return dataclasses.replace(many, images=images, parts=parts, **numbers)


def mean_flops(recipe: Recipe, config: DsConfig, on_gpu: bool) -> dict[str, float]:
    """Mean FLOPs of a micro-batch by part, over the steps of all resolutions. Raises NotEstimated."""
    mean = defaultdict[str, float](float)
    for resolution in recipe.resolutions:
        costs = step_costs(recipe, config, on_gpu, groups=recipe.groups_of(resolution))
        for name, part in costs.parts.items():
            mean[name] += resolution.share * part.flops
    return mean


def model_flops(recipe: Recipe) -> dict[str, float]:
    """FLOPs per image by part, of the whole model with every branch, as is usual for MFU. Raises NotEstimated."""
    model = recipe.model.model_copy(update={"drop_path": 0.0})
    whole = recipe.model_copy(update={"model": model})
    config = DsConfig({}, 2, 1, 0, "fp32", False, 0.0, 0, PerformanceOptions(cls_only_last_block=False))
    return {name: flops / 2 for name, flops in mean_flops(whole, config, on_gpu=True).items() if flops}


@functools.cache
def student_facts(recipe: Recipe) -> StudentFacts:
    """The facts of a recipe's student. Raises ConfigError for a network that can't be built."""

    def make() -> Any:
        from dino_ds.costs.rehearse import describe_student

        return describe_student(recipe, frozen_spec(recipe))

    return kept({"student": _learned(recipe)}, StudentFacts, make, _own_code(recipe))


def count_parameters(recipe: Recipe) -> int:
    return sum(student_facts(recipe).sizes.values())


@with_config(ConfigDict(extra="forbid"))
@dataclass(frozen=True)
class StepCosts:
    """The costs of one micro-batch of `images`.

    parts: "teacher NAME" of each teacher, "targets", "student", "loss", "backward".
    teachers: bytes of each teacher's weights.
    saved: bytes that autograd keeps for the backward pass.
    held: bytes of a micro-batch's targets and teachers' outputs that live until its backward pass.
    crops: bytes of a micro-batch's crops.
    window: micro-batches that the rehearsal prepared together; a step may prepare more.
    """

    images: int
    parts: Mapping[str, PartCosts]
    saved: float
    held: float
    crops: float
    window: int
    teachers: Mapping[str, int]


@with_config(ConfigDict(extra="forbid"))
@dataclass(frozen=True)
class PartCosts:
    """A part of a micro-batch.

    flops: of all its products.
    moments: (elements of gradients that are finished, most bytes alive meanwhile).
    """

    flops: float
    moments: Sequence[tuple[int, float]]


@with_config(ConfigDict(extra="forbid"))
@dataclass(frozen=True)
class StudentFacts:
    """The student's weights. sizes: elements by name. frozen: names of weights that are never trained. cast: names of
    weights that a low-precision teacher copies. groups: (kind of optimizer, elements) of each parameter group.
    matrices: (rows, columns, number) of the matrices that Muon orthogonalizes, by parameter group; rows <= columns.
    statistics: elements of each running mean. whole_step: whether targets depend on all micro-batches."""

    sizes: Mapping[str, int]
    frozen: frozenset[str]
    cast: frozenset[str]
    groups: tuple[tuple[str, int], ...]
    matrices: tuple[tuple[tuple[int, int, int], ...], ...]
    statistics: tuple[int, ...]
    whole_step: bool

    @property
    def trained(self) -> dict[str, int]:
        return {name: size for name, size in self.sizes.items() if name not in self.frozen}

    @property
    def optimizer_flops(self) -> float:
        """FLOPs of the matrix products of Muon's step, which the ranks share; 0 for other optimizers."""
        every = (matrix for group in self.matrices for matrix in group)
        return 5.0 * sum(n * (4 * rows**2 * columns + 2 * rows**3) for rows, columns, n in every)


@dataclass(frozen=True)
class RehearsalSettings:
    """Settings that a rehearsed micro-batch depends on. window: micro-batches that are prepared together; frozen: the
    backbone of teacher.source, None if it is unknown. `performance` is without compiled blocks and the EMA teacher's
    low-precision copy, so that one rehearsal serves many configs: the teacher's matrices are cast at each use."""

    precision: str
    checkpoint_blocks: int | str
    performance: PerformanceOptions
    window: int
    frozen: ViTSpec | None

    @staticmethod
    def of(recipe: Recipe, config: DsConfig, window: int) -> RehearsalSettings:
        fixed: dict[str, Any] = {"compile": "off", "deterministic": False, "teacher_copy": False, "fast_paths": True}
        performance = dataclasses.replace(config.performance, **fixed)
        return RehearsalSettings(config.precision, config.checkpoint_blocks, performance, window, frozen_spec(recipe))


@functools.cache
def _rehearsed(
    recipe: Recipe, settings: RehearsalSettings, groups: tuple[CropGroup, ...], images: int, on_gpu: bool
) -> StepCosts:
    def make() -> Any:
        text = f"dino_ds: rehearsing a step of {images} images on tensors without memory, to predict what it needs"
        message = threading.Timer(3.0, print, [text], {"file": sys.stderr, "flush": True})  # people wait no longer
        message.daemon = True
        message.start()
        try:
            from dino_ds.costs.rehearse import rehearse

            return rehearse(recipe, settings, groups, images, on_gpu)
        except UserError:
            raise
        except Exception as error:  # whatever a foreign network raises
            raise NotEstimated(f"memory is not estimated: {one_line(error)}") from None
        finally:
            message.cancel()

    about = {"recipe": _learned(recipe), "how": dataclasses.asdict(settings), "images": images, "on_gpu": on_gpu}
    about["groups"] = [dataclasses.asdict(group) for group in groups]
    return kept(about, StepCosts, make, _own_code(recipe))


def _learned(recipe: Recipe) -> dict[str, Any]:
    """The settings of a recipe on which a micro-batch's costs or the student's weights may depend."""
    specs = {"backbone": repr(recipe.model.spec()), "frozen": repr(frozen_spec(recipe))}
    return recipe.model_dump(mode="json", exclude=_ELSEWHERE) | specs


def _own_code(recipe: Recipe) -> tuple[str, ...]:
    """Modules outside the package that a rehearsal runs."""
    specs: list[TermSpec | TeacherSpec] = [*terms_of(recipe), *teachers_of(recipe)]
    names = [type(spec).__module__ for spec in specs]
    if ":" in recipe.model.backbone:
        check_allowed("model.backbone", recipe.model.backbone)  # looking for a module imports its package
        names.append(recipe.model.backbone.partition(":")[0])
    return tuple(dict.fromkeys(name for name in names if not name.startswith("dino_ds.")))


@functools.cache
def frozen_spec(recipe: Recipe) -> ViTSpec | None:
    """The backbone of teacher.source, by its name or the JSON file beside it; None: another kind, or unknown."""
    if (source := recipe.teacher.source) is None:
        return None
    base, path = source.partition(".")[0], Path(source)
    spec = None if path.exists() else BACKBONES.get(base)
    if isinstance(spec, ViTSpec):
        return spec
    beside = find_model_folder(source).folder / "teacher.json" if path.is_dir() else path.with_suffix(".json")
    try:
        about = read_object(beside)
        return dataclasses.replace(ViTSpec(**about["architecture"]), local_cls_norm=False)
    except (OSError, ValueError, TypeError, KeyError):
        return None


def not_counted(recipe: Recipe) -> list[str]:
    """Notes on a distilled teacher whose memory can't be counted before its file is read."""
    distill, source = recipe.teacher.distill, recipe.teacher.source
    if source is None:
        note = f"teacher.distill {distill} and no teacher.source: an EMA teacher is counted; add --teacher.source"
        return [] if distill is None else [note]
    note = f"teacher.source {source} does not say its architecture without being read: its memory is not counted"
    return [note] if frozen_spec(recipe) is None else []


def kept(about: Mapping[str, Any], type_: type[_T], make: Callable[[], Any], modules: tuple[str, ...] = ()) -> _T:
    """The value of `type_` in the plain JSON that `make` returns, or returned before for the same `about` and code.

    A file that holds no such value is replaced. If the folder can't be read or written, only time is lost.

    Args:
        about: what the result depends on, as plain JSON.
        type_: a type that pydantic checks, such as a dataclass.
        make: computes a result that is not in the cache.
        modules: names of other modules whose code `make` runs.
    """
    digests = []
    for module in modules:
        with suppress(ImportError, OSError, ValueError):
            if (spec := find_spec(module)) and spec.origin:
                module = hashlib.sha256(Path(spec.origin).read_bytes()).hexdigest()
        digests.append(module)
    text = json.dumps([about, _versions(), digests], sort_keys=True)
    name = hashlib.sha256(text.encode()).hexdigest()[:32]
    if name not in _known:
        value = TypeAdapter(type_)
        try:
            content = read_bytes(cache_folder() / "steps" / f"{name}.json", MAX_JSON_BYTES)
            _known[name] = value.validate_json(content, strict=True)
        except (*_UNUSABLE, ValueError):
            result = json.dumps(make())
            with suppress(*_UNUSABLE):
                path = cache_folder() / "steps" / f"{name}.json"
                path.parent.mkdir(parents=True, exist_ok=True)
                replace_file(path, result)
                files = sorted(path.parent.glob("*.json"), key=lambda file: file.stat().st_mtime)
                for old in files[:-1000]:
                    old.unlink(missing_ok=True)
            _known[name] = value.validate_json(result, strict=True)
    return cast(_T, _known[name])


def share() -> None:
    """Give every rank the results of rank 0: all ranks need the same ones. Every rank must call this."""
    from dino_ds.engine import distributed  # imports torch, which a plan from the cache does not need

    _known.update(distributed.gather_objects(_known if distributed.rank() == 0 else {})[0])


@functools.cache
def _versions() -> list[str]:
    return [version("torch"), version("timm"), hash_code()]
