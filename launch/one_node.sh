#!/bin/sh
# All GPUs of one machine, through DeepSpeed's launcher. Edit the lines on top; further options are passed on to train.
# The same command goes on where the run has ended; torchrun.sh starts it again by itself.
GPUS=8
DATA=/images                          # any folder tree of images
RUN=runs/mine                         # checkpoints, metrics, teacher
RECIPE=vits16                         # dino_ds/recipes, or your YAML file
DS_CONFIG=ds_configs/zero2_bf16.json

cd "$(dirname "$0")/.." || exit 1
exec deepspeed --num_gpus "$GPUS" dino_ds/train.py \
    --config "$RECIPE" --ds_config "$DS_CONFIG" --data.root "$DATA" --run_dir "$RUN" --resume auto "$@"
