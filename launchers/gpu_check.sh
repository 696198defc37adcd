#!/usr/bin/env bash
# Everything that wants a look on a machine with new GPUs:  bash launchers/gpu_check.sh [--out DIR] [--minutes 40]
#
# Tests, preflight, step time and MFU at four sizes, engines side by side, memory, resume, both quickstarts: one JSON and one
# page, part by part; the same command goes on where an earlier call stopped. Options: benchmarks/_gpu_check.py
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
. "$root/launchers/_env.sh"
mmldlm_leave_platform
mmldlm_env quickstart eval dev bench
exec "$PYTHON" "$root/benchmarks/_gpu_check.py" "$@"
