"""The optimizer in a checkpoint: parameter groups, settings, counters, and the locations of the
moments of AdamW and Muon.

Each format reads its OptimizerMetadata; a writer of another format needs it.

A torch optimizer's state_dict numbers its parameters through the groups and has no names.
DeepSpeed gives the optimizer one flat tensor per group (ZeRO-1, 2) or sub-group (ZeRO-3), so the
index is that of the group.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from mmldlm.checkpoints.files.dtypes import DTYPES, WIDE_FLOATS, numel
from mmldlm.checkpoints.files.file_io import read_json_object
from mmldlm.checkpoints.files.tensor_writer import TensorSpec
from mmldlm.checkpoints.files.torch_file import (
    NUMBERS,
    SAME_SAVE_HINT,
    TorchFile,
    corrupt_file_error,
)
from mmldlm.checkpoints.files.torch_writer import GlobalRef, ObjectSpec
from mmldlm.checkpoints.files.unpickler import OpaqueObject, TensorRef, dtype_name
from mmldlm.checkpoints.formats.selection import StoredValue, is_tensor, tree_of
from mmldlm.checkpoints.formats.weight_source import (
    OpenedCheckpoint,
    Parts,
    WeightSource,
    read_parts,
    whole_tensor,
)
from mmldlm.checkpoints.manifest import RUN_CONFIG, STATE_FILE
from mmldlm.errors import UserError
from mmldlm.utils.formatting import join_some
from mmldlm.utils.moments import MOMENTS, moment_keys

# Entries that DeepSpeed saves next to its loss scaler.
_SCALING_KEYS = ("dynamic_loss_scale", "overflow", "clip_grad")
# Limits of an entry of the caller, because the lists of a pickle may contain each other.
MAX_COPIED_VALUES, MAX_COPIED_DEPTH = 1_000_000, 100
_PLAIN_SCALER = "plain_loss_scaler"
PLAIN_TYPES = (str, int, float, bool, type(None))
_SCALER_MODULE = "deepspeed.runtime.fp16.loss_scaler"
_SCALERS = ("LossScaler", "DynamicLossScaler")
# The one of bf16 and fp32 engines.
STATIC_SCALER = {"class": "LossScaler", "state": {"cur_scale": 1.0, "dynamic": False}}
DYNAMIC_SCALER = {
    "class": "DynamicLossScaler",
    "state": {
        "cur_scale": 2.0**16,
        "cur_iter": 0,
        "last_overflow_iter": -1,
        "scale_factor": 2.0,
        "scale_window": 1000,
        "min_scale": 1,
        "delayed_shift": 2,
        "cur_hysteresis": 2,
        "consecutive_hysteresis": False,
        "raise_error_at_min_scale": True,
        "dynamic": True,
        "dtype": "torch.float16",
    },
}
_PRECISIONS = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


@dataclass
class Group:
    """One parameter group.

    Attributes:
        names: Parameters of the group, in the optimizer's order.
        settings: Settings of the group (lr, betas, ...), if known; see utils.moments.moment_keys.
    """

    names: list[str]
    settings: dict[str, Any]


@dataclass
class OptimizerMetadata:
    """Everything about an optimizer except its moments.

    Attributes:
        groups: Parameter groups, with every trainable name once.
        steps: Number of steps of the optimizer; None if not recorded, or before the first step.
        compute_dtype: Dtype of the weights in the forward pass.
        model_states: Other entries of DeepSpeed's model file (counters, lr_scheduler, the caller's
            own).
        optimizer: Loss scaler (its class and state) and clipping, under the keys of DeepSpeed's
            optimizer file.
        ds_config: DeepSpeed config as saved.
        notes: Notes on what could not be carried over.
        is_of_deepspeed: Whether model_states and ds_config are DeepSpeed's own, not defaults.
    """

    groups: list[Group]
    steps: float | None
    compute_dtype: str
    model_states: dict[str, Any]
    optimizer: dict[str, Any]
    ds_config: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    is_of_deepspeed: bool = False


def check_groups(source: WeightSource, metadata: OptimizerMetadata) -> None:
    """Check that the groups name every trained weight once, and that each weight has the moments
    of its group.

    Drop the step count of a source without moments.

    Raises:
        UserError: they do not.
    """
    trained = {name for name, info in source.tensors.items() if info.kind == "trainable"}
    names = [name for group in metadata.groups for name in group.names]
    if set(names) != trained or len(names) != len(trained):
        differing = sorted(trained.symmetric_difference(names)) or names
        found = (
            f"parameter groups that do not match its trained weights, first {join_some(differing)}"
        )
        raise corrupt_file_error(source.path, found)
    if not source.moments:
        metadata.steps = None
        return
    for index, group in enumerate(metadata.groups):
        keys = moment_keys(group.settings)
        if others := [name for name in group.names if source.moments_of(name) != keys]:
            found = (
                f"{' and '.join(keys)} in group {index} by its settings, not so in"
                f" {join_some(others)}"
            )
            raise corrupt_file_error(source.path, found)


# -- values ---------------------------------------------------------------------------------------


class Unreadable(ValueError):
    """What cannot be carried over of an optimizer; the message is the reason."""


def plain_value(leaf: Any) -> Any:
    """Return the plain value of a leaf or of a dict or list of them, a one-element tensor as its
    number.

    Raises:
        UserError: damaged files.
        Unreadable: another tensor, or an object.
    """
    if isinstance(leaf, StoredValue):
        leaf = leaf.load()
    if isinstance(leaf, PLAIN_TYPES):
        return leaf
    if isinstance(leaf, dict):
        return {key: plain_value(value) for key, value in leaf.items()}
    if isinstance(leaf, list | tuple):
        return type(leaf)(plain_value(value) for value in leaf)
    if not is_tensor(leaf) or numel(leaf.shape) != 1 or leaf.dtype not in NUMBERS:
        what = f"a tensor {leaf.shape} of {leaf.dtype}" if is_tensor(leaf) else str(leaf)[:80]
        raise Unreadable(f"{what} among its settings, instead of a number")
    return read_parts(leaf.parts(), 0, 1)[0].item()


def group_settings(file: TorchFile, tables: list[dict]) -> list[dict[str, Any]]:
    """Return the settings of torch's param_groups, without their parameters.

    Raises:
        UserError: one that is not plain.
    """
    settings = [
        {key: value for key, value in table.items() if key != "params"} for table in tables
    ]
    try:
        return plain_value(tree_of(file, settings))
    except Unreadable as error:
        raise corrupt_file_error(file.path, f"an optimizer with {error}") from error


def copied_values(file: TorchFile, value: Any, what: str) -> Any:
    """Return a value in a form that can be written: plain values, and tensors with their elements.

    Raises:
        ValueError: an object of a class, which was never built, or more values than any file
            needs: the lists of a pickle may contain each other.
    """
    return _copied(file, value, what, [MAX_COPIED_VALUES])


def _copied(file: TorchFile, value: Any, what: str, left: list[int], depth: int = 0) -> Any:
    left[0] -= 1
    if left[0] < 0 or depth > MAX_COPIED_DEPTH:
        raise ValueError(what)
    if isinstance(value, str):
        # Half of a character, which no file can hold, raises UnicodeEncodeError, a ValueError.
        value.encode()
    if isinstance(value, PLAIN_TYPES):
        return value
    if isinstance(value, TensorRef):
        file.check_ref(value, what)
        if value.numel * DTYPES[value.dtype].itemsize > file.file_size:
            # An expanded tensor has many elements of few bytes.
            raise ValueError(what)
        flat = (
            file.read_elements(value, 0, value.numel)
            if value.is_contiguous
            else file.read_strided(value, what)
        )
        return TensorSpec(value.dtype, value.shape, [flat])
    if isinstance(value, (list, tuple)):
        return type(value)(_copied(file, item, what, left, depth + 1) for item in value)
    if isinstance(value, dict):
        return {
            _copied(file, key, what, left, depth + 1): _copied(file, item, what, left, depth + 1)
            for key, item in value.items()
        }
    raise ValueError(what)


# -- loss scaler ----------------------------------------------------------------------------------


def read_scaling(saved: dict) -> dict[str, Any]:
    """Return OptimizerMetadata.optimizer of a DeepSpeed file, or of what plain_scaling wrote."""
    copied = {
        key: saved[key]
        for key in _SCALING_KEYS
        if key in saved and type(saved[key]) in PLAIN_TYPES
    }
    scaler = saved.get("loss_scaler", saved.get(_PLAIN_SCALER))
    return {"loss_scaler": _plain_scaler(scaler), **copied}


def plain_scaling(metadata: OptimizerMetadata) -> dict[str, Any]:
    """Return OptimizerMetadata.optimizer for a file without objects."""
    plain = {key: value for key, value in metadata.optimizer.items() if key != "loss_scaler"}
    return {**plain, _PLAIN_SCALER: metadata.optimizer["loss_scaler"]}


def _plain_scaler(value: Any) -> dict[str, Any]:
    """Return the class and state of DeepSpeed's loss scaler, its dtypes as text, from the saved
    object or what this returned; STATIC_SCALER for anything else.
    """
    if isinstance(value, OpaqueObject) and isinstance(value.state, dict):
        plain = {
            key: f"torch.{dtype_name(item)}" if dtype_name(item) else item
            for key, item in value.state.items()
        }
        value = {"class": value.kind.removeprefix(_SCALER_MODULE + "."), "state": plain}
    state = value.get("state") if isinstance(value, dict) else None
    is_known = (
        isinstance(state, dict)
        and value.get("class") in _SCALERS
        and all(
            isinstance(key, str) and isinstance(item, PLAIN_TYPES) for key, item in state.items()
        )
    )
    return value if is_known else STATIC_SCALER


def scaling_of(metadata: OptimizerMetadata) -> dict[str, Any]:
    """Return OptimizerMetadata.optimizer for a ZeRO file, with the loss scaler as an object.

    A checkpoint that another engine or dtype saved has no loss scaler. DeepSpeed would put the
    static one of scale 1 in place of its own, and gradients in fp16 would underflow: there it
    gets the dynamic one at DeepSpeed's defaults.
    """
    scaling = metadata.optimizer
    if metadata.compute_dtype == "float16" and scaling["loss_scaler"] == STATIC_SCALER:
        scaling = {**scaling, "loss_scaler": DYNAMIC_SCALER, "dynamic_loss_scale": True}
    scaler = scaling["loss_scaler"]
    state = {
        key: GlobalRef("torch", item.removeprefix("torch."))
        if isinstance(item, str) and item.removeprefix("torch.") in DTYPES
        else item
        for key, item in scaler["state"].items()
    }
    saved_scaler = ObjectSpec(GlobalRef(_SCALER_MODULE, scaler["class"]), state=state)
    return {**scaling, "loss_scaler": saved_scaler}


# -- the run around a checkpoint ------------------------------------------------------------------


def torch_metadata(
    opened: OpenedCheckpoint, groups: list[Group], steps: float | None, compute_dtype: str
) -> OptimizerMetadata:
    """Return the metadata of an optimizer that DeepSpeed did not save: without loss scaling, at
    the run's training step, or else at the number of the optimizer's steps.
    """
    step = int(steps or 0) if opened.step is None else opened.step
    return OptimizerMetadata(
        groups,
        steps,
        compute_dtype,
        model_states={
            "lr_scheduler": None,
            "data_sampler": None,
            "random_ltd": None,
            "skipped_steps": 0,
            "global_steps": step,
        },
        optimizer={
            "loss_scaler": STATIC_SCALER,
            "dynamic_loss_scale": False,
            "overflow": False,
        },
    )


def applied_steps(opened: OpenedCheckpoint) -> float | None:
    """Return the optimizer's step count from training_state.json; None if it is not recorded."""
    state = read_json_object(opened.checkpoint / STATE_FILE) if opened.checkpoint else {}
    steps = state.get("applied_steps")
    return float(steps) if isinstance(steps, int) else None


def configured_dtype(opened: OpenedCheckpoint) -> str:
    """Return training.dtype of the run: engines with fp32 weights do not save the low-precision
    copy.
    """
    path = opened.checkpoint / RUN_CONFIG if opened.checkpoint else None
    if path is None or not path.is_file():
        return "float32"
    from mmldlm.config.yaml_reader import read_yaml

    training = read_yaml(path).get("training")
    return (
        _PRECISIONS.get(str(training.get("dtype")), "float32")
        if isinstance(training, dict)
        else "float32"
    )


# -- Moments --------------------------------------------------------------------------------------


class TensorState(NamedTuple):
    """State of one of an optimizer's tensors.

    Attributes:
        values: Entries that were saved for the tensor: its moments, its step, ...
        keys: Keys of MOMENTS that its group has.
    """

    values: dict
    keys: tuple[str, ...]


def states_by_index(file: TorchFile, optimizer: Any, count: int) -> list[TensorState]:
    """Return the state of each of an optimizer's `count` tensors, in order; [] before the first
    step.

    Args:
        optimizer: `state_dict` of a torch optimizer, or DeepSpeed's elastic list of states.

    Raises:
        UserError: another structure, an index twice or missing, a state of none or of a moment
            that its group lacks.
    """
    keys: list[tuple[str, ...]]
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
    tensor_states = [TensorState(states[index], of_group) for index, of_group in zip(order, keys)]
    for index, state in zip(order, tensor_states):
        check_no_other_moment(file.path, state.values, state.keys, f"tensor {index}")
    return tensor_states


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
    """Return index -> state, the indices in the order of the groups, and for each index the
    moments of its group.
    """
    states = optimizer.get("state") if isinstance(optimizer, dict) else None
    groups = optimizer.get("param_groups") if isinstance(optimizer, dict) else None
    lists: list[Any] = [
        group.get("params") if isinstance(group, dict) else None for group in groups or []
    ]
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
    if not ref.is_contiguous or ref.dtype not in WIDE_FLOATS:
        raise corrupt_file_error(file.path, f"{key} of {what} in {ref.dtype} of shape {ref.shape}")
    return ref


def moments_by_name(
    file: TorchFile,
    states: list[TensorState],
    names: list[str],
    shapes: dict[str, tuple[int, ...]],
) -> dict[str, dict[str, Parts]]:
    """Return the moments of an optimizer over unsharded parameters, `names` in its order.

    Raises:
        UserError: a moment whose shape is not its parameter's.
    """
    moments: dict[str, dict[str, Parts]] = {key: {} for key in MOMENTS}
    for state, name in zip(states, names):
        for key in state.keys:
            ref = moment(file, state, key, name)
            if ref.shape != shapes[name]:
                raise corrupt_file_error(
                    file.path,
                    f"{key} of {name} of shape {ref.shape}, the weight has {shapes[name]}",
                )
            moments[key][name] = whole_tensor(file, ref)
    return moments


def flat_moments(
    files: list[TorchFile], states: list[list[TensorState]], group: int, sizes: list[list[int]]
) -> dict[str, list[TensorRef]]:
    """Return key -> the group's flat moment on every rank.

    Args:
        files: Files, one per rank.
        states: Result of states_by_index, per rank.
        group: Index of the group.
        sizes: Allowed numbers of elements per rank (with and without padding).

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


def named_groups(source: WeightSource, file: TorchFile, names: Any) -> list[list[str]]:
    """Return [[names of group 0], ...] as a file lists them, each the name that stores the weight.

    Raises:
        UserError: anything else, or a name that is not in the checkpoint.
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
    owners = iter(source.resolve_tied(flat, file.path))
    return [[next(owners) for _ in group] for group in names]
