"""Signals that ask a process to stop."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import NoReturn

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
"""Requests to stop; SIGUSR1 is Slurm's warning."""


def interrupt_on_stop_signals() -> None:
    """Raise KeyboardInterrupt on every stop signal, so that partial outputs are removed.

    A signal that the process was started to ignore (nohup, a shell's background job) stays ignored.
    """

    def interrupt(number: int, frame: FrameType | None) -> NoReturn:
        raise KeyboardInterrupt

    if threading.current_thread() is threading.main_thread():
        for name in STOP_SIGNALS:
            if signal.getsignal(name) is not signal.SIG_IGN:
                signal.signal(name, interrupt)
