"""Signals that ask a process to stop, and signals between a process and its children.

A process inherits which signals are ignored. One that was ignored at the start stays ignored
(nohup, a shell's background job): the parent decided that. SIGCHLD is the exception, because
ignoring it loses exit codes.
"""

from __future__ import annotations

import ctypes
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any, NoReturn

_PR_SET_PDEATHSIG = 1
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
"""Requests to stop; SIGUSR1 is Slurm's warning, SIGHUP says that the terminal was closed."""


def handle_stop_signals(
    handler: Callable[[int, FrameType | None], object],
) -> dict[signal.Signals, Any]:
    """Install a handler for every stop signal that is not ignored; return the earlier handlers."""
    handled = [signum for signum in STOP_SIGNALS if signal.getsignal(signum) is not signal.SIG_IGN]
    return {signum: signal.signal(signum, handler) for signum in handled}


def interrupt_on_stop_signals() -> None:
    """Raise KeyboardInterrupt on every stop signal that is not ignored, so that partial outputs
    are removed.
    """

    def interrupt(number: int, frame: FrameType | None) -> NoReturn:
        raise KeyboardInterrupt

    if threading.current_thread() is threading.main_thread():
        handle_stop_signals(interrupt)


def keep_exit_codes() -> None:
    """Restore the default of SIGCHLD: a parent that ignores it passes that on, and exit codes of
    children are lost.

    The kernel would reap the children itself, waitpid would fail with ECHILD, and Popen would
    report 0.
    """
    if (
        threading.current_thread() is threading.main_thread()
        and signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN
    ):
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)


def set_parent_death_signal(number: signal.Signals) -> None:
    """Ask the kernel to send `number` to this process when its parent exits (prctl(2)); Linux
    only.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)
