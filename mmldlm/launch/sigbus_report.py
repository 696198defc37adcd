"""Why a rank ended with SIGBUS: a file that it reads through a memory map became shorter, mostly one of its store."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from mmldlm.errors import MmldlmError


def explain_sigbus(words: Sequence[str]) -> str:
    """One sentence for the report of a rank that SIGBUS ended; never raises.

    Args:
        words: the arguments of train.py, by which the stores are found.
    """
    try:
        changed = _changed_files(words)
    except (MmldlmError, OSError, ImportError, ValueError):
        changed = []
    if not changed:
        return "a file that it had mapped became shorter, or /dev/shm is full (df /dev/shm)"
    named = "; ".join(changed[:5]) + (f" and {len(changed) - 5} more" if len(changed) > 5 else "")
    return (
        f"files of the store were changed while it was read: {named}. Copy the store again and resume; replace a store "
        "by renaming a new folder, never by writing over its files"
    )


def _changed_files(words: Sequence[str]) -> list[str]:
    from mmldlm.config.load import load_config
    from mmldlm.data.store.store import changed_files

    parser = argparse.ArgumentParser(add_help=False, exit_on_error=False)
    parser.add_argument("--config-name")
    parser.add_argument("--config")
    known, rest = parser.parse_known_args(words)
    overrides = [word for word in rest if "=" in word and not word.startswith("-")]
    config = load_config(known.config_name, known.config, overrides)
    return [line for root in config.data.roots for line in changed_files(root)]
