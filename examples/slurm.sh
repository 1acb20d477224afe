#!/bin/bash
#SBATCH --job-name=hookdiff
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=04:00:00
#SBATCH --signal=USR1@300
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.log

# Trains a config on all GPUs of the job. A run that takes longer than one job goes on in further jobs:
#
#     sbatch examples/slurm.sh examples/basic.toml
#
# One torchrun on each node starts a process for each GPU. The run directory must be on a disk that all nodes share.
# 300 seconds before the end of the job, SLURM sends SIGUSR1 to each torchrun, which passes it on to its processes. They
# save and end; then this script puts the job back into the queue. A run that crashes goes on from its newest checkpoint
# up to three times in the same job.

config=${1:?usage: sbatch slurm.sh CONFIG}
run=runs/$(basename "$config" .toml)
first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
before=$(cat "$run/outcome.json" 2> /dev/null)

# The end of one torchrun must not end the others: they may still save.
srun --kill-on-bad-exit=0 --wait=0 torchrun \
    --nnodes "$SLURM_JOB_NUM_NODES" \
    --nproc-per-node "$SLURM_GPUS_ON_NODE" \
    --rdzv-backend c10d \
    --rdzv-endpoint "$first:$((20000 + SLURM_JOB_ID % 10000))" \
    --rdzv-id "$SLURM_JOB_ID-${SLURM_RESTART_COUNT:-0}" \
    --max-restarts 3 \
    --signals-to-handle SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1 \
    --shutdown-timeout 240 \
    -m hookdiff run "$config" --plugins ddp --out "$run" --resume --usr1 && exit 0

# torchrun ends with 1 for every reason; the run directory has the true reason. The same outcome as before means that
# this job has not made a step, and another job would not make a step either.
outcome=$(cat "$run/outcome.json" 2> /dev/null)
if [ "$outcome" != "$before" ] && [[ $outcome == *'"reason": "time"'* ]]; then
    scontrol requeue "$SLURM_JOB_ID"
    exit 0
fi
echo "the run has not ended as planned: ${outcome:-it has crashed}"
exit 1
