#!/bin/sh
# Several machines through OpenMPI's mpirun, a process a GPU; started on the first of them. Tested on one machine only.
HOSTS=node0:8,node1:8                 # NAME:GPUS of every machine, this one first
RANKS=16                              # GPUs in all
PORT=29500                            # free on this machine, and open to the others
DATA=/images                          # any folder tree of images
RUN=/shared/runs/mine                 # on a disk that all machines share
RECIPE=vits16                         # dino_ds/recipes, or your YAML file
DS_CONFIG=ds_configs/zero2_bf16.json

cd "$(dirname "$0")/.." || exit 1
exec mpirun -n "$RANKS" --host "$HOSTS" --bind-to none -x PATH -x MASTER_ADDR="${HOSTS%%:*}" -x MASTER_PORT="$PORT" \
    python -m dino_ds train \
    --config "$RECIPE" --ds_config "$DS_CONFIG" --data.root "$DATA" --run_dir "$RUN" --resume auto "$@"
