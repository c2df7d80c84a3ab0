#!/usr/bin/env bash
# Trains DSpark, DFlash and Eagle3 drafts for a small real model and measures them: bash scripts/quickstart.sh [preset=smoke|default|long]
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
make_environment quickstart
cd "$checkout"
export HF_HUB_OFFLINE="${HF_HUB_OFFLINE:-1}" # nothing is fetched, and a hub name must not wait for a network
exec "$venv/bin/deepspec" quickstart "$@"
