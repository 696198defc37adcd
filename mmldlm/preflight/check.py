"""What a check says: one Result, and the register in which the checks are found."""

from __future__ import annotations

import importlib
import pkgutil
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass

PASS, WARN, FAIL, SKIP, ERROR = "PASS", "WARN", "FAIL", "SKIP", "ERROR"
SCOPES = ("head", "node", "pair", "cluster")


@dataclass
class Result:
    """One verdict.

    Attributes:
        status: PASS, WARN, FAIL, SKIP (`why` says the reason) or ERROR (the check itself broke: no verdict).
        measured, expected, fix: one sentence each; `fix` is empty where nothing is to be done.
        node: name as in the hostfile; "" for verdicts on the head or on the whole job. A pair is "from->to".
        id, scope, level, title, seconds: of the check, filled in by run_check.
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

    def as_dict(self) -> dict:
        return asdict(self)


def ok(measured: str, node: str = "") -> Result:
    return Result(PASS, measured, node=node)


def fail(measured: str, expected: str, fix: str, node: str = "") -> Result:
    return Result(FAIL, measured, expected, fix, node)


def warn(measured: str, expected: str, fix: str, node: str = "") -> Result:
    return Result(WARN, measured, expected, fix, node)


def skip(why: str, node: str = "") -> Result:
    return Result(SKIP, why=why, node=node)


@dataclass(frozen=True)
class Check:
    """A check as registered: stable id, the level it belongs to, whom it judges, and its function.

    The function takes the Context and yields (or returns) Results; its docstring is what --explain prints.
    """

    id: str
    level: int
    scope: str
    title: str
    function: Callable[..., Iterable[Result] | Result]


_REGISTER: dict[str, Check] = {}


def check(id: str, level: int, scope: str, title: str):
    """Decorator that registers a check. Ids never change their meaning and are never used again."""
    assert scope in SCOPES and 0 <= level <= 4

    def register(function):
        assert id not in _REGISTER or _REGISTER[id].function.__module__ == function.__module__, f"{id} is taken"
        assert function.__doc__, f"{id} needs a docstring: --explain prints it"
        _REGISTER[id] = Check(id, level, scope, title, function)
        return function

    return register


def all_checks() -> list[Check]:
    """Every check in preflight/checks/, by level and then in the order in which the files have them."""
    from mmldlm.preflight import checks

    for module in sorted(pkgutil.iter_modules(checks.__path__), key=lambda found: found.name):
        importlib.import_module(f"{checks.__name__}.{module.name}")
    return sorted(_REGISTER.values(), key=lambda found: found.level)


def run_check(found: Check, context) -> list[Result]:
    """Run one check; a fault inside it is an ERROR of the tool, never a verdict on a node."""
    started = time.perf_counter()
    try:
        returned = found.function(context)
        results = [returned] if isinstance(returned, Result) else list(returned)
    except Exception as error:
        results = [Result(ERROR, why=f"the check broke: {type(error).__name__}: {error}")]
    for result in results:
        result.id, result.scope, result.level, result.title = found.id, found.scope, found.level, found.title
        result.seconds = round(time.perf_counter() - started, 3)
    return results
