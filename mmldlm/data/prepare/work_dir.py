"""The folder next to the output that keeps finished work, so that a killed preparation can be
resumed.
"""

from __future__ import annotations

import fcntl
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mmldlm.data.prepare.inputs import FileIdentities, diff_inputs, with_known_versions
from mmldlm.data.prepare.options import diff_options
from mmldlm.data.prepare.task_queue import TaskQueue
from mmldlm.errors import UserError
from mmldlm.utils.atomic_files import write_json
from mmldlm.utils.formatting import join_some
from mmldlm.utils.input_files import open_append, read_text
from mmldlm.utils.paths import check_writable_dir

PLAN = "plan.json"
_IDENTITIES = "file_identities.json"


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
        self._lock = None

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
        self._lock = open_append(self.folder / "lock")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(
                f"no other preparation at work on {self.root}",
                f"one holds {self.folder / 'lock'}",
                "wait for it, or stop it; the next one resumes its work",
            ) from None
        except OSError:
            # A file system without locks: the user must keep launches apart.
            pass
        path = self.folder / PLAN
        recorded = json.loads(read_text(path, 1 << 30)) if path.is_file() else None
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
            self.clear()
            recorded = None
        if recorded is None:
            write_json(path, plan)
        return recorded is not None

    def identities(self) -> FileIdentities:
        """Return the identities of input files that an earlier launch has found; rank 0 saves new
        ones.
        """
        return FileIdentities(self.folder / _IDENTITIES)

    def read_plan(self) -> dict[str, Any]:
        """Return the plan that rank 0 has written."""
        return json.loads((self.folder / PLAN).read_text(encoding="utf-8"))

    def clear(self) -> None:
        """Discard all results; the lock stays."""
        for path in self.folder.iterdir():
            if path.is_dir():
                shutil.rmtree(path)
            elif path.name != "lock":
                path.unlink()

    def remove(self) -> None:
        """Delete the folder, when the output is complete."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def task_paths(self, stage: str, count: int) -> list[Path]:
        """Return the path of each task's result, a file or a folder, and create the folder of the
        stage.
        """
        (self.folder / stage).mkdir(exist_ok=True)
        return [self.folder / stage / f"{index:06d}" for index in range(count)]

    def run(
        self,
        stage: str,
        paths: list[Path],
        run_task: Callable[[int], None],
        on_done: Callable[[int], None],
    ) -> None:
        """Run the tasks of a stage that have no result yet, shared by all ranks; return when all
        tasks are done.

        Args:
            stage: Name of the stage, used once.
            paths: Results of the tasks.
            run_task: Function that writes paths[i] atomically.
            on_done: Function that is called on one rank for each finished task.
        """
        for task in self.queue.claim(stage, len(paths)):
            if not paths[task].exists():
                run_task(task)
            on_done(task)
        self.queue.barrier(stage)
