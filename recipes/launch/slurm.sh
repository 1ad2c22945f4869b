#!/usr/bin/env bash
# Train on several nodes under SLURM, back in the queue by itself when it is preempted or its time runs out.
#   sbatch --nodes 8 recipes/launch/slurm.sh recipes/paper-1.5b.toml
# Five minutes before the end SLURM sends USR1 to this script, and TERM at a preemption; both are passed on as TERM. The trainer
# then saves after its step and exits with 0. Whether the run is finished is told by the exported model in the run's folder:
# without it the job is queued again, under its own number, and the same command goes on from the checkpoint.
# A run that failed (a guard's stop, a broken recipe) is not queued again.
#SBATCH --job-name=rla
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --exclusive
#SBATCH --time=24:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=B:USR1@300
#SBATCH --output=rla-%j.log
set -euo pipefail

if [ $# -eq 0 ]; then
    echo "usage: sbatch --nodes N $0 RECIPE [--section.field value ...]" >&2
    exit 2
fi
RUN=${RUN:-runs/$(basename "$1" .toml)} # the run's folder, on a file system that all nodes see
GPUS=${GPUS:-8}                         # of a node
HEAD=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-8}
export PYTORCH_CUDA_ALLOC_CONF=${PYTORCH_CUDA_ALLOC_CONF:-expandable_segments:True}
# Seconds that torchrun leaves its processes to finish their step and save, once it has passed a signal on.
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-240}

stopped=0
stop() {
    stopped=1
    scancel --signal=TERM "$SLURM_JOB_ID.0" 2>/dev/null || true # the step's processes on all nodes: torchrun passes it on
}
trap stop USR1 TERM

# One torchrun a node; they meet at the first node. The step runs in the background so that the traps are heard at once.
srun --kill-on-bad-exit=1 torchrun \
    --nnodes "$SLURM_JOB_NUM_NODES" --nproc-per-node "$GPUS" \
    --rdzv-backend c10d --rdzv-endpoint "$HEAD:${PORT:-29500}" --rdzv-id "$SLURM_JOB_ID" \
    -m rla train "$@" --out "$RUN" &
step=$!
code=0
wait "$step" || code=$?
while kill -0 "$step" 2>/dev/null; do # a trap ended the wait before the step was over
    code=0
    wait "$step" || code=$?
done

if [ -d "$RUN/model" ]; then
    echo "finished: $RUN/model"
elif [ "$stopped" -eq 1 ]; then
    echo "stopped by SLURM before the end (code $code): back in the queue"
    scontrol requeue "$SLURM_JOB_ID"
else
    exit "$code"
fi
