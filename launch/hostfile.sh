#!/bin/sh
# Several machines over ssh and pdsh, through DeepSpeed's launcher; started on one of them. Each needs this checkout, its
# environment and the images at the same paths, a disk for RUN that all share, and ssh to it without a password.
HOSTFILE=hostfile                     # a line a machine: NAME slots=GPUS
DATA=/images                          # any folder tree of images
RUN=/shared/runs/mine                 # on a disk that all machines share
RECIPE=vits16                         # dino_ds/recipes, or your YAML file
DS_CONFIG=ds_configs/zero2_bf16.json

cd "$(dirname "$0")/.." || exit 1
dino-ds doctor --hostfile "$HOSTFILE" --config "$RECIPE" --ds_config "$DS_CONFIG" --data.root "$DATA" --run_dir "$RUN" ||
    exit
exec deepspeed --hostfile "$HOSTFILE" --force_multi dino_ds/train.py \
    --config "$RECIPE" --ds_config "$DS_CONFIG" --data.root "$DATA" --run_dir "$RUN" --resume auto "$@"
