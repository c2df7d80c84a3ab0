#!/usr/bin/env bash
# One SLURM array task for each algorithm and seed, 8 GPUs each; the tasks are independent of each other:
#   sbatch --array=0-8 scripts/slurm/array.sh target=qwen3_4b           3 algorithms x 3 seeds
#   SEEDS="0 1 2 3" sbatch --array=0-11%4 scripts/slurm/array.sh ...    any seeds, at most 4 tasks at once
# Words after the script are overrides of train.py. Afterwards: deepspec compare ~/checkpoints/deepspec
#SBATCH --job-name=deepspec
#SBATCH --nodes=1
#SBATCH --ntasks=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=24:00:00
#SBATCH --output=deepspec_%A_%a.txt
#SBATCH --open-mode=append
# SIGUSR1 ten minutes before the time is up: the run writes a checkpoint and ends with status 75, then it is requeued
# and goes on from there.
#SBATCH --signal=B:USR1@600
#SBATCH --requeue
set -euo pipefail

# sbatch runs a copy of this file, so the checkout is where it was submitted from, or where DEEPSPEC_CHECKOUT says.
checkout="${DEEPSPEC_CHECKOUT:-${SLURM_SUBMIT_DIR:-$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)}}"
if [ ! -f "$checkout/train.py" ]; then
    echo "array.sh: $checkout is not the checkout. Submit from there, or set DEEPSPEC_CHECKOUT." >&2
    exit 2
fi
read -r -a algorithms <<<"${ALGORITHMS:-dspark dflash eagle3}"
read -r -a seeds <<<"${SEEDS:-0 1 2}"
task="${SLURM_ARRAY_TASK_ID:-0}"
if [ "$task" -ge $((${#algorithms[@]} * ${#seeds[@]})) ]; then
    echo "array.sh: task $task of ${#algorithms[@]} algorithms x ${#seeds[@]} seeds; use --array=0-$((${#algorithms[@]} * ${#seeds[@]} - 1))" >&2
    exit 2
fi
algorithm="${algorithms[$((task / ${#seeds[@]}))]}"
seed="${seeds[$((task % ${#seeds[@]}))]}"

# In the background, so that the shell can pass the signal on.
bash "$checkout/scripts/train/train.sh" engine=ddp engine.num_processes=8 "$@" algorithm="$algorithm" seed="$seed" \
    'exp_name="${algorithm.name}_block${algorithm.num_draft_tokens}_${target.short_name}_seed=${seed}"' &
run=$!
trap 'kill -USR1 "$run"' USR1
trap 'kill -TERM "$run"' TERM
# A signal ends `wait` while the run still saves; its own status is what a later `wait` says.
wait "$run" || true
while kill -0 "$run" 2>/dev/null; do
    wait "$run" || true
done
status=0
wait "$run" || status=$?
if [ "$status" -eq 75 ] && [ -n "${SLURM_JOB_ID:-}" ]; then
    scontrol requeue "$SLURM_JOB_ID" # the array task's own job id
    exit 0
fi
exit "$status"
