"""JSON files written by other programs, and strict JSON of any value: no NaN words, no number that
readers lose.
"""

from __future__ import annotations

import json
import math
import numbers
from collections.abc import Mapping, Set
from pathlib import Path
from typing import Any, NoReturn

from mmldlm.errors import UserError
from mmldlm.utils.formatting import describe_os_error
from mmldlm.utils.input_files import MAX_BYTES, read_bytes

# A larger integer is written as a hexadecimal word: many readers of JSON would round it or fail.
_MAX_INT = 1 << 64


def read_json(
    path: Path, fix: str, max_bytes: int = MAX_BYTES, *, finite: bool = False
) -> dict[str, Any]:
    """Return the object in a JSON file written by another program.

    Args:
        fix: Advice of the error.
        max_bytes: Size above which a file is not parsed.
        finite: Whether to refuse numbers that are infinite, NaN, or whole and beyond 64 bits, as
            1e999.

    Raises:
        UserError: not readable, not a regular file, too large, not JSON in UTF-8 (a BOM is
            skipped), nested too deep, or not an object.
    """
    value = read_json_value(path, fix, max_bytes, finite=finite)
    if not isinstance(value, dict):
        raise UserError(
            f"a JSON object in {path}", f"damaged file: a JSON {type(value).__name__}", fix
        )
    return value


def read_json_value(
    path: Path, fix: str, max_bytes: int = MAX_BYTES, *, finite: bool = False
) -> Any:
    """Return what a JSON file holds: as `read_json`, but it need not be an object."""
    checks: dict[str, Any] = {}
    if finite:
        checks = {
            "parse_constant": _refuse_number,
            "parse_float": _finite_float,
            "parse_int": _int64,
        }
    try:
        return json.loads(read_bytes(path, max_bytes).decode("utf-8-sig"), **checks)
    except OSError as error:
        raise UserError(f"a JSON object in {path}", describe_os_error(error), fix) from error
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        found = f"byte 0x{error.object[error.start]:02x} in line {line}"
        raise UserError(
            f"JSON in UTF-8 in {path}", found, f"convert it to UTF-8; {fix}"
        ) from error
    except (ValueError, RecursionError) as error:
        raise UserError(
            f"a JSON object in {path}", f"damaged file: {str(error)[:200]}", fix
        ) from error


def _refuse_number(text: str) -> NoReturn:
    raise ValueError(f"the number {text[:30]}, which is not finite or too large")


def _finite_float(text: str) -> float:
    value = float(text)
    return value if math.isfinite(value) else _refuse_number(text)


def _int64(text: str) -> int:
    return int(text) if len(text) < 20 and abs(int(text)) < 1 << 63 else _refuse_number(text)


def to_json(value: Any, indent: int | None = None) -> str:
    """Return any value as strict JSON: what JSON cannot hold becomes words (`plain_value`)."""
    return json.dumps(plain_value(value), indent=indent, ensure_ascii=False, allow_nan=False)


def plain_value(value: Any) -> Any:
    """Return a copy of dicts, lists, strings and numbers that JSON holds. It never fails.

    NumPy and torch values become Python's, sets sorted lists; non-finite floats the strings nan,
    inf and -inf, which float() reads; integers above 64 bits hexadecimal; other objects their
    text. Logs use `to_strict_json`.
    """
    if isinstance(value, Mapping):
        return {
            key if isinstance(key, str) else _key(key): plain_value(part)
            for key, part in value.items()
        }
    if isinstance(value, (list, tuple)):
        return [plain_value(part) for part in value]
    if isinstance(value, Set):
        return [plain_value(part) for part in sorted(value, key=repr)]
    if callable(getattr(value, "tolist", None)):  # numpy and torch, scalars too
        value = value.tolist()
        return plain_value(value) if isinstance(value, list) else _plain_scalar(value)
    return _plain_scalar(value)


def nonfinite_places(value: Any, place: str = "") -> list[str]:
    """Return where a value holds numbers that are not finite, as `details.model.nelbo`."""
    parts: Any = ()
    if isinstance(value, Mapping):
        parts = value.items()
    elif isinstance(value, (list, tuple)):
        parts = enumerate(value)
    elif isinstance(value, float) and not math.isfinite(value):
        return [place]
    return [
        found
        for key, part in parts
        for found in nonfinite_places(part, f"{place}.{key}" if place else str(key))
    ]


def to_strict_json(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of a record that strict JSON can represent, as `plain_value` but for numbers
    that are not finite.

    A non-finite number becomes None, and `<key>_nonfinite` holds "nan", "inf" or "-inf" (for a
    list, a list of such words and None).
    """
    out: dict[str, Any] = {}
    for key, value in record.items():
        value, key = _to_python(value), key if isinstance(key, str) else _key(key)
        if isinstance(value, Mapping):
            out[key] = to_strict_json(value)
        elif isinstance(value, (list, tuple)):
            items = [_to_python(item) for item in value]
            words = [_nonfinite_word(item) for item in items]
            out[key] = [
                to_strict_json(item)
                if isinstance(item, Mapping)
                else None
                if word
                else plain_value(item)
                for item, word in zip(items, words)
            ]
            if any(words):
                out[f"{key}_nonfinite"] = words
        elif word := _nonfinite_word(value):
            out[key], out[f"{key}_nonfinite"] = None, word
        else:
            out[key] = plain_value(value)
    return out


def _key(key: Any) -> str:
    """Return a key as json.dumps writes it."""
    return json.dumps(key) if key is None or isinstance(key, (bool, int)) else str(key)


def _plain_scalar(value: Any) -> Any:
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, bytes):
        return value.decode("utf-8", "backslashreplace")
    if isinstance(value, numbers.Integral):
        value = int(value)
        return value if abs(value) < _MAX_INT else hex(value)
    if isinstance(value, numbers.Real):
        return _nonfinite_word(float(value)) or float(value)
    return str(value)


def _to_python(value: Any) -> Any:
    return value.tolist() if callable(getattr(value, "tolist", None)) else value


def _nonfinite_word(value: Any) -> str | None:
    if not isinstance(value, float) or math.isfinite(value):
        return None
    return "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"
