"""The JSON report that every benchmark writes, and its lines on the screen."""

from __future__ import annotations

import json
import operator
import os
import platform
from importlib import metadata
from pathlib import Path

_OPS = {">=": operator.ge, "<=": operator.le, "==": operator.eq, ">": operator.gt}
COULD_NOT_CHECK = 3  # exit code


def claim(name: str, value: float, op: str, bound: float, measured: bool = False) -> dict:
    """Return one claim; `holds` is False for NaN.

    Args:
        measured: the value is a time, an amount of memory or a share, which depends on the machine
            and on data of a real size. --quick prints such a claim without judging it. Counts,
            equality and model errors are always judged.
    """
    holds = bool(_OPS[op](value, bound))
    return {
        "id": name,
        "value": value,
        "op": op,
        "bound": bound,
        "holds": holds,
        "measured": measured,
    }


def conditions(**more) -> dict:
    """Return the machine and the versions to which the figures belong."""
    versions = {
        name: metadata.version(name) for name in ("torch", "deepspeed", "numpy", "transformers")
    }
    return {
        "python": platform.python_version(),
        "cpus": os.cpu_count(),
        "machine": platform.machine(),
        **versions,
        **more,
    }


def verdict(entry: dict, quick: bool) -> str:
    """Return "holds", "FAILS", or "not judged" (a measured claim under --quick)."""
    if quick and entry.get("measured"):
        return "not judged"
    return "holds" if entry["holds"] else "FAILS"


def line(entry: dict, quick: bool) -> str:
    """Format a claim for the screen."""
    return (
        f"{verdict(entry, quick):10}  {entry['id']} = {entry['value']:.4g} ({entry['op']}"
        f" {entry['bound']:g})"
    )


def write(path: str | None, claims: list[dict], quick: bool = False, **more) -> int:
    """Print the claims, write the JSON file, and return the exit code: 1 if a judged claim fails,
    else 0.
    """
    for entry in claims:
        print(line(entry, quick))
    if path is not None:
        answer = {"conditions": conditions(quick=quick, **more), "claims": claims}
        Path(path).write_text(json.dumps(answer, indent=2) + "\n", encoding="utf-8")
    return 1 if any(verdict(entry, quick) == "FAILS" for entry in claims) else 0
