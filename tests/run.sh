#!/usr/bin/env bash
# All tests, with their own set-up:  bash tests/run.sh [pytest arguments]
# Skipped tests are listed with their reasons.
set -euo pipefail
cd "$(dirname "$0")/.."
. launchers/_env.sh
mmldlm_leave_platform
mmldlm_env quickstart eval dev
unset PYTHONDONTWRITEBYTECODE # hundreds of processes would each compile mmldlm, for a third of a second
# Four files at a time keep two cores busy, since many a test waits for a rank or a host. Files marked `long` begin first.
exec "$PYTHON" -m pytest -ra -n "${MMLDLM_TEST_WORKERS:-4}" --dist loadfile --no-loadscope-reorder "$@"
