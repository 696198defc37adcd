"""The hostfile, read strictly: what DeepSpeed's own reader takes silently for something else is an error here."""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass
from pathlib import Path

from mmldlm.errors import UserError

_NAME = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9._-]*[A-Za-z0-9_])?")
_RANGE = re.compile(r"\[[0-9,-]+\]")
LOCAL_NAMES = ("localhost", "127.0.0.1", "::1")


@dataclass(frozen=True)
class Node:
    """A line of the hostfile: the name that ssh takes, its ranks, and where the line stands."""

    name: str
    slots: int
    line: int = 0


def read_hostfile(path: str | Path) -> list[Node]:
    """The nodes of a DeepSpeed hostfile, in order.

    Raises:
        UserError: no such file, or any line that DeepSpeed would refuse, skip, or read as something else; every such
            line is named as file:line.
    """
    path = Path(path)
    try:
        data = path.read_bytes()
    except OSError as error:
        raise UserError(
            f"a hostfile at {path}",
            error.strerror or str(error),
            "check the path: DeepSpeed takes a missing hostfile for a run on this machine alone",
        ) from error
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(
            f"a text file at {path}", f"bytes that are not UTF-8 (offset {error.start})", "save it as plain UTF-8"
        ) from error
    problems: list[str] = []
    if text.startswith("\ufeff"):
        problems.append(f"{path}:1: a byte order mark, which would become part of the first name")
        text = text[1:]
    nodes: list[Node] = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        node, problem = _read_line(line, number)
        if problem is None and (first := next((n for n in nodes if n.name == node.name), None)):
            problem = f"{node.name} stands in line {first.line} already"
        if problem is not None:
            problems.append(f"{path}:{number}: {problem}")
        else:
            nodes.append(node)
    if not nodes and not problems:
        problems.append(f"{path}: no node in it")
    local = [node for node in nodes if node.name in LOCAL_NAMES]
    if len(local) > 1 or (local and len(nodes) > 1):
        problems.append(
            f"{path}:{local[-1].line}: {local[-1].name} means another machine on every node; write its real name"
        )
    if problems:
        raise UserError("one 'NAME slots=N' a line", "\n         ".join(problems), "mend the lines named above")
    return nodes


def _read_line(line: str, number: int) -> tuple[Node | None, str | None]:
    words = line.split()
    name, rest = words[0], words[1:]
    if "#" in line:
        return None, "a comment behind a node, which is read as part of it: give the comment its own line"
    if _RANGE.search(name):
        return None, f"{name!r} is a range, which DeepSpeed takes for one name: write each node on its own line"
    if not _NAME.fullmatch(name):
        hint = ": write 'NAME slots=N'" if ":" in name else ""
        return None, f"{name!r} is no host name{hint}"
    if not rest:
        return None, f"no slots behind {name}: write '{name} slots=N'"
    if len(rest) > 1:
        joined = "".join(rest)
        spaced = re.fullmatch(r"slots=\d+", joined)
        hint = f"write {joined} without blanks" if spaced else "only slots=N may follow"
        return None, f"{' '.join(rest)!r} behind {name}: {hint}"
    key, equals, value = rest[0].partition("=")
    if not equals or key != "slots":
        close = difflib.get_close_matches(key, ["slots", "max_slots"], 1, 0.5) or not equals
        number_found = re.search(r"\d+", rest[0])
        meant = (
            f"did you mean 'slots={number_found.group() if number_found else 'N'}'?" if close else "expected slots=N"
        )
        return None, f"{rest[0]!r}: {meant}"
    if not value.isascii() or not value.isdigit():
        return None, f"{rest[0]!r}: slots needs a whole number"
    if int(value) == 0:
        return None, f"slots=0: {name} would start no rank; leave the line out"
    return Node(name, int(value), number), None
