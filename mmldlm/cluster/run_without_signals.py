"""Run a command with SIGINT and SIGTERM blocked: `python unsignaled.py COMMAND WORD...`.

For DeepSpeed's runner, which answers either of them with `pkill -f "python -u -m deepspeed.launcher.launch"` on every
node: that ends every other DeepSpeed run of the user there. It can still be killed.
"""

from __future__ import annotations

import os
import signal
import sys

if __name__ == "__main__":
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    os.execv(sys.argv[1], sys.argv[1:])
