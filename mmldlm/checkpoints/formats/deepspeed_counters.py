"""The counters in the files of a DeepSpeed checkpoint, which tell files of one save from files of
two.

| compared | if they differ |
|---|---|
| model files with each other: steps, samples, world size, version, scheduler | an error |
| optimizer files with each other: steps, learning rates, loss scaler | an error |
| `partition_count` of optimizer files with dp_world_size | an error |
| steps of the loss scaler with the model's | ahead: an error |
| steps of the optimizer with the model's, skips left out | ahead: an error; behind: a note |

The last two are not compared where a manifest says that all files are of one save; an optimizer
may be ahead by `extra_optimizer_steps`. Rank files of an
optimizer without a step count (SGD) under ZeRO-3, whose learning rate and loss scale are the same
at both saves, cannot be told apart. Under ZeRO-1 and 2 the 16-bit weights reveal those too.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mmldlm.checkpoints.files.torch_file import SAME_SAVE_HINT, TorchFile, corrupt_file_error
from mmldlm.checkpoints.files.unpickler import OpaqueObject, TensorRef

# Key in a model file that mmldlm wrote: the number of steps by which the optimizer was ahead in
# the source, where that was one save. ZeRO-0 in bf16 has one file, and steps once by itself when
# it starts, as DeepSpeed before 0.14 did at every stage.
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
        model: Model file, for messages.
        state: Content of the model file.
        optimizer: File of the optimizer, for messages.
        counters: Result of check_optimizer_files, or {"step": [steps]}.

    Returns:
        "", or a note if the optimizer is behind: it may have been started anew, or the files are
        of two saves.

    Raises:
        UserError: the optimizer is ahead: the files are of two saves.
    """
    steps = [value for value in counters.get("step", []) if isinstance(value, (int, float))]
    global_steps, skipped = state.get("global_steps"), state.get("skipped_steps", 0)
    if type(global_steps) is not int or type(skipped) is not int:
        return ""
    scaled = counters.get("cur_iter")
    if global_steps == 0 and "global_samples" not in state and steps:
        return f"{model.name} records no global_steps, the optimizer made {max(steps):.0f} steps"
    applied = global_steps - skipped
    behind = (
        f", but {model.name} is at {global_steps} (global_steps, {skipped} of them skipped): files"
        " of two saves"
    )
    if steps and max(steps) > applied + extra_optimizer_steps(state):
        raise corrupt_file_error(
            optimizer, f"optimizer step {max(steps):.0f}{behind}", SAME_SAVE_HINT
        )
    if isinstance(scaled, int) and scaled > global_steps:
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
    """Return the number of steps by which the optimizer of one save may be ahead of its model
    file.

    DeepSpeed before 0.14 stepped once by itself when it started (its pull request 5104).
    """
    recorded = state.get(STEPS_AHEAD)
    if type(recorded) is int:
        return recorded
    version = re.match(r"(\d+)\.(\d+)", str(state.get("ds_version")))
    is_old = version is None or (int(version[1]), int(version[2])) < (0, 14)
    return int(is_old)


def steps_ahead(state: dict, steps: float | None) -> int:
    """Return the number of steps by which the optimizer is ahead of the model file of the same
    save; 0 if that is unknown.
    """
    global_steps, skipped = state.get("global_steps"), state.get("skipped_steps", 0)
    if steps is None or type(global_steps) is not int or type(skipped) is not int:
        return 0
    return int(steps) - (global_steps - skipped)


def read_scalar(file: TorchFile, value: Any) -> Any:
    """Return a plain number, or that in a tensor of one element; None for anything else."""
    return file.read_number(value) if isinstance(value, TensorRef) else _number(value)


def _check_equal(files: list[TorchFile], counters: list[dict[str, Any]]) -> None:
    for file, of_file in zip(files, counters):
        for key in {*of_file, *counters[0]}:
            value, first = of_file.get(key), counters[0].get(key)
            if repr(value) != repr(first):
                # Compared as text, nan is equal to itself.
                what = f"{key} {value!r} while {files[0].path.name} is at {first!r}"
                raise corrupt_file_error(file.path, what, SAME_SAVE_HINT)


def _model_counters(state: dict) -> dict[str, Any]:
    counters = {key: state.get(key) for key in _OF_MODEL}
    scheduler = state.get("lr_scheduler")
    if isinstance(scheduler, dict):
        counters |= {f"lr_scheduler.{key}": _number(scheduler.get(key)) for key in _OF_SCHEDULER}
    return counters


def _optimizer_counters(file: TorchFile, inner: dict) -> dict[str, Any]:
    """Return the counters of an optimizer file; "step" and "lr" are lists."""
    optimizer = torch_optimizer(inner)
    counters: dict[str, Any] = {
        "step": optimizer_steps(file, optimizer),
        "lr": [read_scalar(file, table.get("lr")) for table in group_tables(optimizer)],
    }
    scaler = inner.get("loss_scaler")
    if isinstance(scaler, OpaqueObject) and isinstance(scaler.state, dict):
        counters |= {key: _number(scaler.state.get(key)) for key in _OF_SCALER}
    return counters


def torch_optimizer(inner: dict) -> Any:
    """Return the state_dict of the torch optimizer, or elastic list of its states, in DeepSpeed's
    optimizer.
    """
    return inner.get("base_optimizer_state", inner.get("optimizer_state_dict"))


def group_tables(optimizer: Any) -> list[dict]:
    """Return the param_groups of a torch optimizer's state_dict; [] if they are not tables."""
    tables = optimizer.get("param_groups") if isinstance(optimizer, dict) else None
    if isinstance(tables, list) and all(isinstance(table, dict) for table in tables):
        return tables
    return []


def optimizer_steps(file: TorchFile, optimizer: Any) -> list[Any]:
    """Return the step counts of an optimizer's tensors and groups; None where there is none."""
    # Older versions of FusedAdam keep the step in the tables.
    tables = [table for table in group_tables(optimizer) if "step" in table]
    return [read_scalar(file, state.get("step")) for state in (*states_of(optimizer), *tables)]


def _number(value: Any) -> float | int | None:
    return value if isinstance(value, (int, float)) else None


def states_of(optimizer: Any) -> Iterator[dict]:
    """Yield the states of an optimizer's tensors in a fixed order."""
    states: Any = optimizer
    if isinstance(states, dict):
        of_index = states.get("state")
        items = of_index.items() if isinstance(of_index, dict) else ()
        states = [value for _, value in sorted(items, key=lambda item: str(item[0]))]
    for state in states if isinstance(states, list) else ():
        if isinstance(state, dict):
            yield state
