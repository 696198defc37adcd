"""The names that the config key `task` takes. A table of strings, so that no task is imported before it is chosen."""

from __future__ import annotations

import difflib
import importlib
import os
import sys
from functools import cache
from typing import TYPE_CHECKING

from mmldlm.errors import UserError

if TYPE_CHECKING:
    from mmldlm.tasks.base import Task

TASKS = {
    "ar": "mmldlm.tasks.baselines.ar.task:ArTask",
    "gidd": "mmldlm.tasks.baselines.gidd.task:GiddTask",
    "hdlm": "mmldlm.tasks.baselines.hdlm.task:HdlmTask",
    "image_text": "mmldlm.tasks.image_text.task:ImageTextTask",
    "mdlm": "mmldlm.tasks.baselines.mdlm.task:MdlmTask",
    "translation": "mmldlm.tasks.translation.task:TranslationTask",
}
DEFAULT_TASK = "translation"


@cache
def find_task(name: str) -> Task:
    """Return the task of a name in TASKS, or of `package.module:Class` on the Python path.

    The folder in which the command was started counts as part of the Python path.

    Raises:
        UserError: an unknown name, a module that cannot be imported, or a class that is not a Task.
    """
    target = TASKS.get(name, name)
    module_name, colon, class_name = target.partition(":")
    if not (module_name and colon and class_name):
        close = difflib.get_close_matches(name, TASKS, n=1)
        hint = f" (did you mean {close[0]}?)" if close else ""
        raise UserError(
            f"task: one of {', '.join(TASKS)}, or package.module:Class",
            f"task={name}{hint}",
            "name a task that exists; docs/tasks.md shows how to write one",
        )
    if name not in TASKS and os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        task_class = getattr(importlib.import_module(module_name), class_name, None)
    except ImportError as error:
        raise UserError(
            f"an importable task {target}",
            f"{type(error).__name__}: {error}",
            "start the command in the folder that holds the module, or add that folder to PYTHONPATH; "
            "install what the module imports",
        ) from error
    if not (isinstance(task_class, type) and hasattr(task_class, "config_class")):
        raise UserError(
            f"a subclass of mmldlm.tasks.base.Task at {target}", repr(task_class), "see docs/tasks.md for an example"
        )
    return task_class()
