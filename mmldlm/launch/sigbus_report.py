"""Explain a SIGBUS of a rank: a memory-mapped file became shorter, usually a file of the store."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from mmldlm.errors import MmldlmError
from mmldlm.utils.formatting import join_some


def explain_sigbus(train_args: Sequence[str]) -> str:
    """Return one sentence for the report of a rank that SIGBUS ended; never raises.

    Args:
        train_args: arguments of train.py, from which the stores are located.
    """
    try:
        changed = _changed_files(train_args)
    except (MmldlmError, OSError, ImportError, ValueError):
        changed = []
    if not changed:
        return "a memory-mapped file became shorter, or /dev/shm is full (df /dev/shm)"
    return (
        f"files of the store were changed while it was read: {join_some(changed, 5, '; ')}. Copy"
        " the store again and resume; replace a store by renaming a new folder, never by"
        " overwriting its files"
    )


def _changed_files(train_args: Sequence[str]) -> list[str]:
    from mmldlm.config.load import load_config
    from mmldlm.data.store import changed_files

    parser = argparse.ArgumentParser(add_help=False, exit_on_error=False)
    parser.add_argument("--config-name")
    parser.add_argument("--config")
    known, rest = parser.parse_known_args(train_args)
    overrides = [argument for argument in rest if "=" in argument and not argument.startswith("-")]
    config = load_config(known.config_name, known.config, overrides)
    return [line for root in config.data.roots for line in changed_files(root)]
