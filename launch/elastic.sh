#!/bin/sh
# A number of machines that may change: run this on each one, whenever it is there. When a machine is lost or comes back,
# all go on from the last checkpoint with as many as there are, at the same global batch: micro-batch or accumulation
# must be "auto" in DS_CONFIG, and BATCH a multiple of every number of ranks.
NODES=1:4                             # least:most
GPUS=8                                # of each machine
HOST=node0                            # where the machines meet: the one that must not be lost
PORT=29500
RESTARTS=100                          # of all machines together
DATA=/images                          # any folder tree of images
RUN=/shared/runs/mine                 # on a disk that all machines share
RECIPE=vits16                         # dino_ds/recipes, or your YAML file
BATCH=768                             # images of a step: a multiple of the GPUs of 1, 2, 3 and 4 machines
DS_CONFIG=ds_configs/zero2_bf16.json

cd "$(dirname "$0")/.." || exit 1
exec dino-ds launch --launcher torchrun --nodes "$NODES" --ranks "$GPUS" --master_addr "$HOST" --master_port "$PORT" \
    --max_restarts "$RESTARTS" -- \
    --config "$RECIPE" --ds_config "$DS_CONFIG" --data.root "$DATA" --data.global_batch "$BATCH" \
    --run_dir "$RUN" --resume auto "$@"
