#!/usr/bin/env bash
# All tests, with their own set-up:  bash tests/run.sh [pytest arguments]
# Skipped tests are listed with their reasons.
set -euo pipefail
cd "$(dirname "$0")/.."
. launchers/_env.sh
mmldlm_leave_platform
mmldlm_env quickstart eval dev
unset PYTHONDONTWRITEBYTECODE # hundreds of processes would each compile mmldlm, for a third of a second
# Two files at a time: the ranks of one test mostly wait for each other. Files marked `long` begin first.
exec "$PYTHON" -m pytest -ra -n "${MMLDLM_TEST_WORKERS:-2}" --dist loadfile --no-loadscope-reorder "$@"
