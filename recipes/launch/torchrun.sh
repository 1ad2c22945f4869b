#!/usr/bin/env bash
# Train on all GPUs of this machine; the same command goes on with a run that was stopped.
#   recipes/launch/torchrun.sh recipes/paper-1.5b.toml --parallel.micro-sequences 8
# Ctrl-C or SIGTERM ends the run after its step, with a checkpoint. A process that dies is started again with all others, up to
# RESTARTS times, from the newest whole checkpoint.
set -euo pipefail

if [ $# -eq 0 ]; then
    echo "usage: $0 RECIPE [--section.field value ...]" >&2
    exit 2
fi
GPUS=${GPUS:-$(nvidia-smi --list-gpus | wc -l)} # processes, one for each GPU
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-4}
# Segments that grow lose less memory between blocks of different sizes.
export PYTORCH_CUDA_ALLOC_CONF=${PYTORCH_CUDA_ALLOC_CONF:-expandable_segments:True}
# Seconds that torchrun leaves its processes to finish their step and save, once it has passed a signal on.
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-240}

exec torchrun --standalone --nproc-per-node "$GPUS" --max-restarts "${RESTARTS:-3}" -m rla train "$@"
