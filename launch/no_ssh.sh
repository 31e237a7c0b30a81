#!/bin/sh
# Several machines without ssh between them: run this on each one, with its line in the hostfile, counted from 0:
#   sh launch/no_ssh.sh 0        on the first machine, where the ranks meet
#   sh launch/no_ssh.sh 1        on the second one, and so on
HOSTFILE=hostfile                     # the same on every machine; a line each: NAME slots=GPUS
PORT=29500                            # free on the first machine, and open to the others
DATA=/images                          # any folder tree of images
RUN=/shared/runs/mine                 # on a disk that all machines share
RECIPE=vits16                         # dino_ds/recipes, or your YAML file
DS_CONFIG=ds_configs/zero2_bf16.json

NODE_RANK=${1:?"which line of $HOSTFILE is this machine? 0, 1, ..."}
shift
cd "$(dirname "$0")/.." || exit 1
exec dino-ds launch --hostfile "$HOSTFILE" --no_ssh --node_rank "$NODE_RANK" --master_port "$PORT" --max_restarts 3 -- \
    --config "$RECIPE" --ds_config "$DS_CONFIG" --data.root "$DATA" --run_dir "$RUN" --resume auto "$@"
