"""Schedules of passes in a JSON file: how many positions each pass fills, by length of the text
and number of passes.

    {"version": 1, "model": "runs/a", "schedules": {"12": {"1": [12], "2": [3, 9]}, "13": ...}}

The length of a text counts its EOS, and so does the sum of a schedule: in a random order the EOS
has a place like any token. The study studies/information writes one from a measured curve.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from mmldlm.errors import UserError
from mmldlm.utils import atomic_files
from mmldlm.utils.json_files import read_json

VERSION = 1
_FIX = "write it with studies/information/main.py --write-schedule FILE"

Schedules = dict[int, dict[int, list[int]]]
"""Length (EOS counted) -> number of passes -> positions that each pass fills."""


def write_schedules(path: str | Path, schedules: Schedules, model: str) -> None:
    """Write schedules atomically.

    Args:
        model: the checkpoint whose curve they come from.
    """
    entries = {
        str(length): {str(passes): list(counts) for passes, counts in sorted(found.items())}
        for length, found in sorted(schedules.items())
    }
    # One line per length: thousands of numbers, too many to read one below the other.
    lines = ",\n".join(f'  "{length}": {json.dumps(found)}' for length, found in entries.items())
    text = (
        f'{{"version": {VERSION}, "model": {json.dumps(model)}, "schedules": {{\n{lines}\n}}}}\n'
    )
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    atomic_files.write_bytes(Path(path), text.encode())


def read_schedules(path: str | Path) -> Schedules:
    """Read a file of `write_schedules`.

    Raises:
        UserError: not readable, of another version, or a schedule that does not fill its text.
    """
    values = read_json(Path(path), _FIX, finite=True)
    if values.get("version") != VERSION or not isinstance(values.get("schedules"), dict):
        found = f"version {values.get('version')!r}, keys {', '.join(map(str, values))[:100]}"
        raise UserError(f'"version": {VERSION} and "schedules" in {path}', found, _FIX)
    try:
        return {
            int(length): {
                int(passes): _checked(int(length), int(passes), counts)
                for passes, counts in found.items()
            }
            for length, found in values["schedules"].items()
        }
    except (AttributeError, TypeError, ValueError) as error:
        raise UserError(
            f"schedules of positive counts in {path}", str(error)[:200], _FIX
        ) from error


def schedules_of(schedules: Schedules, passes: int | None) -> dict[int, list[int]]:
    """Return the schedules of one number of passes: length -> positions that each pass fills.

    Texts of at most that many positions get one a pass.

    Raises:
        UserError: no number of passes, or none of the schedules has it.
    """
    known = sorted({number for found in schedules.values() for number in found})
    words = ", ".join(map(str, known))
    if passes is None:
        raise UserError(
            f"--num-steps beside a file of schedules of {words} passes",
            "none",
            "choose with --num-steps",
        )
    found = {
        length: [1] * length
        if passes >= length
        else by_passes.get(passes, [length] if passes == 1 else [])
        for length, by_passes in schedules.items()
    }
    if missing := [length for length, counts in found.items() if not counts]:
        where = f"no schedule of {passes} passes for texts of {missing[0]} tokens"
        raise UserError(
            f"--num-steps 1 or one of the file of schedules: {words}", where, "choose one of them"
        )
    return found


def _checked(length: int, passes: int, counts: Any) -> list[int]:
    numbers = [int(count) for count in counts]
    if (
        numbers != counts
        or min(numbers, default=0) < 1
        or (len(numbers), sum(numbers)) != (passes, length)
    ):
        raise ValueError(f"length {length}, {passes} passes: {str(counts)[:100]}")
    return numbers
