"""Settings classes: frozen dataclasses whose fields are options of a command, each declared once.

    @dataclass(frozen=True)
    class BeamSettings(Settings):
        num_beams: int = option(4, "beams of a beam search (default: 4)", int, low=1, metavar="W")

From a field follow its option on the command line, the check of a value from Python, and which
options a class reads.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import numbers
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mmldlm.errors import UserError
from mmldlm.utils import option_types

_KEY = "option"


@dataclass(frozen=True)
class Option:
    """What the command line and the check of a value need to know of a field.

    Attributes:
        help: Text of --help.
        number: int or float for a finite number; None for anything else.
        low, high: Bounds of the number, both included.
        group: Title of the group in --help; None: among the common options.
        arguments: Further arguments of `add_argument`: type, choices, nargs, metavar.
    """

    help: str
    number: type | None = None
    low: float = -math.inf
    high: float = math.inf
    group: str | None = None
    arguments: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def parser_arguments(self) -> dict[str, Any]:
        """Return the arguments of `add_argument`; an option that is not given is None."""
        bounds: dict[str, Any] = {}
        if self.number is int:
            high = option_types.MAX_COUNT if self.high == math.inf else int(self.high)
            bounds["type"] = option_types.integer(int(self.low), high)
        elif self.number is float:
            bounds["type"] = option_types.number(self.low, self.high)
        return {**bounds, **self.arguments, "help": self.help}

    def check(self, key: str, value: Any) -> None:
        """Raise a UserError for what the command line would refuse: a number out of range, not one
        of the choices, no list of the length that the option has; None passes.
        """
        if value is None:
            return
        choices = self.arguments.get("choices")
        if choices is not None and value not in choices:
            raise UserError(
                f"{flag(key)} {' or '.join(choices)}", str(value), "choose one of them"
            )
        if self.arguments.get("action") == "store_const" and not isinstance(value, bool):
            raise UserError(f"{flag(key)} True or False", repr(value), "choose one of them")
        values = self._list_of(key, value) if "nargs" in self.arguments else [value]
        kind = numbers.Integral if self.number is int else numbers.Real
        for number in values if self.number is not None else ():
            # True is a whole number, for Python.
            is_number = isinstance(number, kind) and not isinstance(number, bool)
            is_usable = is_number and option_types.is_usable(number)
            if not (is_usable and self.low <= number <= self.high):
                raise UserError(
                    f"{flag(key)} {self._range()}", repr(number), "choose a value in this range"
                )

    def _list_of(self, key: str, value: Any) -> Sequence[Any]:
        """Return the value of an option that takes several words."""
        count = self.arguments["nargs"]
        is_list = isinstance(value, (list, tuple))
        if not is_list or not value or count != "+" and len(value) != count:
            size = "at least one" if count == "+" else str(count)
            fix = "give a list, also of one value"
            raise UserError(f"{flag(key)}: a list of {size}", repr(value)[:200], fix)
        return value

    def _range(self) -> str:
        smallest, largest = option_types.SMALLEST, option_types.LARGEST
        size = "" if self.number is int else f", 0 or from {smallest:g} to {largest:g} in size"
        if self.low == -math.inf:
            return f"a finite number{size}"
        if self.high == math.inf:
            return f"of at least {self.low:g}{size}"
        return f"from {self.low:g} to {self.high:g}{size}"


class Settings:
    """Base of settings classes: checks the value of every option.

    Raises:
        UserError: A number out of range, or a value that is not one of the choices.
    """

    def __post_init__(self) -> None:
        for key, own in options_of(type(self)).items():
            own.check(key, getattr(self, key))


def option(
    default: Any,
    help: str,
    number: type | None = None,
    low: float = -math.inf,
    high: float = math.inf,
    metadata: Mapping[str, Any] | None = None,
    group: str | None = None,
    **arguments: Any,
) -> Any:
    """Return a field of a settings class that is an option.

    Args:
        default: Value of the field where none is given.
        metadata: Further metadata of the field.
        help, number, low, high, group, arguments: See `Option`.
    """
    own = Option(help, number, low, high, group, arguments)
    return dataclasses.field(default=default, metadata={_KEY: own, **(metadata or {})})


def same_option(
    settings: type, key: str, default: Any, metadata: Mapping[str, Any] | None = None
) -> Any:
    """Return a field like that of another settings class, with its own default."""
    own = options_of(settings)[key]
    return dataclasses.field(default=default, metadata={_KEY: own, **(metadata or {})})


def options_of(settings: type) -> dict[str, Option]:
    """Return the options of a settings class by the names of their fields."""
    return {
        field.name: field.metadata[_KEY]
        for field in dataclasses.fields(settings)
        if _KEY in field.metadata
    }


def add_options(parser: argparse.ArgumentParser, *settings: type) -> None:
    """Add the options of settings classes to a parser, those of several classes once."""
    groups = OptionGroups(parser)
    added: dict[str, Option] = {}
    for own in settings:
        for key, one in options_of(own).items():
            if key not in added:
                groups[one.group].add_argument(flag(key), **one.parser_arguments())
                added[key] = one


class OptionGroups(dict[str | None, Any]):
    """Groups of --help by their titles, in the order in which they are first asked for; None: the
    common options.
    """

    def __init__(self, parser: argparse.ArgumentParser):
        super().__init__({None: parser})
        self._parser = parser

    def __missing__(self, title: str) -> Any:
        self[title] = self._parser.add_argument_group(title)
        return self[title]


def given_options(args: argparse.Namespace, keys: Iterable[str]) -> dict[str, Any]:
    """Return those of some options that the user gave a value."""
    return {key: getattr(args, key) for key in keys if getattr(args, key) is not None}


def flag(key: str) -> str:
    """Return how an option is written: --num-steps for num_steps."""
    return "--" + key.replace("_", "-")


def flags(keys: Iterable[str]) -> str:
    """Return several options as a list in words."""
    return ", ".join(map(flag, keys))
