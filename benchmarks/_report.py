"""The JSON form that every benchmark writes, and its table."""

from __future__ import annotations

import json
import operator
import os
import platform
from importlib import metadata
from pathlib import Path

_OPS = {">=": operator.ge, "<=": operator.le, "==": operator.eq}


def claim(name: str, value: float, op: str, bound: float) -> dict:
    """One claim; `holds` is False for NaN."""
    return {"id": name, "value": value, "op": op, "bound": bound, "holds": bool(_OPS[op](value, bound))}


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


def write(path: str | None, claims: list[dict], **more) -> int:
    """Print the claims, write the JSON file, and return the exit code: 0 when all hold, 1 otherwise."""
    for entry in claims:
        mark = "holds" if entry["holds"] else "FAILS"
        print(f"{mark}  {entry['id']} = {entry['value']:.4g} ({entry['op']} {entry['bound']:g})")
    if path is not None:
        Path(path).write_text(json.dumps({"conditions": conditions(**more), "claims": claims}, indent=2) + "\n")
    return 0 if all(entry["holds"] for entry in claims) else 1
