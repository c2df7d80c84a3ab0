#!/usr/bin/env bash
# Measures and writes benchmarks/results/, under 15 minutes on 2 cores: bash scripts/bench.sh [name [options]]
# Names: matrix_peak, train_step, scaling, peers; others in benchmarks/README.md. The peers run where there is an environment of
# theirs: DEEPSPEC_SPECULATORS_PYTHON names its Python, or scripts/conformance.sh has made one.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
make_environment quickstart
cd "$checkout"
export HF_HUB_OFFLINE=1
if [ -z "${DEEPSPEC_SPECULATORS_PYTHON:-}" ]; then
    for found in "${DEEPSPEC_CACHE:-$HOME/.cache/deepspec}"/conformance/speculators-*/bin/python; do
        [ -x "$found" ] && export DEEPSPEC_SPECULATORS_PYTHON="$found"
    done
fi
if [ "$#" -gt 0 ]; then
    exec "$venv/bin/python" -m "benchmarks.$1" "${@:2}"
fi
for name in matrix_peak train_step scaling; do
    "$venv/bin/python" -m "benchmarks.$name"
done
if [ -n "${DEEPSPEC_SPECULATORS_PYTHON:-}" ]; then
    "$venv/bin/python" -m benchmarks.peers
else
    echo "peers: left out. DEEPSPEC_SPECULATORS_PYTHON=FILE names the Python of an environment with speculators." >&2
fi
