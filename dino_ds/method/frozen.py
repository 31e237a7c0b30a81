"""Frozen teachers, which never change, and their networks from files; a checkpoint holds only their digests.

Source of the distillation of teacher.source: DINOv2 (arXiv 2304.07193), section 5: targets from the heads of a frozen
larger teacher, for a student without masks or stochastic depth, whose EMA is the product.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dino_ds.basics.ranges import rehearsing
from dino_ds.checkpoint.manifest import Manifest
from dino_ds.config.crops import FROZEN, Masks, teacher_sizes
from dino_ds.config.ds_schema import DsConfig, PerformanceOptions
from dino_ds.config.recipe import Recipe
from dino_ds.data.normalization import Normalization
from dino_ds.engine import distributed
from dino_ds.engine.process import DTYPES, device
from dino_ds.engine.schedules import ScheduleValues
from dino_ds.errors import CheckpointError, ConfigError
from dino_ds.method.networks import TeacherParts, TermParts, build_head, speed_options
from dino_ds.method.objective import Needs, Objective, Outputs, StudentOutputs, Term, TermLoss
from dino_ds.method.specs.ours import HEAD, IBOT_HEAD, FeatureSpec, FrozenSpec, regresses_features
from dino_ds.method.specs.own import heads_of
from dino_ds.method.teacher import Teacher, Teachers
from dino_ds.models.base import Crops, Placer, cls_of, is_cast, patches_of, resized_patches, take_drawn_weights
from dino_ds.models.foreign import build_backbone
from dino_ds.models.network import Network, Output, Query
from dino_ds.models.specs.base import BackboneOptions
from dino_ds.models.trained import adapters_in
from dino_ds.weights.frozen import FrozenSource, digest, find_frozen
from dino_ds.weights.load import fit_tensors
from dino_ds.weights.sidecar import notes_on_range

_DIGEST = "sha256"


class FrozenTeacher(Teacher):
    """A teacher whose weights come from a file; `notes` are lines about it for the log.

    Args:
        about: source and digest of its tensors, as in a checkpoint's manifest.
        stated: normalization of the images that it was trained on.
        ours: normalization of this run's images.
    """

    def __init__(
        self, network: Network, dtype: torch.dtype, about: dict[str, Any], stated: Normalization, ours: Normalization
    ) -> None:
        super().__init__(network, dtype)
        self.about = about
        self.notes: list[str] = []
        self._change = None if stated == ours else _between(ours, stated).to(self._device)

    @torch.no_grad()
    def __call__(self, crops: Crops, masks: Masks) -> dict[str, Output]:
        if self._change is not None:
            offset, factor = (part.view(-1, 1, 1) for part in self._change)
            crops = {name: [crop * factor + offset for crop in group] for name, group in crops.items()}
        return super().__call__(crops, masks)


class FixedTeacher(FrozenTeacher):
    """The frozen teacher of one loss `term`, idle while the term's weight is 0; the recipe's `key` has its path.

    A checkpoint holds the digest of its weights, which must be the same on a resume.
    """

    term: ClassVar[str]
    key: ClassVar[str]

    def rests(self, schedule: ScheduleValues) -> bool:
        return not schedule.weights[self.term]

    def state(self) -> dict[str, Tensor]:
        return {_DIGEST: torch.tensor(list(bytes.fromhex(self.about["digest"])), dtype=torch.uint8)}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Compare a saved digest with this teacher's. Raises CheckpointError for other weights."""
        if state and not torch.equal(state[_DIGEST].cpu(), self.state()[_DIGEST]):
            raise CheckpointError(
                f"{self.key} {self.about['source']} has other weights than the one that this run was trained with: "
                "put those back in its place"
            )


def _between(ours: Normalization, wanted: Normalization) -> Tensor:
    """(2, c): offset and factor (applied first) that turn images normalized by `ours` into those by `wanted`."""
    (offset, factor), (their_offset, their_factor) = ours.offset_and_factor(), wanted.offset_and_factor()
    ratio = their_factor / factor
    return torch.stack((their_offset - offset * ratio, ratio))


def place_frozen(network: Network, source: FrozenSource, config: DsConfig) -> str:
    """Fill a `network` on the meta device with the tensors of `source`, on this process's device.

    Matrices are in the engine's precision where autocast would cast them to it: results are the same. Every rank must
    call it.
    Returns the digest of its tensors. Raises CheckpointError for tensors that do not fit the network, and if ranks have
    read different tensors.
    """
    dtype = DTYPES[config.precision]
    if rehearsing():
        allocate(network, dtype)
        return ""
    with distributed.raise_on_all_ranks():
        tensors = _tensors(source, network)
    checksum = digest(tensors)
    if len(set(distributed.gather_objects(checksum))) > 1:
        raise CheckpointError(f"{source.name}: ranks have read different weights there")
    _fill(network, tensors, partial(_place, dtype=dtype))
    if config.performance.compile != "off":
        network.backbone.compile_segments(config.performance.compile)
    return checksum


def meta_network(
    source: FrozenSource,
    performance: PerformanceOptions,
    outputs: Sequence[str],
    queries: Mapping[str, Query] = MappingProxyType({}),
) -> Network:
    """The network of `source` on the meta device; outputs that `queries` name are its heads', others features."""
    options = BackboneOptions(pos_embed_interpolation=source.interpolation, **speed_options(performance))
    asked = {name: query for name, query in queries.items() if name in outputs}
    with torch.device("meta"):
        backbone = build_backbone(source.spec, source.image_size, options)
        names = dict.fromkeys(query.head for query in asked.values())
        heads = {name: build_head(source.spec.width, source.head(name)) for name in names}
    return Network(backbone, heads, asked, [name for name in outputs if name not in asked])


def _tensors(source: FrozenSource, network: Network) -> dict[str, torch.Tensor]:
    """The source's tensors under the network's names. Raises CheckpointError if they do not fit."""
    wanted = {name: tuple(tensor.shape) for name, tensor in network.state_dict().items()}
    only = network.backbone.training_only
    tensors = {f"backbone.{name}": tensor for name, tensor in source.backbone.items() if name not in only}
    for name in only:
        if (shape := wanted.get(f"backbone.{name}")) is not None:
            tensors[f"backbone.{name}"] = source.backbone.get(name, torch.zeros(shape))
    for name, shape in adapters_in(wanted).items():
        tensors.setdefault(name, torch.zeros(shape))  # a file has them merged into its weights
    for name in network.head_names:
        tensors |= {f"{name}.{key}": tensor for key, tensor in source.heads[name].items()}
    return fit_tensors(tensors, wanted, source.interpolation, f"{source.name} lacks", f"{source.name} is")


def allocate(network: Network, dtype: torch.dtype) -> None:
    """Allocate a network on this process's device without values, in `dtype` where autocast would cast at each use."""
    for module in network.modules():
        for parameter in module.parameters(recurse=False) if is_cast(module) else ():
            parameter.data = parameter.data.to(dtype)
    network.to_empty(device=device())


@torch.no_grad()
def _place(module: nn.Module, dtype: torch.dtype) -> None:
    """Copy the module's own tensors to this process's device, matrices in `dtype`."""
    for parameter in module.parameters(recurse=False):
        parameter.data = parameter.data.to(device(), dtype if is_cast(module) else torch.float32, copy=True)
    for name, buffer in list(module.named_buffers(recurse=False)):
        setattr(module, name, buffer.to(device(), copy=True))


def _fill(network: Network, tensors: dict[str, torch.Tensor], placer: Placer) -> None:
    """Give each module its tensors and call `placer` on it, so that not all are in memory twice."""
    drawn = network.backbone.drawn()
    if drawn is not None:  # it may have buffers that no file holds
        drawn.load_state_dict({name: tensors[f"backbone.{name}"] for name in drawn.state_dict()})
        take_drawn_weights(network.backbone, drawn, placer)
    inside = set(network.backbone.modules()) if drawn is not None else set()
    for name, module in network.named_modules():
        if module in inside:
            continue
        prefix = f"{name}." if name else ""
        if any(f"{prefix}{key}" not in tensors for key, _ in module.named_buffers(recurse=False)):
            module.to_empty(device="cpu", recurse=False)
            module.reset_parameters()  # `Backbone` requires this of modules with buffers
        for key, _ in list(module.named_parameters(recurse=False)):
            module.register_parameter(key, nn.Parameter(tensors[f"{prefix}{key}"], requires_grad=False))
        for key, _ in list(module.named_buffers(recurse=False)):
            if f"{prefix}{key}" in tensors:
                setattr(module, key, tensors[f"{prefix}{key}"])
        placer(module)


def find_teacher(recipe: Recipe) -> FrozenSource | None:
    """The weights of teacher.source, or None where the recipe has none. Every rank must call it.

    Raises CheckpointError for weights that can't be used, ConfigError if they don't fit the recipe.
    """
    if recipe.teacher.source is None:
        return None
    with distributed.raise_on_all_ranks():
        source = find_frozen(recipe.teacher.source)
        _check(source, recipe)
    return source


def _check(source: FrozenSource, recipe: Recipe) -> None:
    teacher, spec = source.name, source.spec
    source.check_channels(recipe.model.in_chans)
    with torch.device("meta"):
        backbone = build_backbone(spec, source.image_size)
    steps = [recipe.groups_of(resolution) for resolution in recipe.resolutions]
    for side in dict.fromkeys(side for groups in steps for side in teacher_sizes(groups, FROZEN)):
        try:
            backbone.check_image(side, side)
        except ConfigError as error:
            raise ConfigError(f"{teacher} can't take this run's crops: {error}; change crops.global_size") from None
    if recipe.teacher.distill != "features":
        _check_heads(source, recipe)
    elif recipe.objective.ibot_weight:
        for name, backbone_spec in ((teacher, spec), (f"model.backbone {recipe.model.backbone}", recipe.model.spec())):
            if not backbone_spec.patch_width:
                raise ConfigError(f"{name} gives no features of patches: set objective.ibot_weight 0")


def _check_heads(source: FrozenSource, recipe: Recipe) -> None:
    teacher, how, wanted = source.name, recipe.objective, heads_of(recipe)
    if not source.heads:
        why = next((f" ({note})" for note in source.notes if "head" in note), "")
        raise ConfigError(f"{teacher} has no heads{why}: set teacher.distill features, or give a run that has them")
    for name, ours in wanted.items():
        if name not in source.heads:
            weight = "objective.dino_weight 0" if name == HEAD else "objective.ibot_head shared"
            heads = ", ".join(source.heads)
            raise ConfigError(f"{teacher} has no {name}, only {heads}: set {weight}, or teacher.distill features")
        if (count := source.head(name).prototypes) != ours.prototypes:
            raise ConfigError(
                f"{name}.prototypes {ours.prototypes} must be those of {teacher}, {count}: set "
                f"--{name}.prototypes {count}, or teacher.distill features"
            )
    if how.ibot_weight and how.ibot_head == "shared" and IBOT_HEAD in source.heads:
        raise ConfigError(f"{teacher} has a head of its own for patches: set objective.ibot_head own")
    stride = recipe.model.spec().stride
    if how.ibot_weight and source.spec.stride != stride:
        raise ConfigError(
            f"{teacher} has patches of {source.spec.stride} pixels and the student of {stride}: the loss of masked "
            "patches needs equal ones; set objective.ibot_weight 0 and crops.mask none, or teacher.distill features"
        )


def build_features(spec: FeatureSpec, parts: TermParts) -> FeatureTerm:
    """The term that a spec describes, as wide as the teacher's features."""
    source = parts.source
    assert source is not None, "a distillation has a teacher"
    if spec.patches:
        return FeatureTerm(spec.name, patches_of(spec.group), "patch_regression", source.spec.patch_width)
    return FeatureTerm(spec.name, cls_of(spec.group), "cls_regression", source.spec.width)


def begin_centers(objective: Objective, source: FrozenSource) -> None:
    """Set the running means of the frozen teacher's logits to those that its training saved."""
    for name, statistic in objective.statistics.items():
        if name in source.centers and source.centers[name].shape == statistic.value.shape:
            statistic.load(source.centers[name])


def build_teacher(spec: FrozenSpec, parts: TeacherParts) -> FrozenTeacher:
    """The teacher on this process's device; every rank must call it.

    Raises CheckpointError for tensors that do not fit the network, and if ranks have read different tensors.
    """
    source, recipe, config = parts.source, parts.recipe, parts.config
    assert source is not None
    objective = parts.objective
    network = meta_network(source, config.performance, objective.teacher_features(spec.name), objective.queries)
    about = {"source": source.path, "digest": place_frozen(network, source, config)}
    teacher = FrozenTeacher(network, DTYPES[config.precision], about, source.normalization, Normalization.of(recipe))
    teacher.notes = [*source.notes, *notes_on_range(source.range, recipe.data.known_range)]
    return teacher


def describe_distillation(teachers: Teachers, recipe: Recipe) -> list[str]:
    """Lines of the log about the distillation: its teacher and targets; none without a frozen teacher."""
    teacher = teachers.get(FROZEN)
    if not isinstance(teacher, FrozenTeacher):
        return []
    how = "heads"
    if regresses_features(recipe):
        how = "features, through a linear layer each: head.*, objective.centering and temperatures have no effect"
    lines = []
    if regresses_features(recipe) and recipe.crops.num_local:
        lines = ["local crops are computed, and no loss compares their features: set crops.num_local 0"]
    return [*lines, "; ".join([f"distilled from {teacher.about['source']} by its {how}", *teacher.notes])]


def distilled(teachers: Teachers) -> dict[str, Any] | None:
    """The origin of a run's frozen teacher and the digest of its tensors, or None where it has none."""
    teacher = teachers.get(FROZEN)
    return teacher.about if isinstance(teacher, FrozenTeacher) else None


def check_same_teacher(saved: Manifest, now: dict[str, Any] | None) -> None:
    """Raise CheckpointError if a run would resume with another frozen teacher; only its path may differ."""
    earlier = saved.frozen_teacher
    if (earlier or {}).get("digest") == (now or {}).get("digest"):
        return
    was, now_source = ((about or {}).get("source") or "none" for about in (earlier, now))
    difference = (
        f"the same path {was} with other weights" if was == now_source else f"teacher.source {now_source}, not {was}"
    )
    raise CheckpointError(
        f"step {saved.step} was distilled from another teacher: this start has {difference}; give the one that the run "
        "began with, or start a new run (--run_dir)"
    )


class FeatureTerm(Term):
    """Regression to the teacher's features: 1 - cosine, mean over crops and patches. FP32.

    name: of the output of `head`, a linear layer from the student's `feature` ("cls/GROUP" or "patches/GROUP") to the
    `width` of the teacher's. Teacher's patches on another grid are resized to the student's grid.
    """

    def __init__(self, name: str, feature: str, head: str, width: int) -> None:
        self.needs = Needs((name,), {FROZEN: (feature,)}, {name: Query(head, feature, width)})
        self._name, self._feature = name, feature

    def targets(self, window: Sequence[Outputs], masks: Sequence[Masks], schedule: ScheduleValues) -> list[Tensor]:
        return [_tensor(teachers[FROZEN][self._feature]) for teachers in window]

    def loss(self, student: StudentOutputs, targets: Tensor, schedule: ScheduleValues) -> TermLoss:
        features = _tensor(student[self._name])
        with torch.autocast(features.device.type, enabled=False):
            wanted = targets.float()
            if wanted.ndim == 3:
                wanted = resized_patches(wanted, features.shape[1])
            return TermLoss((1 - F.cosine_similarity(features.float(), wanted, dim=-1)).mean(), {})


def _tensor(output: object) -> Tensor:
    assert isinstance(output, Tensor)
    return output
