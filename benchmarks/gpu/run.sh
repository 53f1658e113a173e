#!/usr/bin/env bash
# Run every check that needs a GPU: about ten minutes on one GPU. Use an environment with axolotl[deepspeed] and this
# package. Installed kernels (flash-attn, xformers, liger-kernel, unsloth) are checked too.
#   benchmarks/gpu/run.sh [FOLDER]    writes gpu.json and distributed.jsonl there; default: benchmarks/results
set -uo pipefail
cd "$(dirname "$0")/../.."
output=${1:-benchmarks/results}
mkdir -p "$output"
export CUDA_VISIBLE_DEVICES=${CUDA_VISIBLE_DEVICES:-0} OMP_NUM_THREADS=4
code=0
python benchmarks/gpu/checks.py --output "$output" || code=1
# With several GPUs, their losses are compared with those of one process.
unset CUDA_VISIBLE_DEVICES
python benchmarks/gpu/distributed.py > "$output/distributed.jsonl" || code=1
[ "$(nvidia-smi --list-gpus | wc -l)" -lt 2 ] || python benchmarks/gpu/context_parallel.py || code=1
tail -n 5 "$output/distributed.jsonl"
exit $code
