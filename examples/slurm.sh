#!/bin/bash
#SBATCH --job-name=pipedejavu
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=16
#SBATCH --gpus-per-node=4
#SBATCH --time=12:00:00
#SBATCH --signal=TERM@90
#SBATCH --requeue
set -euo pipefail

WORKERS_PER_NODE=${WORKERS_PER_NODE:-4}
first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
port=$((20000 + SLURM_JOB_ID % 20000))

srun --kill-on-bad-exit=1 torchrun \
    --nnodes "$SLURM_NNODES" --nproc-per-node "$WORKERS_PER_NODE" \
    --rdzv-backend c10d --rdzv-id "$SLURM_JOB_ID" --rdzv-endpoint "$first:$port" \
    -m pipedejavu train "${MODEL:-zoo:gpt-tiny}" --plan "${PLAN:-preset:1f1b}" --workers "$WORKERS_PER_NODE" \
    --replicas "$SLURM_NNODES" --microbatches 8 --steps "${STEPS:-1000}" \
    --run-dir "${RUN_DIR:-runs/$SLURM_JOB_ID}" --resume
