"""What a run does when it is asked to stop: SIGTERM, SIGINT (Ctrl-C), SIGUSR1 (Slurm's warning) or
SIGHUP.
"""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType

from mmldlm.distributed.collectives import Ranks
from mmldlm.distributed.error_reporting import in_process_group, log_line
from mmldlm.errors import EXIT_INTERRUPTED, Interrupted
from mmldlm.utils.stop_signals import handle_stop_signals


class StopSignal:
    """Remembers that this process was asked to stop; the ranks agree on it before any of them
    acts.

    Until the ranks have met (imports, reading the config, waiting for a late node), nothing is
    written and no rank waits for this one in a collective, so the process ends at once with exit
    code 5. It does so from a thread of its own: the main thread may be inside a C++ call, which no
    Python handler interrupts.

    Attributes:
        received: Whether this process got a signal. Another rank may not have: see `agreed`.
    """

    def __init__(self):
        self.received = False
        self._have_met = False
        reader, writer = os.pipe()
        os.set_blocking(writer, False)  # set_wakeup_fd asks for it
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        self._numbers = frozenset(handle_stop_signals(self._receive))
        threading.Thread(
            target=self._end_before_the_start, args=(reader,), name="stop-signal", daemon=True
        ).start()

    def _receive(self, signal_number: int, frame: FrameType | None) -> None:
        self.received = True

    def _end_before_the_start(self, reader: int) -> None:
        while byte := os.read(reader, 1):
            if byte[0] in self._numbers and not self._have_met and not in_process_group():
                if os.environ.get("RANK", "0") == "0":
                    log_line("stopped by a signal before the run began; nothing was written")
                os._exit(EXIT_INTERRUPTED)

    def all_have_met(self) -> None:
        """From now on the ranks agree before they stop."""
        self._have_met = True

    def agreed(self, ranks: Ranks) -> bool:
        """Whether any rank was asked to stop; the same on every rank.

        Collective, waits for the device.
        """
        return not ranks.all_agree(not self.received)

    def leave_if_received(self) -> None:
        """Raise on this rank alone, inside work whose errors all ranks then share
        (Ranks.run_together).

        Raises:
            Interrupted: this process was asked to stop.
        """
        if self.received:
            raise Interrupted("stopped by a signal")

    def leave_if_agreed(self, ranks: Ranks, when: str) -> None:
        """End where there is nothing to save. Collective.

        Raises:
            Interrupted: on every rank, when any of them was asked to stop.
        """
        if self.agreed(ranks):
            raise Interrupted(f"stopped by a signal {when}; nothing had to be saved")
