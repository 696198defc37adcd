"""The JSON form that every benchmark writes, and its table."""

from __future__ import annotations

import json
import operator
import os
import platform
from importlib import metadata
from pathlib import Path

_OPS = {">=": operator.ge, "<=": operator.le, "==": operator.eq}
COULD_NOT_CHECK = 3  # exit code


def claim(name: str, value: float, op: str, bound: float, measured: bool = False) -> dict:
    """One claim; `holds` is False for NaN.

    measured: the value is a time, memory or a share that belongs to the machine and to data of a real size. --quick
    prints such a claim and does not judge it; counts, equality and model errors are judged in every form.
    """
    holds = bool(_OPS[op](value, bound))
    return {"id": name, "value": value, "op": op, "bound": bound, "holds": holds, "measured": measured}


def conditions(**more) -> dict:
    """Machine and versions that the figures belong to."""
    versions = {name: metadata.version(name) for name in ("torch", "deepspeed", "numpy", "transformers")}
    return {
        "python": platform.python_version(),
        "cpus": os.cpu_count(),
        "machine": platform.machine(),
        **versions,
        **more,
    }


def verdict(entry: dict, quick: bool) -> str:
    """ "holds", "FAILS", or "not judged" for what --quick measures."""
    if quick and entry.get("measured"):
        return "not judged"
    return "holds" if entry["holds"] else "FAILS"


def line(entry: dict, quick: bool) -> str:
    """A claim on the screen."""
    return f"{verdict(entry, quick):10}  {entry['id']} = {entry['value']:.4g} ({entry['op']} {entry['bound']:g})"


def write(path: str | None, claims: list[dict], quick: bool = False, **more) -> int:
    """Print the claims, write the JSON file, and return the exit code: 0 when no judged claim fails, 1 otherwise."""
    for entry in claims:
        print(line(entry, quick))
    if path is not None:
        answer = {"conditions": conditions(quick=quick, **more), "claims": claims}
        Path(path).write_text(json.dumps(answer, indent=2) + "\n")
    return 1 if any(verdict(entry, quick) == "FAILS" for entry in claims) else 0
