"""`python -m mmldlm.data.prepare`, for torchrun: one rank of `mmldlm prepare`."""

from __future__ import annotations

import sys
from types import SimpleNamespace

from mmldlm.commands import prepare
from mmldlm.errors import EXIT_FAILED, EXIT_INTERRUPTED
from mmldlm.utils.entry_point import run_command
from mmldlm.utils.stop_signals import interrupt_on_stop_signals

if __name__ == "__main__":
    interrupt_on_stop_signals()
    rank = SimpleNamespace(add_arguments=prepare.add_arguments, main=prepare.run_rank)
    try:
        sys.exit(run_command("mmldlm.data.prepare", __doc__, rank))
    except KeyboardInterrupt as error:
        print(": ".join(["interrupted", *map(str, error.args)]), file=sys.stderr)
        sys.exit(EXIT_INTERRUPTED if error.args else EXIT_FAILED)
