"""Where AdamW's moments lie: in the state_dict of a torch optimizer, and in DeepSpeed's flat ones.

A torch optimizer's state_dict counts its parameters through the groups in order and names none of them. DeepSpeed hands
the optimizer one flat tensor for each group (ZeRO-1, 2) or sub-group (ZeRO-3), so there the index is the group's.
"""

from __future__ import annotations

from typing import Any

from mmldlm.checkpoints.formats.deepspeed.files import SAME_SAVE_HINT, join_some
from mmldlm.checkpoints.formats.dtypes import DTYPES
from mmldlm.checkpoints.formats.torch_save.reader import TorchFile, corrupt_file_error
from mmldlm.checkpoints.formats.torch_save.unpickler import TensorRef
from mmldlm.checkpoints.formats.weight_source import FileRange

MOMENTS = ("exp_avg", "exp_avg_sq")


def states_by_index(file: TorchFile, optimizer: Any, count: int) -> list[dict]:
    """The state of each of an optimizer's `count` tensors, in order; [] where it has never stepped.

    Args:
        optimizer: a state_dict of a torch optimizer, or DeepSpeed's elastic list of states.

    Raises:
        UserError: no such thing, an index twice or left out, or a state without moments.
    """
    if isinstance(optimizer, list):
        states = dict(enumerate(optimizer))
        order = list(range(len(optimizer)))
    else:
        states, order = _state_and_order(file, optimizer)
    if not any(states.values()):
        return []
    if len(order) != count:
        raise corrupt_file_error(file.path, f"an optimizer of {len(order)} tensors where {count} are trained")
    lacking = [index for index in order if not isinstance(states.get(index), dict) or not states[index]]
    if lacking:
        raise corrupt_file_error(file.path, f"no optimizer state of tensor {join_some(lacking)}, while others have one")
    return [states[index] for index in order]


def _state_and_order(file: TorchFile, optimizer: Any) -> tuple[dict, list]:
    states = optimizer.get("state") if isinstance(optimizer, dict) else None
    groups = optimizer.get("param_groups") if isinstance(optimizer, dict) else None
    lists = [group.get("params") if isinstance(group, dict) else None for group in groups or []]
    if not isinstance(states, dict) or not all(isinstance(params, list) for params in lists):
        raise corrupt_file_error(
            file.path, "no state_dict of a torch optimizer (state and param_groups) where one should stand"
        )
    order = [index for params in lists for index in params]
    if len(set(map(str, order))) != len(order):
        raise corrupt_file_error(file.path, "param_groups count a parameter twice")
    return states, order


def moment(file: TorchFile, state: dict, key: str, what: str) -> TensorRef:
    """One moment of one tensor: a float tensor without gaps, inside its record."""
    ref = state.get(key)
    if not isinstance(ref, TensorRef):
        raise corrupt_file_error(
            file.path,
            f"no {key} in the optimizer state of {what} (it has {join_some(list(state))})",
            "only AdamW's state can be carried on; use training.init_from to take the weights alone",
        )
    file.check_ref(ref, f"{key} of {what}")
    if not ref.is_contiguous or not DTYPES[ref.dtype].is_float or DTYPES[ref.dtype].itemsize == 1:
        raise corrupt_file_error(file.path, f"{key} of {what} is a {ref.dtype} tensor of shape {ref.shape}")
    return ref


def moments_by_name(
    file: TorchFile, states: list[dict], names: list[str], shapes: dict[str, tuple[int, ...]]
) -> dict[str, dict[str, list[FileRange]]]:
    """Moments of an optimizer over whole parameters, `names` in its order.

    Raises:
        UserError: a moment whose shape is not its parameter's.
    """
    found: dict[str, dict[str, list[FileRange]]] = {key: {} for key in MOMENTS}
    for state, name in zip(states, names):
        for key in MOMENTS:
            ref = moment(file, state, key, name)
            if ref.shape != shapes[name]:
                raise corrupt_file_error(file.path, f"{key} of {name} has shape {ref.shape}, the weight {shapes[name]}")
            found[key][name] = [FileRange(file, ref, 0, ref.numel)] if ref.numel else []
    return found


def flat_moments(files: list[TorchFile], states: list[list[dict]], group: int, sizes: list[list[int]]) -> dict:
    """key -> this group's flat moment on every rank.

    Args:
        states: per rank, what states_by_index gave.
        sizes: per rank, the numbers of elements that its moment may have (with and without its padding).

    Raises:
        UserError: another size, or dtypes that differ over the ranks.
    """
    flats: dict[str, list[TensorRef]] = {}
    for key in MOMENTS:
        flats[key] = [moment(file, rank[group], key, f"group {group}") for file, rank in zip(files, states)]
        for file, flat, allowed in zip(files, flats[key], sizes):
            if flat.numel not in allowed or flat.dtype != flats[key][0].dtype:
                found = f"{flat.numel} {flat.dtype} elements of {key} of group {group}, {allowed[0]} were expected"
                raise corrupt_file_error(file.path, found, SAME_SAVE_HINT)
    return flats


def check_equal_steps(files: list[TorchFile], states: list[list[dict]]) -> bool:
    """Whether the ranks' optimizers have state; UserError where some have and some have not."""
    for file, rank in zip(files, states):
        if bool(rank) != bool(states[0]):
            has = "an" if rank else "no"
            raise corrupt_file_error(file.path, f"{has} optimizer state, unlike {files[0].path.name}", SAME_SAVE_HINT)
    return bool(states[0])


def group_names(file: TorchFile, names: Any) -> list[str]:
    """The flat list of [[names of group 0], ...]; UserError where it is anything else."""
    is_list = isinstance(names, list) and all(isinstance(group, list) for group in names)
    flat = [name for group in names for name in group] if is_list else []
    if not is_list or not all(isinstance(name, str) for name in flat) or len(set(flat)) != len(flat):
        raise corrupt_file_error(file.path, "the names of the optimizer's parameters are no list of lists of names")
    return flat
