#!/usr/bin/env bash
# Measures the train step and writes benchmarks/results/: bash scripts/bench.sh [train_step | matrix_peak | scaling [options]]
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
make_environment quickstart
cd "$checkout"
export HF_HUB_OFFLINE=1
if [ "$#" -gt 0 ]; then
    exec "$venv/bin/python" -m "benchmarks.$1" "${@:2}"
fi
for name in matrix_peak train_step scaling; do
    "$venv/bin/python" -m "benchmarks.$name"
done
