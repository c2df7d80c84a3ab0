#!/usr/bin/env bash
# Measures drafts against plain decoding of their target:
#   bash scripts/eval/eval.sh --target_name_or_path Qwen/Qwen3-4B --draft_name_or_path DRAFT [--draft_name_or_path DRAFT]
#   bash scripts/eval/eval.sh --target_name_or_path Qwen/Qwen3-4B --draft_name_or_path DRAFT,DRAFT suite=paper
set -euo pipefail

script=eval.sh
known_flags="--target_name_or_path X, --draft_name_or_path X[,Y]"
accepts_drafts=yes
source "$(dirname "${BASH_SOURCE[0]}")/../flags.sh"

exec "$python" "$repository/eval.py" ${hydra_flags[@]+"${hydra_flags[@]}"} ${overrides[@]+"${overrides[@]}"}
