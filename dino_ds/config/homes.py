"""Names the right file for a setting that was found in the wrong one: the recipe says what is learned, the ds JSON how
fast and on what hardware.
"""

from __future__ import annotations

from dino_ds.basics.names import by_word

RECIPE_HOMES = by_word(
    {
        "optimizer.lr, optimizer.weight_decay, optimizer.beta1, ...": "optimizer",
        "optimizer.warmup, optimizer.min_lr and length": "scheduler",
        "optimizer.lr": "lr learning_rate",
        "optimizer.min_lr": "min_lr",
        "optimizer.weight_decay": "weight_decay",
        "optimizer.weight_decay_end": "weight_decay_end",
        "optimizer.beta1 and optimizer.beta2": "betas",
        "optimizer.warmup": "warmup warmup_epochs warmup_steps",
        "seed": "seed",
        "length": "epoch epochs max_epochs num_train_epochs max_steps length",
        "data.global_batch": "global_batch batch_size",
        "data.source, data.root, ...": "data",
        "data.global_batch (an incomplete last batch is always dropped)": "dataloader_drop_last",
        "data.workers": "num_workers workers",
        "model.backbone, model.patch_size, ...": "model",
        "model.backbone": "backbone arch",
        "model.drop_path": "drop_path",
        "crops.global_size, crops.num_local, ...": "crops",
        "head.prototypes, ...": "head",
        "objective.student_temp, ...": "objective",
        "objective.student_temp, head.prototypes, ...": "dino",
        "teacher.momentum": "teacher ema teacher_momentum",
        "objective.teacher_temp": "teacher_temp",
        "eval.every, ...": "eval",
        "data.root": "data_path",
        "head.prototypes": "out_dim",
        "crops.num_local": "local_crops_number",
        "log_every": "log_every",
        "save_every": "save_every",
    }
)
"""First part of a key that people write in a ds JSON -> the recipe key that holds it."""
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
    """The sentence for a recipe key that belongs to the ds JSON, or None if it does not."""
    for part in (key.rsplit(".", 1)[-1], key.split(".", 1)[0]):
        if part.startswith("stage3_"):
            return f"it belongs to the ds JSON: zero_optimization.{part} (--ds.zero_optimization.{part})"
        if part in DS_HOMES:
            return f"it belongs to the ds JSON: {DS_HOMES[part]} (--ds.{DS_HOMES[part]})"
    return None


def recipe_home(key: str) -> str | None:
    """The sentence for a ds JSON key that belongs to the recipe, or None if it does not."""
    part = key.split(".", 1)[0]
    return f"it belongs to the recipe: {RECIPE_HOMES[part]}" if part in RECIPE_HOMES else None
