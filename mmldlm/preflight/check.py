"""Results of checks, and the registry of all checks."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from statistics import mode
from typing import Any

from mmldlm.preflight.context import Context

PASS, WARN, FAIL, SKIP, ERROR = "PASS", "WARN", "FAIL", "SKIP", "ERROR"
SCOPES = ("head", "node", "pair", "cluster")


@dataclass
class Result:
    """Result of a check for one node, one pair or the whole job.

    Attributes:
        status: PASS, WARN, FAIL, SKIP or ERROR (the check itself failed: no statement about the
            node).
        measured: Measured value, in one sentence.
        expected: Expected value, in one sentence; empty if the check passed.
        fix: Fix, in one sentence; empty if nothing needs to be done.
        node: Name of the node as in the hostfile, "from->to" for a pair, "" for the head or the
            whole job.
        why: Reason of SKIP or ERROR.
        id: Identifier of the check, filled in by run_check, as are the following.
        scope: Scope among SCOPES.
        level: Level of the check.
        title: Short title of the check.
        seconds: Duration of the check.
    """

    status: str
    measured: str = ""
    expected: str = ""
    fix: str = ""
    node: str = ""
    why: str = ""
    id: str = ""
    scope: str = ""
    level: int = 0
    title: str = ""
    seconds: float = 0.0


def ok(measured: str, node: str = "") -> Result:
    return Result(PASS, measured, node=node)


def fail(measured: str, expected: str, fix: str, node: str = "") -> Result:
    return Result(FAIL, measured, expected, fix, node)


def warn(measured: str, expected: str, fix: str, node: str = "") -> Result:
    return Result(WARN, measured, expected, fix, node)


def skip(why: str, node: str = "") -> Result:
    return Result(SKIP, why=why, node=node)


Results = Iterator[Result]  # of a check that yields one per node, pair or problem
CheckFunction = Callable[[Context], Iterable[Result] | Result]


@dataclass(frozen=True)
class Check:
    """A registered check.

    Attributes:
        id: Stable identifier.
        level: Lowest level of the preflight that runs it.
        scope: Scope among SCOPES.
        title: Short title.
        function: Function that takes the Context and yields (or returns) Results; --explain prints
            its docstring.
    """

    id: str
    level: int
    scope: str
    title: str
    function: CheckFunction


_REGISTRY: dict[str, Check] = {}


def check(id: str, level: int, scope: str, title: str) -> Callable[[CheckFunction], CheckFunction]:
    """Register a check (decorator). An id never changes its meaning and is never reused."""
    assert scope in SCOPES and 0 <= level <= 4

    def register(function: CheckFunction) -> CheckFunction:
        assert id not in _REGISTRY or _REGISTRY[id].function.__module__ == function.__module__, (
            f"{id} is taken"
        )
        assert function.__doc__, f"{id} needs a docstring: --explain prints it"
        _REGISTRY[id] = Check(id, level, scope, title, function)
        return function

    return register


def registered_checks() -> list[Check]:
    """Return the checks of all imported files, in the order of their registration."""
    return list(_REGISTRY.values())


def run_check(check: Check, context: Context) -> list[Result]:
    """Run one check; an exception in it is an ERROR of the tool, not a statement about a node."""
    started = time.perf_counter()
    try:
        returned = check.function(context)
        results = [returned] if isinstance(returned, Result) else list(returned)
    except Exception as error:
        results = [Result(ERROR, why=f"the check failed: {type(error).__name__}: {error}")]
    for result in results:
        result.id, result.title = check.id, check.title
        result.scope, result.level = check.scope, check.level
        result.seconds = round(time.perf_counter() - started, 3)
    return results


def majority(values: dict[str, Any]) -> Any:
    """Return the value of most nodes; in a tie, that of the first node; None without a node."""
    # Values may be lists and dicts, which cannot be counted; equal ones have equal JSON.
    texts = [json.dumps(value, sort_keys=True) for value in values.values()]
    return json.loads(mode(texts)) if texts else None
