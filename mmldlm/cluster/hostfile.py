"""Strict reader of DeepSpeed hostfiles: lines that DeepSpeed would silently misread are errors.

As a script, for the launcher scripts: print "NAME SLOTS" for every node of a file.
"""

from __future__ import annotations

import os
import re
import select
import stat
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from mmldlm.errors import UserError
from mmldlm.utils.formatting import describe_os_error, join_some

_NAME = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9._-]*[A-Za-z0-9_])?")
_SLOTS = re.compile(r"slots=(0*[1-9][0-9]*)")
LOCAL_NAMES = ("localhost", "127.0.0.1")
_PIPE_SECONDS = 10.0
_MAX_BYTES = 1 << 24
MOST_PROBLEMS = 8


@dataclass(frozen=True)
class Node:
    """One line of the hostfile.

    Attributes:
        name: Host name or address for ssh.
        slots: Number of ranks.
        line: Line number in the file; 0 if it was not read from a file.
    """

    name: str
    slots: int
    line: int = 0


def read_hostfile(path: str | Path) -> list[Node]:
    """Return the nodes of a DeepSpeed hostfile, in order.

    Raises:
        UserError: the file is missing, or DeepSpeed would reject, skip or misread lines. The first
            of them are reported as file:line.
    """
    path = Path(path)
    try:
        data = _read_bytes(path)
    except OSError as error:
        raise UserError(
            f"a hostfile at {path}",
            describe_os_error(error),
            "check the path (DeepSpeed would treat a missing hostfile as a run on this machine"
            " alone)",
        ) from error
    # Bytes of another encoding are no part of a name, and are shown as what they are.
    nodes, problems = _parse(data.decode("utf-8", errors="backslashreplace"), path)
    if problems:
        raise UserError(
            "one 'NAME slots=N' per line",
            join_some(problems, MOST_PROBLEMS, "\n         "),
            "correct the lines named above",
        )
    return nodes


def write_hostfile(path: str | Path, nodes: Iterable[Node]) -> None:
    """Write a DeepSpeed hostfile."""
    lines = (f"{node.name} slots={node.slots}\n" for node in nodes)
    Path(path).write_text("".join(lines), encoding="utf-8")


def _parse(text: str, path: Path) -> tuple[list[Node], list[str]]:
    """Return the nodes and the problems of a hostfile's text."""
    problems: list[str] = []
    nodes: list[Node] = []
    # These are DeepSpeed's line ends: a form feed is not one.
    for line_number, line in enumerate(re.split(r"\r\n|\r|\n", text), 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        try:
            node = _read_line(line, line_number)
        except ValueError as problem:
            problems.append(f"{path}:{line_number}: {problem}")
            continue
        if first := next((n for n in nodes if n.name == node.name), None):
            problems.append(f"{path}:{line_number}: {node.name} is already in line {first.line}")
        else:
            nodes.append(node)
    if not nodes and not problems:
        problems.append(f"{path}: no nodes")
    local = [node for node in nodes if node.name in LOCAL_NAMES]
    if len(local) > 1 or (local and len(nodes) > 1):
        problems.append(
            f"{path}:{local[-1].line}: {local[-1].name} means another machine on every node; write"
            " its real name"
        )
    return nodes, problems


def _read_bytes(path: Path) -> bytes:
    """Read a file, or a pipe (a shell's process substitution) whose writer finishes within
    _PIPE_SECONDS.

    Raises:
        OSError: unreadable, neither a file nor a pipe, or the writer takes too long.
    """
    # Otherwise open() would block on a pipe without a writer.
    file = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        mode, deadline, data = os.fstat(file).st_mode, time.monotonic() + _PIPE_SECONDS, b""
        if not (stat.S_ISREG(mode) or stat.S_ISFIFO(mode) or stat.S_ISDIR(mode)):
            raise OSError(None, "neither a file nor a pipe")
        while len(data) <= _MAX_BYTES:
            if not select.select([file], [], [], max(deadline - time.monotonic(), 0))[0]:
                raise OSError(
                    None, f"a pipe whose writer did not finish within {_PIPE_SECONDS:.0f} s"
                )
            chunk = os.read(file, 1 << 16)
            if not chunk:
                return data
            data += chunk
        raise OSError(None, f"more than {_MAX_BYTES >> 20} MiB")
    finally:
        os.close(file)


def _read_line(line: str, line_number: int) -> Node:
    """Return the node of a line; a ValueError says what is wrong with it."""
    name, *rest = line.split()
    if not _NAME.fullmatch(name):
        raise ValueError(
            f"{name!r} is not a host name (a range, user, port or IPv6 address is none)"
        )
    slots = _SLOTS.fullmatch(" ".join(rest))
    if slots is None:
        found = repr(" ".join(rest)) if rest else "nothing"
        raise ValueError(f"{found} after {name}, where slots=N of at least 1 is expected")
    return Node(name, int(slots[1]), line_number)


def main(path: str) -> int:
    """Print the nodes of a hostfile; return the exit code."""
    try:
        nodes = read_hostfile(path)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    print("\n".join(f"{node.name} {node.slots}" for node in nodes))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
