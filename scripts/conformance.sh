#!/usr/bin/env bash
# Our exports in real engines on a CPU: bash scripts/conformance.sh [--clients vllm,dflash] [pytest arguments]
# Builds an environment for each client once, below $DEEPSPEC_CACHE or ~/.cache/deepspec (10 GB; docs/engines/README.md).
# --clients builds those alone; without their environment tests of the others are skipped. -m core is what CI runs.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
clients=()
if [ "${1:-}" = --clients ]; then
    IFS=, read -ra clients <<<"${2:?names of clients, such as vllm,dflash}"
    shift 2
fi
make_environment quickstart,dev
cd "$checkout"
"$venv/bin/python" tests/conformance/environments.py ${clients[@]+"${clients[@]}"}
mkdir -p runs
export HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1
export DEEPSPEC_CONFORMANCE_OUTCOMES="${DEEPSPEC_CONFORMANCE_OUTCOMES:-$checkout/runs/conformance.json}"
status=0
"$venv/bin/python" -m pytest -q -m conformance tests/conformance "$@" || status=$?
echo "outcomes: $DEEPSPEC_CONFORMANCE_OUTCOMES"
echo "into the docs: $venv/bin/python tests/conformance/render.py $DEEPSPEC_CONFORMANCE_OUTCOMES"
exit "$status"
