"""The output folder of a preparation: whether it is free or already the result, and its commit."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import platform
import shutil
from pathlib import Path
from typing import Any

import mmldlm
from mmldlm.data.manifest import MANIFEST
from mmldlm.data.prepare.inputs import diff_inputs, inputs_entry, with_known_versions
from mmldlm.data.prepare.options import diff_options
from mmldlm.data.store import Store
from mmldlm.errors import UserError
from mmldlm.utils.atomic_files import fsync_path
from mmldlm.utils.formatting import is_utf8, printable
from mmldlm.utils.input_files import read_text

QUARANTINE = "quarantine.jsonl"
# Lies next to the tokenizer's folder in the work folder.
TOKENIZER_IDENTITY = "tokenizer.json"


def existing_output(root: Path, plan: dict[str, Any]) -> str | None:
    """Return how far the folder is known to be the result of this plan; None if it is not.

    Stores of earlier versions know the names and sizes of their files (of texts) alone, not the
    content: they count.
    """
    try:
        manifest = json.loads(read_text(root / MANIFEST))
        if manifest.get("options") != plan["options"]:
            return None
        inputs = with_known_versions(plan["inputs"], manifest.get("inputs"))
        if manifest.get("units") == plan_digest({**plan, "inputs": inputs}):
            return "from the same corpus and options"
        if "inputs" not in manifest and manifest.get("units") == _digest(plan["corpus"]):
            return (
                "from the same options and files of the same names and sizes; their content and"
                " the encoder were not compared, as an earlier version of mmldlm made it (--force"
                " prepares it again)"
            )
    except (OSError, ValueError, AttributeError):
        pass
    return None


def plan_digest(plan: dict[str, Any]) -> str:
    """SHA-256 of what a plan reads: the units of its corpora, and the content of all files."""
    return _digest([plan["corpus"], plan["inputs"]])


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()


def check_readable(folder: Path, summaries: dict[str, dict[str, int]]) -> None:
    """Assert that a finished store opens with the written number of samples."""
    for name, summary in summaries.items():
        assert len(Store(folder, name)) == summary["num_samples"]


def latents_suffix(count: int) -> dict[str, int]:
    """Return the manifest entry of several latents per text; empty for one."""
    return {} if count == 1 else {"latents_per_text": count}


def versions(*more: str) -> dict[str, str]:
    """Return the versions of the packages, and of `more`, on which the bytes of a store may
    depend.
    """
    packages = ("torch", "transformers", "tokenizers", "numpy", *more)
    return {
        "mmldlm": mmldlm.__version__,
        "python": platform.python_version(),
        **{name: importlib.metadata.version(name) for name in packages},
    }


def check_output_free(root: Path, force: bool, plan: dict[str, Any] | None = None) -> None:
    """Check that the output folder is free or, with `force`, a store that may be replaced.

    Args:
        root: Output folder.
        force: Whether to replace an existing store.
        plan: Plan of this preparation, to describe how an existing store differs.

    Raises:
        UserError: the folder is in use.
    """
    if not is_utf8(str(root)):
        raise UserError(
            "an --output-dir in UTF-8, as tokenizers need it",
            printable(str(root)),
            "give another name",
        )
    if root.exists() and not force and (not root.is_dir() or any(root.iterdir())):
        raise UserError(
            f"an --output-dir that does not exist yet: {root}",
            _describe_existing(root, plan),
            "choose another folder, or add --force to replace it when the new store is complete",
        )
    if os.path.ismount(root):
        raise UserError(
            "an --output-dir that can be renamed",
            f"{root}, where a disk is mounted",
            f"give a folder on it: {root / 'store'}",
        )
    if root.is_dir() and force and any(root.iterdir()) and not (root / MANIFEST).is_file():
        raise UserError(
            f"a store to replace at {root}",
            f"a folder with other files in it (no {MANIFEST})",
            "choose another --output-dir; --force only replaces stores",
        )


def _describe_existing(root: Path, plan: dict[str, Any] | None) -> str:
    try:
        manifest = json.loads(read_text(root / MANIFEST))
        options = manifest["options"]
    except (OSError, ValueError, KeyError, TypeError):
        return "a folder that is not a store"
    # `pack` has other options, which cannot be compared.
    if plan is None or not isinstance(options, dict) or "corpus" not in options:
        return "an existing store"
    changes = diff_options(options, plan["options"])
    if changes:
        return f"a store of other options: {'; '.join(changes)}"
    if not inputs_entry(plan["inputs"]):
        return "a store of the same options whose files have changed (too many to name one)"
    if "inputs" not in manifest:
        return (
            "a store of the same options that does not name the files it read (too many, or made"
            " by an earlier version)"
        )
    changes = diff_inputs(manifest["inputs"], plan["inputs"]) or [
        "the order or the captions of its corpus"
    ]
    return f"a store of the same options whose files have changed: {'; '.join(changes)}"


def commit(partial: Path, root: Path, force: bool) -> None:
    """Rename a finished folder to its place; with `force` an existing one is deleted afterwards.

    Raises:
        UserError: a folder appeared at `root` in the meantime.
    """
    for folder in (*(path for path in partial.rglob("*") if path.is_dir()), partial):
        fsync_path(folder)
    old = root.with_name(f"{root.name}.old-{os.getpid()}")
    if root.is_dir() and not any(root.iterdir()):
        root.rmdir()
    if root.exists() and not force:
        raise UserError(
            f"no folder yet at {root}",
            "another one appeared in the meantime",
            "choose another --output-dir",
        )
    if root.exists():
        root.rename(old)
    partial.rename(root)
    fsync_path(root.parent)
    shutil.rmtree(old, ignore_errors=True)
