"""The tasks that the config key `task` names, and what follows from a task's config.

A table of names, so that nothing is imported before it is chosen: the config of a task of mmldlm
does not import torch, its task does.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np

from mmldlm.config import load
from mmldlm.config.schema import Config
from mmldlm.config.task_names import TASK_NAMES
from mmldlm.data.lengths import AnyLengths
from mmldlm.data.run_data import RunData
from mmldlm.errors import UserError
from mmldlm.tasks.base import Task
from mmldlm.utils.formatting import did_you_mean
from mmldlm.utils.own_code import describe_error, os_exit_raises, place_of

# Name -> module:Class of its config, which starts without torch, and of the task; modules below
# mmldlm.tasks.
TASKS = {
    "ar": ("baselines.config:ArConfig", "baselines.ar:ArTask"),
    "corrector": ("corrector.config:CorrectorConfig", "corrector.task:CorrectorTask"),
    "gidd": ("baselines.config:GiddConfig", "baselines.gidd:GiddTask"),
    "hdlm": ("baselines.config:HdlmConfig", "baselines.hdlm:HdlmTask"),
    "image_codes": ("image_codes.config:ImageCodesConfig", "image_codes.task:ImageCodesTask"),
    "image_text": ("image_text.config:ImageTextConfig", "image_text.task:ImageTextTask"),
    "mdlm": ("baselines.config:MdlmConfig", "baselines.mdlm:MdlmTask"),
    "translation": ("translation.config:TranslationConfig", "translation.task:TranslationTask"),
}
assert tuple(TASKS) == TASK_NAMES


def load_config(
    name: str | None = None, path: str | None = None, overrides: Sequence[str] = ()
) -> Config:
    """Resolve a run's config: preset, then file, then overrides, each winning over what came
    before.

    Args:
        name: Preset (`--config-name`).
        path: YAML file (`--config`).
        overrides: `section.key=value` words; values are YAML.

    Raises:
        UserError: unknown preset, file, key, value or task, with the nearest known one.
    """
    return load.resolve_config(find_config_class, name, path, overrides)


def build_config(values: dict[str, Any]) -> Config:
    """Validate a nested dict, whose `task` names its keys; every problem is in one UserError."""
    return load.validate_config(find_config_class, values)


@cache
def find_config_class(name: str) -> type[Config]:
    """Return the class of a task's config, without importing a task of mmldlm.

    Raises:
        UserError: see `find_task`.
    """
    if name not in TASKS:
        return find_task(name).config_class
    module_name, _, class_name = TASKS[name][0].partition(":")
    return getattr(importlib.import_module(f"mmldlm.tasks.{module_name}"), class_name)


@cache
def find_task(name: str) -> Task:
    """Return the task of a name in TASKS, or of `package.module:Class` on the Python path.

    The folder in which the command was started counts as part of the Python path.

    Raises:
        UserError: an unknown name, a module that cannot be imported, or a class that is not a
            Task.
    """
    target = f"mmldlm.tasks.{TASKS[name][1]}" if name in TASKS else name
    module_name, colon, class_name = target.partition(":")
    if not (
        module_name
        and colon
        and class_name
        and all(part.isidentifier() for part in module_name.split("."))
    ):
        raise UserError(
            f"task: one of {', '.join(TASKS)}, or package.module:Class",
            f"task={name}{did_you_mean(name, TASKS)}",
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
        description = f"{describe_error(error)} {place_of(error)}"
        raise UserError(
            f"an importable task {target}", description, "correct the module"
        ) from error
    if not (isinstance(task_class, type) and Task in task_class.__mro__[1:]):
        raise UserError(
            f"a subclass of mmldlm.tasks.base.Task at {target}", repr(task_class), example
        )
    config_class = getattr(task_class, "config_class", None)
    if not (isinstance(config_class, type) and issubclass(config_class, Config)):
        description = "none" if config_class is None else repr(config_class)
        raise UserError(
            f"config_class, a subclass of mmldlm.config.schema.Config, in {target}",
            description,
            example,
        )
    try:
        task = task_class()
    except (Exception, SystemExit) as error:
        description = f"{describe_error(error)} {place_of(error)}"
        raise UserError(
            f"{target}() without arguments", description, f"correct the class; {example}"
        ) from error
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


def _in_own_code(error: ImportError) -> str:
    """Return where the user's module fails to import something; "" where the module itself is
    missing.
    """
    location = place_of(error)
    return (
        ""
        if os.path.dirname(os.path.abspath(__file__)) in location or "importlib" in location
        else f" {location}"
    )


def open_run_data(config: Config) -> RunData:
    """Let the task of a config open its data, and check what it returns: the task may be a user's
    own.

    Raises:
        UserError: as Task.open_data, or what it returns is not the data of a run.
    """
    task = find_task(config.task)
    data = task.open_data(config)
    where = f"{type(task).__module__}:{type(task).__name__}.open_data"
    if not isinstance(data, RunData):
        raise UserError(f"a RunData from {where}", repr(data)[:200], "return one (docs/tasks.md)")
    for name in ("train_lengths", "validation_lengths"):
        lengths = getattr(data, name)
        if not (
            isinstance(lengths, AnyLengths)
            and lengths.ndim == 1
            and np.issubdtype(lengths.dtype, np.integer)
        ):
            description = (
                f"{type(lengths).__name__} {getattr(lengths, 'dtype', '')}"
                f" {getattr(lengths, 'shape', '')}"
            )
            raise UserError(
                f"{name} of {where}: [N] integers of NumPy",
                description,
                "return np.array(..., dtype=np.int32)",
            )
        if not len(lengths):
            split = name.removesuffix("_lengths")
            raise UserError(
                f"a sample for {split} in {data.source}",
                "none",
                "give more data, or split it otherwise",
            )
    return data
