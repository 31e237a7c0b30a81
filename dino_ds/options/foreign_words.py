"""Names that other programs give options, commands and values, and what to type here."""

from __future__ import annotations

from dino_ds.basics.names import by_word
from dino_ds.config.fields import EVALUATIONS_ELSEWHERE

OPTIONS = by_word({
    # Images.
    "write --eval.val_share 0.05 for a held-out loss; labelled test images for k-NN are a folder of their own: "
    "--eval.root DIR": "val_split validation_split test_split val_ratio val_size holdout",
    "each epoch has every image once, in an order of --seed; rare ones come more often with --data.balance classes (or "
    "clusters:FILE), sources by their shares with --data.mixture": "sampler class_weights class_balanced balanced "
    "weighted_sampler shuffle",
    "an incomplete last batch is always dropped": "drop_last dataloader_drop_last",
    "the loader sets it; --data.workers is what can be chosen": "pin_memory persistent_workers prefetch_factor",
    "training needs no labels; evaluations count the classes of the folders": "num_classes labels",
    "decoded images stay in memory with --data.cache_gib N, which pays for small images (docs/data.md)": "cache "
    "cache_images cache_dataset in_memory",
    # Length and sizes.
    'write --length "{n} epochs"': "epochs epoch max_epochs num_train_epochs num_epochs n_epochs",
    'write --length "{n} steps"': "steps iterations num_steps max_iter max_iters total_steps num_train_steps "
    "max_train_steps official_epoch_length",
    "dino-ds bench batch-size measures what fits": "auto_scale_batch_size auto_find_batch_size",
    "sizes are those of the crops: --crops.global_size {n}, --crops.local_size": "image_size img_size crop_size "
    "input_size resolution",
    "recompute blocks instead: --ds_config ds_configs/zero2_bf16_checkpointing.json (docs/performance.md)": (
        "crop_batch_size"
    ),
    "--crops.augment names an augmentation; --crops.jitter, blur, grayscale, flip, solarize, vertical_flip, rotation "
    "change it; --data.transform adds a function of yours (docs/data.md)": "color_jitter jitter blur grayscale flip "
    "hflip solarize vflip vertical_flip rotation transform transforms transform_args brightness contrast saturation "
    "hue gaussian_blur augmentation augmentations auto_augment aa randaugment",
    "DINO has no such thing: its views are crops (--crops.augment, --crops.num_local)": "mixup cutmix reprob "
    "random_erasing label_smoothing smoothing",
    "write --crops.global_scale {value}, two numbers with a comma": "global_crops_scale",
    "write --crops.local_scale {value}, two numbers with a comma": "local_crops_scale",
    # Network, weights and objective.
    "a recipe names the network: --config vits16; --model.backbone NAME takes another (docs/backbones.md)": "model "
    "model_name architecture encoder network",
    "existing weights: --model.init_from FILE, or timm's name; a stopped run continues with --resume": "pretrained "
    "checkpoint ckpt ckpt_path checkpoint_path resume_from resume_from_checkpoint load_from load_checkpoint "
    "pretrained_weights model_name_or_path initial_checkpoint auto_resume",
    'there is no LoRA; --model.freeze_backbone "N epochs" trains the head first, --optimizer.layer_decay 0.9 moves '
    "lower blocks less": "lora lora_r lora_rank lora_alpha use_peft adapter",
    'the backbone may wait while the head learns, --model.freeze_backbone "{n} epochs"; --optimizer.layer_decay 0.9 '
    "moves lower blocks less": "freeze freeze_layers freeze_encoder freeze_epochs unfreeze",
    'write --objective.freeze_prototypes "{n} epochs"': "freeze_last_layer freeze_last_layer_epochs",
    "prototypes have length 1 unless --head.learned_lengths true": "norm_last_layer",
    "the objective is DINO's; its settings are --objective.KEY (dino-ds train --help all)": "method loss",
    'write --objective.teacher_temp_warmup "{n} epochs"': "warmup_teacher_temp_epochs",
    # Optimizer.
    'write --optimizer.warmup "N epochs", or a number of steps': "warmup_ratio warmup_lr",
    "write --optimizer.schedule cosine, or constant": "lr_scheduler_type lr_scheduler sched scheduler",
    "write --optimizer.kind adamw, sgd or lars": "opt optim optimizer_name",
    # Checkpoints, evaluations and logs.
    'write --save_every "{n} steps", or epochs': "save_steps save_freq save_interval checkpoint_every save_strategy "
    "every_n_train_steps",
    'write --save_every "{n} epochs"': "saveckp_freq every_n_epochs",
    "the teacher with the best k-NN is kept, best_teacher.safetensors; by another metric: --eval.keep_best METRIC": (
        "save_best save_best_only save_top_k monitor metric_for_best_model load_best_model_at_end"
    ),
    'write --eval.stop_after "5 evaluations": the run then ends without progress; touch RUN/stop saves and ends one': (
        "early_stopping early_stop patience early_stopping_patience"
    ),
    'write --eval.every "{n} steps", or epochs': "eval_freq eval_steps eval_interval val_interval eval_strategy "
    "check_val_every_n_epoch val_check_interval evaluation_strategy eval_period_iterations",
    "dino-ds eval MODEL evaluates": "eval_only evaluate do_eval test_only",
    "a run is never overwritten: name another --run_dir, or continue with --resume": "overwrite overwrite_output_dir "
    "force exist_ok",
    "metrics are written to RUN/metrics.jsonl and RUN/tensorboard; --ds.wandb.enabled true sends them on, as do comet, "
    "mlflow and trackio": "logger wandb tensorboard mlflow comet trackio log_dir logging_dir report_to log_with "
    "use_wandb wandb_project project",
    "a run has its folder's name: --run_dir runs/{value}": "run_name exp_name experiment experiment_name tag",
    "dino-ds export RUN --format hf --push OWNER/NAME": "push_to_hub hub_model_id",
    # Machines and configuration.
    "a GPU is taken where there is one; CUDA_VISIBLE_DEVICES=1 names another, an empty one leaves the CPU": "device "
    "cuda cpu gpu accelerator gpu_id gpu_ids no_cuda use_cpu",
    "the launcher starts the processes: deepspeed --num_gpus {n} dino_ds/train.py ..., or dino-ds launch": "gpus "
    "num_gpus devices nproc_per_node num_nodes nnodes ranks world_size n_gpu num_processes rank dist_url",
    "ZeRO is what DDP and FSDP are elsewhere: --ds_config zero1_bf16, zero2_bf16 or zero3_bf16": "strategy ddp fsdp",
    "--ds_config FILE names the DeepSpeed JSON; --ds.KEY VALUE changes a key of it": "ds deepspeed",
    "write --ds.dino_ds.compile default": "torch_compile compile",
    "each key is an option: --optimizer.lr 1e-3, --ds.gradient_clipping 3": "opts cfg_options options override set",
    "write --help all": "help_all help_full",
})  # fmt: skip
"""Other programs' options of training (last part of the name) that have no counterpart here -> what to do instead."""
OPTIONS_BEFORE = by_word({
    "dino-ds embed writes features to search in (docs/embeddings.md)": "queries",
    "patches that are alike have one color with --only pca": "patch",
})  # fmt: skip
"""Options that commands without a recipe had before -> what to do instead."""
MEANT = by_word({
    "run_dir out write": "out output output_dir out_dir output_path save_dir save_path work_dir default_root_dir",
    "model run": "model checkpoint ckpt ckpt_path checkpoint_path weights pretrained pretrained_weights "
    "model_path model_name_or_path run_dir",
    "root data.root": "data dataset data_dir data_path dataset_path dataset_name input images image_dir image_folder "
    "train_dir train_data train_data_dir data.root",
    "test_root eval.root": "val_dir val_root val_data validation_dir test_dir test_data test_root eval.root",
    "evals": "eval tasks benchmarks metrics eval.evals",
    "batch batches": "batch_size eval_batch_size per_device_eval_batch_size data.global_batch",
    "workers data.workers": "num_workers dataloader_num_workers n_workers data.workers",
    "size": "image_size img_size crop_size input_size resolution",
    "ranks": "gpus num_gpus devices nproc nproc_per_node num_processes world_size",
    "half": "fp16 bf16 precision",
    "config": "config_file cfg config_name",
    "max_steps": "limit_train_batches fast_dev_run overfit_batches",
    "keep_checkpoints": "save_total_limit keep_last max_to_keep",
    "log_every": "print_freq logging_steps log_interval log_freq log_every_n_steps",
    "crops.global_size": "global_crops_size",
    "crops.local_size": "local_crops_size",
    "crops.num_local": "n_local_crops num_local_crops local_number num_crops",
    "model.drop_path": "drop_path_rate",
    "head.batch_norm": "use_bn_in_head",
    "objective.ibot_weight": "ibot ibot_loss_weight",
    "objective.koleo_weight": "koleo koleo_loss_weight",
    "teacher.momentum": "momentum_teacher ema_decay model_ema_decay model_ema ema_momentum",
    "optimizer.beta1": "adam_beta1",
    "optimizer.beta2": "adam_beta2",
    "optimizer.eps": "adam_epsilon opt_eps",
})  # fmt: skip
"""Other programs' name of an option, with its section or by its last part -> names here: the first that a command has
is meant."""
COMMANDS_ELSEWHERE = by_word({
    "dino-ds embed MODEL --root DIR --out x.parquet writes features": "predict extract features infer encode",
    "dino-ds pictures MODEL, or dino-ds report RUN": "visualize visualise plot show",
    "dino-ds train --help lists the recipes": "list recipes models",
    "dino-ds export RUN --format hf --push OWNER/NAME": "push upload publish",
    "dino-ds train --data.root IMAGES trains": "fit pretrain run start",
    "dino-ds eval MODEL evaluates": "validate val evaluate benchmark knn linear probe",
    "weights by timm's name come by themselves; others: hf download OWNER/NAME --local-dir DIR": "download",
    "dino-ds train --resume --run_dir RUN": "resume",
    "python -m dino_ds.examples.finetune_classification, or _segmentation (docs/finetuning.md)": "finetune",
    "dino-ds eval evaluates a model; make test runs this project's tests": "test",
    # Commands that dino_ds had.
    "--save_every auto, the default, takes the interval that is best for the failures that a run expects": (
        "simulate-goodput"
    ),
    "dino-ds train --resume --run_dir RUN continues on any number of ranks; for the student's weights dino-ds "
    "export CHECKPOINT --format safetensors --weights student": "convert",
    "tar xf SHARD.tar -C FOLDER takes the images out, sha256sum -c checksums.sha256 checks the shards": "unshard",
    "dino-ds train --help all lists every option; --help alone, the commands": "completion",
    "python -m dino_ds.examples.attention_video MODEL FRAMES OUT paints a folder of frames": "attention-video",
}) | {
    "find-workers": "dino-ds bench workers measures loader processes",
    "find-batch-size": "dino-ds bench batch-size measures which micro-batches fit",
    "bench scaling": "torchrun --nproc_per_node N -m dino_ds bench step measures the step on N ranks, dino-ds bench "
    "step on one; dino-ds plan predicts other machines",
}  # fmt: skip
CHOICES_ELSEWHERE = by_word({
    "for TensorRT: --format onnx, and trtexec builds the engine": "tensorrt trt",
    "for OpenVINO: --format onnx, which it reads": "openvino",
    "for Core ML: --format timm, and coremltools converts timm's network": "coreml",
    "torch has deprecated TorchScript: --format onnx, or timm in Python": "torchscript",
    "for PyTorch: --format safetensors, one file with the names of timm's and DINO's ViTs": "pytorch torch pth pt dino",
    "write timm, whose networks are DINOv2's; or safetensors": "dinov2",
    "write hf": "huggingface transformers",
    "--map tsne is the nearest to it": "umap",
    "patches that are alike have one color with --only pca": "similarity",
    "write neighbors": "neighbours",
}) | EVALUATIONS_ELSEWHERE  # fmt: skip
