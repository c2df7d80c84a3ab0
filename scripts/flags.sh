# Sourced by train.sh and eval.sh: flags in the Hugging Face manner become Hydra overrides in the array `overrides`.
# Expects: script (its name for messages), known_flags (text), accepts_drafts (yes or no).

repository="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
python="${DEEPSPEC_VENV:-$repository/.venv}/bin/python"
[ -x "$python" ] || python=python3
# An activated environment that holds what we need comes first: it may have the CUDA build of torch that .venv lacks.
for active in "${VIRTUAL_ENV:-}" "${CONDA_PREFIX:-}"; do
    if [ -n "$active" ] && [ -x "$active/bin/python" ] && "$active/bin/python" -c 'import importlib.util as found, sys
sys.exit(not all(map(found.find_spec, ("torch", "transformers", "accelerate", "hydra", "pydantic"))))'; then
        python="$active/bin/python"
        break
    fi
done
source "$repository/scripts/threads.sh"

fail() {
    echo "ConfigError: $*" >&2
    exit 2
}

# Hydra reads a value in single quotes as it stands, whatever characters it holds.
quoted() {
    local escaped="${1//\'/\\\'}"
    printf "'%s'" "$escaped"
}

# A target that config/target/ knows brings its taps and mask token; any other id or folder takes the defaults.
target_overrides() {
    local name="$1" file
    for file in "$repository"/config/target/*.yaml; do
        if grep -qxF "name_or_path: $name" "$file"; then
            overrides+=("target=$(basename "$file" .yaml)")
            return
        fi
    done
    overrides+=("target=auto" "target.name_or_path=$(quoted "$name")")
}

add_drafts() {
    local part parts
    IFS=, read -r -a parts <<<"$1"
    for part in "${parts[@]}"; do
        [ -z "$part" ] || drafts+=("$(quoted "$part")")
    done
}

old_form() {
    local name choices
    name="$(basename "$1" .py)"
    name="$(basename "$name" .yaml)"
    if [ "$script" = eval.sh ]; then
        fail "--config_path is the old form. Use $known_flags and key=value; python eval.py --help lists the keys."
    fi
    if [ -f "$repository/config/experiment/$name.yaml" ]; then
        fail "--config_path $1 is the old form. Use: bash scripts/train/train.sh experiment=$name"
    fi
    choices="$(cd "$repository/config/experiment" && printf '%s, ' *.yaml)"
    choices="${choices//.yaml/}"
    fail "--config_path $1 is the old form. Use experiment=<name>; '$name' is none of: ${choices%, }."
}

overrides=()
drafts=()
hydra_flags=()
while [ $# -gt 0 ]; do
    flag="$1"
    shift
    case "$flag" in
        --help | -h | --multirun | -m | --resolve)
            hydra_flags+=("$flag")
            continue
            ;;
        --*=*)
            value="${flag#*=}"
            flag="${flag%%=*}"
            ;;
        -*)
            case "$flag" in
                --target_name_or_path | --draft_name_or_path | --config_path | --cfg | -c)
                    [ $# -gt 0 ] || fail "$flag needs a value: $flag <value>."
                    value="$1"
                    shift
                    ;;
            esac
            ;;
        *)
            overrides+=("$flag")
            continue
            ;;
    esac
    case "$flag" in
        --target_name_or_path) target_overrides "$value" ;;
        --draft_name_or_path)
            [ "$accepts_drafts" = yes ] || fail "--draft_name_or_path belongs to scripts/eval/eval.sh;" \
                "a training starts from algorithm.init and goes on from its own checkpoint with checkpoint.resume=auto."
            add_drafts "$value"
            ;;
        --config_path) old_form "$value" ;;
        --cfg | -c) hydra_flags+=(--cfg "$value") ;;
        *) fail "unknown flag '$flag'. $script knows: $known_flags, --multirun, --cfg job, --help; other settings are key=value." ;;
    esac
done
if [ ${#drafts[@]} -gt 0 ]; then
    overrides+=("drafts=[$(IFS=,; echo "${drafts[*]}")]")
fi
