"""Errors that a command reports as one message, and its exit codes."""

from __future__ import annotations

EXIT_DONE = 0
EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_UNCHECKED = 3
EXIT_STABILITY = 4
EXIT_INTERRUPTED = 5
EXIT_CODES = {
    EXIT_DONE: "done",
    EXIT_FAILED: "failed, or a check found something: the last lines say what",
    EXIT_USAGE: "what you typed, or what is there, cannot work: nothing was started",
    EXIT_UNCHECKED: "preflight could not finish its checks",
    EXIT_STABILITY: "stopped because the numbers stayed bad",
    EXIT_INTERRUPTED: (
        "interrupted, and what was finished is saved: a training goes on with"
        " `training.resume=auto`, `prepare` with the same command"
    ),
}
"""Exit codes of every command and of a training, and what they mean, in Markdown."""


class MmldlmError(Exception):
    """Base class of the errors that a command prints as one message, without a traceback."""

    exit_code = EXIT_FAILED


ACCESS_FIX = (
    "give this user access (`ls -ld` shows the owner and mode of a file and of its folders), or"
    " name another path"
)
"""What to do where the system refuses access to a path, whatever it was for."""


class UserError(MmldlmError, ValueError):
    """Unusable input; the message has the form expected / found / fix.

    Args:
        expected: Accepted input and its place.
        found: Actual input.
        fix: Imperative that names the key, option or command to change.
    """

    exit_code = EXIT_USAGE

    def __init__(self, expected: str, found: str, fix: str):
        self.expected, self.found, self._fix = expected, found, fix
        super().__init__(f"expected {expected}\n  found: {found}\n  fix:   {fix}")

    @property
    def fix(self) -> str:
        """What to do: the given fix, unless this error reports one of missing permissions.

        Who reads a file knows what to do about its content, which then was not seen.
        """
        cause = self.__cause__ or self.__context__
        is_refused = isinstance(cause, PermissionError) and str(cause.strerror) in self.found
        return ACCESS_FIX if is_refused else self._fix

    def __str__(self) -> str:
        return f"expected {self.expected}\n  found: {self.found}\n  fix:   {self.fix}"


class StabilityStop(MmldlmError):
    """A stop of all ranks by the stability guard (exit 4)."""

    exit_code = EXIT_STABILITY


class Interrupted(MmldlmError):
    """A stop by a signal (exit 5): all ranks have saved a checkpoint, or nothing was to be saved;
    the message says which.
    """

    exit_code = EXIT_INTERRUPTED
