"""DeepSpeed ZeRO-0 to 3 and universal checkpoints: the format, and the optimizer metadata in their
model and optimizer files.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from mmldlm.checkpoints.files.torch_file import TorchFile, corrupt_file_error
from mmldlm.checkpoints.files.unpickler import TensorRef
from mmldlm.checkpoints.formats.base import WritePlan, WriteRequest
from mmldlm.checkpoints.formats.deepspeed_counters import (
    STEPS_AHEAD,
    group_tables,
    optimizer_steps,
    states_of,
    steps_ahead,
    torch_optimizer,
)
from mmldlm.checkpoints.formats.deepspeed_files import find_states, inner_optimizer, param_shapes
from mmldlm.checkpoints.formats.deepspeed_reader import ZeroCheckpoint
from mmldlm.checkpoints.formats.deepspeed_writer import (
    plan_universal,
    plan_zero,
    write_other_files,
)
from mmldlm.checkpoints.formats.optimizer import (
    Group,
    OptimizerMetadata,
    copied_values,
    group_settings,
    named_groups,
    read_scaling,
)
from mmldlm.checkpoints.formats.universal_folder import is_universal, universal_steps
from mmldlm.checkpoints.formats.weight_source import OpenedCheckpoint, ReadOptions, WeightSource
from mmldlm.checkpoints.manifest import UNIVERSAL_TAG, ZERO_TAG
from mmldlm.errors import UserError
from mmldlm.utils.formatting import join_some
from mmldlm.utils.moments import MOMENTS


class DeepSpeedFormat:
    """A folder with *_states.pt files."""

    name = "deepspeed"
    targets: tuple[str, ...] = ("universal", "zero1", "zero2", "zero3")
    has_keys = False

    def detect(self, path: Path) -> Path | None:
        return find_states(path)

    def open(self, path: Path, options: ReadOptions) -> WeightSource:
        return ZeroCheckpoint.open(path, options)

    def can_resume(self, path: Path) -> bool:
        return True

    def read_optimizer_metadata(self, opened: OpenedCheckpoint) -> OptimizerMetadata:
        source = opened.weights
        model = _first(source, "model_states.pt")
        assert model is not None
        state = model.load_dict()
        notes: list[str] = []
        model_states = _other_entries(model, state, notes)
        file, inner, optimizer = _optimizer_of(source, model, state)
        tables = group_tables(optimizer)
        config = state.get("ds_config")
        config = config if isinstance(config, dict) else {}
        names_of = _group_names(source, model, state, file, tables)
        zero = config.get("zero_optimization")
        if source.stage in (1, 2) and isinstance(zero, dict) and zero.get("round_robin_gradients"):
            position_of = {name: position for position, name in enumerate(source.tensors)}
            names_of = [sorted(group, key=position_of.__getitem__) for group in names_of]
            notes.append(
                "round_robin_gradients reordered the groups' parameters: written in the model's"
                " order"
            )
        settings = group_settings(file, tables)
        if len(settings) != len(names_of):
            settings = [{} for _ in names_of]
        if not all(settings):
            notes.append(
                "the optimizer's settings are not in the checkpoint: DeepSpeed's own loader would"
                " miss them"
            )
        try:
            config = copied_values(model, config, "ds_config")
        except ValueError:
            config = {}
            notes.append("ds_config holds an object of a class and was left out")
        _check_states(file, optimizer)
        steps = _steps(source, file, optimizer, [name for group in names_of for name in group])
        if (ahead := steps_ahead(state, steps)) > 0:
            model_states[STEPS_AHEAD] = ahead
        return OptimizerMetadata(
            groups=[Group(names, values) for names, values in zip(names_of, settings)],
            steps=steps,
            compute_dtype=_compute_dtype(source, state),
            model_states=model_states,
            optimizer=read_scaling(inner),
            ds_config=config,
            notes=notes,
            is_of_deepspeed=True,
        )

    def plan_write(self, request: WriteRequest) -> tuple[WritePlan, Callable[[Path], object]]:
        if request.target == UNIVERSAL_TAG:
            return plan_universal(request), lambda folder: write_other_files(request, folder)
        return plan_zero(request), lambda folder: None


# -- The optimizer --------------------------------------------------------------------------------

# Entries of model_states files that the writers compute themselves.
REGENERATED_KEYS = {
    "module",
    "buffer_names",
    "optimizer",
    "param_shapes",
    "frozen_param_shapes",
    "shared_params",
    "frozen_param_fragments",
    "dp_world_size",
    "mp_world_size",
    "ds_config",
    "ds_version",
    "optimizer_param_names",
    "aliases",
}


def _first(source: WeightSource, ending: str) -> TorchFile | None:
    return next((file for file in source.files if file.path.name.endswith(ending)), None)


def _other_entries(model: TorchFile, state: dict, notes: list[str]) -> dict[str, Any]:
    entries = {}
    for key, value in state.items():
        if key not in REGENERATED_KEYS:
            try:
                entries[copied_values(model, key, "a key")] = copied_values(model, value, str(key))
            except ValueError:
                notes.append(
                    f"entry {str(key)[:80]!r} of the model file holds an object of a class and was"
                    " left out"
                )
    return entries


def _group_names(
    source: WeightSource, model: TorchFile, state: dict, file: TorchFile, tables: list[dict]
) -> list[list[str]]:
    """Return the names of every parameter group."""
    if source.stage == 0:
        names = state.get("optimizer_param_names")
        return source.names_of_groups or named_groups(source, model, names)
    names_of = [list(group) for group in param_shapes(model, state)]
    return _join_sub_groups(file, names_of, tables) if source.stage == 3 else names_of


def _optimizer_of(
    source: WeightSource, model: TorchFile, state: dict
) -> tuple[TorchFile, dict, Any]:
    """Return the file, DeepSpeed's optimizer in it, and the torch optimizer's state_dict (or
    elastic list) in that.
    """
    file = _first(source, "optim_states.pt")
    if file is not None:
        inner = inner_optimizer(file)
        return file, inner, torch_optimizer(inner)
    if source.stage == 0:
        saved = state.get("optimizer")
        inner = saved if isinstance(saved, dict) else {}
        return model, inner, inner.get("optimizer_state_dict", inner)
    file = TorchFile(source.path / ZERO_TAG / "optimizer_state.pt")
    source.files.append(file)
    inner = file.load_dict()
    optimizer = {
        **inner.get("optimizer_state_dict", {}),
        "param_groups": inner.get("param_groups"),
    }
    return file, inner, optimizer


def _join_sub_groups(
    file: TorchFile, sub_groups: list[list[str]], tables: list[dict]
) -> list[list[str]]:
    """Join ZeRO-3's sub-groups, whose numbers an optimizer group lists as its parameters."""
    counts = [
        len(table["params"]) if isinstance(table.get("params"), list) else 0 for table in tables
    ]
    if sum(counts) != len(sub_groups):
        found = f"{len(sub_groups)} sub-groups in param_shapes, {sum(counts)} in its param_groups"
        raise corrupt_file_error(file.path, found)
    remaining = iter(sub_groups)
    return [[name for _ in range(count) for name in next(remaining)] for count in counts]


def _check_states(file: TorchFile, optimizer: Any) -> None:
    """Raise UserError if the optimizer keeps tensors that AdamW and Muon do not have."""
    for state in states_of(optimizer):
        extra = [
            key
            for key in state
            if key not in (*MOMENTS, "step") and isinstance(state[key], TensorRef)
        ]
        if extra:
            raise UserError(
                f"AdamW's exp_avg and exp_avg_sq alone in {file.path}",
                f"{join_some(extra)} too (amsgrad, or another optimizer)",
                "take the weights alone with --to safetensors; such state cannot be carried over",
            )


def _steps(
    source: WeightSource, file: TorchFile, optimizer: Any, names: list[str]
) -> float | None:
    """Return the optimizer's step count; the reader has compared those of all tensors."""
    steps = [step for step in optimizer_steps(file, optimizer) if step is not None]
    if not steps and is_universal(source.path):
        steps = [step for _, step in universal_steps(source, names)]
    return float(steps[0]) if steps else None


def _compute_dtype(source: WeightSource, state: dict) -> str:
    """Return the dtype of the model file's weights; ZeRO-3 leaves empty tensors there, which have
    it too.
    """
    module = state.get("module")
    module = module if isinstance(module, dict) else {}
    for name, info in source.tensors.items():
        if info.kind == "trainable" and isinstance(module.get(name), TensorRef):
            return module[name].dtype
    return "float32"
