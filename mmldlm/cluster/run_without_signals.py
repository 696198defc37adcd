"""Run a command with SIGINT and SIGTERM blocked: `python run_without_signals.py COMMAND ARG...`.

DeepSpeed's runner answers either signal with `pkill -f "python -u -m deepspeed.launcher.launch"`
on every node. That would end every other DeepSpeed run of the user there. SIGKILL still works.
"""

from __future__ import annotations

import os
import signal
import sys

if __name__ == "__main__":
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    os.execv(sys.argv[1], sys.argv[1:])
