"""Counters in DeepSpeed's files, by which files of two saves are told from files of one.

What they cannot show: rank files of an optimizer without a step count (SGD) under ZeRO-3, whose
learning rate and loss scale are the same at both saves. Under ZeRO-1 and 2 the 16-bit weights show
those too.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mmldlm.checkpoints.formats.torch_save.reader import (
    SAME_SAVE_HINT,
    TorchFile,
    corrupt_file_error,
)
from mmldlm.checkpoints.formats.torch_save.unpickler import OpaqueObject, TensorRef

# In a model file that mmldlm wrote: by how many steps the optimizer was ahead in the source, where
# that was one save (ZeRO-0 in bf16 has one file, and steps once by itself when it starts, as
# DeepSpeed before 0.14 did at every stage).
STEPS_AHEAD = "mmldlm_optimizer_steps_ahead"
_OF_MODEL = (
    "global_steps",
    "global_samples",
    "skipped_steps",
    "dp_world_size",
    "mp_world_size",
    "ds_version",
)
_OF_SCHEDULER = ("last_batch_iteration", "last_epoch", "_step_count")
_OF_SCALER = ("cur_iter", "last_overflow_iter", "cur_scale")


def check_model_files(files: list[TorchFile], states: list[dict]) -> None:
    """Check that the counters of the ranks' model files agree.

    Raises:
        UserError: they differ.
    """
    _check_equal(files, [_model_counters(state) for state in states])


def check_optimizer_files(
    files: list[TorchFile], inners: list[dict], world_size: int
) -> dict[str, Any]:
    """Check that the counters of the ranks' optimizer files agree, and return them.

    Raises:
        UserError: they differ, or the files are of another world size.
    """
    for file, inner in zip(files, inners):
        counts = inner.get("partition_count")
        for count in counts if isinstance(counts, list) else [counts]:
            if type(count) is int and count != world_size:
                found = f"partition_count = {count}, but dp_world_size is {world_size}"
                raise corrupt_file_error(file.path, found, SAME_SAVE_HINT)
    counters = [_optimizer_counters(file, inner) for file, inner in zip(files, inners)]
    _check_equal(files, counters)
    return counters[0]


def compare_steps(model: Path, state: dict, optimizer: Path, counters: dict[str, Any]) -> str:
    """Compare the optimizer's step count with that of the model file.

    Args:
        model: the model file, for messages.
        state: what it holds.
        optimizer: the optimizer's file, for messages.
        counters: the result of check_optimizer_files, or {"step": [steps]}.

    Returns:
        "", or a note if the optimizer is behind: it may have been started anew, or the files are
        of two saves.

    Raises:
        UserError: the optimizer is ahead: the files are of two saves.
    """
    steps = [value for value in counters.get("step", []) if isinstance(value, (int, float))]
    made, skipped = state.get("global_steps"), state.get("skipped_steps", 0)
    if type(made) is not int or type(skipped) is not int:
        return ""
    scaled = counters.get("cur_iter")
    if made == 0 and "global_samples" not in state and steps:
        return f"{model.name} records no global_steps, the optimizer made {max(steps):.0f} steps"
    applied = made - skipped
    behind = (
        f", but {model.name} is at {made} (global_steps, {skipped} of them skipped): files of two"
        " saves"
    )
    if steps and max(steps) > applied + extra_optimizer_steps(state):
        raise corrupt_file_error(
            optimizer, f"optimizer step {max(steps):.0f}{behind}", SAME_SAVE_HINT
        )
    if isinstance(scaled, int) and scaled > made:
        raise corrupt_file_error(
            optimizer, f"step {scaled} of the loss scaler{behind}", SAME_SAVE_HINT
        )
    if steps and max(steps) < applied:
        return (
            f"the optimizer in {optimizer.name} made {max(steps):.0f} steps, {model.name} counts"
            f" {applied}: it was started anew since, or the files are of two saves"
        )
    return ""


def extra_optimizer_steps(state: dict) -> int:
    """Return by how many steps the optimizer of one save may be ahead of its model file.

    DeepSpeed before 0.14 stepped once by itself when it started (its pull request 5104).
    """
    recorded = state.get(STEPS_AHEAD)
    if type(recorded) is int:
        return recorded
    version = re.match(r"(\d+)\.(\d+)", str(state.get("ds_version")))
    is_old = version is None or (int(version[1]), int(version[2])) < (0, 14)
    return int(is_old)


def steps_ahead(state: dict, steps: float | None) -> int:
    """Return by how many steps the optimizer is ahead of the model file of the same save; 0 if
    that is unknown.
    """
    made, skipped = state.get("global_steps"), state.get("skipped_steps", 0)
    if steps is None or type(made) is not int or type(skipped) is not int:
        return 0
    return int(steps) - (made - skipped)


def read_scalar(file: TorchFile, value: Any) -> Any:
    """Return a plain number, or that in a tensor of one element; None for anything else."""
    if not isinstance(value, TensorRef):
        return value if isinstance(value, (int, float)) else None
    if value.numel != 1 or value.dtype not in ("float32", "float64", "int64", "int32"):
        return None
    file.check_ref(value, "step")
    one = TensorRef(value.dtype, (1,), (1,), value.key, value.offset, value.storage_elements)
    return file.read_elements(one, 0, 1)[0].item()


def _check_equal(files: list[TorchFile], counters: list[dict[str, Any]]) -> None:
    for file, found in zip(files, counters):
        for key in {*found, *counters[0]}:
            mine, first = found.get(key), counters[0].get(key)
            if repr(mine) != repr(first):  # nan is equal to itself here
                what = f"{key} {mine!r} while {files[0].path.name} is at {first!r}"
                raise corrupt_file_error(file.path, what, SAME_SAVE_HINT)


def _model_counters(state: dict) -> dict[str, Any]:
    found = {key: state.get(key) for key in _OF_MODEL}
    scheduler = state.get("lr_scheduler")
    if isinstance(scheduler, dict):
        found.update(
            {
                f"lr_scheduler.{key}": scheduler[key]
                for key in _OF_SCHEDULER
                if _is_number(scheduler.get(key))
            }
        )
    return found


def _optimizer_counters(file: TorchFile, inner: dict) -> dict[str, Any]:
    """Return the counters of an optimizer file; "step" and "lr" are lists."""
    optimizer: Any = inner.get("base_optimizer_state", inner.get("optimizer_state_dict"))
    tables = optimizer.get("param_groups") if isinstance(optimizer, dict) else None
    tables = (
        [table for table in tables if isinstance(table, dict)] if isinstance(tables, list) else []
    )
    in_tables = [
        read_scalar(file, table["step"]) for table in tables if "step" in table
    ]  # older FusedAdam
    found = {
        "step": [
            *(read_scalar(file, state.get("step")) for state in _states(optimizer)),
            *in_tables,
        ],
        "lr": [read_scalar(file, table.get("lr")) for table in tables],
    }
    scaler = inner.get("loss_scaler")
    if isinstance(scaler, OpaqueObject) and isinstance(scaler.state, dict):
        found.update(
            {key: scaler.state[key] for key in _OF_SCALER if _is_number(scaler.state.get(key))}
        )
    return found


def _states(optimizer: Any) -> Iterator[dict]:
    """Yield the states of an optimizer's tensors in a fixed order."""
    states: Any = optimizer
    if isinstance(states, dict):
        of_index = states.get("state")
        items = of_index.items() if isinstance(of_index, dict) else ()
        states = [value for _, value in sorted(items, key=lambda item: str(item[0]))]
    for state in states if isinstance(states, list) else ():
        if isinstance(state, dict):
            yield state


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float))
