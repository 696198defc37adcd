"""Paths as users write them: with ~ and variables, which a shell leaves alone after `=`, in quotes
and in files.
"""

from __future__ import annotations

import os
import re

_VARIABLE = re.compile(r"\$\$|\$\{[^}]*\}?|\$[A-Za-z_][A-Za-z0-9_]*")
_NAME = re.compile(r"\$(?:\{([A-Za-z_][A-Za-z0-9_]*)\}|([A-Za-z_][A-Za-z0-9_]*))")


def expand_path(path: str) -> str:
    """Return a path with a leading ~ or ~user, $NAME and ${NAME} replaced as a shell does.

    A path that exists as it is written, or lies in a folder whose absolute name has the sign, is
    what it says: names may have a $.

    Raises:
        ValueError: an unknown user, a variable that is not set, or another use of ${.
    """
    if path.startswith("~"):
        expanded = os.path.expanduser(path)
        if expanded.startswith("~") and not os.path.lexists(path):
            user = path.partition("/")[0]
            raise ValueError(
                f"{path!r}: no home folder is known for {user}; write ./{path} if that is its name"
            )
        path = expanded
    if not _VARIABLE.search(path) or _exists_as_written(path):
        return path
    return _VARIABLE.sub(lambda found: _value_of(found[0], path), path)


def _exists_as_written(path: str) -> bool:
    if "\0" in path:
        return False
    if not os.path.isabs(path):
        return os.path.lexists(path)
    signs = [found.end() for found in _VARIABLE.finditer(path) if found[0] != "$$"]
    end = path.find("/", signs[-1]) if signs else -1
    return os.path.lexists(path if end < 0 else path[:end])


def _value_of(variable: str, path: str) -> str:
    if variable == "$$":  # a process number in a shell; here two letters of a name
        return variable
    found = _NAME.fullmatch(variable)
    if found is None:
        raise ValueError(
            f"{path!r}: {variable} is not a variable; write $NAME, ${{NAME}}, or the path itself"
        )
    name = found[1] or found[2]
    value = os.environ.get(name)
    if not value:
        state = "not set" if value is None else "empty"
        raise ValueError(
            f"{path!r}: the variable {name} is {state} here; set it, or write the path itself"
        )
    return value
