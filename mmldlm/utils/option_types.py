"""Types of command-line options for argparse: paths, and numbers within bounds. Every option of
every verb uses them.

argparse prints the error with the option's name and ends with exit code 2.
"""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Callable
from typing import Any

from mmldlm.utils.paths import expand_path

MAX_COUNT = 1 << 31  # of samples, steps and tokens
MAX_SEED = (1 << 63) - 1
# Sizes of a number other than 0: fp32 overflows when it divides by less, or multiplies more.
SMALLEST, LARGEST = 1e-12, 1e30
ONE_YEAR = 366 * 86_400.0  # longest time limit in seconds; longer ones overflow in C


def path(word: str) -> str:
    """Return a path (or a name that may be one) with ~ and variables expanded."""
    try:
        return expand_path(word)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def integer(low: int = 0, high: int = MAX_COUNT) -> Callable[[str], int]:
    """Return the type of a whole number from low to high, both included."""

    def parse(word: str) -> int:
        if (
            not re.fullmatch(r"[-+]?(0|[1-9][0-9]*)", word)
            or len(word) > 1000
            or not low <= int(word) <= high
        ):
            raise argparse.ArgumentTypeError(
                f"{word[:100]!r}: a whole number of at least {low} and at most {high}"
            )
        return int(word)

    return parse


def is_usable(value: Any) -> bool:
    """Whether a number is 0, or its size is from SMALLEST to LARGEST; NaN is not."""
    return value == 0 or SMALLEST <= abs(value) <= LARGEST


def number(
    low: float = -math.inf, high: float = math.inf, *, above: float | None = None
) -> Callable[[str], float]:
    """Return the type of a number from low to high, both included, and above another one, of a
    usable size (`is_usable`).
    """

    def parse(word: str) -> float:
        try:
            value = float(word) if "_" not in word else math.nan
        except ValueError:
            value = math.nan
        if not (is_usable(value) and low <= value <= high and (above is None or value > above)):
            bounds = (
                [f"above {above:g}"]
                if above is not None
                else [f"at least {low:g}"]
                if low > -math.inf
                else []
            )
            bounds += [f"at most {high:g}"] if high < math.inf else []
            described = f" {' and '.join(bounds)}" if bounds else ""
            if math.isfinite(value) and not is_usable(value):
                described += f", 0 or from {SMALLEST:g} to {LARGEST:g} in size"
            raise argparse.ArgumentTypeError(f"{word[:100]!r}: a finite number{described}")
        return value

    return parse


seed = integer(0, MAX_SEED)
"""Type of a seed: what torch, NumPy and the counter-based generator take."""
count = integer(1)
"""Type of a number of things of which there is at least one."""
size = integer(0)
"""Type of a number of things of which there may be none."""
seconds = number(0.0, ONE_YEAR)
"""Type of a time limit."""
port = integer(1, 65_535)
"""Type of a TCP port."""


_SIZE = re.compile(r"(\d{1,15}(?:\.\d{1,15})?)\s*([KMGT]?)(i?)B?", re.IGNORECASE)


def num_bytes(word: str) -> int:
    """Return the bytes of "5GB" (10^9), "500MiB" (2^20) or "1000"; at least 1."""
    found = _SIZE.fullmatch(word.strip())
    power = "kmgt".find(found[2].lower()) + 1 if found and found[2] else 0
    size = int(float(found[1]) * (1024 if found[3] else 1000) ** power) if found else 0
    if size < 1:
        raise argparse.ArgumentTypeError(f"{word[:100]!r}: a size such as 5GB or 500MiB")
    return size


def path_after(prefix: str) -> Callable[[str], str]:
    """Return the type of a word that ends in a path where it begins with a prefix, as
    vae:FOLDER.
    """
    return lambda word: prefix + path(word[len(prefix) :]) if word.startswith(prefix) else word
