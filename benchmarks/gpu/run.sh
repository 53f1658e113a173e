#!/usr/bin/env bash
# Every check that needs a GPU, in one go: about ten minutes on one card. Wants an environment with axolotl[deepspeed]
# and this package installed; kernels that are there as well (flash-attn, xformers, liger-kernel, unsloth) are used.
#   benchmarks/gpu/run.sh [FOLDER]    writes gpu.json and distributed.jsonl there; default: benchmarks/results
set -uo pipefail
cd "$(dirname "$0")/../.."
output=${1:-benchmarks/results}
mkdir -p "$output"
export CUDA_VISIBLE_DEVICES=${CUDA_VISIBLE_DEVICES:-0} OMP_NUM_THREADS=4
code=0
python benchmarks/gpu/checks.py --output "$output" || code=1
# One card is shared by no two processes; with more, losses are held against one.
unset CUDA_VISIBLE_DEVICES
python benchmarks/gpu/distributed.py > "$output/distributed.jsonl" || code=1
tail -n 5 "$output/distributed.jsonl"
exit $code
