#!/usr/bin/env bash
# Repeats the recall experiment with a window of 65,536 tokens on one GPU: nine runs, each judged on three haystacks.
# Start it again after a stop: finished runs and haystacks are kept, and a run resumes from its last checkpoint.
#   benchmarks/gpu/recall.sh            all of it; needs axolotl and this package, and once the package index
#   benchmarks/gpu/recall.sh 600        stops after 600 seconds, for a machine that is lent in pieces
set -euo pipefail
shopt -s nullglob
cd "$(dirname "$0")/../.."
limit=${1:-86400}
end=$((SECONDS + limit))
piece() { # one resumable command, for the seconds that are left
  local left=$((end - SECONDS))
  [ "$left" -gt 0 ] || { echo "stopped after $limit s; start it again to go on"; exit 0; }
  timeout --signal TERM "$left" python "$@" || [ $? = 124 ]
}
for model in base yarn-8; do piece benchmarks/recall/judge.py "$model" --length 65472; done
piece benchmarks/recall/run.py all --rope yarn-8
for run in outputs/recall/*-yarn-8-*/; do piece benchmarks/recall/judge.py "${run%/}" --length 65472; done
python benchmarks/recall/judge.py --table --length 65472
for other in no_skip yarn-8; do piece benchmarks/recall/compare.py pose_skip "$other" --rope yarn-8; done
