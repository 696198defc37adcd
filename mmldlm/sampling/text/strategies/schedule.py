"""How many tokens each pass fills: an even split, a list, or a file of lists for every length."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from mmldlm.errors import UserError
from mmldlm.sampling.text.schedule_file import read_schedules, schedules_of
from mmldlm.utils.json_files import read_json_value
from mmldlm.utils.option_types import MAX_COUNT

_FIX = "correct it, or write it with studies/information/main.py --write-schedule FILE"

Schedule = Sequence[float] | Mapping[int, Sequence[float]]
"""Numbers of tokens per pass, or those for texts of each length (EOS counted); scaled to the
tokens of a text.
"""


def read_schedule(word: str, passes: int | None = None) -> Schedule:
    """Read --schedule: numbers such as 1,2,4,8, or a JSON file of a list, of {length: list}, or of
    `schedule_file`.

    Args:
        passes: which schedules of a `schedule_file`; other forms say themselves how many passes
            there are.

    Raises:
        UserError: not readable, not such numbers, or no schedules for this number of passes.
    """
    if names_passes(word):
        return schedules_of(read_schedules(word), passes)
    expected = "--schedule 1,2,4,8 or a JSON file of such a list, or of {length: list}"
    try:
        if not word.endswith(".json"):
            values: object = [float(part) for part in word.split(",")]
        else:
            values = read_json_value(Path(word), _FIX, finite=True)
            if isinstance(values, dict):
                values = {int(length): numbers for length, numbers in values.items()}
    except ValueError as error:
        found = error.found if isinstance(error, UserError) else str(error)
        raise UserError(expected, f"{word[:200]}: {found[:200]}", "correct it") from error
    lists = list(values.values()) if isinstance(values, dict) else [values]
    if not lists or not all(_is_schedule(numbers) for numbers in lists):
        raise UserError(
            expected + ", numbers from 0 to 2^31 that are not all 0", word[:200], "correct it"
        )
    return values  # type: ignore[return-value]


def names_passes(word: str) -> bool:
    """Whether --schedule is a file with schedules for several numbers of passes, of which
    --num-steps chooses.
    """
    if not word.endswith(".json"):
        return False
    try:
        values = read_json_value(Path(word), _FIX, finite=True)
    except UserError:
        return False
    return isinstance(values, dict) and "schedules" in values


def _is_schedule(numbers: object) -> bool:
    if not isinstance(numbers, list) or not all(type(x) in (int, float) for x in numbers):
        return False
    return all(0 <= x < MAX_COUNT for x in numbers) and sum(numbers) > 0


def filled_after(schedule: Schedule, counts: Tensor, lengths: Tensor) -> Tensor:
    """Return how many tokens of each text stand after each pass.

    Args:
        schedule: for a mapping, the nearest of its lengths is taken, the shorter of two.
        counts: [B] int64, tokens to fill.
        lengths: [B] int64, under which a mapping names a text.

    Returns:
        [B, T] int64, not decreasing, `counts` at the end; T: of the longest list in use.
    """
    rows = []
    for count, length in zip(counts.tolist(), lengths.tolist()):
        numbers = schedule
        if isinstance(schedule, Mapping):
            numbers = schedule[min(schedule, key=lambda known: (abs(known - length), known))]
        share = torch.tensor(list(numbers), dtype=torch.float64).cumsum(0)  # type: ignore[arg-type]
        rows.append((share / share[-1] * count + 0.5).floor().long())
    width = max(len(row) for row in rows)
    padded = [torch.cat([row, row[-1:].expand(width - len(row))]) for row in rows]
    return torch.stack(padded).to(counts.device)
