#!/usr/bin/env bash
# Lets a target answer prompts, so that drafts learn from what it says itself:
#   bash scripts/data/regenerate.sh --target_name_or_path Qwen/Qwen3-4B prompts=prompts.jsonl answers=answers.jsonl
set -euo pipefail

script=regenerate.sh
known_flags="--target_name_or_path X"
accepts_drafts=no
source "$(dirname "${BASH_SOURCE[0]}")/../flags.sh"

exec "$python" -m deepspec.cli data regenerate ${hydra_flags[@]+"${hydra_flags[@]}"} ${overrides[@]+"${overrides[@]}"}
