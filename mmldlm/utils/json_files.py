"""JSON files written by other programs, and JSON without NaN words."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from mmldlm.errors import UserError
from mmldlm.utils.formatting import describe_os_error


def read_json(path: Path, fix: str, max_bytes: int = 64 << 20, *, finite: bool = False) -> dict[str, Any]:
    """Return the object in a JSON file written by another program.

    Args:
        fix: what the error advises. max_bytes: a larger file is not parsed.
        finite: refuse numbers that are infinite, NaN, or whole and beyond 64 bits, as 1e999.

    Raises:
        UserError: not readable, too large, not JSON in UTF-8 (a BOM is skipped), nested too deep, or not an object.
    """
    value = read_json_value(path, fix, max_bytes, finite=finite)
    if not isinstance(value, dict):
        raise UserError(f"a JSON object in {path}", f"damaged file: a JSON {type(value).__name__}", fix)
    return value


def read_json_value(path: Path, fix: str, max_bytes: int = 64 << 20, *, finite: bool = False) -> Any:
    """Return what a JSON file holds: as `read_json`, but it need not be an object."""
    checks: dict[str, Any] = {}
    if finite:
        checks = {"parse_constant": _refuse_number, "parse_float": _finite_float, "parse_int": _int64}
    try:
        with open(path, "rb") as file:
            raw = file.read(max_bytes + 1)
        if len(raw) > max_bytes:
            raise ValueError(f"more than {max_bytes:,} bytes")
        return json.loads(raw.decode("utf-8-sig"), **checks)
    except OSError as error:
        raise UserError(f"a JSON object in {path}", describe_os_error(error), fix) from error
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        found = f"byte 0x{error.object[error.start]:02x} in line {line}"
        raise UserError(f"JSON in UTF-8 in {path}", found, f"convert it to UTF-8; {fix}") from error
    except RecursionError as error:
        raise UserError(f"a JSON object in {path}", "damaged file: nested too deep", fix) from error
    except ValueError as error:
        raise UserError(f"a JSON object in {path}", f"damaged file: {str(error)[:200]}", fix) from error


def _refuse_number(text: str) -> NoReturn:
    raise ValueError(f"the number {text[:30]}, which is not finite or too large")


def _finite_float(text: str) -> float:
    value = float(text)
    return value if math.isfinite(value) else _refuse_number(text)


def _int64(text: str) -> int:
    return int(text) if len(text) < 20 and abs(int(text)) < 1 << 63 else _refuse_number(text)


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
