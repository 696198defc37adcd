"""Guards around a user's own code: an exit or an error of a task is an error of mmldlm's, with
file and line.
"""

from __future__ import annotations

import contextlib
import os
import traceback
from collections.abc import Iterator
from typing import Any, NoReturn

from mmldlm.errors import MmldlmError
from mmldlm.utils.formatting import first_line

_OUR_FOLDER = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep


class _ExitCalledError(Exception):
    """os._exit was called where the process must go on."""


@contextlib.contextmanager
def report_exit_as_error() -> Iterator[None]:
    """Turn SystemExit into an error: no command exits by itself, and an exit with 0 would look
    like success.

    Raises:
        MmldlmError: the code inside called sys.exit.
    """
    try:
        yield
    except SystemExit as end:
        raise MmldlmError(
            f"{describe_error(end)} was called {place_of(end)}: the work was not finished"
        ) from end


@contextlib.contextmanager
def os_exit_raises() -> Iterator[None]:
    """Let os._exit raise an error in this process, which it would end without a word.

    Forked processes still exit.
    """
    original, process = os._exit, os.getpid()

    def refuse(status: Any) -> NoReturn:
        if os.getpid() != process:
            original(status)
        raise _ExitCalledError(f"os._exit({status!r})")

    os._exit = refuse
    try:
        yield
    finally:
        os._exit = original


def describe_error(error: BaseException) -> str:
    """Return an error in one line; an exit by the call that asked for it."""
    if isinstance(error, SystemExit):
        return f"sys.exit({error.code!r})"
    return str(error) if isinstance(error, _ExitCalledError) else first_line(error)


def place_of(error: BaseException) -> str:
    """Return "in FILE, line N" of the user's code that raised an error, or of the code that did
    where none is.
    """
    if isinstance(error, SyntaxError) and error.filename is not None:
        return f"in {error.filename}, line {error.lineno}"
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith("<") and frame.filename != __file__
    ]
    installed = (_OUR_FOLDER, os.path.dirname(os.__file__))
    own = [
        frame
        for frame in frames
        if not frame.filename.startswith(installed) and "-packages" not in frame.filename
    ]
    found = (own or frames)[-1:]
    return f"in {found[0].filename}, line {found[0].lineno}" if found else "at an unknown place"
