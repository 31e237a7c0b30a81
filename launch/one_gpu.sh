#!/bin/sh
# One GPU (or none: then the CPU). Edit the lines on top, or pass more options: sh launch/one_gpu.sh --optimizer.lr 0.001
# Started again after a failure; the same command goes on where the run was stopped.
# The ds config is the planner's for the card; --ds_config FILE takes another.
DATA=/images   # any folder tree of images
RUN=runs/mine  # checkpoints, metrics, teacher
RECIPE=vits16  # dino_ds/recipes, or your YAML file

cd "$(dirname "$0")/.." || exit 1
exec torchrun --standalone --nproc_per_node 1 --max_restarts 3 dino_ds/train.py \
    --config "$RECIPE" --data.root "$DATA" --run_dir "$RUN" --resume auto "$@"
