#!/bin/bash
# sbatch launch/slurm.sh [options of train], in the checkout. Before its time is over (USR1), or when another job takes
# its nodes, the run saves and ends with code 75: the job is queued again, and goes on. Run with Slurm 22.05 on one
# machine as two nodes, without GPUs; not on a cluster.
#SBATCH --job-name=dino_ds
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8           # a process a GPU
#SBATCH --gpus-per-node=8             # not per task: every process must see them all
#SBATCH --cpus-per-task=12
#SBATCH --time=24:00:00
#SBATCH --signal=B:USR1@120           # seconds before the end
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=dino_ds-%j.log
DATA=/images                          # any folder tree of images
RUN=/shared/runs/mine                 # on a disk that all nodes share
RECIPE=vits16                         # dino_ds/recipes, or your YAML file
DS_CONFIG=ds_configs/zero2_bf16.json

cd "$SLURM_SUBMIT_DIR" || exit 1
MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
MASTER_PORT=$((20000 + SLURM_JOB_ID % 10000))
export MASTER_ADDR MASTER_PORT

# Not --kill-on-bad-exit: a rank that ends first, with 75, would take the others with it while they save.
srun --kill-on-bad-exit=0 --wait=300 python -m dino_ds train \
    --config "$RECIPE" --ds_config "$DS_CONFIG" --data.root "$DATA" --run_dir "$RUN" --resume auto "$@" &
STEP=$!
trap 'kill -USR1 "$STEP"' USR1 # srun hands it on to the ranks
wait "$STEP"
CODE=$?
while kill -0 "$STEP" 2>/dev/null; do # the signal has ended the wait, not the step
    wait "$STEP"
    CODE=$?
done
if [ "$CODE" -eq 75 ]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$CODE"
