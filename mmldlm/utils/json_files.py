"""Read JSON files written by other programs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from mmldlm.errors import UserError
from mmldlm.utils.formatting import describe_os_error


def read_json(path: Path, fix: str, max_bytes: int = 64 << 20) -> dict[str, Any]:
    """Read the object in an untrusted JSON file.

    Args:
        path: the file.
        fix: the advice of the error.
        max_bytes: larger files are not parsed.

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
