"""`python -m mmldlm.data.prepare`, for torchrun: one rank of `mmldlm prepare`."""

from __future__ import annotations

import sys

from mmldlm.commands.prepare import add_arguments, run_rank
from mmldlm.errors import EXIT_FAILED, EXIT_INTERRUPTED, MmldlmError
from mmldlm.utils.command_parser import CommandParser
from mmldlm.utils.stop_signals import interrupt_on_stop_signals, keep_exit_codes
from mmldlm.utils.streams import open_standard_streams

if __name__ == "__main__":
    open_standard_streams()
    keep_exit_codes()
    parser = CommandParser("mmldlm.data.prepare", __doc__)
    add_arguments(parser)
    interrupt_on_stop_signals()
    try:
        sys.exit(run_rank(parser.parse()))
    except MmldlmError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except KeyboardInterrupt as error:
        print(": ".join(["interrupted", *map(str, error.args)]), file=sys.stderr)
        sys.exit(EXIT_INTERRUPTED if error.args else EXIT_FAILED)
