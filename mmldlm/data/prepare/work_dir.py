"""The folder beside the output in which a preparation keeps what is done, so that it can be killed and go on."""

from __future__ import annotations

import fcntl
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mmldlm.data.prepare.options import diff_options
from mmldlm.data.prepare.task_queue import TaskQueue
from mmldlm.errors import UserError
from mmldlm.utils.atomic_files import write_json
from mmldlm.utils.output_paths import check_writable_dir

PLAN = "plan.json"
_MOST_NAMED = 3


def differences(found: dict[str, Any], plan: dict[str, Any]) -> list[str]:
    """What distinguishes two plans, with both values."""
    lines = diff_options(found.get("options") or {}, plan["options"])
    if found.get("corpus") != plan["corpus"]:
        before, now = (dict.fromkeys(sum(side.values(), [])) for side in (found.get("corpus") or {}, plan["corpus"]))
        lost = [unit for unit in before if unit not in now]
        new = [unit for unit in now if unit not in before]
        lines.append(f"the corpus had {join_some(lost)}, has {join_some(new)}")
    return lines or [f"another cut of the work ({found.get('shards')}, now {plan['shards']})"]


def join_some(units: list[str]) -> str:
    more = f" and {len(units) - _MOST_NAMED} more" if units[_MOST_NAMED:] else ""
    return ", ".join(units[:_MOST_NAMED]) + more or "nothing more"


class WorkDir:
    """ROOT.work: finished tasks as files, and the plan that they belong to.

    Args:
        root: the folder that is being made. peers: of this launch.
    """

    def __init__(self, root: Path, peers: TaskQueue):
        self.root, self.peers = root, peers
        self.folder = root.with_name(f"{root.name}.work")
        self._lock = None

    def open(self, plan: dict[str, Any], force: bool) -> bool:
        """Start, or go on where an earlier launch stopped. Rank 0 only.

        Returns:
            Whether there was something to go on with.

        Raises:
            UserError: another launch is at work, or the folder belongs to other options or another corpus.
        """
        check_writable_dir(self.folder, "--output-dir")
        self.folder.mkdir(parents=True, exist_ok=True)
        self._lock = open(self.folder / "lock", "a")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(
                f"no other preparation at work on {self.root}",
                f"one holds {self.folder / 'lock'}",
                "wait for it, or end it; the next one goes on where it stopped",
            ) from None
        except OSError:  # a file system without locks: the user keeps launches apart
            pass
        path = self.folder / PLAN
        found = json.loads(path.read_text()) if path.is_file() else None
        if found is not None and found != plan:
            if not force:
                raise UserError(
                    f"the options and corpus with which {self.folder} was begun",
                    "; ".join(differences(found, plan)),
                    "give the same to go on, or --force to throw away what was done so far, or another --output-dir",
                )
            self.clear()
            found = None
        if found is None:
            write_json(path, plan)
        return found is not None

    def clear(self) -> None:
        """Throw away what was done; the lock stays."""
        for path in self.folder.iterdir():
            if path.is_dir():
                shutil.rmtree(path)
            elif path.name != "lock":
                path.unlink()

    def remove(self) -> None:
        """The output is whole: nothing of this is needed any more."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def claim_tasks(self, stage: str, count: int) -> list[Path]:
        """The files (or folders) that the tasks of a stage end in."""
        (self.folder / stage).mkdir(exist_ok=True)
        return [self.folder / stage / f"{number:06d}" for number in range(count)]

    def run(self, stage: str, paths: list[Path], do: Callable[[int], None], done: Callable[[int], None]) -> None:
        """Do every task of a stage whose file is not there yet, shared by all ranks; ends when all of them are done.

        Args:
            do: makes paths[i], wholly or not at all. done: called for a task that needs nothing more.
        """
        for number in self.peers.claim(stage, len(paths)):
            if not paths[number].exists():
                do(number)
            done(number)
        self.peers.barrier(stage)
