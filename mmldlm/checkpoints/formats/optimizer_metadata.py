"""What a checkpoint says of its training beside the tensors: parameter groups, AdamW's settings and steps, counters.

A writer of another layout needs them; every kind of source keeps them elsewhere, or not at all.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mmldlm.checkpoints.formats.adam_state import MOMENTS, group_names
from mmldlm.checkpoints.formats.dcp.reader import TRAINABLE, DcpCheckpoint
from mmldlm.checkpoints.formats.deepspeed.files import inner_optimizer, join_some, load_dict, param_shapes
from mmldlm.checkpoints.formats.deepspeed.reader import ZeroCheckpoint
from mmldlm.checkpoints.formats.deepspeed.universal_reader import FOLDER
from mmldlm.checkpoints.formats.dtypes import DTYPES
from mmldlm.checkpoints.formats.model_pt.reader import ModelFile
from mmldlm.checkpoints.formats.open import OpenedCheckpoint
from mmldlm.checkpoints.formats.torch_save.pickler import GlobalRef, ObjectSpec, TensorSpec
from mmldlm.checkpoints.formats.torch_save.reader import TorchFile, corrupt_file_error
from mmldlm.checkpoints.formats.torch_save.unpickler import OpaqueObject, TensorRef, dtype_name
from mmldlm.checkpoints.formats.weight_source import WeightSource
from mmldlm.errors import UserError

_SCALER = "deepspeed.runtime.fp16.loss_scaler"
_SCALERS = ("LossScaler", "DynamicLossScaler")
COPIED_KEYS = ("dynamic_loss_scale", "overflow", "clip_grad")  # beside it in DeepSpeed's optimizer files
PLAIN_SCALER = "plain_loss_scaler"
_PLAIN = (str, int, float, bool, type(None))
# What the writers of model_states files work out anew.
_OWN = {
    "module", "buffer_names", "optimizer", "param_shapes", "frozen_param_shapes", "shared_params",
    "frozen_param_fragments", "dp_world_size", "mp_world_size", "ds_config", "ds_version", "optimizer_param_names",
    "aliases",
}  # fmt: skip
_PRECISIONS = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


@dataclass
class Group:
    """Names of one parameter group, in the optimizer's order, and its settings (lr, betas, ...) as far as known."""

    names: list[str]
    settings: dict[str, Any]


@dataclass
class OptimizerMetadata:
    """See the module's text.

    Attributes:
        groups: every trainable name once.
        steps: how often AdamW has stepped; None where the source does not say, or it has not.
        compute_dtype: of the weights that the forward pass uses.
        model_states: what else DeepSpeed's model file says (counters, lr_scheduler, the caller's own entries).
        optimizer: loss scaler and clipping, as DeepSpeed's optimizer file names them.
        ds_config: DeepSpeed's, as it was saved.
        notes: what could not be carried over.
    """

    groups: list[Group]
    steps: float | None
    compute_dtype: str
    model_states: dict[str, Any]
    optimizer: dict[str, Any]
    ds_config: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def training_facts(opened: OpenedCheckpoint) -> OptimizerMetadata:
    """Facts of a source that was opened with its moments.

    Raises:
        UserError: nobody knows which of its weights were trained, or it is damaged.
    """
    source = opened.weights
    unknown = [name for name, info in source.tensors.items() if info.kind == "parameter"]
    if unknown:
        raise UserError(
            f"a training checkpoint at {source.path}: which weights were trained, and their optimizer",
            f"nothing of that kind for {join_some(unknown)}",
            "weights alone go to --to safetensors, model.pt or dcp",
        )
    if isinstance(source, ZeroCheckpoint):
        facts = _of_zero(source)
    elif isinstance(source, DcpCheckpoint):
        facts = _of_dcp(opened, source)
    else:
        assert isinstance(source, ModelFile), f"no training in a {type(source).__name__}"
        facts = _of_model_file(opened, source)
    trained = {name for name, info in source.tensors.items() if info.kind == "trainable"}
    named = [name for group in facts.groups for name in group.names]
    if set(named) != trained or len(named) != len(trained):
        odd = sorted(trained.symmetric_difference(named)) or named
        raise corrupt_file_error(
            source.path, f"its parameter groups and its trained weights disagree, first about {join_some(odd)}"
        )
    if not source.moments:
        facts.steps = None
    return facts


def to_plain_value(file: TorchFile, value: Any) -> Any:
    """Numbers and words as they are, a one-element tensor as its number.

    Raises:
        UserError: anything else.
    """
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, (list, tuple)):
        return type(value)(to_plain_value(file, item) for item in value)
    if isinstance(value, dict):
        return {key: to_plain_value(file, item) for key, item in value.items()}
    if isinstance(value, TensorRef) and value.numel == 1 and value.dtype in ("float32", "float64", "int64", "int32"):
        file.check_ref(value, "a setting of the optimizer")
        one = TensorRef(value.dtype, (1,), (1,), value.key, value.offset, value.storage_elements)
        return file.read_elements(one, 0, 1)[0].item()
    raise corrupt_file_error(
        file.path, f"{str(value)[:80]} among the settings of the optimizer, where a number should stand"
    )


def copied_values(file: TorchFile, value: Any, what: str) -> Any:
    """A value as it can be written again: plain values, and tensors with their elements.

    Raises:
        ValueError: an object of a class; it was never built, so it cannot be.
    """
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, TensorRef):
        file.check_ref(value, what)
        flat = file.read_elements(value, 0, value.numel) if value.is_contiguous else file.read_strided(value, what)
        return TensorSpec(value.dtype, value.shape, [flat])
    if isinstance(value, (list, tuple)):
        return type(value)(copied_values(file, item, what) for item in value)
    if isinstance(value, dict):
        return {copied_values(file, key, what): copied_values(file, item, what) for key, item in value.items()}
    raise ValueError(what)


def loss_scaler(value: Any) -> ObjectSpec:
    """DeepSpeed's loss scaler as it was saved, or the static one of scale 1, which bf16 and fp32 engines have."""
    if (
        isinstance(value, OpaqueObject)
        and value.kind.removeprefix(_SCALER + ".") in _SCALERS
        and isinstance(value.state, dict)
    ):
        dtypes = {key: f"torch.{dtype_name(item)}" for key, item in value.state.items() if dtype_name(item)}
        value = {"class": value.kind.rpartition(".")[2], "state": {**value.state, **dtypes}}
    if isinstance(value, dict) and value.get("class") in _SCALERS and isinstance(value.get("state"), dict):
        if all(isinstance(key, str) and isinstance(item, _PLAIN) for key, item in value["state"].items()):
            state = {key: _dtype_or_plain(item) for key, item in value["state"].items()}
            return ObjectSpec(GlobalRef(_SCALER, value["class"]), state=state)
    return ObjectSpec(GlobalRef(_SCALER, "LossScaler"), state={"cur_scale": 1.0, "dynamic": False})


def _dtype_or_plain(item: Any) -> Any:
    is_dtype = isinstance(item, str) and item.removeprefix("torch.") in DTYPES
    return GlobalRef("torch", item.removeprefix("torch.")) if is_dtype else item


def plain_scaler(scaler: ObjectSpec) -> dict[str, Any]:
    """A loss scaler for a file that holds no objects; loss_scaler() makes it one again."""
    state = {key: f"torch.{item.name}" if isinstance(item, GlobalRef) else item for key, item in scaler.state.items()}
    return {"class": scaler.type.name, "state": state}


def _first(source: WeightSource, ending: str) -> TorchFile | None:
    return next((file for file in source.files if file.path.name.endswith(ending)), None)


# -- DeepSpeed --------------------------------------------------------------------------------------------------------


def _of_zero(source: ZeroCheckpoint) -> OptimizerMetadata:
    model = _first(source, "model_states.pt")
    assert model is not None
    state = load_dict(model)
    notes: list[str] = []
    model_states = {}
    for key, value in state.items():
        if key not in _OWN:
            try:
                model_states[copied_values(model, key, "a key")] = copied_values(model, value, str(key))
            except ValueError:
                notes.append(f"entry {str(key)[:80]!r} of the model file holds an object of a class and was left out")
    file, inner, optimizer = _optimizer_of(source, model, state)
    tables = optimizer.get("param_groups") if isinstance(optimizer, dict) else None
    tables = tables if isinstance(tables, list) and all(isinstance(table, dict) for table in tables) else []
    if source.stage == 0:
        named = state.get("optimizer_param_names")
        names = group_names(model, named)  # refuses what is no list of names
        owners = iter(source.owners_of(names, model))
        names_of = [[next(owners) for _ in group] for group in named]
    else:
        names_of = [list(group) for group in param_shapes(model, state)]
        if source.stage == 3:
            names_of = _joined(file, names_of, tables)
    config = state.get("ds_config")
    config = config if isinstance(config, dict) else {}
    zero = config.get("zero_optimization")
    if source.stage in (1, 2) and isinstance(zero, dict) and zero.get("round_robin_gradients"):
        place = {name: number for number, name in enumerate(source.tensors)}
        names_of = [sorted(group, key=place.__getitem__) for group in names_of]
        notes.append("round_robin_gradients reordered the groups' parameters: written in the model's order")
    settings = [
        {key: to_plain_value(file, value) for key, value in table.items() if key != "params"} for table in tables
    ]
    if len(settings) != len(names_of):
        settings = [{} for _ in names_of]
    if not all(settings):
        notes.append("the optimizer's settings are not in the checkpoint: DeepSpeed's own loader would miss them")
    facts = {key: inner[key] for key in COPIED_KEYS if key in inner and type(inner[key]) in _PLAIN}
    scaled = {"loss_scaler": loss_scaler(inner.get("loss_scaler", inner.get(PLAIN_SCALER))), **facts}
    try:
        config = copied_values(model, config, "ds_config")
    except ValueError:
        config = {}
        notes.append("ds_config holds an object of a class and was left out")
    steps = _steps(file, optimizer, source)
    groups = [Group(names, table) for names, table in zip(names_of, settings)]
    return OptimizerMetadata(groups, steps, _compute_dtype(source), model_states, scaled, config, notes)


def _optimizer_of(source: ZeroCheckpoint, model: TorchFile, state: dict) -> tuple[TorchFile, dict, Any]:
    """A file, what DeepSpeed's optimizer says in it, and the torch optimizer's state_dict (or elastic list) there."""
    file = _first(source, "optim_states.pt")
    if file is not None:
        inner = inner_optimizer(file)
        return file, inner, inner.get("base_optimizer_state", inner.get("optimizer_state_dict"))
    if source.stage == 0:
        inner = state.get("optimizer")
        inner = inner if isinstance(inner, dict) else {}
        return model, inner, inner.get("optimizer_state_dict", inner)
    path = source.path / FOLDER / "optimizer_state.pt"
    file = TorchFile(path)
    source.files.append(file)
    inner = load_dict(file)
    return file, inner, {**inner.get("optimizer_state_dict", {}), "param_groups": inner.get("param_groups")}


def _joined(file: TorchFile, sub_groups: list[list[str]], tables: list[dict]) -> list[list[str]]:
    """ZeRO-3 cuts an optimizer group into sub-groups, whose numbers the group lists as its parameters."""
    counts = [len(table["params"]) if isinstance(table.get("params"), list) else 0 for table in tables]
    if sum(counts) != len(sub_groups):
        raise corrupt_file_error(
            file.path, f"{len(sub_groups)} sub-groups in param_shapes, {sum(counts)} in its param_groups"
        )
    rest = iter(sub_groups)
    return [[name for _ in range(count) for name in next(rest)] for count in counts]


def _steps(file: TorchFile, optimizer: Any, source: ZeroCheckpoint) -> float | None:
    states: Any = optimizer.get("state") if isinstance(optimizer, dict) else optimizer
    states = list(states.values()) if isinstance(states, dict) else states if isinstance(states, list) else []
    for state in states:
        if isinstance(state, dict):
            extra = [key for key in state if key not in (*MOMENTS, "step") and isinstance(state[key], TensorRef)]
            if extra:
                raise UserError(
                    f"AdamW's exp_avg and exp_avg_sq alone in {file.path}",
                    f"{join_some(extra)} too (amsgrad, or another optimizer)",
                    "such state cannot be carried over; take the weights alone with --to safetensors",
                )
            if "step" in state:
                return float(to_plain_value(file, state["step"]))
    tables = optimizer.get("param_groups") if isinstance(optimizer, dict) else None
    told = tables[0].get("step") if tables else None
    if told is None and (path := next(iter((source.path / FOLDER).glob("*/step.pt")), None)):
        told_by = TorchFile(path)
        source.files.append(told_by)
        return float(to_plain_value(told_by, told_by.load()))
    return None if told is None else float(to_plain_value(file, told))


def _compute_dtype(source: ZeroCheckpoint) -> str:
    """Of the copies that the forward pass used: the model file's, where ZeRO-3 has left empty ones."""
    state = load_dict(source.files[0])
    module = state.get("module") if isinstance(state.get("module"), dict) else {}
    for name, info in source.tensors.items():
        if info.kind == "trainable" and isinstance(module.get(name), TensorRef):
            return module[name].dtype
    return "float32"


# -- the others -------------------------------------------------------------------------------------------------------


def _counters(source: WeightSource, opened: OpenedCheckpoint) -> dict[str, Any]:
    step = opened.step or 0
    return {"lr_scheduler": None, "data_sampler": None, "random_ltd": None, "skipped_steps": 0, "global_steps": step}


def _scaler_of_none() -> dict[str, Any]:
    return {"loss_scaler": loss_scaler(None), "dynamic_loss_scale": False, "overflow": False}


def _of_dcp(opened: OpenedCheckpoint, source: DcpCheckpoint) -> OptimizerMetadata:
    path = source.path / TRAINABLE
    told = json.loads(path.read_text())  # the reader has taken it apart before
    notes = []
    try:
        groups = [Group(list(group["names"]), dict(group["settings"])) for group in told["groups"]]
        for group in groups:
            if "betas" in group.settings:  # JSON knows no tuples
                group.settings["betas"] = tuple(group.settings["betas"])
    except KeyError:
        groups = [Group(list(told["trainable"]), {})]
        notes.append(f"{path.name} names no parameter groups: all are in one, without settings")
    except (TypeError, ValueError) as error:
        raise corrupt_file_error(path, f"groups that are no list of names and settings ({error!r})") from error
    groups = [Group(source.owners_of(group.names, source), group.settings) for group in groups]
    steps = _applied_steps(opened) if told.get("steps") is None else float(told["steps"])
    dtype = told.get("compute_dtype") or _configured_dtype(opened)
    kept = told.get("deepspeed")
    kept = kept if isinstance(kept, dict) else {}
    scaled = _scaler_of_none() | {
        key: kept[key] for key in COPIED_KEYS if type(kept.get(key)) in _PLAIN and key in kept
    }
    scaled["loss_scaler"] = loss_scaler(kept.get(PLAIN_SCALER))
    return OptimizerMetadata(groups, steps, dtype, _counters(source, opened), scaled, notes=notes)


def _of_model_file(opened: OpenedCheckpoint, source: ModelFile) -> OptimizerMetadata:
    file = source.files[1]
    state = load_dict(file)
    named = state.get("param_names")
    owners = iter(source.owners_of(group_names(file, named), file))
    names_of = [[next(owners) for _ in group] for group in named or []]
    tables = state.get("param_groups")
    tables = tables if isinstance(tables, list) and len(tables) == len(names_of) else [{} for _ in names_of]
    settings = [
        {key: to_plain_value(file, value) for key, value in table.items() if key != "params"} for table in tables
    ]
    groups = [Group(names, table) for names, table in zip(names_of, settings)]
    first = next(iter((state.get("state") or {}).values()), {})
    steps = float(to_plain_value(file, first["step"])) if "step" in first else _applied_steps(opened)
    dtype = _configured_dtype(opened)
    return OptimizerMetadata(groups, steps, dtype, _counters(source, opened), _scaler_of_none())


def _applied_steps(opened: OpenedCheckpoint) -> float | None:
    state = _read_json(opened.checkpoint / "training_state.json") if opened.checkpoint else {}
    steps = state.get("applied_steps")
    return float(steps) if isinstance(steps, int) else None


def _configured_dtype(opened: OpenedCheckpoint) -> str:
    """training.dtype of the run around the checkpoint: engines that keep fp32 weights do not save the other copy."""
    path = opened.checkpoint / "config.yaml" if opened.checkpoint else None
    if path is None or not path.is_file():
        return "float32"
    from mmldlm.config.yaml_reader import read_yaml

    training = read_yaml(path).get("training")
    return _PRECISIONS.get(str(training.get("dtype")), "float32") if isinstance(training, dict) else "float32"


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}
