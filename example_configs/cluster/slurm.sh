#!/bin/bash
# Axolotl on two machines of eight GPUs under Slurm, by torchrun. Run from the root of the repository:
#   sbatch example_configs/cluster/slurm.sh config.yaml
# The output folder must be on a disk that all machines share. For a TRL script, replace `-m axolotl.cli.train`. The
# launch line was run on two CPU machines, this file has not been run on a cluster.
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
set -e
export HOST CONFIG=$1
HOST=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
# In single quotes, as each machine has its own SLURM_NODEID.
srun bash -c 'torchrun --nnodes $SLURM_NNODES --node_rank $SLURM_NODEID --nproc_per_node 8 \
    --master_addr $HOST --master_port 29500 -m axolotl.cli.train "$CONFIG"'
