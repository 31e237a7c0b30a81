"""Declares the keys of a ds JSON: DeepSpeed 0.19 silently ignores most unknown keys.

Only keys that have an effect in dino_ds are allowed. The content of `PASSED` is left to DeepSpeed's own checks.
`stages` are the ZeRO stages at which a key acts, if not all of them. No torch and no DeepSpeed here.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, Strict

from dino_ds.config.ds_values import Bool, PerformanceOptions
from dino_ds.config.fields import Section, option
from dino_ds.config.schema import options_of


def _whole(value: object) -> object:
    """Turn 5e7 and 2.0, which JSON reads as floats, into integers."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


_SHARDED, _12, _3 = (1, 2, 3), (1, 2), (3,)
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
    check_grad_overflow: Literal[True] = option(None, "skip steps whose gradient is not finite, as always")


class Offload(Section):
    device: Literal["none", "cpu"] = option(..., "where it lies; NVMe is not offered")
    pin_memory: Bool = option(None, "page-locked host memory")


class Zero(Section):
    stage: _Stage = option(..., "sharded: 0 nothing, 1 optimizer state, 2 + gradients, 3 + parameters")
    contiguous_gradients: Bool = option(None, "copy gradients into one buffer", stages=_SHARDED)
    reduce_bucket_size: _From1 | _Auto = option(
        None, "elements reduced at once; auto = all, up to 5e7", stages=_SHARDED
    )
    allgather_bucket_size: _From1 | _Auto = option(None, "elements gathered at once; auto = all, up to 5e7", stages=_12)
    overlap_comm: Bool = option(None, "reduce gradients during the backward pass; off on one process", stages=_SHARDED)
    offload_optimizer: Offload = option(None, "optimizer state and step on the host", stages=_SHARDED)
    offload_param: Offload = option(None, "parameters on the host", stages=_3)
    stage3_prefetch_bucket_size: _From0 | _Auto = option(None, "elements fetched ahead", stages=_3)
    stage3_param_persistence_threshold: _From0 | _Auto = option(None, "smaller ones stay whole", stages=_3)
    stage3_max_live_parameters: _From0 = option(None, "elements gathered at once, at most", stages=_3)
    stage3_max_reuse_distance: _From0 = option(None, "keep what is used again within so many elements", stages=_3)
    zero_hpz_partition_size: _From1 = option(None, "ZeRO++: ranks that share a second copy of the shards", stages=_3)
    zero_quantized_weights: Bool = option(None, "ZeRO++: gather int8 weights (CUDA; not exact)", stages=_3)
    zero_quantized_gradients: Bool = option(None, "ZeRO++: reduce int4 gradients (not exact)", stages=_3)


class DataTypes(Section):
    grad_accum_dtype: _Dtype = option(None, "dtype in which gradients are accumulated")


class ActivationCheckpointing(Section):
    number_checkpoints: _From0 | _Auto = option(None, "how many blocks are recomputed; auto or absent = all")


class Wandb(Section):
    enabled: Bool = option(..., "log there")
    project: _Text = option(None, "default dino_ds")
    group: _Text = option(None, "group of runs")
    team: _Text = option(None, "the entity; default: your own")


class Trackio(Section):
    enabled: Bool = option(..., "log there: trackio show opens the page")
    project: _Text = option(None, "default dino_ds")
    space_id: _Text = option(None, "a Hugging Face Space to log to; default: files of this machine")
    server_url: _Text = option(None, "a server of your own to log to")


class DsJson(Section):
    """A ds JSON."""

    train_batch_size: _From1 | _Auto = option(None, "must equal the recipe's data.global_batch if given")
    train_micro_batch_size_per_gpu: _From1 | _Auto = option(None, "images per rank; auto = from data.global_batch")
    gradient_accumulation_steps: _From1 | _Auto = option(None, "micro-batches of a step; auto = from the others")
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
    activation_checkpointing: ActivationCheckpointing = option(
        None, "recompute blocks in the backward pass (by dino_ds)"
    )
    wandb: Wandb = option(None, "metrics also go to Weights & Biases (pip install wandb; WANDB_MODE=offline)")
    trackio: Trackio = option(None, "metrics also go to trackio (pip install trackio)")
    dino_ds: PerformanceOptions = option(None, "speed of dino_ds's own parts; DeepSpeed does not read it")


KEYS = options_of(DsJson)
"""Every allowed key by its dotted name."""
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
    """The dotted names of every allowed key and section."""
    return [*KEYS, *SECTIONS[1:], *PASSED]


def is_key(name: str) -> bool:
    """Whether a ds JSON may have the key or section with this dotted name."""
    return name in key_names() or name.startswith(tuple(f"{section}." for section in PASSED))
