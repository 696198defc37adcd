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
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from mmldlm.checkpoints.manifest import FORMAT, MANIFEST, VERSION, describe_file, list_files, read_manifest, verify
from mmldlm.errors import MmldlmError, UserError

CHECKPOINTS = "checkpoints"
LATEST = "latest"
_STEP = re.compile(r"step_(\d{8,})")
_OWNER = re.compile(r"(?:pp_rank_|rng_state_rank|ema_rank|^__)(\d+)")


class CommitFailed(MmldlmError):
    """A checkpoint could not be saved. Raised on every rank alike; the previous one and `latest` are as before."""


class Peers(NamedTuple):
    """How the ranks agree. Both callables are collective: every rank calls them the same number of times.

    Attributes:
        all_ok: True on every rank if every rank passed True (an all-reduce AND).
        barrier: returns once every rank has called it.
        gather: what every rank that has something to say says, on every rank.
    """

    rank: int
    world_size: int
    barrier: Callable[[], None]
    all_ok: Callable[[bool], bool]
    gather: Callable[[str | None], list[str]] = lambda text: [] if text is None else [text]


ALONE = Peers(rank=0, world_size=1, barrier=lambda: None, all_ok=lambda ok: ok)


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

    def __init__(self, run_dir: Path, step: int, peers: Peers):
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
        self.agree("writing its files", saved)
        if not sealed:
            error = _try(self.seal)
            self.agree("flushing its files to the disk", error)
        error = _try(self._publish, facts) if self.peers.rank == 0 else None
        self.agree("publishing the checkpoint", error)
        return self.final

    def abandon(self) -> None:
        """Removes the partial folder. Collective."""
        self.peers.barrier()
        if self.peers.rank == 0:
            shutil.rmtree(self.path, ignore_errors=True)
            heal(self.run_dir)
        self.peers.barrier()

    def agree(self, doing: str, error: BaseException | None) -> None:
        """Go on when all ranks did this without an error; else remove the checkpoint. Collective.

        Raises:
            CommitFailed: on every rank, naming those that had one.
        """
        if self.peers.all_ok(error is None):
            return
        # Free space is asked for before the partial files go: torch does not say that the disk is full.
        own = f"{type(error).__name__}: {error}; {_free_space(self.run_dir)} free on its disk" if error else None
        said = self.peers.gather(own)
        self.abandon()
        who = "; ".join(said[:3]) or "on another rank"
        more = f", and {len(said) - 3} more ranks" if len(said) > 3 else ""
        raise CommitFailed(
            f"checkpoint of step {self.step} was not saved: {doing} failed ({who}{more}). "
            f"The previous checkpoint in {self.run_dir} is untouched."
        ) from error

    def seal(self) -> None:
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
        if self.final.exists():
            # A step saved again, after a resume from an earlier one. heal() undoes this rename after a crash here.
            shutil.rmtree(replaced, ignore_errors=True)
            os.rename(self.final, replaced)
        os.rename(self.path, self.final)
        fsync_path(self.final.parent)
        point_latest(self.run_dir, self.final)
        shutil.rmtree(replaced, ignore_errors=True)


def begin(run_dir: Path | str, step: int, peers: Peers = ALONE) -> PendingCheckpoint:
    """Starts a checkpoint: rank 0 clears what crashed saves left and makes the partial folder. Collective.

    Raises:
        CommitFailed: on every rank, if the folder cannot be made or another rank cannot see it.
    """
    pending = PendingCheckpoint(Path(run_dir), step, peers)
    error = _try(_prepare, pending) if peers.rank == 0 else None
    pending.agree("making its folder", error)
    error = None if pending.path.is_dir() else FileNotFoundError(f"{pending.path} is not visible here")
    pending.agree("seeing its folder (logging.save_dir must be shared by all hosts)", error)
    return pending


def _prepare(pending: PendingCheckpoint) -> None:
    parent = pending.final.parent
    parent.mkdir(parents=True, exist_ok=True)
    heal(pending.run_dir)
    for stale in [*parent.glob(".partial_*"), *parent.glob(".deleting_*"), *parent.glob(".replaced_*")]:
        try:
            shutil.rmtree(stale)
        except OSError:
            # NFS keeps a file that some process still has open. Only a folder of this very name is in the way.
            if stale == pending.path:
                os.rename(stale, _free_name(stale.with_name(f".stale{stale.name}")))
    pending.path.mkdir()
    fsync_path(parent)


def heal(run_dir: Path) -> None:
    """Puts back a checkpoint that a crash caught moved aside, while its replacement was not in place yet."""
    for aside in (run_dir / CHECKPOINTS).glob(".replaced_step_*"):
        final = aside.with_name(aside.name.removeprefix(".replaced_"))
        if not final.exists():
            try:
                os.rename(aside, final)
            except OSError:  # another process did it, or the run is read-only; verify() will tell
                pass


def point_latest(run_dir: Path, target: Path) -> None:
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


def read_latest(run_dir: Path) -> Path | None:
    """The folder that RUN/latest names, whether or not it exists; None without a `latest`."""
    latest = run_dir / LATEST
    if latest.is_symlink():
        return run_dir / os.readlink(latest)
    if latest.is_file():
        return run_dir / latest.read_text(errors="replace").strip()
    return None


def list_checkpoints(run_dir: Path | str) -> list[tuple[int, Path]]:
    """(step, folder) of every committed checkpoint of a run, oldest first, whole or not."""
    parent = Path(run_dir) / CHECKPOINTS
    found = []
    if parent.is_dir():
        for path in parent.iterdir():
            if (match := _STEP.fullmatch(path.name)) and path.is_dir():
                found.append((int(match[1]), path))
    return sorted(found)


def drop_after(run_dir: Path | str, step: int) -> list[Path]:
    """Moves the checkpoints of later steps aside (checkpoints/.dropped_step_N), and `latest` to the newest one left.

    For a run that goes on from `step`: theirs is a future that it has left, and `auto` must not find it. Call it on one
    rank. Returns where they are now.
    """
    run_dir, dropped = Path(run_dir), []
    steps = list_checkpoints(run_dir)
    later = [path for found, path in steps if found > step]
    left = [path for found, path in steps if found <= step]
    if later and left:  # first, so that a crash in between leaves a `latest` that exists
        point_latest(run_dir, left[-1])
    for path in later:
        dropped.append(_free_name(path.with_name(f".dropped_{path.name}")))
        os.rename(path, dropped[-1])
    return dropped


def is_fit(path: Path) -> bool:
    """Whether a rollback may go there: saved amid skipped steps, the weights may be what made them bad."""
    return not (read_manifest(path).get("consecutive_skips") or 0)


def find_latest_whole(
    run_dir: Path | str,
    on_damaged: Callable[[str], None] = lambda message: None,
    checksums: bool = True,
    for_rollback: bool = False,
    below: int | None = None,
) -> Path | None:
    """The newest whole checkpoint of a run; None if there is none. `on_damaged` gets one line for each damaged one.

    Call it on one rank and tell the others: with `checksums` it reads every byte.

    Args:
        for_rollback: of those that are fit for it. below: of steps before this one.
    """
    run_dir = Path(run_dir)
    heal(run_dir)
    for step, path in reversed(list_checkpoints(run_dir)):
        if below is not None and step >= below:
            continue
        problems = verify(path, checksums=checksums)
        if not problems and for_rollback and not is_fit(path):
            continue
        if not problems:
            return path
        more = f" (and {len(problems) - 1} more problems)" if len(problems) > 1 else ""
        on_damaged(f"checkpoint {path.name} is damaged and was skipped: {problems[0]}{more}")
    return None


def resolve(path: Path | str) -> Path:
    """The checkpoint folder for training.resume=PATH: a run, RUN/latest, RUN/checkpoints/step_N.

    Only presence and sizes of its files are checked.

    Raises:
        UserError: nothing there, no checkpoint there, or a damaged one (its file is named).
    """
    path = Path(path)
    expected = f"a run, its `latest`, or a checkpoints/step_* folder at {path}"
    folder: Path | None = path
    if path.name == LATEST and (path.is_symlink() or path.is_file()):
        heal(path.parent)
        folder = read_latest(path.parent)
    elif path.is_dir() and not (path / MANIFEST).exists() and not _STEP.fullmatch(path.name):
        run_dir = path.parent if path.name == CHECKPOINTS else path
        heal(run_dir)
        folder = read_latest(run_dir)
        if folder is None:
            steps = list_checkpoints(run_dir)
            if not steps:
                inside = sorted(p.name for p in path.iterdir())[:5]
                raise UserError(
                    expected,
                    f"a folder without checkpoints ({', '.join(inside) or 'empty'})",
                    "check logging.save_dir and logging.run_name, or start without training.resume",
                )
            folder = steps[-1][1]
    if folder is None or not folder.is_dir():
        what = "nothing" if folder in (None, path) else f"a `latest` that names {folder}, which does not exist"
        raise UserError(expected, what, "check the path; training.resume=auto takes the newest whole checkpoint")
    problems = verify(folder, checksums=False)
    if problems:
        raise UserError(
            f"a whole checkpoint in {folder}",
            "; ".join(problems[:3]),
            "training.resume=auto takes the newest whole checkpoint of the run",
        )
    return folder.resolve()


def prune(run_dir: Path | str, keep_last: int, keep_every: int = 0) -> list[Path]:
    """Deletes old checkpoints; call on rank 0 only, after a commit. Returns what was deleted.

    Kept: the `keep_last` newest whole ones that a rollback may go to (at least one), every step divisible by
    `keep_every` (if > 0), what `latest` names, and others newer than the oldest of the former. "Whole" means present
    with the right sizes.
    """
    run_dir = Path(run_dir)
    steps = list_checkpoints(run_dir)
    whole = [path for _, path in steps if not verify(path, checksums=False)]
    newest = [path for path in whole if is_fit(path)][-max(1, keep_last) :]
    if not newest:
        return []
    latest = read_latest(run_dir)
    oldest_kept = next(step for step, path in steps if path == newest[0])
    deleted = []
    for step, path in steps:
        is_due = path in whole and keep_every > 0 and step % keep_every == 0
        if path in newest or is_due or (latest is not None and path.name == latest.name) or step > oldest_kept:
            continue
        delete(path)
        deleted.append(path)
    return deleted


def delete(path: Path) -> None:
    """Removes a checkpoint. The manifest goes first: what a crash leaves can never pass for a whole one."""
    (path / MANIFEST).unlink(missing_ok=True)
    fsync_path(path)
    gone = path.with_name(f".deleting_{path.name}")
    shutil.rmtree(gone, ignore_errors=True)
    os.rename(path, gone)
    shutil.rmtree(gone)


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


def _free_space(path: Path) -> str:
    try:
        return f"{shutil.disk_usage(path).free / 2**20:,.0f} MiB"
    except OSError:
        return "an unknown amount"


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


__all__ = [
    "ALONE", "CommitFailed", "Peers", "PendingCheckpoint", "begin", "delete", "drop_after", "find_latest_whole",
    "is_fit", "list_checkpoints", "owner_of", "point_latest", "prune", "read_latest", "read_manifest", "resolve",
    "step_name", "verify",
]  # fmt: skip
