"""Locate the moments of AdamW and Muon in the state_dict of a torch optimizer, and in DeepSpeed's
flat tensors.

A torch optimizer's state_dict numbers its parameters through the groups and has no names.
DeepSpeed gives the optimizer one flat tensor per group (ZeRO-1, 2) or sub-group (ZeRO-3), so the
index is that of the group.
"""

from __future__ import annotations

from collections.abc import Container
from pathlib import Path
from typing import Any, NamedTuple

from mmldlm.checkpoints.formats.dtypes import DTYPES
from mmldlm.checkpoints.formats.torch_save.reader import (
    SAME_SAVE_HINT,
    TorchFile,
    corrupt_file_error,
)
from mmldlm.checkpoints.formats.torch_save.unpickler import TensorRef
from mmldlm.checkpoints.formats.weight_source import FileRange
from mmldlm.errors import UserError
from mmldlm.utils.formatting import join_some
from mmldlm.utils.moments import MOMENTS, moment_keys


class TensorState(NamedTuple):
    """State of one of an optimizer's tensors.

    Attributes:
        values: what was saved: its moments, its step, ...
        keys: those of MOMENTS that its group has.
    """

    values: dict
    keys: tuple[str, ...]


def states_by_index(file: TorchFile, optimizer: Any, count: int) -> list[TensorState]:
    """Return the state of each of an optimizer's `count` tensors, in order; [] before the first
    step.

    Args:
        optimizer: a state_dict of a torch optimizer, or DeepSpeed's elastic list of states.

    Raises:
        UserError: another structure, an index twice or missing, a state of none or of a moment
            that its group lacks.
    """
    if isinstance(optimizer, list):
        states = dict(enumerate(optimizer))
        order, keys = list(range(len(optimizer))), [MOMENTS] * len(optimizer)
    else:
        states, order, keys = _states_and_keys(file, optimizer)
    if not any(states.values()):
        return []
    if len(order) != count:
        raise corrupt_file_error(
            file.path, f"an optimizer of {len(order)} tensors, {count} are trained"
        )
    missing = [
        index for index in order if not isinstance(states.get(index), dict) or not states[index]
    ]
    if missing:
        raise corrupt_file_error(
            file.path, f"no optimizer state of tensor {join_some(missing)}, while others have one"
        )
    found = [TensorState(states[index], of_group) for index, of_group in zip(order, keys)]
    for index, state in zip(order, found):
        check_no_other_moment(file.path, state.values, state.keys, f"tensor {index}")
    return found


def check_no_other_moment(
    path: Path, found: Container[str], keys: tuple[str, ...], what: str
) -> None:
    """Raise UserError if `found` has a moment that is not among `keys`, those of its group."""
    for key in MOMENTS:
        if key in found and key not in keys:
            raise corrupt_file_error(
                path, f"{key} of {what}, whose group is Muon's and has none", SAME_SAVE_HINT
            )


def _states_and_keys(file: TorchFile, optimizer: Any) -> tuple[dict, list, list[tuple[str, ...]]]:
    """Return index -> state; the indices in the order of the groups; the moments that the group of
    each has.
    """
    states = optimizer.get("state") if isinstance(optimizer, dict) else None
    groups = optimizer.get("param_groups") if isinstance(optimizer, dict) else None
    lists = [group.get("params") if isinstance(group, dict) else None for group in groups or []]
    if not isinstance(states, dict) or not all(isinstance(params, list) for params in lists):
        raise corrupt_file_error(
            file.path,
            "something other than the state_dict of a torch optimizer (state and param_groups)",
        )
    order = [index for params in lists for index in params]
    if len(set(map(str, order))) != len(order):
        raise corrupt_file_error(file.path, "a parameter twice in param_groups")
    return (
        states,
        order,
        [moment_keys(group) for group, params in zip(groups or [], lists) for _ in params],
    )


def moment(file: TorchFile, state: TensorState, key: str, what: str) -> TensorRef:
    """Return one moment of one tensor: a contiguous float tensor inside its record.

    Raises:
        UserError: anything else.
    """
    ref = state.values.get(key)
    if not isinstance(ref, TensorRef):
        raise UserError(
            f"the state of AdamW or Muon in {file.path}, the optimizers that can be continued",
            f"no {key} in the optimizer state of {what} (it has {join_some(list(state.values))})",
            "take the weights alone: --to safetensors or model.pt, or training.init_from",
        )
    file.check_ref(ref, f"{key} of {what}")
    if not ref.is_contiguous or not DTYPES[ref.dtype].is_float or DTYPES[ref.dtype].itemsize == 1:
        raise corrupt_file_error(file.path, f"{key} of {what} in {ref.dtype} of shape {ref.shape}")
    return ref


def moments_by_name(
    file: TorchFile,
    states: list[TensorState],
    names: list[str],
    shapes: dict[str, tuple[int, ...]],
) -> dict[str, dict[str, list[FileRange]]]:
    """Return the moments of an optimizer over unsharded parameters, `names` in its order.

    Raises:
        UserError: a moment whose shape is not its parameter's.
    """
    found: dict[str, dict[str, list[FileRange]]] = {key: {} for key in MOMENTS}
    for state, name in zip(states, names):
        for key in state.keys:
            ref = moment(file, state, key, name)
            if ref.shape != shapes[name]:
                raise corrupt_file_error(
                    file.path,
                    f"{key} of {name} of shape {ref.shape}, the weight has {shapes[name]}",
                )
            found[key][name] = [FileRange(file, ref, 0, ref.numel)] if ref.numel else []
    return found


def flat_moments(
    files: list[TorchFile], states: list[list[TensorState]], group: int, sizes: list[list[int]]
) -> dict[str, list[TensorRef]]:
    """Return key -> the group's flat moment on every rank.

    Args:
        files: one per rank.
        states: per rank, the result of states_by_index.
        group: its number.
        sizes: per rank, the allowed numbers of elements (with and without padding).

    Raises:
        UserError: another size, or moments or dtypes that differ over the ranks.
    """
    flats: dict[str, list[TensorRef]] = {}
    for file, rank in zip(files, states):
        if rank[group].keys != states[0][group].keys:
            found = f"settings of group {group} that differ from those in {files[0].path.name}"
            raise corrupt_file_error(file.path, found, SAME_SAVE_HINT)
    for key in states[0][group].keys:
        flats[key] = [
            moment(file, rank[group], key, f"group {group}") for file, rank in zip(files, states)
        ]
        for file, flat, allowed in zip(files, flats[key], sizes):
            if flat.numel not in allowed or flat.dtype != flats[key][0].dtype:
                found = (
                    f"{flat.numel} {flat.dtype} elements of {key} of group {group}, expected"
                    f" {allowed[0]}"
                )
                raise corrupt_file_error(file.path, found, SAME_SAVE_HINT)
    return flats


def check_equal_steps(files: list[TorchFile], states: list[list[TensorState]]) -> bool:
    """Return whether the ranks' optimizers have state.

    Raises:
        UserError: some have and some have not.
    """
    for file, rank in zip(files, states):
        if bool(rank) != bool(states[0]):
            has = "an" if rank else "no"
            raise corrupt_file_error(
                file.path, f"{has} optimizer state, unlike {files[0].path.name}", SAME_SAVE_HINT
            )
    return bool(states[0])


def group_names(file: TorchFile, names: Any) -> list[str]:
    """Return the flat list of [[names of group 0], ...].

    Raises:
        UserError: anything else.
    """
    is_list = isinstance(names, list) and all(isinstance(group, list) for group in names)
    flat = [name for group in names for name in group] if is_list else []
    if (
        not is_list
        or not all(isinstance(name, str) for name in flat)
        or len(set(flat)) != len(flat)
    ):
        raise corrupt_file_error(
            file.path, "names of the optimizer's parameters that are not a list of lists of names"
        )
    return flat
