"""Write model.pt and optimizer.pt, as torch.save of a state_dict and of AdamW's, and as mmldlm's
single and ddp.
"""

from __future__ import annotations

from pathlib import Path

from mmldlm.checkpoints.formats.optimizer_metadata import OptimizerMetadata
from mmldlm.checkpoints.formats.torch_save.pickler import TensorSpec, scalar
from mmldlm.checkpoints.formats.torch_save.writer import TorchFileLayout, TorchFileWriter
from mmldlm.checkpoints.formats.weight_source import WeightSource
from mmldlm.checkpoints.formats.write_plan import WEIGHT, WritePlan, WriteSegment
from mmldlm.checkpoints.layout import MODEL_FILE, OPTIMIZER_FILE


def plan_model_file(
    tensors: dict[str, TensorSpec], names: dict[str, str], path: Path
) -> WritePlan:
    """Return the plan of one file, a dict name -> tensor.

    Args:
        tensors: source name -> what to write of it.
        names: every name in the file -> source name; tied weights share one.
        path: the file.
    """
    layout = TorchFileLayout({name: tensors[owner] for name, owner in names.items()}, path.stem)
    file = TorchFileWriter(path, [layout])
    plan = WritePlan([file])
    for name, tensor in tensors.items():
        plan.add(name, WEIGHT, [WriteSegment(file, tensor, 0, 0, tensor.numel)])
    return plan


def plan_model_and_optimizer(
    source: WeightSource, optimizer: OptimizerMetadata, folder: Path
) -> WritePlan:
    """Return the plan of model.pt and optimizer.pt in `folder`."""
    stored = {
        name: TensorSpec(i.dtype, i.shape) for name, i in source.tensors.items() if not i.alias_of
    }
    owners = {name: info.alias_of or name for name, info in source.tensors.items()}
    plan = plan_model_file(stored, owners, folder / MODEL_FILE)
    names = [name for group in optimizer.groups for name in group.names]
    states: dict[int, dict[str, TensorSpec]] = {}
    if optimizer.steps is not None:
        for number, name in enumerate(names):
            shape = source.tensors[name].shape
            states[number] = {
                "step": scalar(optimizer.steps),
                **{what: TensorSpec("float32", shape) for what in source.moments_of(name)},
            }
    number_of = {name: number for number, name in enumerate(names)}
    groups = [
        {**group.settings, "params": [number_of[name] for name in group.names]}
        for group in optimizer.groups
    ]
    value = {
        "state": states,
        "param_groups": groups,
        "param_names": [group.names for group in optimizer.groups],
        "buffer_names": [name for name, info in source.tensors.items() if info.kind == "buffer"],
        "aliases": {name: info.alias_of for name, info in source.tensors.items() if info.alias_of},
    }
    file = TorchFileWriter(folder / OPTIMIZER_FILE, [TorchFileLayout(value, "optimizer")])
    plan.files.append(file)
    for number, state in states.items():
        for what in source.moments_of(names[number]):
            plan.add(
                names[number], what, [WriteSegment(file, state[what], 0, 0, state[what].numel)]
            )
    return plan
