#!/usr/bin/env bash
# Makes .venv, installs and passes the fast tests: bash scripts/test.sh [pytest arguments]
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
make_environment quickstart,dev
cd "$checkout"
export HF_HUB_OFFLINE=1
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" # on tiny models a second thread only costs synchronisation
if [ "$#" -eq 0 ]; then
    # Two processes take whole files, whose tests share what is expensive, in their order: the longest stand first.
    set -- -n 2 --dist loadfile --no-loadscope-reorder -m "not slow and not gpu and not conformance"
fi
exec "$venv/bin/python" -m pytest -q "$@"
