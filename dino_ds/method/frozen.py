"""Frozen teachers, which never change, and the loss terms that compare the student's features with theirs. Weights
come from a file; a checkpoint holds only their digest. Source of distilling teacher.source: DINOv2 (arXiv 2304.07193),
section 5: targets from the heads of a frozen larger teacher, for a student without masks or stochastic depth, whose EMA
is the product. Of comparing features with those of teacher.source or model.init_from: AM-RADIO (arXiv 2312.06709)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dino_ds.basics.ranges import rehearsing
from dino_ds.checkpoint.manifest import Manifest
from dino_ds.config.crops import FROZEN, GLOBAL, Masks, teacher_sizes
from dino_ds.config.ds_schema import DsConfig, PerformanceOptions
from dino_ds.config.recipe import Recipe
from dino_ds.data.normalization import Normalization
from dino_ds.engine import distributed
from dino_ds.engine.process import DTYPES, device
from dino_ds.engine.schedules import ScheduleValues
from dino_ds.errors import CheckpointError, ConfigError
from dino_ds.method.networks import TeacherParts, TermParts, build_head, speed_options
from dino_ds.method.objective import Needs, Outputs, StudentOutputs, Term, TermLoss
from dino_ds.method.specs import ours as specs
from dino_ds.method.specs.own import heads_of
from dino_ds.method.teacher import Teacher, Teachers
from dino_ds.models import foreign, trained
from dino_ds.models.base import NOTHING, Crops, cls_of, is_cast, patches_of, resized_patches, take_drawn_weights
from dino_ds.models.network import Network, Output, Query
from dino_ds.models.specs.base import BackboneOptions
from dino_ds.weights import load, sidecar
from dino_ds.weights.frozen import FrozenSource, digest, find_frozen

_DIGEST = "sha256"


class FrozenTeacher(Teacher):
    """The `network` on the meta device, filled with the tensors of `source` on this process's device. Every rank must
    build it. Raises CheckpointError as `place_frozen`. `about`: source and digest of the tensors, as in a checkpoint's
    manifest; `notes`: lines about `source` for the log."""

    def __init__(self, network: Network, source: FrozenSource, parts: TeacherParts) -> None:
        self.about = {"source": source.path, "digest": place_frozen(network, source, parts.config)}
        super().__init__(network, DTYPES[parts.config.precision])
        self.notes = [*source.notes, *sidecar.notes_on_range(source.range, parts.recipe.data.known_range)]
        self._change, ours = None, Normalization.of(parts.recipe)
        if source.normalization != ours:  # offset and factor that turn this run's images into the teacher's
            (offset, factor), wanted = ours.offset_and_factor(), source.normalization.offset_and_factor()
            ratio = wanted[1] / factor
            self._change = torch.stack((wanted[0] - offset * ratio, ratio)).to(self._device)

    @torch.no_grad()
    def __call__(self, crops: Crops, masks: Masks) -> dict[str, Output]:
        if self._change is not None:
            offset, factor = (part.view(-1, 1, 1) for part in self._change)
            crops = {name: [crop * factor + offset for crop in group] for name, group in crops.items()}
        return super().__call__(crops, masks)


class FixedTeacher(FrozenTeacher):
    """The frozen teacher of one loss `term`, idle while the term's weight is 0; the recipe's `key` has its path. A
    checkpoint holds the digest of its weights, which must be the same on a resume."""

    def __init__(self, network: Network, source: FrozenSource, parts: TeacherParts, term: str, key: str) -> None:
        super().__init__(network, source, parts)
        self._term, self._key = term, key

    def rests(self, schedule: ScheduleValues) -> bool:
        return not schedule.weights[self._term]

    def state(self) -> dict[str, Tensor]:
        return {_DIGEST: torch.tensor(list(bytes.fromhex(self.about["digest"])), dtype=torch.uint8)}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Compare a saved digest with this teacher's. Raises CheckpointError for other weights."""
        if state and not torch.equal(state[_DIGEST].cpu(), self.state()[_DIGEST]):
            why = f"{self._key} {self.about['source']} has other weights than the one that this run was trained with"
            raise CheckpointError(f"{why}: put those back in its place")


def place_frozen(network: Network, source: FrozenSource, config: DsConfig) -> str:
    """Fill a `network` on the meta device with the tensors of `source`, on this process's device. Matrices are in the
    engine's precision where autocast would cast them to it: results are the same. Every rank must call it. Returns the
    tensors' digest. Raises CheckpointError for tensors that do not fit, and if ranks have read different ones."""
    dtype = DTYPES[config.precision]
    if rehearsing():
        allocate(network, dtype)
        return ""
    with distributed.raise_on_all_ranks():
        wanted = {name: tuple(tensor.shape) for name, tensor in network.state_dict().items()}
        only = network.backbone.training_only
        tensors = {f"backbone.{name}": tensor for name, tensor in source.backbone.items() if name not in only}
        for name in only:
            if (shape := wanted.get(f"backbone.{name}")) is not None:
                tensors[f"backbone.{name}"] = source.backbone.get(name, torch.zeros(shape))
        for name, shape in trained.adapters_in(wanted).items():
            tensors.setdefault(name, torch.zeros(shape))  # a file has them merged into its weights
        for name in network.head_names:
            tensors |= {f"{name}.{key}": tensor for key, tensor in source.heads[name].items()}
        tensors = load.fit_tensors(tensors, wanted, source.interpolation, f"{source.name} lacks", f"{source.name} is")
    checksum = digest(tensors)
    if len(set(distributed.gather_objects(checksum))) > 1:
        raise CheckpointError(f"{source.name}: ranks have read different weights there")
    _fill(network, tensors, dtype)
    if config.performance.compile != "off":
        network.backbone.compile_segments(config.performance.compile)
    return checksum


def meta_network(
    source: FrozenSource,
    performance: PerformanceOptions,
    outputs: Sequence[str],
    queries: Mapping[str, Query] = NOTHING,
) -> Network:
    """The network of `source` on the meta device; outputs named in `queries` come from heads, others are features."""
    options = BackboneOptions(pos_embed_interpolation=source.interpolation, **speed_options(performance))
    asked = {name: query for name, query in queries.items() if name in outputs}
    with torch.device("meta"):
        backbone = foreign.build_backbone(source.spec, source.image_size, options)
        names = dict.fromkeys(query.head for query in asked.values())
        heads = {name: build_head(source.spec.width, source.head(name)) for name in names}
    return Network(backbone, heads, asked, [name for name in outputs if name not in asked])


def allocate(network: Network, dtype: torch.dtype) -> None:
    """Allocate a network on this process's device without values, in `dtype` where autocast would cast at each use."""
    for module in network.modules():
        for parameter in module.parameters(recurse=False) if is_cast(module) else ():
            parameter.data = parameter.data.to(dtype)
    network.to_empty(device=device())


@torch.no_grad()
def _fill(network: Network, tensors: dict[str, torch.Tensor], dtype: torch.dtype) -> None:
    """Give modules their tensors, moved to the device one by one, matrices in `dtype`: never all in memory twice."""

    def place(module: nn.Module) -> None:
        for parameter in module.parameters(recurse=False):
            parameter.data = parameter.data.to(device(), dtype if is_cast(module) else torch.float32, copy=True)
        for name, buffer in list(module.named_buffers(recurse=False)):
            setattr(module, name, buffer.to(device(), copy=True))

    drawn = network.backbone.drawn()
    if drawn is not None:  # it may have buffers that no file holds
        drawn.load_state_dict({name: tensors[f"backbone.{name}"] for name in drawn.state_dict()})
        take_drawn_weights(network.backbone, drawn, place)
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
        place(module)


def find_teacher(recipe: Recipe) -> FrozenSource | None:
    """The weights of teacher.source, or None where the recipe has none. Every rank must call it. Raises CheckpointError
    for weights that can't be used, ConfigError if they don't fit the recipe."""
    if recipe.teacher.source is None:
        return None
    with distributed.raise_on_all_ranks():
        source = find_frozen(recipe.teacher.source)
        source.check_channels(recipe.model.in_chans)
        with torch.device("meta"):
            backbone = foreign.build_backbone(source.spec, source.image_size)
        steps = [recipe.groups_of(resolution) for resolution in recipe.resolutions]
        for side in dict.fromkeys(side for groups in steps for side in teacher_sizes(groups, FROZEN)):
            try:
                backbone.check_image(side, side)
            except ConfigError as error:
                why = f"{source.name} can't take this run's crops: {error}"
                raise ConfigError(f"{why}; change crops.global_size") from None
        if recipe.teacher.distill != "features":
            _check_heads(source, recipe)
        elif recipe.objective.ibot_weight:
            ours = f"model.backbone {recipe.model.backbone}", recipe.model.spec()
            for name, spec in ((source.name, source.spec), ours):
                if not spec.patch_width:
                    raise ConfigError(f"{name} gives no features of patches: set objective.ibot_weight 0")
    return source


def _check_heads(source: FrozenSource, recipe: Recipe) -> None:
    teacher, how, wanted = source.name, recipe.objective, heads_of(recipe)
    if not source.heads:
        why = next((f" ({note})" for note in source.notes if "head" in note), "")
        raise ConfigError(f"{teacher} has no heads{why}: set teacher.distill features, or give a run that has them")
    for name, ours in wanted.items():
        if name not in source.heads:
            weight = "objective.dino_weight 0" if name == specs.HEAD else "objective.ibot_head shared"
            heads = ", ".join(source.heads)
            raise ConfigError(f"{teacher} has no {name}, only {heads}: set {weight}, or teacher.distill features")
        if (count := source.head(name).prototypes) != ours.prototypes:
            why = f"{name}.prototypes {ours.prototypes} must be those of {teacher}, {count}"
            raise ConfigError(f"{why}: set --{name}.prototypes {count}, or teacher.distill features")
    if how.ibot_weight and how.ibot_head == "shared" and specs.IBOT_HEAD in source.heads:
        raise ConfigError(f"{teacher} has a head of its own for patches: set objective.ibot_head own")
    stride = recipe.model.spec().stride
    if how.ibot_weight and source.spec.stride != stride:
        why = f"{teacher} has patches of {source.spec.stride} pixels and the student of {stride}"
        more = "the loss of masked patches needs equal ones; set objective.ibot_weight 0 and crops.mask none"
        raise ConfigError(f"{why}: {more}, or teacher.distill features")


def build_teacher(spec: specs.FrozenSpec, parts: TeacherParts) -> FrozenTeacher:
    assert parts.source is not None
    objective = parts.objective
    outputs = objective.teacher_features(spec.name)
    network = meta_network(parts.source, parts.config.performance, outputs, objective.queries)
    return FrozenTeacher(network, parts.source, parts)


def build_start_teacher(spec: specs.StartSpec, parts: TeacherParts) -> FixedTeacher:
    """Teacher with the weights of model.init_from. Raises CheckpointError, or ConfigError for other channels."""
    recipe, weights = parts.recipe, str(parts.recipe.model.init_from)
    with distributed.raise_on_all_ranks():
        if rehearsing():
            side, how = recipe.crops.global_size, recipe.model.pos_embed_interpolation
            source = FrozenSource(weights, recipe.model.spec(), side, how, {}, {}, Normalization.of(recipe))
        else:
            source = find_frozen(weights, "objective.preserve_weight, model.init_from", recipe.model.heads)
            known, ours_in = source.spec.in_chans, recipe.model.in_chans
            if known != ours_in:
                why = f"is for images of {known} channels, and has no features of these of {ours_in} (model.in_chans)"
                raise ConfigError(f"{source.name} {why}: add --objective.preserve_weight 0")
        network = meta_network(source, parts.config.performance, parts.objective.teacher_features(spec.name))
    return FixedTeacher(network, source, parts, specs.PRESERVE, "model.init_from")


def describe_distillation(teachers: Teachers, recipe: Recipe) -> list[str]:
    teacher = teachers.get(FROZEN)
    if not isinstance(teacher, FrozenTeacher):
        return []
    how, lines = "heads", []
    if specs.regresses_features(recipe):
        how = "features, through a linear layer each: head.*, objective.centering and temperatures have no effect"
        if recipe.crops.num_local:
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
    why = f"step {saved.step} was distilled from another teacher: this start has {difference}"
    raise CheckpointError(f"{why}; give the one that the run began with, or start a new run (--run_dir)")


class FeatureTerm(Term):
    """Regression to the teacher's features: 1 - cosine, mean over crops and patches. FP32. name: that of the
    output of `head`, a linear layer from the student's `feature` ("cls/GROUP" or "patches/GROUP") to the `width` of the
    teacher's feature. Teacher's patches on another grid are resized to the student's grid."""

    def __init__(self, name: str, feature: str, head: str, width: int) -> None:
        self.needs = Needs((name,), {FROZEN: (feature,)}, {name: Query(head, feature, width)})
        self._name, self._feature = name, feature

    def targets(self, window: Sequence[Outputs], masks: Sequence[Masks], schedule: ScheduleValues) -> list[Output]:
        return [teachers[FROZEN][self._feature] for teachers in window]

    def loss(self, student: StudentOutputs, targets: Output, schedule: ScheduleValues) -> TermLoss:
        return TermLoss(_distance(student[self._name], targets), {})


def build_features(spec: specs.FeatureSpec, parts: TermParts) -> FeatureTerm:
    assert parts.source is not None, "a distillation has a teacher"
    if spec.patches:
        return FeatureTerm(spec.name, patches_of(GLOBAL), "patch_regression", parts.source.spec.patch_width)
    return FeatureTerm(spec.name, cls_of(GLOBAL), "cls_regression", parts.source.spec.width)


class PreserveTerm(Term):
    """1 - cosine of CLS features to those of the weights that the run started from, averaged with that of patch
    features if the backbone has these. FP32."""

    def __init__(self, has_patches: bool) -> None:
        self._features = (cls_of(GLOBAL), *([patches_of(GLOBAL)] if has_patches else []))
        self.needs = Needs(self._features, {specs.START: self._features})

    def targets(self, window: Sequence[Outputs], masks: Sequence[Masks], schedule: ScheduleValues) -> Sequence[Any]:
        return [teachers.get(specs.START, {}) for teachers in window]

    def loss(self, student: StudentOutputs, targets: Mapping[str, Output], schedule: ScheduleValues) -> TermLoss:
        parts = [_distance(student[name], targets.get(name)) for name in self._features]
        return TermLoss(torch.stack(parts).mean(), {})


def _distance(features: Output, wanted: Output | None) -> Tensor:
    """1 - cosine, mean over rows; 0 without `wanted`, but with a gradient: without one ZeRO 3 repeats an old one."""
    assert isinstance(features, Tensor)
    with torch.autocast(features.device.type, enabled=False):
        if wanted is None:
            return 0.0 * features.float().sum()
        assert isinstance(wanted, Tensor)
        wanted = wanted.float()
        if wanted.ndim == 3 and wanted.shape[1] != features.shape[1]:
            wanted = resized_patches(wanted, features.shape[1])
        return (1 - F.cosine_similarity(features.float(), wanted, dim=-1)).mean()
