#!/bin/bash
# Axolotl on two machines of eight GPUs under Ray. Start Ray on each machine, the first one without an address:
#   example_configs/cluster/ray.sh                      # on the first machine
#   example_configs/cluster/ray.sh HOST                 # on the second one, with the address of the first
#   example_configs/cluster/ray.sh train config.yaml    # then on the first one
# Ray starts one worker per GPU on any machine. Folders must be on a disk that all machines share. This file has not
# been run on a cluster.
set -e
case "$1" in
    "") ray start --head --port 6379 --num-gpus 8 ;;
    train) axolotl train "$2" --use-ray --ray-num-workers 16 ;;
    *) ray start --address "$1:6379" --num-gpus 8 ;;
esac
