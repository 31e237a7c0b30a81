#!/bin/sh
# Several machines over ssh and pdsh, through DeepSpeed's launcher. Every machine needs this checkout at the same path,
# the same environment, and the images at the same path. The hostfile has one line a machine: HOST slots=GPUS
HOSTFILE=hostfile
DATA=/images
RECIPE=vits16
DS_CONFIG=ds_configs/zero2_bf16.json

cd "$(dirname "$0")/.." || exit 1
exec deepspeed --hostfile "$HOSTFILE" dino_ds/train.py \
    --config "$RECIPE" --ds_config "$DS_CONFIG" --data.root "$DATA" "$@"
