"""Verify, without torch, that exported weights match config.json.

Shapes: mmldlm/models (a test compares them with a model).
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from mmldlm.checkpoints.formats.weight_source import WeightSource
from mmldlm.checkpoints.layout import MODEL_CONFIG
from mmldlm.config.renamed_keys import is_removed_weight, model_config_with_new_names
from mmldlm.config.task_registry import DEFAULT_TASK, TASKS, find_task
from mmldlm.errors import UserError
from mmldlm.utils.input_files import read_bytes


def check_config(weights: WeightSource, checkpoint: Path | None) -> None:
    """Compare a source with the model_config.json of its checkpoint, if there is one.

    Raises:
        UserError: a weight is missing or has another shape than in the config, or there are more
            blocks.
    """
    removed = sorted({name.split(".")[0] for name in weights.tensors if is_removed_weight(name)})
    if removed and checkpoint is not None:
        weights.notes.append(
            f"mmldlm does not read {', '.join(removed)}.* any more (docs/results/options.md)"
        )
    path = checkpoint / MODEL_CONFIG if checkpoint else None
    if path is None or not path.is_file():
        return
    try:
        config = model_config_with_new_names(json.loads(read_bytes(path)))
        # Checkpoints older than the key `task` are of the translation task. A user's own task is
        # not imported.
        task = config.get(
            "task", DEFAULT_TASK if config.get("architecture") == "MultimodalMMDiT" else None
        )
        if task not in TASKS:
            return
        if config.get("n_blocks", 0) > len(weights.tensors):  # before a loop over all of them
            raise ValueError(f"n_blocks {config['n_blocks']} for {len(weights.tensors)} tensors")
        shapes = find_task(task).expected_shapes(config)
    except (
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
        ArithmeticError,
        RecursionError,
    ) as error:
        raise UserError(
            f"the config of a model in {path}", repr(error)[:200], "use an intact checkpoint"
        ) from error
    for name, shape in shapes.items():
        found = weights.tensors[name].shape if name in weights.tensors else "no such weight"
        if found != shape:
            raise _mismatch_error(path, weights, f"{name} of shape {shape}", f"{found}")
    expected, found = _layers(shapes), _layers(weights.tensors)
    for stack in expected:
        if len(found.get(stack, ())) > len(expected[stack]):
            raise _mismatch_error(
                path, weights, f"{len(expected[stack])} {stack}", f"{len(found[stack])}"
            )


def _layers(names: Iterable[str]) -> dict[str, set[str]]:
    """Numbers of the layers of every stack, counted from 0: {"blocks": {"0", "1"}} for blocks.0.x
    and blocks.1.x.
    """
    found: dict[str, set[str]] = {}
    for name in names:
        stack, _, rest = name.partition(".")
        if rest.split(".")[0].isdigit():
            found.setdefault(stack, set()).add(rest.split(".")[0])
    return {stack: numbers for stack, numbers in found.items() if "0" in numbers}


def _mismatch_error(path: Path, weights: WeightSource, expected: str, found: str) -> UserError:
    fix = "restore the checkpoint as it was saved; the two are of different runs"
    return UserError(f"{expected}, as {path} says", f"{found} in {weights.path}", fix)
