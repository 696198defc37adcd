"""Starting modules of this package: `python -m mmldlm.ROOM`, and by another process."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

from mmldlm.errors import EXIT_FAILED, MmldlmError
from mmldlm.utils import run_module
from mmldlm.utils.command_parser import CommandParser
from mmldlm.utils.formatting import explain_os_error
from mmldlm.utils.stop_signals import keep_exit_codes
from mmldlm.utils.streams import open_standard_streams


def module_command(module: str, *words: str) -> list[str]:
    """Return the command line of a module of this package, whose process finds nothing in the
    working folder.
    """
    return [sys.executable, "-u", run_module.__file__, module, *words]


def run_command(prog: str, description: str, command: ModuleType | SimpleNamespace) -> int:
    """Parse sys.argv with a command's options and run it; return the exit code.

    Args:
        prog: Name of the command in its usage line.
        description: First line of --help.
        command: `add_arguments` and `main`, as modules of mmldlm/commands have them.
    """
    open_standard_streams()
    keep_exit_codes()
    parser = CommandParser(prog, description)
    command.add_arguments(parser)
    try:
        return command.main(parser.parse())
    except MmldlmError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except OSError as error:
        print(f"error: {explain_os_error(error)}", file=sys.stderr)
        return EXIT_FAILED
