"""Checkpoints: the commit protocol, readers that need neither torch nor deepspeed, and the converter.

Names are looked up when they are first asked for: a conversion of a second should not import what it does not use.
"""

from importlib import import_module
from typing import Any

_PLACES = {
    "commit": (
        "ALONE", "CommitFailed", "Peers", "PendingCheckpoint", "begin", "find_latest_whole", "list_checkpoints",
        "resolve",
    ),
    "manifest": ("read_manifest", "verify"),
    "retention": ("prune",),
    "zero_reader": ("ZeroCheckpoint",),
}  # fmt: skip
_MODULE_OF = {name: module for module, names in _PLACES.items() for name in names}

__all__ = list(_MODULE_OF)  # noqa: PLE0604


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
