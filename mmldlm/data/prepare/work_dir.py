"""The folders of a preparation: the output, and the one next to it that keeps finished work.

A killed preparation resumes from the work folder. The output is checked before the work begins and
committed by one rename.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.metadata
import json
import os
import platform
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

import mmldlm
from mmldlm.data.manifest import MANIFEST
from mmldlm.data.prepare.inputs import diff_inputs, inputs_entry, with_known_versions
from mmldlm.data.prepare.options import diff_options
from mmldlm.data.prepare.task_queue import TaskQueue
from mmldlm.data.store import FORMAT, Store
from mmldlm.data.writers import FILES_FORMAT, FILES_LAYOUT
from mmldlm.errors import UserError
from mmldlm.utils.atomic_files import fsync_path, write_json
from mmldlm.utils.formatting import is_utf8, join_some, printable
from mmldlm.utils.input_files import open_append
from mmldlm.utils.json_files import read_json
from mmldlm.utils.paths import check_writable_dir

PLAN = "plan.json"
IDENTITIES = "file_identities.json"
RULES = 2
"""Grows whenever a version makes other results of the same corpus and options, because an
interrupted preparation must not go on by other rules. Finished stores stay as they are.
"""


def diff_plans(recorded: dict[str, Any], plan: dict[str, Any]) -> list[str]:
    """Describe each difference between two plans, with both values."""
    lines = diff_options(recorded.get("options") or {}, plan["options"])
    if recorded.get("corpus") != plan["corpus"]:
        before, now = (
            dict.fromkeys(sum(side.values(), []))
            for side in (recorded.get("corpus") or {}, plan["corpus"])
        )
        removed = join_some((unit for unit in before if unit not in now), limit=3)
        added = join_some((unit for unit in now if unit not in before), limit=3)
        lines.append(f"the corpus had {removed or 'nothing more'}, has {added or 'nothing more'}")
    if "inputs" in plan:
        lines += diff_inputs(recorded.get("inputs"), plan["inputs"])
    if recorded.get("rules") != plan.get("rules"):
        lines.append("another version of mmldlm began it, which reads or splits texts otherwise")
    return lines or [f"another cut of the work ({recorded.get('shards')}, now {plan['shards']})"]


class WorkDir:
    """ROOT.work: the results of finished tasks as files, and the plan that they belong to.

    Args:
        root: Output folder.
        queue: Ranks of this launch.
    """

    def __init__(self, root: Path, queue: TaskQueue):
        self.root, self.queue = root, queue
        self.folder = root.with_name(f"{root.name}.work")
        self._lock: TextIO | None = None

    def open(self, plan: dict[str, Any], force: bool) -> bool:
        """Lock the folder and start, or resume an earlier launch. Rank 0 only.

        Returns:
            Whether there is earlier work to resume.

        Raises:
            UserError: another launch is at work, or the folder belongs to other options or another
                corpus.
        """
        check_writable_dir(self.folder, "--output-dir")
        self.folder.mkdir(parents=True, exist_ok=True)
        if not self._take_lock():
            raise UserError(
                f"no other preparation at work on {self.root}",
                f"one holds {self.folder / 'lock'}",
                "wait for it, or stop it; the next one resumes its work",
            )
        recorded = self._recorded_plan(force)
        if recorded is not None and "inputs" in plan:
            plan = {**plan, "inputs": with_known_versions(plan["inputs"], recorded.get("inputs"))}
        if recorded is not None and recorded != plan:
            if not force:
                raise UserError(
                    f"the options and corpus that {self.folder} was started with",
                    "; ".join(diff_plans(recorded, plan)),
                    "give the same to resume, --force to discard the earlier work, or another"
                    " --output-dir",
                )
            recorded = None
        if recorded is None:
            # What lies there without a plan may be of other options.
            self.clear()
            write_json(self.folder / PLAN, plan)
        return recorded is not None

    def _take_lock(self) -> bool:
        """Lock the folder; return False if another launch holds it."""
        if self._lock is not None:
            return True
        lock = open_append(self.folder / "lock")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.close()
            return False
        except OSError:
            # A file system without locks: the user must keep launches apart.
            pass
        self._lock = lock
        return True

    def _recorded_plan(self, force: bool) -> dict[str, Any] | None:
        """Return the plan of an earlier launch; None without one, or for a damaged one that is to
        be discarded.
        """
        if not os.path.lexists(self.folder / PLAN):
            return None
        try:
            fix = "give --force to discard the earlier work"
            return read_json(self.folder / PLAN, fix, 1 << 30)
        except UserError:
            if not force:
                raise
            return None

    def read_plan(self) -> dict[str, Any]:
        """Return the plan that rank 0 has written."""
        return read_json(self.folder / PLAN, "rerun the same command", 1 << 30)

    def clear(self) -> None:
        """Discard all results; the lock stays."""
        for path in self.folder.iterdir():
            if path.is_dir():
                shutil.rmtree(path)
            elif path.name != "lock":
                path.unlink()

    def remove(self) -> None:
        """Delete the folder, when the output is complete; not that of another launch at work."""
        with contextlib.suppress(OSError):
            if self.folder.is_dir() and self._take_lock():
                shutil.rmtree(self.folder, ignore_errors=True)
                self._lock = None

    def run(
        self,
        stage: str,
        count: int,
        run_task: Callable[[int, Path], None],
        on_done: Callable[[int], None] = lambda task: None,
    ) -> list[Path]:
        """Run the tasks of a stage that have no result yet, shared by all ranks.

        Args:
            stage: Name of the stage, used once.
            count: Number of tasks.
            run_task: Function that writes the result of a task, a file or a folder, atomically to
                a path.
            on_done: Function that is called on one rank for each finished task.

        Returns:
            The path of each task's result, when all tasks are done.
        """
        folder = self.folder / stage
        folder.mkdir(exist_ok=True)
        paths = [folder / f"{task:06d}" for task in range(count)]
        for task in self.queue.claim(stage, count):
            if not paths[task].exists():
                run_task(task, paths[task])
            on_done(task)
        self.queue.barrier(stage)
        return paths


QUARANTINE = "quarantine.jsonl"


def existing_output(root: Path, plan: dict[str, Any]) -> str | None:
    """Return how far the folder is known to be the result of this plan; None if it is not.

    Stores of earlier versions know the names and sizes of their files (of texts) alone, not the
    content: they count.
    """
    try:
        manifest = read_json(root / MANIFEST, "")
        # Earlier versions recorded --max-quarantined, which does not change the result.
        options = {**manifest["options"], "max_quarantined": None}
        if options != {**plan["options"], "max_quarantined": None}:
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
    except (
        UserError,
        AttributeError,
        TypeError,
        KeyError,
    ):  # not a manifest, or not of such entries
        pass
    return None


def plan_digest(plan: dict[str, Any]) -> str:
    """SHA-256 of what a plan reads: the units of its corpora, and the content of all files."""
    return _digest([plan["corpus"], plan["inputs"]])


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()


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
    if force and (others := _files_beside(root)):
        raise UserError(
            f"nothing but the store at {root}, which --force deletes",
            join_some(others),
            "move it elsewhere, or choose another --output-dir",
        )


def _files_beside(root: Path) -> list[str]:
    """Return the files and folders in a store's folder that its manifest does not list."""
    try:
        manifest = read_json(root / MANIFEST, "")
        is_files_layout = manifest.get("format") == FILES_FORMAT
        listed = FILES_LAYOUT if is_files_layout else manifest["files"]
        known = {MANIFEST, QUARANTINE, *(name.split("/")[0] for name in listed)}
        return sorted(path.name for path in root.iterdir() if path.name not in known)
    except (UserError, OSError, KeyError, TypeError, AttributeError):
        return []


def _describe_existing(root: Path, plan: dict[str, Any] | None) -> str:
    try:
        manifest = read_json(root / MANIFEST, "")
        options = manifest["options"]
    except (UserError, KeyError):
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


def write_manifest(folder: Path, manifest: dict[str, Any]) -> None:
    """Write the manifest of a finished folder, and assert that a store opens with the written
    number of samples.
    """
    write_json(folder / MANIFEST, manifest)
    if manifest["format"] == FORMAT:
        for name, summary in manifest["splits"].items():
            assert len(Store(folder, name)) == summary["num_samples"]


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
