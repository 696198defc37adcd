"""The parser of every command: an error is two lines, and --help begins with what most calls
need.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NoReturn

from mmldlm.errors import EXIT_USAGE
from mmldlm.utils.formatting import did_you_mean, for_screen


class _Formatter(argparse.HelpFormatter):
    """Help whose usage line names what a call must have; the options below it say the rest."""

    _OTHERS = argparse.Action([], "options", nargs="*", metavar="OPTION")

    def add_usage(
        self,
        usage: str | None,
        actions: Iterable[argparse.Action],
        groups: Iterable[Any],
        prefix: str | None = None,
    ) -> None:
        needed = [action for action in actions if action.required or not action.option_strings]
        super().add_usage(usage, [*needed, self._OTHERS], [], prefix)


class CommandParser(argparse.ArgumentParser):
    """A parser whose arguments are common ones, or belong to a group that a verb adds.

    Args:
        prog: The command, as users type it.
        description: First line of --help.

    Attributes:
        takes_script: Whether what stands behind `--` is a script and its arguments, which `parse`
            returns as `script`; None without `--`.
        hints: Unknown option -> what to write instead, for the error.
    """

    takes_script = False
    hints: Mapping[str, str] = MappingProxyType({})

    def __init__(self, prog: str, description: str | None):
        super().__init__(prog=prog, description=description, formatter_class=_Formatter)
        self._positionals = self._optionals
        self._optionals.title = "common options"

    def parse(self, words: Sequence[str] | None = None) -> argparse.Namespace:
        """Return the arguments of a command line; exit with 0 after --help, with 2 after an error.

        argparse would report a missing option before one that it does not know, which is often
        the same one with a typing error.

        Args:
            words: None: those of this process.
        """
        words, script = list(sys.argv[1:] if words is None else words), None
        if self.takes_script and "--" in words:
            end = words.index("--")
            words, script = words[:end], words[end + 1 :]
        known = [name for action in self._actions for name in action.option_strings]
        for word in words[: words.index("--") if "--" in words else None]:
            name = word.partition("=")[0]
            is_option = name.startswith("--") and " " not in name
            if is_option and not any(option.startswith(name) for option in known):
                hint = f" (now {self.hints[name]})" if name in self.hints else ""
                self.error(f"unknown option {name}{hint or did_you_mean(name, known)}")
        args = self.parse_intermixed_args(words)
        if self.takes_script:
            args.script = script
        return args

    def error(self, message: str) -> NoReturn:
        """Print the error and exit with 2."""
        text = f"error: {message}\n  fix:   `{self.prog} --help` lists the options"
        self.exit(EXIT_USAGE, for_screen(text, sys.stderr) + "\n")
