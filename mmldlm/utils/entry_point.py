"""Entry of a command that is started as a module: `python -m mmldlm.ROOM`."""

from __future__ import annotations

import argparse
import sys
from types import ModuleType

from mmldlm.errors import EXIT_FAILED, MmldlmError
from mmldlm.utils.formatting import explain_os_error
from mmldlm.utils.standard_streams import open_standard_streams


def run_command(prog: str, description: str, command: ModuleType) -> int:
    """Parse sys.argv with a command's options and run it; return the exit code.

    Args:
        prog: name of the command in its usage line.
        description: first line of --help.
        command: module of mmldlm/commands, with `add_arguments` and `main`.
    """
    open_standard_streams()
    parser = argparse.ArgumentParser(prog=prog, description=description)
    command.add_arguments(parser)
    try:
        return command.main(parser.parse_intermixed_args())
    except MmldlmError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except OSError as error:
        print(f"error: {explain_os_error(error)}", file=sys.stderr)
        return EXIT_FAILED
