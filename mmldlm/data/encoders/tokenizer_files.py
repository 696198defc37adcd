"""Reading a tokenizer that someone else may have written: none of its code is run, and its files have a limit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mmldlm.errors import UserError

MAX_BYTES = 256 << 20  # the largest tokenizers of today have about 35 MB


def read_tokenizer(place: str | Path, expected: str, fix: str, **options: Any):
    """A Hugging Face tokenizer, from local files only where ``place`` is a folder.

    Args:
        place: a folder, or a name on the hub. expected, fix: of the error. options: of ``AutoTokenizer``.

    Raises:
        UserError: it cannot be read, a file of it is too large, or it wants Python of its own to be run.
    """
    from transformers import AutoTokenizer

    folder = Path(place)
    is_local = folder.is_dir()
    for path in folder.iterdir() if is_local else ():
        if path.suffix in (".json", ".txt", ".model") and path.stat().st_size > MAX_BYTES:
            found = f"{path} of {path.stat().st_size:,} bytes, more than the {MAX_BYTES:,} that a tokenizer may have"
            raise UserError(expected, found, fix)
    try:
        return AutoTokenizer.from_pretrained(
            folder if is_local else str(place), local_files_only=is_local, trust_remote_code=False, **options
        )
    except BaseException as error:  # missing files, no network, bad JSON: all as different kinds
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":  # of the Rust library
            raise
        found = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}"
        if "trust_remote_code" in str(error):
            found = f"{place} wants Python code of its own to be run (auto_map), which mmldlm never does"
            fix = "use a tokenizer with a tokenizer.json and a class of transformers"
        raise UserError(expected, found, fix) from error
