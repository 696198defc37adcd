"""JSON files written by other programs, and JSON without NaN words."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mmldlm.errors import UserError
from mmldlm.utils.formatting import describe_os_error


def read_json(path: Path, fix: str, max_bytes: int = 64 << 20) -> dict[str, Any]:
    """Return the object in a JSON file written by another program.

    Args:
        fix: what the error advises. max_bytes: a larger file is not parsed.

    Raises:
        UserError: not readable, too large, not JSON, nested too deep, or not an object.
    """
    try:
        with open(path, "rb") as file:
            raw = file.read(max_bytes + 1)
        if len(raw) > max_bytes:
            raise ValueError(f"more than {max_bytes:,} bytes")
        value = json.loads(raw)
        if not isinstance(value, dict):
            raise ValueError(f"a JSON {type(value).__name__}")
    except OSError as error:
        raise UserError(f"a JSON object in {path}", describe_os_error(error), fix) from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"a JSON object in {path}", f"damaged file: {str(error)[:200]}", fix) from error
    return value


def to_strict_json(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy that strict JSON can represent; NumPy and torch scalars become Python numbers.

    A non-finite number becomes None, and `<key>_nonfinite` holds "nan", "inf" or "-inf" (for a list, a list of such
    words and None).
    """
    out: dict[str, Any] = {}
    for key, value in record.items():
        value = _to_python(value)
        if isinstance(value, Mapping):
            out[key] = to_strict_json(value)
        elif isinstance(value, (list, tuple)):
            items = [_to_python(item) for item in value]
            words = [_nonfinite_word(item) for item in items]
            out[key] = [
                to_strict_json(item) if isinstance(item, Mapping) else None if word else item
                for item, word in zip(items, words)
            ]
            if any(words):
                out[f"{key}_nonfinite"] = words
        elif word := _nonfinite_word(value):
            out[key], out[f"{key}_nonfinite"] = None, word
        else:
            out[key] = value
    return out


def nonfinite_to_words(value: Any) -> Any:
    """Return a copy in which non-finite floats are the strings nan, inf and -inf, which float() reads.

    For reports in which every key must keep a value; logs use `to_strict_json`.
    """
    if isinstance(value, Mapping):
        return {key: nonfinite_to_words(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [nonfinite_to_words(part) for part in value]
    return _nonfinite_word(value) or value


def _to_python(value: Any) -> Any:
    item = getattr(value, "item", None)
    return item() if callable(item) else value


def _nonfinite_word(value: Any) -> str | None:
    if not isinstance(value, float) or math.isfinite(value):
        return None
    return "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"
