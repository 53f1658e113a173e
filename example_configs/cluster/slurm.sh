#!/bin/bash
# Axolotl on two machines of eight GPUs under Slurm, by torchrun. Run from the root of the repository:
#   sbatch example_configs/cluster/slurm.sh config.yaml
# The output folder must be on a disk that all machines share. For a TRL script, put it in the place of
# `-m axolotl.cli.train`. This file has not been run on a cluster.
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
set -e
first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
srun torchrun --nnodes "$SLURM_NNODES" --nproc_per_node 8 \
    --rdzv_backend c10d --rdzv_id "$SLURM_JOB_ID" --rdzv_endpoint "$first:29500" \
    -m axolotl.cli.train "$1"
