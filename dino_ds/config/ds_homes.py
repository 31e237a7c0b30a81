"""The place in the ds JSON of a setting that was found in the recipe or on the command line."""

from __future__ import annotations

from dino_ds.basics.names import by_word

DS_HOMES = by_word(
    {
        "train_micro_batch_size_per_gpu": "micro_batch micro_batch_size batch_size_per_gpu "
        "train_micro_batch_size_per_gpu per_device_train_batch_size per_gpu_train_batch_size per_device_batch_size "
        "batch_size_per_device",
        "train_batch_size": "train_batch_size",
        "gradient_accumulation_steps": "accumulation grad_accum accumulate_grad_batches gradient_accumulation_steps "
        "gradient_accumulation accum_iter accum_steps grad_accum_steps",
        "gradient_clipping": "clip_grad clip clipping max_grad_norm gradient_clipping grad_clip "
        "gradient_clip_val clip_grad_norm max_norm",
        "fp16.enabled": "fp16 use_fp16",
        "fp16.loss_scale": "loss_scale",
        "fp16.initial_scale_power": "initial_scale_power",
        "bf16.enabled": "bf16 precision mixed_precision amp half use_amp use_bf16 autocast dtype torch_dtype",
        "zero_optimization.stage": "zero zero_stage zero_optimization stage",
        "zero_optimization.offload_optimizer.device": "offload_optimizer",
        "zero_optimization.offload_param.device": "offload_param",
        "activation_checkpointing.number_checkpoints": "grad_checkpointing gradient_checkpointing "
        "activation_checkpointing",
        "data_types.grad_accum_dtype": "grad_accum_dtype",
        "communication_data_type": "communication_data_type",
        "wall_clock_breakdown": "wall_clock_breakdown",
        "steps_per_print": "steps_per_print",
    }
)
"""The last part of a key that people write in a recipe -> the key of DeepSpeed's JSON that has it."""


def ds_home(key: str) -> str | None:
    """The sentence for a recipe key that belongs to the ds JSON, None if it does not."""
    for part in (key.rsplit(".", 1)[-1], key.split(".", 1)[0]):
        if part.startswith("stage3_"):
            return f"it belongs to the ds JSON: zero_optimization.{part} (--ds.zero_optimization.{part})"
        if part in DS_HOMES:
            return f"it belongs to the ds JSON: {DS_HOMES[part]} (--ds.{DS_HOMES[part]})"
    return None
