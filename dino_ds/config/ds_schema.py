"""Declares the keys of a ds JSON that have an effect in dino_ds, since DeepSpeed silently ignores most unknown ones;
checks a ds JSON against them; and defines `DsConfig`, the values by which a run is built. No torch, no DeepSpeed."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Field, Strict
from pydantic.dataclasses import dataclass

from dino_ds.basics.names import did_you_mean, words_elsewhere
from dino_ds.config.fields import Section, option
from dino_ds.config.schema import MOST_PROBLEMS, Option, options_of
from dino_ds.errors import ConfigError

LOGGERS = ("wandb", "trackio")  # metric loggers: not passed to DeepSpeed, which would synchronize in each step
Bool = Annotated[bool, Strict()]
_Compile = Annotated[
    Literal["off", "default", "max-autotune", "reduce-overhead"],
    BeforeValidator(lambda value: ("off", "default")[value] if isinstance(value, bool) else value),
]


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class PerformanceOptions:
    """The section "dino_ds" of a ds JSON: how fast, not what is learned."""

    attention: Literal["sdpa", "varlen"] = option("sdpa", "varlen: one kernel for all sizes (CUDA)")
    packed: Bool = option(True, "crops of all sizes in one pass (default true); exact")
    channels_last: Bool | None = option(
        None, "convolutions with the channels innermost in memory (default: on a GPU); exact"
    )
    cls_only_last_block: Bool = option(True, "the last block for the CLS token alone (default true); exact")
    compile: _Compile = option(
        "off",
        "torch.compile each block; same up to rounding. reduce-overhead: CUDA graphs; true = default, false = off",
        stages=(0, 1, 2),
    )
    teacher_copy: Bool | None = option(
        None, "keep the teacher's matrices in bf16 or fp16 too; exact (default: on a GPU, up to 5e8 weights)"
    )
    fast_paths: Bool = option(True, "false: plain operators in place of fused, compiled and TF32 ones (GPU)")
    deterministic: Bool = option(False, "kernels that add up in the same order in every run (GPU; slower)")


@dataclasses.dataclass(frozen=True)
class DsConfig:
    """A ds JSON resolved for one run."""

    raw: dict[str, Any]  # the JSON, its open values filled in
    micro_batch: int  # images per rank
    accumulation: int  # micro-batches per step
    stage: int
    precision: str
    dynamic_loss_scale: bool
    clipping: float  # largest global gradient norm, 0 = none
    checkpoint_blocks: int | str  # how many blocks are recomputed, or "all"
    performance: PerformanceOptions
    notes: list[str] = dataclasses.field(default_factory=list)  # a line about each value that was filled in

    def keeps_teacher_copy(self, on_gpu: bool, weights: int) -> bool:
        """Whether the teacher's matrices are kept in the engine's precision too; by default on a GPU up to a ViT-L with
        its heads, where casts would be a quarter of the kernel launches. For larger ones memory is worth more."""
        asked = self.performance.teacher_copy
        return self.precision != "fp32" and (on_gpu and weights <= 500_000_000 if asked is None else asked)

    def copies_gradients(self, world_size: int) -> bool:
        """Whether DeepSpeed copies gradients into buckets. A single process has no one to reduce with: at stages 0
        and 1 its gradients stay in place, unless the optimizer takes them on another device or in another dtype."""
        zero = self.raw.get("zero_optimization", {})
        if self.stage != 1 or world_size > 1 or zero.get("overlap_comm") or offloads_optimizer(zero):
            return self.stage > 0
        return self.raw.get("data_types", {}).get("grad_accum_dtype", self.precision) not in (self.precision, None)


@dataclasses.dataclass(frozen=True)
class ChosenDsConfig:
    config: DsConfig
    reason: str  # how the config was chosen, "" if the user named it
    memory: str  # the log's line about the prediction
    trained: str  # the part of the weights that is trained, in words, "" for all
    predicted_gib: float | None  # of a rank, None if it is not estimated
    check_fits: Callable[[], None]  # raises ConfigError, with a config that fits, for more than the machine's memory


def offloads_optimizer(zero: dict[str, Any]) -> bool:
    return bool(zero.get("offload_optimizer", {}).get("device", "none") != "none")


def offloads_weights(zero: dict[str, Any]) -> bool:
    return bool(zero.get("offload_param", {}).get("device", "none") != "none")


ORTHOGONALIZED_ELEMENTS = 2**25  # of the matrices that Muon takes at a time: its scratch memory stays at about 0.5 GiB
COMMUNICATES_IN_STEP = {  # kind of optimizer -> what its ranks do in a step, and the kind to take instead
    "lars": ("the norm of a layer is summed over ranks", "sgd"),
    "muon": ("ranks exchange slices of matrices", "adamw"),
}


def check_offload(config: DsConfig, kind: str) -> None:
    """Raises ConfigError for an optimizer that communicates inside its step and is offloaded to the host."""
    if kind in COMMUNICATES_IN_STEP and offloads_optimizer(config.raw["zero_optimization"]):
        does, instead = COMMUNICATES_IN_STEP[kind]
        why = f"{does} in the middle of a step that runs on the host"
        both = f"optimizer.kind {kind} does not go with zero_optimization.offload_optimizer"
        raise ConfigError(f"{both}: {why}; remove the one, or set optimizer.kind {instead}")


def _whole(value: object) -> object:
    """Turn 5e7 and 2.0, which JSON reads as floats, into integers."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


_123, _12, _3 = (1, 2, 3), (1, 2), (3,)
_Auto = Literal["auto"]
_Text = Annotated[str, Strict()]
_From0 = Annotated[int, Strict(), Field(ge=0), BeforeValidator(_whole)]
_From1 = Annotated[int, Strict(), Field(ge=1), BeforeValidator(_whole)]
_Number0 = Annotated[float, Strict(), Field(ge=0)]
_Above0 = Annotated[float, Strict(), Field(gt=0)]
_Dtype = Literal["fp32", "bf16", "fp16"]
_Stage = Annotated[int, Strict(), Field(ge=0, le=3), BeforeValidator(_whole)]


class Fp16(Section):
    enabled: Bool = option(..., "train in fp16")
    loss_scale: _Number0 = option(None, "0 = dynamic")
    initial_scale_power: _From0 = option(None, "the dynamic scale starts at 2 to this power")
    loss_scale_window: _From1 = option(None, "good steps before the scale doubles")
    hysteresis: _From1 = option(None, "overflows before the scale is halved")
    min_loss_scale: _From1 = option(None, "smallest dynamic scale")


class Bf16(Section):
    enabled: Bool = option(..., "train in bf16")
    check_grad_overflow: Literal[True] = option(
        None, "skip steps whose gradient is not finite: always done, so false is refused"
    )


class Offload(Section):
    device: Literal["none", "cpu"] = option(..., "where ZeRO keeps this part; NVMe is not offered")
    pin_memory: Bool = option(None, "page-locked host memory")


class Zero(Section):
    stage: _Stage = option(..., "sharded: 0 nothing, 1 optimizer state, 2 + gradients, 3 + parameters")
    contiguous_gradients: Bool = option(None, "copy gradients into one buffer", stages=_123)
    reduce_bucket_size: _From1 | _Auto = option(None, "elements reduced at once; auto = all, up to 5e7", stages=_123)
    allgather_bucket_size: _From1 | _Auto = option(None, "elements gathered at once; auto = all, up to 5e7", stages=_12)
    overlap_comm: Bool = option(None, "reduce gradients during the backward pass; off on one process", stages=_123)
    offload_optimizer: Offload = option(None, "optimizer state and step on the host", stages=_123)
    offload_param: Offload = option(None, "parameters on the host", stages=_3)
    stage3_prefetch_bucket_size: _From0 | _Auto = option(None, "elements fetched ahead", stages=_3)
    stage3_param_persistence_threshold: _From0 | _Auto = option(
        None, "parameters of fewer elements stay whole on each rank", stages=_3
    )
    stage3_max_live_parameters: _From0 = option(None, "elements gathered at once, at most", stages=_3)
    stage3_max_reuse_distance: _From0 = option(
        None, "keep parameters gathered that are used again within so many elements", stages=_3
    )
    zero_hpz_partition_size: _From1 = option(None, "ZeRO++: ranks that share a second copy of the shards", stages=_3)
    zero_quantized_weights: Bool = option(None, "ZeRO++: gather int8 weights (CUDA; not exact)", stages=_3)
    zero_quantized_gradients: Bool = option(None, "ZeRO++: reduce int4 gradients (not exact)", stages=_3)


class DataTypes(Section):
    grad_accum_dtype: _Dtype = option(None, "dtype in which gradients are accumulated")


class Recomputation(Section):
    number_checkpoints: _From0 | _Auto = option(None, "how many blocks are recomputed; auto or absent = all")


class Wandb(Section):
    enabled: Bool = option(..., "log metrics to Weights & Biases")
    project: _Text = option(None, "default dino_ds")
    group: _Text = option(None, "group of runs")
    team: _Text = option(None, "the entity; default: your own")


class Trackio(Section):
    enabled: Bool = option(..., "log metrics to trackio; trackio show opens its page")
    project: _Text = option(None, "default dino_ds")
    space_id: _Text = option(None, "a Hugging Face Space to log to; default: files of this machine")
    server_url: _Text = option(None, "a server of your own to log to")


class DsJson(Section):
    train_batch_size: _From1 | _Auto = option(None, "must equal the recipe's data.global_batch if given")
    train_micro_batch_size_per_gpu: _From1 | _Auto = option(None, "images per rank; auto = from data.global_batch")
    gradient_accumulation_steps: _From1 | _Auto = option(
        None, "micro-batches of a step; auto = global batch / (micro-batch x ranks)"
    )
    gradient_clipping: _Number0 = option(..., "largest global norm of the gradient; 0 = no clipping")
    prescale_gradients: Bool = option(None, "divide gradients before the all-reduce")
    gradient_predivide_factor: _Above0 = option(None, "divisor before the all-reduce, with prescale_gradients")
    communication_data_type: _Dtype = option(None, "dtype of gradients on the wire")
    wall_clock_breakdown: Bool = option(None, "log times of forward, backward and step")
    steps_per_print: _From1 = option(None, "steps between DeepSpeed's own progress lines")
    zero_force_ds_cpu_optimizer: Bool = option(None, "false with offload: dino_ds gives an optimizer of torch's")
    fp16: Fp16 = option(None, "fp16 with loss scaling")
    bf16: Bf16 = option(None, "bf16 with FP32 masters")
    zero_optimization: Zero = option(None, "ZeRO: what is sharded over the ranks")
    data_types: DataTypes = option(None, "dtype of accumulated gradients")
    activation_checkpointing: Recomputation = option(None, "recompute blocks in the backward pass (by dino_ds)")
    wandb: Wandb = option(None, "metrics also go to Weights & Biases (pip install wandb; WANDB_MODE=offline)")
    trackio: Trackio = option(None, "metrics also go to trackio (pip install trackio)")
    dino_ds: PerformanceOptions = option(None, "speed of dino_ds's own parts; DeepSpeed does not read it")


KEYS = options_of(DsJson)  # every allowed key by its dotted name
SECTIONS = ("", *dict.fromkeys(name[:i] for name in KEYS for i, letter in enumerate(name) if letter == "."))
"""Dotted names of the sections; "" is the top level."""
PASSED = (
    "comms_logger", "dump_state", "flops_profiler", "zero_allow_untested_optimizer", "fp16.consecutive_hysteresis",
    *(f"zero_optimization.{key}" for key in (
        "allgather_partitions", "enable_sanity_checks", "ignore_unused_parameters", "leaf_module",
        "log_trace_cache_warnings", "parameter_alignment", "reduce_scatter", "round_robin_gradients",
        "stage3_allgather_sequential", "stage3_model_persistence_threshold", "stage3_module_granularity_threshold",
        "stage3_use_all_reduce_for_fetch_params", "sub_group_size", "use_multi_rank_bucket_allreduce",
    )),
)  # fmt: skip
"""Keys and sections whose content DeepSpeed checks alone; its documentation explains them."""


def key_names() -> list[str]:
    return [*KEYS, *SECTIONS[1:], *PASSED]


def is_key(name: str) -> bool:
    return name in key_names() or name.startswith(tuple(f"{section}." for section in PASSED))


Problem = tuple[str, str]  # (dotted key, what is wrong)
_REQUIRED = [name for name, option in KEYS.items() if option.info.is_required()]


def problems_of(config: dict[str, Any]) -> list[Problem]:
    """All problems of `config`, changed in place: 5e7 and 2.0 become integers, and keys that are off are removed."""
    _drop_what_is_off(config, "")
    if problems := list(islice(_check_section(config, ""), MOST_PROBLEMS)):
        return problems
    zero = config.get("zero_optimization", {})
    for key, value in zero.items():  # DeepSpeed accepts a key at any stage
        if key in Zero.model_fields and value is not False and not _is_default(f"zero_optimization.{key}", value):
            stages = Option(key, Zero.model_fields[key]).fact("stages", (zero["stage"],))
            if zero["stage"] not in stages:
                why = f"no effect at stage {zero['stage']}, only at {', '.join(map(str, stages))}: remove it"
                problems.append((f"zero_optimization.{key}", why))
    return [*problems, *_check_combinations(config)]


def _drop_what_is_off(content: dict[str, Any], section: str) -> None:
    """Remove null, and refused features, offloading and DeepSpeed's own keys where these are off or default."""
    offload = [name for name in SECTIONS if "offload_" in name]
    optional = {*words_elsewhere("refused_ds_keys"), *PASSED, *offload, "dataloader_drop_last"}
    for key, value in [*content.items()]:
        name = f"{section}.{key}".removeprefix(".")
        if (value is None and name not in _REQUIRED) or (name in optional and _is_off(name, value)):
            del content[key]
        elif isinstance(value, dict) and name in SECTIONS:
            _drop_what_is_off(value, name)


def _is_off(name: str, value: Any) -> bool:
    """Whether a value turns its key off or is DeepSpeed's default; a section's switch decides, else all of its keys."""
    if isinstance(value, dict):
        switch = value.get("enabled", value.get("device"))
        has_none = switch is None and all(_is_off(f"{name}.{key}", inner) for key, inner in value.items())
        return has_none or switch in (False, "none")
    return value in (None, False, "none") or _is_default(name, value)


def _is_default(name: str, value: Any) -> bool:
    return name in (known := words_elsewhere("default_ds_keys")) and bool(json.loads(known[name]) == value)


def wrong_key(name: str) -> str:
    """The message for a dotted name that is not allowed: why, where it belongs, or near names."""
    refused = words_elsewhere("refused_ds_keys")
    parents = [".".join(name.split(".")[:i]) for i in range(1, name.count(".") + 2)]
    if known := next((parent for parent in parents if parent in refused), None):
        return f"refused: {refused[known]}"
    if key := words_elsewhere("recipe_keys").get(parents[0]):
        return f"not a key of the ds JSON: it belongs to the recipe: {key}"
    return f"unknown key.{did_you_mean(name, key_names())}"


def override(config: dict[str, Any], name: str, value: Any) -> str | None:
    """Set the key with the dotted `name` to `value`, text or a Python value; returns the problem with it, if any."""
    *sections, leaf = name.split(".")
    if not is_key(name):
        return wrong_key(name)
    target = config
    for section in sections:
        target = target.setdefault(section, {})
        if not isinstance(target, dict):
            return f"{section} is not a section in the file"
    try:
        is_word = isinstance(value, str) and value.lower() in ("true", "false")
        target[leaf] = json.loads(value.lower() if is_word else value) if isinstance(value, str) else value
    except json.JSONDecodeError:
        target[leaf] = value
    return None


def _check_section(content: dict[str, Any], section: str) -> Iterator[Problem]:
    for key, value in content.items():
        name = f"{section}.{key}".removeprefix(".")
        if name in KEYS:
            try:
                read = KEYS[name].read(value, json.dumps)
                content[key] = value if isinstance(read, float) else read
            except ValueError as error:
                yield name, str(error)
        elif name not in SECTIONS and name not in PASSED:
            yield name, wrong_key(name)
        elif name in SECTIONS and isinstance(value, dict):
            yield from _check_section(value, name)
        elif name in SECTIONS:
            yield name, f"{json.dumps(value)} is not a section: write {{...}}"
    for name in _REQUIRED:
        if name.rpartition(".")[0] == section and (key := name.rpartition(".")[2]) not in content:
            why = "DeepSpeed has a default of its own for it"
            yield section, f'has no "{key}", and {why}: write it ({KEYS[name].type})'


def _check_combinations(config: dict[str, Any]) -> Iterator[Problem]:
    zero, ours = config.get("zero_optimization", {"stage": 0}), config.get("dino_ds", {})
    low = [name for name in ("fp16", "bf16") if config.get(name, {}).get("enabled")]
    dtype, compiled, varlen = low[0] if low else "fp32", ours.get("compile", "off"), ours.get("attention") == "varlen"
    accumulated = config.get("data_types", {}).get("grad_accum_dtype", "fp32")
    if len(low) == 2:
        yield "fp16", "fp16 and bf16 are both enabled: choose one"
    if low and zero["stage"] == 0:
        does = "the loss is not scaled, a hidden optimizer step changes the weights"
        instead = "use stage 1, which on one process shards nothing"
        yield "zero_optimization.stage", f"stage 0 in {dtype} is broken in DeepSpeed 0.19 ({does}): {instead}"
    if accumulated not in ("fp32", dtype):
        yield "data_types.grad_accum_dtype", f'"{accumulated}" does not go with training in {dtype}: use fp32'
    if compiled != "off" and zero["stage"] == 3:
        why = "ZeRO 3 gathers parameters by hooks that break a compiled block into some 40 pieces"
        yield "dino_ds.compile", f"{why}: use stage 1 or 2, or remove it"
    if compiled == "reduce-overhead" and "activation_checkpointing" in config:
        why = "does not go with activation_checkpointing, which runs blocks twice"
        yield "dino_ds.compile", f'"reduce-overhead" {why}: use "default"'
    if varlen and not low:
        yield "dino_ds.attention", '"varlen" needs bf16 or fp16: enable one, or use "sdpa"'
    if varlen and ours.get("deterministic"):
        yield "dino_ds.deterministic", "varlen's gradients are added up in any order: remove one of the two"
    if compiled != "off" and ours.get("deterministic"):
        why = "dino_ds.compile, whose kernels are chosen by timing them, does not go with it"
        yield "dino_ds.deterministic", f"{why}: remove one of the two"
