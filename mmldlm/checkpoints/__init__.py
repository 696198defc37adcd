"""Checkpoints: the commit protocol, readers that need neither torch nor deepspeed, and the converter."""

from mmldlm.checkpoints.commit import (
    ALONE,
    CommitFailed,
    Peers,
    PendingCheckpoint,
    begin,
    find_latest_whole,
    list_checkpoints,
    prune,
    resolve,
)
from mmldlm.checkpoints.manifest import read_manifest, verify
from mmldlm.checkpoints.zero_reader import ZeroCheckpoint

__all__ = [
    "ALONE",
    "CommitFailed",
    "Peers",
    "PendingCheckpoint",
    "ZeroCheckpoint",
    "begin",
    "find_latest_whole",
    "list_checkpoints",
    "prune",
    "read_manifest",
    "resolve",
    "verify",
]
