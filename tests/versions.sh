#!/usr/bin/env bash
# The tests on other versions than those of constraints.txt, in an environment of their own (several GB with torch's CUDA):
#   bash tests/versions.sh newest [pytest arguments]   the newest releases of all packages
#   bash tests/versions.sh oldest [pytest arguments]   the oldest lines of releases that pyproject.toml allows
# MMLDLM_VENV: folder of the environment (default: .venv-newest or .venv-oldest). Remove it to try again with later releases.
set -euo pipefail
cd "$(dirname "$0")/.."
. launchers/_env.sh
case ${1:-} in newest | oldest) wanted=$1 ;; *) mmldlm_fail "expected newest or oldest, found '${1:-}'" "see the head of $0" ;; esac
shift
export MMLDLM_VENV=${MMLDLM_VENV:-$PWD/.venv-$wanted}
mkdir -p "$MMLDLM_VENV"
export MMLDLM_CONSTRAINTS=$MMLDLM_VENV/constraints.txt
"$(mmldlm_find_python)" - "$wanted" >"$MMLDLM_CONSTRAINTS" <<'PY'
import re
import sys
import tomllib

project = tomllib.load(open("pyproject.toml", "rb"))["project"]
if sys.argv[1] == "oldest":
    for requirement in project["dependencies"]:
        name, oldest = re.match(r"([\w-]+)>=([\d.]+)", requirement).groups()
        # A bound need not be a release: 12.535 means 12.535.77, 5 means 5.0.0.
        print(f"{name}=={oldest}{'' if '.' in oldest else '.0'}.*")
PY
mmldlm_env quickstart eval dev
"$PYTHON" - <<'PY'
from importlib.metadata import version
print("tests on", *(f"{name} {version(name)}" for name in ("torch", "deepspeed", "transformers", "numpy", "pydantic")), sep="\n  ")
PY
exec bash tests/run.sh "$@"
