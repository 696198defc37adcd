"""The names that the config key `task` takes.

A table of strings, so that no task is imported before it is chosen.
"""

from __future__ import annotations

import difflib
import importlib
import os
import sys
from functools import cache
from typing import TYPE_CHECKING

from mmldlm.errors import UserError
from mmldlm.utils.own_code import describe_error, os_exit_raises, place_of

if TYPE_CHECKING:
    from mmldlm.tasks.base import Task

TASKS = {
    "ar": "mmldlm.tasks.baselines.ar.task:ArTask",
    "corrector": "mmldlm.tasks.corrector.task:CorrectorTask",
    "gidd": "mmldlm.tasks.baselines.gidd.task:GiddTask",
    "hdlm": "mmldlm.tasks.baselines.hdlm.task:HdlmTask",
    "image_codes": "mmldlm.tasks.image_codes.task:ImageCodesTask",
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
        UserError: an unknown name, a module that cannot be imported, or a class that is not a
            Task.
    """
    target = TASKS.get(name, name)
    module_name, colon, class_name = target.partition(":")
    if not (
        module_name
        and colon
        and class_name
        and all(part.isidentifier() for part in module_name.split("."))
    ):
        close = difflib.get_close_matches(name, TASKS, n=1)
        hint = f" (did you mean {close[0]}?)" if close else ""
        raise UserError(
            f"task: one of {', '.join(TASKS)}, or package.module:Class",
            f"task={name}{hint}",
            "name a task that exists; docs/tasks.md shows how to write one",
        )
    if name not in TASKS and os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    with os_exit_raises():
        return _create(target, module_name, class_name)


def _create(target: str, module_name: str, class_name: str) -> Task:
    """Import the class of a task, check it, and return an instance."""
    example = "see docs/tasks.md for an example"
    try:
        task_class = getattr(importlib.import_module(module_name), class_name, None)
    except ImportError as error:
        raise UserError(
            f"an importable task {target}",
            f"{type(error).__name__}: {error}{_in_own_code(error)}",
            "start the command in the folder that holds the module, or add that folder to"
            " PYTHONPATH; install what the module imports",
        ) from error
    except (Exception, SystemExit) as error:
        found = f"{describe_error(error)} {place_of(error)}"
        raise UserError(f"an importable task {target}", found, "correct the module") from error
    if not (
        isinstance(task_class, type) and any(_is_base(base) for base in task_class.__mro__[1:])
    ):
        raise UserError(
            f"a subclass of mmldlm.tasks.base.Task at {target}", repr(task_class), example
        )
    config_class = getattr(task_class, "config_class", None)
    if not (isinstance(config_class, type) and issubclass(config_class, _config_base())):
        found = "none" if config_class is None else repr(config_class)
        raise UserError(
            f"config_class, a subclass of mmldlm.config.schema.Config, in {target}", found, example
        )
    if missing := sorted(getattr(task_class, "__abstractmethods__", ())):
        found = f"none of {', '.join(missing)}"
        raise UserError(f"every method of a task in {target}", found, f"write them; {example}")
    try:
        task = task_class()
    except (Exception, SystemExit) as error:
        found = f"{describe_error(error)} {place_of(error)}"
        raise UserError(f"{target}() without arguments", found, "correct its __init__") from error
    if problems := _wrong_declarations(task):
        raise UserError(f"the declarations of a task in {target}", "; ".join(problems), example)
    return task


def _wrong_declarations(task: Task) -> list[str]:
    """Return what is wrong with the class attributes of a task, of which no method is called
    before training.
    """
    problems = [] if isinstance(getattr(task, "name", None), str) else ["name is no text"]
    is_list = isinstance(task.sums, (tuple, list))
    if not (is_list and all(isinstance(name, str) for name in task.sums) and "loss" in task.sums):
        return [
            *problems,
            f'sums = {task.sums!r}, not names with "loss" among them, as ("loss", "correct")',
        ]
    for metric in task.metrics:
        numerator = getattr(metric, "numerator", None)
        if numerator not in task.sums:
            problems.append(f"metrics: {metric!r}, whose numerator is not one of sums")
    return problems


def _is_base(base: type) -> bool:
    return (base.__module__, base.__name__) == (
        "mmldlm.tasks.base",
        "Task",
    )  # which imports more than a config needs


def _config_base() -> type:
    from mmldlm.config.schema import Config  # which names the default task

    return Config


def _in_own_code(error: ImportError) -> str:
    """Return where the user's module fails to import something; "" where it is the module that is
    missing.
    """
    place = place_of(error)
    return (
        ""
        if os.path.dirname(os.path.abspath(__file__)) in place or "importlib" in place
        else f" {place}"
    )
