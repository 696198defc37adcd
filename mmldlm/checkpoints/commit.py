"""A checkpoint exists wholly or not at all.

    RUN/checkpoints/step_00001000/{engine files, training_state.json, ..., manifest.json}
    RUN/latest -> checkpoints/step_00001000

The order that a crash at any point leaves sound: write into .partial_step_N; every rank fsyncs its files and lists
them; rank 0 writes the manifest, fsyncs it and the folders, renames the folder, fsyncs its parent, and only then moves
`latest`.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from mmldlm.checkpoints.locate import (
    CHECKPOINTS,
    LATEST,
    recover_interrupted_commit,
)
from mmldlm.checkpoints.manifest import FORMAT, MANIFEST, VERSION, describe_file, examine, list_files
from mmldlm.errors import MmldlmError, UserError

_OWNER = re.compile(r"(?:pp_rank_|rng_state_rank|ema_rank|^__)(\d+)")
_TRIAL = ".try_rank"  # every rank's first file in a new checkpoint
_LONGEST_NAME = 64  # at least that of any file below a checkpoint's folders
# What to do about an error of the system. Nothing is said of those that have no one remedy.
_ADVICE = {
    errno.ENOSPC: "free the disk",
    errno.EDQUOT: "free space within the quota",
    errno.EROFS: "mount it for writing again",
    errno.EACCES: "give this user the right to write there",
    errno.EPERM: "give this user the right to write there",
    errno.ENAMETOOLONG: "choose a shorter logging.save_dir or logging.run_name",
    errno.ENOENT: "the folder is gone: put it back, or mount it again",
    errno.ENOTDIR: "a file stands where a folder should be: move it away",
    errno.EIO: "look at the disk and at the system's log (dmesg)",
    errno.ESTALE: "the file server has lost the folder: mount it again",
}
_LITTLE = 16 * 2**20  # bytes left on a disk that counts as full


class CommitFailed(MmldlmError):
    """A checkpoint could not be saved. Raised on every rank alike; the previous one and `latest` are as before."""


class RankGroup(NamedTuple):
    """How the ranks agree. Both callables are collective: every rank calls them the same number of times.

    Attributes:
        all_ok: True on every rank if every rank passed True (an all-reduce AND).
        barrier: returns once every rank has called it.
        gather: what every rank that has something to say says, on every rank.
    """

    rank: int
    world_size: int
    barrier: Callable[[], None]
    all_agree: Callable[[bool], bool]
    gather: Callable[[str | None], list[str]] = lambda text: [] if text is None else [text]


SINGLE_RANK = RankGroup(rank=0, world_size=1, barrier=lambda: None, all_agree=lambda ok: ok)


def step_name(step: int) -> str:
    return f"step_{step:08d}"


def owner_of(name: str, world_size: int) -> int:
    """The rank that wrote a file, by the name that DeepSpeed, DCP and our own files give it; else rank 0.

    The writer itself must fsync: on a network file system another host cannot flush its pages.
    """
    found = _OWNER.search(Path(name).name)
    rank = int(found[1]) if found else 0
    return rank if rank < world_size else 0


class PendingCheckpoint:
    """A checkpoint being written. Write files below `path`, then call commit() on every rank.

    Attributes:
        path: RUN/checkpoints/.partial_step_N, to write into.
        final: RUN/checkpoints/step_N, where it will stand.
    """

    def __init__(self, run_dir: Path, step: int, peers: RankGroup):
        self.run_dir, self.step, self.peers = run_dir, step, peers
        self.final = run_dir / CHECKPOINTS / step_name(step)
        self.path = self.final.with_name(f".partial_{self.final.name}")

    def commit(self, saved: BaseException | None = None, *, sealed: bool = False, **facts: Any) -> Path:
        """Makes the checkpoint real, or removes it, on all ranks alike. Collective.

        Args:
            saved: the exception that writing the files ended with on this rank, None if it went well. Passing it here
                instead of raising keeps the ranks together.
            sealed: True where seal() was called already (in the thread that wrote the files).
            **facts: what else the manifest should say, e.g. engine="deepspeed", stage=2.

        Returns:
            The folder RUN/checkpoints/step_N.

        Raises:
            CommitFailed: on every rank, if anything failed on any rank.
        """
        self.raise_together("writing its files", saved)
        if not sealed:
            error = _try(self.write_manifest_entry)
            self.raise_together("flushing its files to the disk", error)
        error = _try(self._publish, facts) if self.peers.rank == 0 else None
        self.raise_together("publishing the checkpoint", error)
        return self.final

    def discard(self) -> None:
        """Removes the partial folder. Collective."""
        self.peers.barrier()
        if self.peers.rank == 0:
            shutil.rmtree(self.path, ignore_errors=True)
            _try(recover_interrupted_commit, self.run_dir)
        self.peers.barrier()

    def raise_together(self, doing: str, error: BaseException | None) -> None:
        """Go on when all ranks did this without an error; else remove the checkpoint. Collective.

        Raises:
            CommitFailed: on every rank, naming those that had one.
        """
        if self.peers.all_agree(error is None):
            return
        # Asked before the partial files go: they are what fills the disk.
        own = None if error is None else f"{type(error).__name__}: {error}{_advice(error, self.path)}"
        said = self.peers.gather(own)
        self.discard()
        who = "; ".join(said[:3]) or "on another rank"
        more = f", and {len(said) - 3} more ranks" if len(said) > 3 else ""
        raise CommitFailed(
            f"checkpoint of step {self.step} was not saved: {doing} failed ({who}{more}). "
            f"The previous checkpoint in {self.run_dir} is untouched."
        ) from error

    def write_manifest_entry(self) -> None:
        """Flushes this rank's files to the disk and lists them with sizes and checksums. No collective."""
        mine = [name for name in list_files(self.path) if owner_of(name, self.peers.world_size) == self.peers.rank]
        # Rank lists start with a dot and belong to rank 0's clean-up; a stale one cannot exist, begin() saw to that.
        mine = [name for name in mine if not name.startswith(".files_rank")]
        for name in mine:
            fsync_path(self.path / name)
        files = {name: describe_file(self.path / name) for name in mine}
        _write_synced(self.path / f".files_rank{self.peers.rank}.json", json.dumps(files))

    def _publish(self, facts: dict[str, Any]) -> None:
        files: dict[str, dict] = {}
        lists = [self.path / f".files_rank{rank}.json" for rank in range(self.peers.world_size)]
        for rank, path in enumerate(lists):
            try:
                files.update(json.loads(path.read_text()))
            except FileNotFoundError:
                raise UserError(
                    f"{self.run_dir} on a file system that all hosts share",
                    f"what rank {rank} wrote there is not visible to rank 0",
                    "set logging.save_dir to a shared folder",
                ) from None
            path.unlink()
        for name in list_files(self.path):
            if name not in files or (self.path / name).stat().st_size != files[name]["bytes"]:
                raise RuntimeError(f"{self.path / name} is being written while the checkpoint is committed")
        manifest = {
            "format": FORMAT,
            "version": VERSION,
            "step": self.step,
            "world_size": self.peers.world_size,
            **facts,
            "files": {name: files[name] for name in sorted(files)},
        }
        _write_synced(self.path / MANIFEST, json.dumps(manifest, indent=1) + "\n")
        for base, _, _ in os.walk(self.path):
            fsync_path(Path(base))
        replaced = self.final.with_name(f".replaced_{self.final.name}")
        if os.path.lexists(self.final):
            if _is_replaceable(self.final):
                # A step saved again, after a rollback. heal() undoes this rename after a crash here.
                shutil.rmtree(replaced, ignore_errors=True)
                os.rename(self.final, replaced)
            else:
                set_aside(self.final)
        os.rename(self.path, self.final)
        fsync_path(self.final.parent)
        update_latest(self.run_dir, self.final)
        shutil.rmtree(replaced, ignore_errors=True)


def begin(
    run_dir: Path | str, step: int, peers: RankGroup = SINGLE_RANK, folders: Sequence[str] = ()
) -> PendingCheckpoint:
    """Starts a checkpoint: rank 0 clears what crashed saves left and makes the partial folder, and every rank tries to
    write in it. Collective.

    What can fail is tried here, because an engine's own save may be collective: a rank that failed in it would leave
    its peers waiting.

    Args:
        folders: those below the checkpoint that the engine writes in.

    Raises:
        CommitFailed: on every rank, if the folder cannot be made, or some rank cannot see it or write there.
    """
    pending = PendingCheckpoint(Path(run_dir), step, peers)
    error = _try(_prepare, pending, folders) if peers.rank == 0 else None
    pending.raise_together("making its folder", error)
    error = _try(_see, pending.path)
    pending.raise_together("seeing its folder (logging.save_dir must be shared by all hosts)", error)
    error = _try(_try_writing, [pending.path, *(pending.path / name for name in folders)], f"{_TRIAL}{peers.rank}")
    pending.raise_together("trying to write in its folder", error)
    return pending


def _prepare(pending: PendingCheckpoint, folders: Sequence[str]) -> None:
    parent = pending.final.parent
    parent.mkdir(parents=True, exist_ok=True)
    recover_interrupted_commit(pending.run_dir)
    if os.path.lexists(pending.final):
        _is_replaceable(pending.final)  # said now, not when everything is written
    patterns = (".partial_*", ".deleting_*", ".replaced_*", ".longest_*")
    for stale in (path for pattern in patterns for path in parent.glob(pattern)):
        try:
            shutil.rmtree(stale)
        except OSError:
            # NFS keeps a file that some process still has open. Only a folder of this very name is in the way.
            if stale == pending.path:
                os.rename(stale, _free_name(stale.with_name(f".stale{stale.name}")))
    pending.path.mkdir()
    for name in folders:
        (pending.path / name).mkdir(parents=True, exist_ok=True)
    fsync_path(parent)


def _see(path: Path) -> None:
    if not path.is_dir():
        raise FileNotFoundError(f"{path} is not visible here")


def _try_writing(folders: Sequence[Path], name: str) -> None:
    for folder in folders:
        path = folder / name
        path.write_bytes(b"tried\n")
        path.unlink()


def _is_replaceable(final: Path) -> bool:
    """Whether what stands where a checkpoint goes is a whole one; a damaged one is kept.

    Raises:
        RuntimeError: it cannot be read, and stays where it is.
    """
    found = examine(final, checksums=False)
    if found.unreadable:
        raise RuntimeError(f"a checkpoint that cannot be read is not replaced: {found.unreadable[0]}")
    return not found.damaged


def try_longest(run_dir: Path, last_step: int, folders: Sequence[str]) -> None:
    """Makes the longest path that a save of this run will need, and removes it again. Call it on one rank.

    Raises:
        OSError: the system refuses it, e.g. because it is too long.
    """
    parent = run_dir / CHECKPOINTS
    was_there = parent.is_dir()
    longest = parent / f".longest_{step_name(last_step)}"  # as long as .partial_
    try:
        for folder in folders:
            (longest / folder).mkdir(parents=True, exist_ok=True)
            _try_writing([longest / folder], "n" * _LONGEST_NAME)
    finally:
        shutil.rmtree(longest, ignore_errors=True)
        if not was_there:
            _try(parent.rmdir)


def update_latest(run_dir: Path, target: Path) -> None:
    """Moves RUN/latest to a checkpoint atomically: a symlink, or a text file where there are no symlinks."""
    beside = run_dir / f".{LATEST}_new"
    beside.unlink(missing_ok=True)
    relative = target.relative_to(run_dir).as_posix()
    try:
        os.symlink(relative, beside, target_is_directory=True)
    except (OSError, NotImplementedError):
        _write_synced(beside, relative + "\n")
    os.replace(beside, run_dir / LATEST)
    fsync_path(run_dir)


def set_aside(path: Path) -> Path:
    """Moves a checkpoint to checkpoints/.dropped_step_N, where nothing finds or deletes it; returns the new path."""
    aside = _free_name(path.with_name(f".dropped_{path.name}"))
    os.rename(path, aside)
    return aside


def _free_name(path: Path) -> Path:
    """This path, or with a number behind it the first that is not taken."""
    taken, number = path, 1
    while path.exists():
        number += 1
        path = taken.with_name(f"{taken.name}.{number}")
    return path


def _try(work: Callable[..., None], *args: Any) -> Exception | None:
    try:
        work(*args)
    except Exception as error:  # any failure must reach the vote; raising here would leave the peers waiting
        return error
    return None


def _advice(error: BaseException, folder: Path) -> str:
    """What to do about a failed write, ready to stand behind the error; "" where nothing is known."""
    number = _errno(error)
    if number is None:  # torch hides the error of the system
        number = _errno(_try(_try_writing, [folder], f"{_TRIAL}_again"))
    free = _free_bytes(folder)
    if number == errno.ENOSPC or (number is None and free is not None and free < _LITTLE):
        return f"; {_ADVICE[errno.ENOSPC]} ({(free or 0) / 2**20:,.0f} MiB are free)"
    return f"; {_ADVICE[number]}" if number in _ADVICE else ""


def _errno(error: BaseException | None) -> int | None:
    while error is not None:
        if isinstance(error, OSError) and error.errno is not None:
            return error.errno
        error = error.__cause__
    return None


def _free_bytes(path: Path) -> int | None:
    for place in (path, *path.parents):
        try:
            return shutil.disk_usage(place).free
        except OSError:
            continue
    return None


def _write_synced(path: Path, text: str) -> None:
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def fsync_path(path: Path) -> None:
    """Flushes a file or a folder to the disk."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    except OSError as error:
        # Some network file systems cannot fsync a folder and say EINVAL; a file that cannot be flushed is a failure.
        if error.errno != errno.EINVAL or not path.is_dir():
            raise
    finally:
        os.close(fd)
