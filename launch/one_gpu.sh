#!/bin/sh
# One GPU (or none: then the CPU). Edit the lines on top, or pass more options: sh launch/one_gpu.sh --optimizer.lr 0.001
# Started again after a failure; the same command goes on where the run was stopped.
DATA=/images                          # any folder tree of images
RUN=runs/mine                         # checkpoints, metrics, teacher
RECIPE=vits16                         # dino_ds/recipes, or your YAML file
DS_CONFIG=ds_configs/zero1_bf16.json  # zero1_fp16.json for cards without bf16 (V100, T4)

cd "$(dirname "$0")/.." || exit 1
exec dino-ds launch --ranks 1 --max_restarts 3 -- \
    --config "$RECIPE" --ds_config "$DS_CONFIG" --data.root "$DATA" --run_dir "$RUN" --resume auto "$@"
