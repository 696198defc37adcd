"""The two kinds of failure a command reports: the user's input is wrong, or the run had to stop."""

from __future__ import annotations

# Exit codes of every command (ARCHITECTURE: "Config and commands").
EXIT_DONE = 0
EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_UNCHECKED = 3
EXIT_STABILITY = 4
EXIT_INTERRUPTED = 5


class MmldlmError(Exception):
    """Base of the errors that a command prints as one message, without a traceback."""

    exit_code = EXIT_FAILED


class UserError(MmldlmError, ValueError):
    """Input that cannot be used: says what was expected, what was found, and what to do.

    Args:
        expected: what would have been accepted, and where it was looked for.
        found: what was there instead.
        fix: what the user can do about it.
    """

    exit_code = EXIT_USAGE

    def __init__(self, expected: str, found: str, fix: str):
        self.expected, self.found, self.fix = expected, found, fix
        super().__init__(f"expected {expected}\n  found: {found}\n  fix:   {fix}")


class StabilityStop(MmldlmError):
    """The stability guard ended the run on all ranks (exit 4)."""

    exit_code = EXIT_STABILITY


class Interrupted(MmldlmError):
    """A signal ended the run after all ranks had saved a checkpoint (exit 5)."""

    exit_code = EXIT_INTERRUPTED
