#!/usr/bin/env bash
# Checks and measures on one GPU in under 8 minutes: bash benchmarks/gpu.sh [--tiny: small sizes, also without a GPU]
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../scripts/environment.sh"
cd "$checkout"
python="${VIRTUAL_ENV:-$venv}/bin/python"
[ -x "$python" ] || python=python3 # a machine that comes with a CUDA build of torch keeps it
export HF_HUB_OFFLINE=1
exec "$python" -m benchmarks.gpu "$@"
