"""Optimizers that name their parameters, as torch.distributed.checkpoint.state_dict and FSDP save
them.

Two layouts: {"state": {NAME: {"exp_avg": ...}}, "param_groups": [{"params": [NAME, ...], "lr":
...}]}, and the same flattened to `state.NAME.exp_avg` and `param_groups.NAME.lr`. torch.optim
numbers its parameters instead; of these only an optimizer with "param_names" in its groups can be
read.
"""

from __future__ import annotations

from collections.abc import Container, Iterable
from pathlib import Path
from typing import Any

from mmldlm.checkpoints.files.dtypes import DTYPES
from mmldlm.checkpoints.files.torch_file import corrupt_file_error
from mmldlm.checkpoints.formats.optimizer import (
    Group,
    OptimizerMetadata,
    Unreadable,
    plain_value,
    torch_metadata,
)
from mmldlm.checkpoints.formats.selection import Keys, is_tensor, write_path
from mmldlm.checkpoints.formats.weight_source import (
    NamedOptimizer,
    OpenedCheckpoint,
    WeightSource,
)
from mmldlm.errors import UserError
from mmldlm.utils.formatting import join_some
from mmldlm.utils.moments import MOMENTS, moment_keys


def add_named_optimizer(source: WeightSource, optimizers: dict[Keys, dict], path: Keys) -> None:
    """Find the moments and classify the tensors of a source by an optimizer that names them.

    If an optimizer cannot be carried over, the source notes the reason.

    Args:
        optimizers: Path -> node of every optimizer, from `selection`.
        path: Path of the model; optimizers in the same dict are its own, if there are any.

    Raises:
        UserError: damaged files.
    """
    if not optimizers:
        return
    beside = {keys: node for keys, node in optimizers.items() if keys[:-1] == path[:-1]}
    optimizers = beside or optimizers
    try:
        optimizer = read_named_optimizer(optimizers, source.tensors, source.path)
    except Unreadable as error:
        source.optimizer_left_out = str(error)
        source.notes.append(f"the optimizer was left out: {error}")
        return
    source.named_optimizer = optimizer
    for name, entry in optimizer.state.items():
        for key in (key for key in MOMENTS if key in entry):
            moment, shape = entry[key], source.tensors[name].shape
            if not is_tensor(moment) or moment.shape != shape or not DTYPES[moment.dtype].is_float:
                stored = type(moment).__name__
                if is_tensor(moment):
                    stored = f"{moment.dtype} {moment.shape}"
                raise corrupt_file_error(
                    source.path, f"{key} of {name}, which has the shape {shape}, as {stored}"
                )
            source.moments.setdefault(key, {})[name] = moment.parts()
    trained = set(optimizer.names)
    # The files tell no buffers; of those only masks may be infinite.
    others = [name for name in source.unclassified if name not in trained]
    source.classify(trained, {name for name in others if source.begins_as_mask(name)})
    source.find_tied(trained)
    for name in trained:
        if source.tensors[name].dtype in ("bfloat16", "float16"):
            source.set_kind_and_dtype(name, "trainable", "float32")
    source.update_aliases()
    frozen = [name for name, info in source.tensors.items() if info.kind == "frozen"]
    if frozen:
        source.notes.append(
            "in no parameter group, and taken as frozen weights (the files do not tell them from"
            f" buffers): {join_some(frozen)}"
        )


def named_optimizer_metadata(
    opened: OpenedCheckpoint, optimizer: NamedOptimizer
) -> OptimizerMetadata:
    """Return the metadata of the optimizer that add_named_optimizer found."""
    source = opened.weights
    groups = [Group(names, settings) for names, settings in optimizer.groups]
    stored = {source.parts[name][0].ref.dtype for name in optimizer.names if source.parts[name]}
    dtype = stored.pop() if len(stored) == 1 else "float32"
    metadata = torch_metadata(opened, groups, optimizer.steps, dtype)
    metadata.notes.append(
        "the optimizer and its step count were carried over; learning-rate schedule and other"
        " counters were not"
    )
    return metadata


def read_named_optimizer(
    optimizers: dict[Keys, dict], model: Container[str], path: Path
) -> NamedOptimizer:
    """Return the optimizers of a model as one.

    Args:
        optimizers: Path -> node of every optimizer, from `selection`.
        model: Names of the model's tensors.
        path: Path that errors name.

    Raises:
        Unreadable: they number their parameters, train other ones, or are not AdamW or Muon.
        UserError: damaged files.
    """
    optimizer = NamedOptimizer()
    for keys, node in optimizers.items():
        is_nested = "param_groups" in node or "state" in node
        groups, state = _nested(node) if is_nested else _flat(node)
        what = f"the optimizer under {write_path(keys)!r}"
        names = [name for members, _ in groups for name in members]
        if (
            len(optimizers) > 1
            and names
            and not any(name in model for name in names if isinstance(name, str))
        ):
            # It is the optimizer of another model.
            continue
        _check(what, names, groups, state, model)
        if twice := [name for name in names if name in optimizer.names]:
            raise Unreadable(f"{what} and another one both train {join_some(twice)}")
        optimizer.groups += groups
        optimizer.state.update(state)
    if not optimizer.groups:
        raise Unreadable("none of its parameters is one of the model")
    for names, settings in optimizer.groups:
        for name in names if optimizer.state else ():
            _check_state(name, optimizer.state.get(name, {}), moment_keys(settings))
    optimizer.steps = _steps(optimizer.state, path)
    return optimizer


def _nested(node: dict) -> tuple[list[tuple[list[str], dict[str, Any]]], dict[str, dict]]:
    saved = node.get("state")
    saved = saved if isinstance(saved, dict) else {}
    tables = node.get("param_groups")
    tables = list(tables.values()) if isinstance(tables, dict) else tables
    if not isinstance(tables, list | tuple) or not all(
        isinstance(table, dict) for table in tables
    ):
        raise Unreadable("its parameter groups were not saved")
    groups: list[tuple[list[str], dict[str, Any]]] = []
    name_of: dict[str, Any] = {}
    for table in tables:
        settings = {key: plain_value(value) for key, value in table.items()}
        members = settings.pop("params", [])
        names = settings.pop("param_names", members)
        if (
            not isinstance(members, list | tuple)
            or not isinstance(names, list | tuple)
            or len(names) != len(members)
        ):
            raise Unreadable("its parameter groups list no parameters")
        name_of.update(zip(map(str, members), names))
        groups.append((list(names), settings))
    return groups, {
        name_of[str(key)] if str(key) in name_of else key: dict(entry)
        for key, entry in saved.items()
        if isinstance(entry, dict)
    }


def _flat(node: dict) -> tuple[list[tuple[list[str], dict[str, Any]]], dict[str, dict]]:
    """Return the same of a flattened optimizer; parameters with equal settings make one group."""
    if any(isinstance(value, dict) for value in node.values()):
        raise Unreadable("its parameter groups were not saved")
    state: dict[str, dict] = {}
    settings: dict[str, dict] = {}
    for key, value in node.items():
        kind, _, rest = key.partition(".")
        name, _, what = rest.rpartition(".")
        if kind == "state":
            state.setdefault(name, {})[what] = value
        else:
            settings.setdefault(name, {})[what] = plain_value(value)
    groups: dict[str, tuple[list[str], dict[str, Any]]] = {}
    for name, table in settings.items():
        groups.setdefault(repr(sorted(table.items())), ([], table))[0].append(name)
    return list(groups.values()), state


def _check(what: str, names: list, groups: Iterable, state: dict, model: Container[str]) -> None:
    """Raise Unreadable for an optimizer that is not one of this model's, by name."""
    if not all(isinstance(name, str) for name in names) or (not names and not state):
        raise Unreadable(f"{what} numbers its parameters instead of naming them")
    if others := [name for name in names if name not in model]:
        raise Unreadable(f"{what} trains {join_some(others)}, which the model does not have")
    if others := [name for name in state if name not in names]:
        raise Unreadable(
            f"{what} has a state of {join_some(others)}, in none of its parameter groups"
        )


def _check_state(name: str, entry: dict, keys: tuple[str, ...]) -> None:
    if not entry:
        raise Unreadable(f"it has no state of {name}, while others have one")
    if {key for key in entry if key != "step"} != set(keys):
        raise Unreadable(
            f"its state of {name} is {join_some(entry)}; only that of AdamW and Muon can be"
            " carried over"
        )


def _steps(state: dict[str, dict], path: Path) -> float | None:
    steps = {name: plain_value(entry["step"]) for name, entry in state.items() if "step" in entry}
    if not steps:
        return None
    for name, value in steps.items():
        if type(value) not in (int, float):
            raise UserError(
                f"the step count of {name} in {path}", str(value)[:80], "check what was saved"
            )
    values = list(steps.values())
    if different := [name for name, value in steps.items() if value != values[0]]:
        first = next(iter(steps))
        raise Unreadable(
            f"its step counts differ: {values[0]:g} of {first}, {steps[different[0]]:g} of"
            f" {different[0]}; formats with one count for all cannot hold them"
        )
    return float(values[0])
