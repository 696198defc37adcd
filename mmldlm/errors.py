"""Errors that a command reports as one message, and its exit codes."""

from __future__ import annotations

# Exit codes of every command.
EXIT_DONE = 0
EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_UNCHECKED = 3
EXIT_STABILITY = 4
EXIT_INTERRUPTED = 5


class MmldlmError(Exception):
    """Base class of the errors that a command prints as one message, without a traceback."""

    exit_code = EXIT_FAILED


class UserError(MmldlmError, ValueError):
    """Unusable input; the message has the form expected / found / fix.

    Args:
        expected: Accepted input and its place.
        found: Actual input.
        fix: Imperative that names the key, option or command to change.
    """

    exit_code = EXIT_USAGE

    def __init__(self, expected: str, found: str, fix: str):
        self.expected, self.found, self.fix = expected, found, fix
        super().__init__(f"expected {expected}\n  found: {found}\n  fix:   {fix}")


class StabilityStop(MmldlmError):
    """A stop of all ranks by the stability guard (exit 4)."""

    exit_code = EXIT_STABILITY


class Interrupted(MmldlmError):
    """A stop by a signal, after all ranks have saved a checkpoint (exit 5)."""

    exit_code = EXIT_INTERRUPTED
