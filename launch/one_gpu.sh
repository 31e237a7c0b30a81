#!/bin/sh
# One GPU (or none: then the CPU). Edit the three lines, or pass more options: sh launch/one_gpu.sh --optimizer.lr 0.001
DATA=/images                          # any folder tree of images
RECIPE=vits16                         # dino_ds/recipes, or your YAML file
DS_CONFIG=ds_configs/zero1_bf16.json  # zero1_fp16.json for cards without bf16 (V100, T4)

cd "$(dirname "$0")/.." || exit 1
exec python dino_ds/train.py --config "$RECIPE" --ds_config "$DS_CONFIG" --data.root "$DATA" "$@"
