"""Read an untrusted tokenizer (its code is not run, the size of its files is limited), and save
one.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from mmldlm.errors import UserError
from mmldlm.utils.formatting import first_line

MAX_BYTES = 256 << 20  # the largest tokenizers have about 35 MB


def read_tokenizer(source: str | Path, expected: str, fix: str, **options: Any):
    """Load a Hugging Face tokenizer; from local files only if `source` is a folder.

    Args:
        source: a folder, or a name on the hub.
        expected, fix: parts of the error.
        options: of `AutoTokenizer`.

    Raises:
        UserError: it cannot be read, one of its files is too large, or it needs its own Python
            code.
    """
    from transformers import AutoTokenizer

    folder = Path(source)
    is_local = folder.is_dir()
    for path in folder.iterdir() if is_local else ():
        if path.suffix in (".json", ".txt", ".model") and path.stat().st_size > MAX_BYTES:
            found = f"{path} of {path.stat().st_size:,} bytes, more than {MAX_BYTES:,}"
            raise UserError(expected, found, fix)
    try:
        return AutoTokenizer.from_pretrained(
            folder if is_local else str(source),
            local_files_only=is_local,
            trust_remote_code=False,
            **options,
        )
    except BaseException as error:  # missing files, no network, bad JSON: many types
        if (
            not isinstance(error, Exception) and type(error).__name__ != "PanicException"
        ):  # of the Rust library
            raise
        found = first_line(error)
        if "trust_remote_code" in str(error):
            found = f"{source} needs its own Python code (auto_map), which mmldlm does not run"
            fix = "use a tokenizer with a tokenizer.json and a class of transformers"
        raise UserError(expected, found, fix) from error


def save_tokenizer(tokenizer: Any, folder: Path) -> None:
    """Save a Hugging Face tokenizer into a folder.

    Raises:
        OSError: it cannot be written; the Rust library raises a bare Exception for a full disk.
    """
    try:
        tokenizer.save_pretrained(folder)
    except Exception as error:
        if (found := re.search(r"\(os error (\d+)\)", str(error))) is None:
            raise
        number = int(found.group(1))
        raise OSError(number, os.strerror(number), str(folder)) from error
