#!/usr/bin/env bash
# Trains a draft model:
#   bash scripts/train/train.sh                                        the paper's DSpark for Qwen3-4B (needs a GPU)
#   bash scripts/train/train.sh experiment=dspark_smollm2_135m         any experiment, any key=value of train.py
#   bash scripts/train/train.sh --target_name_or_path /models/mine target.mask_token_id=5 algorithm=dflash
#   bash scripts/train/train.sh experiment=dspark_qwen3_4b engine=fsdp2 engine.num_processes=8   docs/clusters.md
set -euo pipefail

script=train.sh
known_flags="--target_name_or_path X"
accepts_drafts=no
number_of_arguments=$#
source "$(dirname "${BASH_SOURCE[0]}")/../flags.sh"

if [ "$number_of_arguments" -eq 0 ]; then
    if ! "$python" -c 'import deepspec' 2>/dev/null; then
        echo "train.sh: deepspec is not installed for $python. On a laptop run: bash scripts/quickstart.sh" \
            "(it installs everything); elsewhere: pip install -e $repository" >&2
        exit 2
    fi
    if ! "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' 2>/dev/null; then
        echo "train.sh without arguments trains DSpark for Qwen3-4B and needs a GPU; none found." \
            "On a laptop run: bash scripts/quickstart.sh" >&2
        exit 2
    fi
    overrides=(experiment=dspark_qwen3_4b)
fi

exec "$python" "$repository/train.py" ${hydra_flags[@]+"${hydra_flags[@]}"} ${overrides[@]+"${overrides[@]}"}
