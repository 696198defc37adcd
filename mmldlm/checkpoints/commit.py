"""Atomic, crash-safe checkpoint commits.

    RUN/checkpoints/step_00001000/{engine files, training_state.json, ..., manifest.json}
    RUN/latest -> checkpoints/step_00001000

The order of operations tolerates a crash at any point: write into .partial_step_N; every rank
fsyncs and lists the files that it wrote; rank 0 writes the manifest, fsyncs it and the folders,
renames the folder, fsyncs its parent, and moves `latest` last.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from mmldlm.checkpoints.locate import recover_interrupted_commit, replaced_path
from mmldlm.checkpoints.manifest import (
    FORMAT,
    MANIFEST,
    VERSION,
    describe_file,
    examine,
    list_files,
)
from mmldlm.distributed.collectives import Ranks
from mmldlm.errors import MmldlmError, UserError
from mmldlm.utils.atomic_files import fsync_path, write_text_synced
from mmldlm.utils.run_files import CHECKPOINTS, LATEST

_OWNER = re.compile(r"(?:pp_rank_|rng_state_rank|ema_rank|^__)(\d+)")
# The first file that every rank writes in a new checkpoint.
_PROBE_FILE = ".try_rank"
# The longest name of a file inside a checkpoint.
_MAX_NAME_LENGTH = 64
# Fixes for errors of the system that have one.
_ADVICE = {
    errno.ENOSPC: "free the disk",
    errno.EDQUOT: "free space within the quota",
    errno.EROFS: "mount it for writing again",
    errno.EACCES: "give this user the right to write there",
    errno.EPERM: "give this user the right to write there",
    errno.ENAMETOOLONG: "choose a shorter logging.save_dir or logging.run_name",
    errno.ENOENT: "the folder is gone: put it back, or mount it again",
    errno.ENOTDIR: "a file is in the place of a folder: move it away",
    errno.EIO: "check the disk and the system log (dmesg)",
    errno.ESTALE: "the file server has lost the folder: mount it again",
}
# A disk with fewer bytes left counts as full.
_DISK_FULL_BYTES = 16 * 2**20


class CommitFailed(MmldlmError):
    """A checkpoint could not be saved, or is complete while `latest` could not be moved to it.

    Raised on all ranks; the previous checkpoint is unchanged, or that of the same step replaced by
    the complete one.
    """


def step_name(step: int) -> str:
    """Return the folder name of a step."""
    return f"step_{step:08d}"


def owner_of(name: str, world_size: int) -> int:
    """Return the rank that wrote a file, by the file names of DeepSpeed, DCP and mmldlm; 0 for any
    other name.

    The rank that wrote a file must fsync it: on a network file system no other host can flush its
    pages.
    """
    match = _OWNER.search(Path(name).name)
    rank = int(match[1]) if match else 0
    return rank if rank < world_size else 0


class PendingCheckpoint:
    """A checkpoint being written. Write files below `path`, then call commit() on every rank.

    Attributes:
        run_dir: Folder of the run.
        step: Training step.
        ranks: Ranks of the run.
        path: Folder to write into, RUN/checkpoints/.partial_step_N.
        final: Path after the commit, RUN/checkpoints/step_N.
    """

    def __init__(self, run_dir: Path, step: int, ranks: Ranks):
        self.run_dir, self.step, self.ranks = run_dir, step, ranks
        self.final = run_dir / CHECKPOINTS / step_name(step)
        self.path = self.final.with_name(f".partial_{self.final.name}")
        self._is_published = False

    def commit(
        self, error: BaseException | None = None, *, has_entry: bool = False, **metadata: Any
    ) -> Path:
        """Publish the checkpoint, or remove it, on all ranks. Collective.

        Args:
            error: Exception that writing the files raised on this rank; None on success. Passing
                it here instead of raising keeps the ranks in step.
            has_entry: Whether write_manifest_entry() was called already (in the thread that wrote
                the files).
            **metadata: Further entries of the manifest, e.g. engine="deepspeed", stage=2.

        Returns:
            The folder RUN/checkpoints/step_N.

        Raises:
            CommitFailed: on every rank, if anything failed on any rank. Also where `latest` alone
                could not be moved: whoever follows it would continue from an earlier step, so the
                save is worth a retry.
        """
        self.raise_together("writing its files", error)
        if not has_entry:
            error = _try(self.write_manifest_entry)
            self.raise_together("flushing its files to the disk", error)
        error = _try(self._publish, metadata) if self.ranks.rank == 0 else None
        self.raise_together("publishing the checkpoint", error)
        return self.final

    def discard(self) -> None:
        """Remove the partial folder. Collective."""
        self.ranks.barrier()
        if self.ranks.rank == 0:
            shutil.rmtree(self.path, ignore_errors=True)
            _try(recover_interrupted_commit, self.run_dir)
        self.ranks.barrier()

    def raise_together(self, phase: str, error: BaseException | None) -> None:
        """Return if no rank had an error in this phase; otherwise remove the checkpoint, unless it
        is published. Collective.

        Raises:
            CommitFailed: on every rank, with the errors.
        """

        def discard_and_explain(own_error: BaseException | None) -> CommitFailed:
            message = None
            if own_error is not None:
                # The disk is examined before the partial files, which may fill it, are removed.
                advice = _advice(own_error, self.path)
                message = f"{type(own_error).__name__}: {own_error}{advice}"
            messages = self.ranks.gather_messages(message)
            self.discard()
            more = f", and {len(messages) - 3} more ranks" if len(messages) > 3 else ""
            reasons = "; ".join(messages[:3]) + more
            # Only rank 0 knows.
            if not self.ranks.all_agree(not self._is_published):
                return CommitFailed(
                    f"checkpoint of step {self.step} is complete in {self.final}, but moving"
                    f" `{LATEST}` to it failed ({reasons}): `{LATEST}` may name an earlier one,"
                    " or none; training.resume=auto finds the complete one"
                )
            # There is none while a conversion writes the first checkpoint of its run.
            is_kept = os.path.lexists(self.run_dir / LATEST)
            previous = ""
            if is_kept:
                previous = f" The previous checkpoint in {self.run_dir} is untouched."
            return CommitFailed(
                f"checkpoint of step {self.step} was not saved: {phase} failed"
                f" ({reasons}).{previous}"
            )

        self.ranks.raise_together(error, discard_and_explain)

    def write_manifest_entry(self, written: Iterable[Path] = ()) -> None:
        """Flush this rank's files to the disk and list them with sizes and checksums.

        Not collective.

        Args:
            written: Files that this rank wrote. Only rank 0 lists the folder, where it takes all
                that are not named after another rank: by 1,024 ranks, a million names would be
                read.
        """
        names = [path.relative_to(self.path).as_posix() for path in written]
        if self.ranks.rank == 0:
            names = [
                name
                for name in list_files(self.path)
                if owner_of(name, self.ranks.world_size) == 0
                # begin() has removed stale ones.
                and not name.startswith(".files_rank")
            ]
        for name in names:
            fsync_path(self.path / name)
        files = {name: describe_file(self.path / name) for name in names}
        write_text_synced(self.path / f".files_rank{self.ranks.rank}.json", json.dumps(files))

    def _publish(self, metadata: dict[str, Any]) -> None:
        files: dict[str, dict] = {}
        lists = [self.path / f".files_rank{rank}.json" for rank in range(self.ranks.world_size)]
        for rank, path in enumerate(lists):
            try:
                files.update(json.loads(path.read_text(encoding="utf-8")))
            except FileNotFoundError:
                raise UserError(
                    f"{self.run_dir} on a file system that all hosts share",
                    f"files of rank {rank} that rank 0 cannot see",
                    "set logging.save_dir to a shared folder",
                ) from None
            path.unlink()
        folders = []
        for root, _, names in os.walk(self.path):
            folders.append(Path(root))
            for path in (Path(root, name) for name in names):
                listed = files.get(path.relative_to(self.path).as_posix())
                if listed is None or path.stat().st_size != listed["bytes"]:
                    raise RuntimeError(f"{path} changes while the checkpoint is committed")
        manifest = {
            "format": FORMAT,
            "version": VERSION,
            "step": self.step,
            "world_size": self.ranks.world_size,
            **metadata,
            "files": {name: files[name] for name in sorted(files)},
        }
        write_text_synced(self.path / MANIFEST, json.dumps(manifest, indent=1) + "\n")
        for folder in folders:
            fsync_path(folder)
        replaced = replaced_path(self.final)
        if os.path.lexists(self.final):
            if _is_replaceable(self.final):
                # A step saved again after a rollback; recover_interrupted_commit() undoes this
                # rename after a crash, and readers look here meanwhile.
                shutil.rmtree(replaced, ignore_errors=True)
                os.rename(self.final, replaced)
            else:
                set_aside(self.final)
        os.rename(self.path, self.final)
        self._is_published = True
        try:
            fsync_path(self.final.parent)
            update_link(self.run_dir, LATEST, self.final)
        finally:
            shutil.rmtree(replaced, ignore_errors=True)


def begin(
    run_dir: Path | str, step: int, ranks: Ranks | None = None, folders: Sequence[str] = ()
) -> PendingCheckpoint:
    """Start a checkpoint: rank 0 removes leftovers of crashed saves, and every rank tries to write
    in the new folder.

    Collective. The save of an engine may be collective too, and a rank that fails there would
    leave the others waiting. Likely failures are therefore provoked here.

    Args:
        run_dir: Folder of the run.
        step: Training step.
        ranks: Ranks of the run; None is this process alone.
        folders: Folders in the checkpoint that the engine writes to.

    Raises:
        CommitFailed: on every rank, if the folder cannot be made, or some rank cannot see it or
            write there.
    """
    ranks = ranks or Ranks()
    pending = PendingCheckpoint(Path(run_dir), step, ranks)
    error = _try(_prepare, pending, folders) if ranks.rank == 0 else None
    pending.raise_together("making its folder", error)
    error = _try(
        _try_writing,
        [pending.path, *(pending.path / name for name in folders)],
        f"{_PROBE_FILE}{ranks.rank}",
    )
    pending.raise_together(
        "trying to write in its folder (logging.save_dir must be shared by all hosts)", error
    )
    return pending


def _prepare(pending: PendingCheckpoint, folders: Sequence[str]) -> None:
    parent = pending.final.parent
    parent.mkdir(parents=True, exist_ok=True)
    # What it cannot restore must not be deleted below: it raises.
    recover_interrupted_commit(pending.run_dir)
    if os.path.lexists(pending.final):
        # A checkpoint that cannot be replaced is an error before anything is written.
        _is_replaceable(pending.final)
    patterns = (".partial_*", ".stale.*", ".deleting_*", ".replaced_*", ".longest_*")
    for stale in (path for pattern in patterns for path in parent.glob(pattern)):
        try:
            shutil.rmtree(stale)
        except OSError:
            # NFS keeps a file that a process still has open; only a folder of this name must go.
            if stale == pending.path:
                os.rename(stale, _free_name(stale.with_name(f".stale{stale.name}")))
    pending.path.mkdir()
    for name in folders:
        (pending.path / name).mkdir(parents=True, exist_ok=True)
    fsync_path(parent)


def _try_writing(folders: Sequence[Path], name: str) -> None:
    for folder in folders:
        path = folder / name
        path.write_bytes(b"tried\n")
        path.unlink()


def _is_replaceable(final: Path) -> bool:
    """Return whether an existing checkpoint of this step is complete and may be replaced; a
    damaged one is kept.

    Raises:
        RuntimeError: it cannot be read; it is left unchanged.
    """
    examination = examine(final, checksums=False)
    if examination.unreadable:
        raise RuntimeError(
            f"a checkpoint that cannot be read is not replaced: {examination.unreadable[0]}"
        )
    return not examination.damaged


def try_longest(run_dir: Path, last_step: int, folders: Sequence[str]) -> None:
    """Create and remove the longest path that a save of this run will need. Call it on one rank.

    Raises:
        OSError: the system refuses it, e.g. as too long.
    """
    parent = run_dir / CHECKPOINTS
    existed = parent.is_dir()
    # The name is as long as that of the partial folder.
    longest = parent / f".longest_{step_name(last_step)}"
    try:
        for folder in folders:
            (longest / folder).mkdir(parents=True, exist_ok=True)
            _try_writing([longest / folder], "n" * _MAX_NAME_LENGTH)
    finally:
        shutil.rmtree(longest, ignore_errors=True)
        if not existed:
            _try(parent.rmdir)


def update_link(run_dir: Path, name: str, target: Path) -> None:
    """Point one of LINKS to a checkpoint atomically: a symlink, or a text file where symlinks are
    not supported. A folder of that name is set aside first (see remove_link).
    """
    new = run_dir / f".{name}_new"
    new.unlink(missing_ok=True)
    relative = target.relative_to(run_dir).as_posix()
    try:
        os.symlink(relative, new, target_is_directory=True)
    except (OSError, NotImplementedError):
        write_text_synced(new, relative + "\n")
    if _is_folder(run_dir / name):
        remove_link(run_dir, name)
    os.replace(new, run_dir / name)
    fsync_path(run_dir)


def remove_link(run_dir: Path, name: str) -> None:
    """Remove one of LINKS. A folder, which is what a copy of the run that follows links makes of
    one, is renamed to NAME.copied: it may hold what is nowhere else.
    """
    link = run_dir / name
    if _is_folder(link):
        aside = _free_name(run_dir / f"{name}.copied")
        os.rename(link, aside)
        print(
            f"note: {link} was a folder, as a copy of the run that follows links makes it; it is"
            f" {aside} now (delete it when you no longer want it)",
            flush=True,
        )
    else:
        link.unlink(missing_ok=True)


def _is_folder(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


def set_aside(path: Path) -> Path:
    """Rename a checkpoint to checkpoints/.dropped_step_N, which is neither found nor deleted;
    return the new path.
    """
    new_path = _free_name(path.with_name(f".dropped_{path.name}"))
    os.rename(path, new_path)
    return new_path


def _free_name(path: Path) -> Path:
    """Return this path, or the first free one with a number appended."""
    original, suffix = path, 1
    while path.exists():
        suffix += 1
        path = original.with_name(f"{original.name}.{suffix}")
    return path


def _try(work: Callable[..., None], *args: Any) -> Exception | None:
    try:
        work(*args)
    except Exception as error:
        # The caller votes on it; raising here would leave the other ranks waiting.
        return error
    return None


def _advice(error: BaseException, folder: Path) -> str:
    """Return a fix for a failed write, to append to the error; "" if none is known."""
    code = _errno(error)
    # torch may hide the error of the system, which a small write then reveals.
    if code is None:
        code = _errno(_try(_try_writing, [folder], f"{_PROBE_FILE}_again"))
    free, inodes = _free_space(folder)
    if code == errno.ENOSPC or (code is None and free is not None and free < _DISK_FULL_BYTES):
        if inodes == 0:
            return (
                "; no inodes are free (df -i): delete or pack files on that disk, which holds too"
                " many"
            )
        return f"; {_ADVICE[errno.ENOSPC]} ({(free or 0) / 2**20:,.0f} MiB are free)"
    return f"; {_ADVICE[code]}" if code in _ADVICE else ""


def _errno(error: BaseException | None) -> int | None:
    while error is not None:
        if isinstance(error, OSError) and error.errno is not None:
            return error.errno
        error = error.__cause__
    return None


def _free_space(path: Path) -> tuple[int | None, int | None]:
    """Return the number of free bytes and of files that may still be created; None if unknown or
    without a limit.
    """
    for folder in (path, *path.parents):
        with contextlib.suppress(OSError):
            space = os.statvfs(folder)
            return space.f_bavail * space.f_frsize, space.f_favail if space.f_files else None
    return None, None
