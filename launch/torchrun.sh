#!/bin/sh
# All GPUs of one machine, through torchrun. Edit the lines on top; further options are passed on.
GPUS=8
DATA=/images                          # any folder tree of images
RECIPE=vits16                         # dino_ds/recipes, or your YAML file
DS_CONFIG=ds_configs/zero2_bf16.json

cd "$(dirname "$0")/.." || exit 1
exec torchrun --standalone --nproc_per_node "$GPUS" dino_ds/train.py \
    --config "$RECIPE" --ds_config "$DS_CONFIG" --data.root "$DATA" "$@"
