"""Every key that a ds JSON may have, and why others are refused: DeepSpeed 0.19 silently ignores most unknown keys.

Only keys that have an effect in dino_ds are allowed. No torch and no DeepSpeed here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Key:
    """kind: int, number, bool, text, list or section. `low`: smallest value, `above`: it must be larger.

    `auto`: "auto" is allowed. `stages`: the ZeRO stages at which the key acts. `required` in its section.
    """

    kind: str
    meaning: str
    low: float | None = None
    above: float | None = None
    choices: tuple[str, ...] = ()
    auto: bool = False
    stages: tuple[int, ...] = (0, 1, 2, 3)
    required: bool = False

    @property
    def type_text(self) -> str:
        words = {"int": "integer", "number": "number", "bool": "true or false", "text": "text", "list": "list of text"}
        text = ", ".join(f'"{c}"' for c in self.choices) or words.get(self.kind, self.kind)
        limit = f" >= {self.low:g}" if self.low is not None else f" > {self.above:g}" if self.above is not None else ""
        return text + limit + (' or "auto"' if self.auto else "")

    @property
    def article(self) -> str:
        """What goes before `type_text` in a sentence."""
        return "one of " if self.choices else {"int": "an ", "number": "a ", "list": "a "}.get(self.kind, "")


_SHARDED, _12, _3 = (1, 2, 3), (1, 2), (3,)
_DTYPES = ("fp32", "bf16", "fp16")

TOP: dict[str, Key] = {
    "train_batch_size": Key("int", "must equal the recipe's data.global_batch if given", low=1, auto=True),
    "train_micro_batch_size_per_gpu": Key("int", "images per rank; auto = from data.global_batch", low=1, auto=True),
    "gradient_accumulation_steps": Key("int", "micro-batches of a step; auto = from the others", low=1, auto=True),
    "gradient_clipping": Key("number", "largest global norm of the gradient; 0 = no clipping", low=0, required=True),
    "prescale_gradients": Key("bool", "divide gradients before the all-reduce"),
    "gradient_predivide_factor": Key("number", "divisor before the all-reduce, with prescale_gradients", above=0),
    "communication_data_type": Key("text", "dtype of gradients on the wire", choices=_DTYPES),
    "fp16": Key("section", "fp16 with loss scaling"),
    "bf16": Key("section", "bf16 with FP32 masters"),
    "zero_optimization": Key("section", "ZeRO: what is sharded over the ranks"),
    "data_types": Key("section", "dtype of accumulated gradients"),
    "activation_checkpointing": Key("section", "recompute blocks in the backward pass (by dino_ds)"),
    "comms_logger": Key("section", "log collectives"),
    "flops_profiler": Key("section", "DeepSpeed's profile of one step"),
    "wandb": Key("section", "metrics also go to Weights & Biases (pip install wandb; WANDB_MODE=offline)"),
    "comet": Key("section", "metrics also go to Comet (pip install comet_ml; COMET_API_KEY)"),
    "mlflow": Key("section", "metrics also go to MLflow (pip install mlflow-skinny); DeepSpeed does not read it"),
    "trackio": Key("section", "metrics also go to Trackio, on this machine (pip install trackio; TRACKIO_DIR)"),
    "dino_ds": Key("section", "speed of dino_ds's own parts; DeepSpeed does not read it"),
    "wall_clock_breakdown": Key("bool", "log times of forward, backward and step"),
    "steps_per_print": Key("int", "steps between DeepSpeed's own progress lines", low=1),
    "dump_state": Key("bool", "print DeepSpeed's state after initialisation"),
    "zero_allow_untested_optimizer": Key("bool", "accepted, and true: dino_ds has tested its optimizers"),
    "zero_force_ds_cpu_optimizer": Key("bool", "false with offload: dino_ds gives an optimizer of torch's"),
}

_FP16 = {
    "enabled": Key("bool", "train in fp16", required=True),
    "loss_scale": Key("number", "0 = dynamic", low=0),
    "initial_scale_power": Key("int", "the dynamic scale starts at 2 to this power", low=0),
    "loss_scale_window": Key("int", "good steps before the scale doubles", above=0),
    "hysteresis": Key("int", "overflows before the scale is halved", low=1),
    "consecutive_hysteresis": Key("bool", "refill the hysteresis at every good step"),
    "min_loss_scale": Key("int", "smallest dynamic scale", above=0),
}
_BF16 = {
    "enabled": Key("bool", "train in bf16", required=True),
    "check_grad_overflow": Key("bool", "must be true: skip steps whose gradient is not finite"),
}
_OFFLOAD = {
    "device": Key("text", "where it lies; NVMe is not offered", choices=("none", "cpu"), required=True),
    "pin_memory": Key("bool", "page-locked host memory"),
}
_ZERO = {
    "stage": Key("int", "sharded: 0 nothing, 1 optimizer state, 2 + gradients, 3 + parameters", low=0, required=True),
    "contiguous_gradients": Key("bool", "copy gradients into one buffer", stages=_SHARDED),
    "reduce_scatter": Key("bool", "reduce-scatter instead of all-reduce", stages=_SHARDED),
    "reduce_bucket_size": Key(
        "int", "elements reduced at once; auto = all, up to 5e7", above=0, auto=True, stages=_SHARDED
    ),
    "allgather_partitions": Key("bool", "all-gather instead of broadcasts", stages=_12),
    "allgather_bucket_size": Key(
        "int", "elements gathered at once; auto = all, up to 5e7", above=0, auto=True, stages=_12
    ),
    "use_multi_rank_bucket_allreduce": Key("bool", "one all-reduce for the buckets of all ranks", stages=_12),
    "overlap_comm": Key("bool", "reduce gradients during the backward pass; off on one process", stages=_SHARDED),
    "round_robin_gradients": Key("bool", "spread gradient copies over the ranks (offload)", stages=_12),
    "parameter_alignment": Key("bool", "align parameters in the flat buffer", stages=_12),
    "ignore_unused_parameters": Key("bool", "accept parameters without a gradient", stages=(2,)),
    "offload_optimizer": Key("section", "optimizer state and step on the host", stages=_SHARDED),
    "offload_param": Key("section", "parameters on the host", stages=_3),
    "sub_group_size": Key("int", "elements the optimizer treats at a time", above=0, stages=_3),
    "stage3_prefetch_bucket_size": Key("int", "elements fetched ahead", low=0, auto=True, stages=_3),
    "stage3_param_persistence_threshold": Key("int", "smaller ones stay whole", low=0, auto=True, stages=_3),
    "stage3_model_persistence_threshold": Key("int", "most elements that stay whole", low=0, stages=_3),
    "stage3_max_live_parameters": Key("int", "elements gathered at once, at most", low=0, stages=_3),
    "stage3_max_reuse_distance": Key("int", "keep what is used again within so many elements", low=0, stages=_3),
    "stage3_module_granularity_threshold": Key("int", "gather smaller modules whole", low=0, stages=_3),
    "stage3_use_all_reduce_for_fetch_params": Key("bool", "fetch with all-reduce", stages=_3),
    "stage3_allgather_sequential": Key("bool", "gather parameters one by one", stages=_3),
    "zero_hpz_partition_size": Key("int", "ZeRO++: ranks that share a second copy of the shards", low=1, stages=_3),
    "zero_quantized_weights": Key("bool", "ZeRO++: gather int8 weights (CUDA; not exact)", stages=_3),
    "zero_quantized_gradients": Key("bool", "ZeRO++: reduce int4 gradients (not exact)", stages=_3),
    "log_trace_cache_warnings": Key("bool", "say when the trace of parameters changes", stages=_3),
    "enable_sanity_checks": Key("bool", "check the order of parameters over ranks", stages=_3),
    "leaf_module": Key("section", "modules whose parameters are gathered together", stages=_3),
}

_DINO_DS = {
    "attention": Key("text", "varlen: one kernel for all sizes (CUDA)", choices=("sdpa", "naive", "varlen")),
    "attention_backend": Key(
        "text",
        "kernel of sdpa; auto = torch's choice, but cuDNN's only if named",
        choices=("cudnn", "flash", "efficient", "math"),
        auto=True,
    ),
    "packed": Key("bool", "crops of all sizes in one pass (default true); exact"),
    "channels_last": Key("bool", "convolutions with the channels innermost in memory (default: on a GPU); exact"),
    "cls_only_last_block": Key("bool", "the last block for the CLS token alone (default true); exact"),
    "compile": Key(
        "text",
        "torch.compile each block; same up to rounding. reduce-overhead: CUDA graphs; true = default, false = off",
        choices=("off", "default", "max-autotune", "reduce-overhead"),
        stages=(0, 1, 2),
    ),
    "teacher_copy": Key(
        "bool", "keep the teacher's matrices in bf16 or fp16 too; exact (default: on a GPU, up to 2e8 weights)"
    ),
    "frozen_teacher": Key("text", "sharded, offloaded: cut by ZeRO 3", choices=("whole", "sharded", "offloaded")),
    "deterministic": Key("bool", "kernels that add up in the same order in every run (GPU; slower)"),
}

# Dotted name of a section -> its keys; "" is the top level.
SECTIONS: dict[str, Mapping[str, Key]] = {
    "": TOP,
    "fp16": _FP16,
    "bf16": _BF16,
    "zero_optimization": _ZERO,
    "zero_optimization.offload_optimizer": _OFFLOAD,
    "zero_optimization.offload_param": _OFFLOAD,
    "zero_optimization.leaf_module": {
        "classes": Key("list", "class names"),
        "names": Key("list", "module names"),
        "name_suffixes": Key("list", "ends of module names"),
    },
    "dino_ds": _DINO_DS,
    "data_types": {"grad_accum_dtype": Key("text", "dtype in which gradients are accumulated", choices=_DTYPES)},
    "activation_checkpointing": {
        "number_checkpoints": Key("int", "how many blocks are recomputed; auto or absent = all", low=0, auto=True),
        "cpu_checkpointing": Key("bool", "keep the saved tensors in host memory"),
    },
    "comms_logger": {
        "enabled": Key("bool", "log collectives", required=True),
        "prof_all": Key("bool", "all of them"),
        "prof_ops": Key("list", "or these"),
        "verbose": Key("bool", "log each call"),
        "debug": Key("bool", "with the caller's name"),
    },
    "flops_profiler": {
        "enabled": Key("bool", "profile one step", required=True),
        "recompute_fwd_factor": Key("number", "part of the forward that is recomputed", low=0),
        "profile_step": Key("int", "which step", low=1),
        "module_depth": Key("int", "depth of the table, -1 = all", low=-1),
        "top_modules": Key("int", "modules listed", low=1),
        "detailed": Key("bool", "the whole model"),
        "output_file": Key("text", "file of the table"),
    },
    "wandb": {
        "enabled": Key("bool", "log there", required=True),
        "project": Key("text", "default dino_ds"),
        "group": Key("text", "group of runs"),
        "team": Key("text", "the entity; default: your own"),
    },
    "comet": {
        "enabled": Key("bool", "log there", required=True),
        "project": Key("text", "default dino_ds"),
        "workspace": Key("text", "default: your own"),
        "experiment_name": Key("text", "default: the run folder's name"),
        "online": Key("bool", "false: into a file, for comet upload"),
    },
    "mlflow": {
        "enabled": Key("bool", "log there", required=True),
        "experiment": Key("text", "default dino_ds"),
        "tracking_uri": Key("text", "server or file; default: MLflow's own"),
    },
    "trackio": {
        "enabled": Key("bool", "log there", required=True),
        "project": Key("text", "default dino_ds"),
        "group": Key("text", "group of runs"),
    },
}

# Dotted name -> why this key, which DeepSpeed knows, is refused.
REFUSED: dict[str, str] = {
    key: why
    for why, keys in {
        "DeepSpeed 0.19 has removed it": "elasticity amp nebula eigenvalue compression_training quantize_training "
        "sparse_gradients sparse_attention graph_harvesting curriculum_learning progressive_layer_drop "
        "zero_optimization.mics_shard_size zero_optimization.mics_hierarchical_params_gather "
        "zero_optimization.zeropp_loco_param zero_optimization.legacy_stage1",
        "dino_ds writes metrics.jsonl and TensorBoard itself, into the run folder": "tensorboard csv_monitor",
        "a file is no place for a secret: set COMET_API_KEY": "comet.api_key",
        "offload to NVMe is not offered: the teacher reads the masters in memory; "
        'use "device": "cpu"': "aio zero_optimization.offload_optimizer.nvme_path "
        "zero_optimization.offload_optimizer.buffer_count zero_optimization.offload_optimizer.pipeline_read "
        "zero_optimization.offload_optimizer.pipeline_write zero_optimization.offload_optimizer.fast_init "
        "zero_optimization.offload_param.nvme_path zero_optimization.offload_param.buffer_count "
        "zero_optimization.offload_param.buffer_size zero_optimization.offload_param.max_in_cpu",
        'use the bf16 section ("bf16": {"enabled": true}): it keeps FP32 masters and works at stages 1 to 3': ""
        "torch_autocast",
        "dino_ds writes checkpoints itself, and the teacher whole (recipe: save_every, keep_checkpoints)": "checkpoint "
        "zero_optimization.stage3_gather_16bit_weights_on_model_save "
        "zero_optimization.stage3_gather_fp16_weights_on_model_save "
        "zero_optimization.load_from_fp32_weights zero_optimization.pipeline_loading_checkpoint",
        "DeepCompile is not supported; dino_ds.compile compiles block by block": "compile",
        "it has no effect here: dino_ds trains, loads and recomputes in its own way, without model parallelism": ""
        "autotuning hybrid_engine data_efficiency pipeline tensor_parallel sequence_parallel_size "
        "seq_parallel_communication_data_type fp16.auto_cast bf16.immediate_grad_update data_types.buffer_dtype "
        "data_types.keep_in_fp32_modules zero_optimization.elastic_checkpoint "
        "zero_optimization.zero_quantized_nontrainable_weights zero_optimization.memory_efficient_linear "
        "zero_optimization.override_module_apply activation_checkpointing.partition_activations "
        "activation_checkpointing.contiguous_memory_optimization "
        "activation_checkpointing.synchronize_checkpoint_boundary activation_checkpointing.profile",
        "summing would multiply the gradient by the number of ranks: gradients are averaged": "gradient_allreduce_op",
        "dino_ds relies on DeepSpeed's own accumulation window": "managed_gradient_accumulation",
        "it removes the FP32 masters, which the teacher follows": "fp16.fp16_master_weights_and_grads "
        "bf16.bf16_master_weights_and_grads bf16.bf16_optimizer_states",
        "its name is check_grad_overflow now": "bf16.check_overflow",
        "the fp16 and bf16 sections say it": "data_types.param_dtype",
        'write "offload_optimizer": {"device": "cpu"}': "zero_optimization.cpu_offload",
        'write "offload_param": {"device": "cpu"}': "zero_optimization.cpu_offload_param",
        "write pin_memory inside offload_optimizer or offload_param": "zero_optimization.cpu_offload_use_pin_memory",
        "the norm is one of the metrics, and clipping needs it": "zero_optimization.compute_grad_norm",
        "it needs DeepSpeed's own optimizer, and dino_ds gives torch's": "zero_optimization.zenflow "
        "zero_optimization.save_muon_momentum_buffer_in_memory zero_optimization.offload_optimizer.ratio "
        "zero_optimization.offload_optimizer.super_offload zero_optimization.offload_optimizer.cpuadam_cores_perc",
    }.items()
    for key in keys.split()
}

LOGGERS = (
    "wandb",
    "comet",
    "mlflow",
    "trackio",
)  # where else metrics go; DeepSpeed would wait for the device in each step
# Sections whose unknown keys make DeepSpeed stop; in all others it ignores them.
STRICT_SECTIONS = ("fp16", "bf16", "zero_optimization", "comms_logger", "dino_ds")


def key_names() -> list[str]:
    """Every allowed key, dotted."""
    return [f"{section}.{key}" if section else key for section, keys in SECTIONS.items() for key in keys]
