"""model.pt and optimizer.pt, as torch.save of a state_dict and of AdamW's leaves them, and mmldlm's single and ddp."""

from __future__ import annotations

from pathlib import Path

from mmldlm.checkpoints.formats.adam_state import MOMENTS
from mmldlm.checkpoints.formats.deepspeed.writer import scalar
from mmldlm.checkpoints.formats.optimizer_metadata import OptimizerMetadata
from mmldlm.checkpoints.formats.torch_save.pickler import TensorSpec
from mmldlm.checkpoints.formats.torch_save.writer import TorchFileLayout, TorchFileWriter
from mmldlm.checkpoints.formats.weight_source import WeightSource
from mmldlm.checkpoints.formats.write_plan import WEIGHT, WritePlan, WriteSegment


def plan_model_file(
    source: WeightSource, tensors: dict[str, TensorSpec], names: dict[str, str], path: Path
) -> WritePlan:
    """The plan (sweep) of one file: a dict written name -> tensor.

    Args:
        tensors: source name -> what to write of it. names: every name in the file -> source name; tied ones share.
    """
    layout = TorchFileLayout({name: tensors[owner] for name, owner in names.items()}, path.stem)
    file = TorchFileWriter(path, [layout])
    plan = WritePlan([file])
    for name, tensor in tensors.items():
        plan.send(name, WEIGHT, [WriteSegment(file, tensor, 0, 0, tensor.numel)])
    return plan


def plan_plain(source: WeightSource, facts: OptimizerMetadata, folder: Path) -> WritePlan:
    """The plan of model.pt and optimizer.pt in `folder`."""
    stored = {name: TensorSpec(i.dtype, i.shape) for name, i in source.tensors.items() if not i.alias_of}
    owners = {name: info.alias_of or name for name, info in source.tensors.items()}
    plan = plan_model_file(source, stored, owners, folder / "model.pt")
    names = [name for group in facts.groups for name in group.names]
    states: dict[int, dict[str, TensorSpec]] = {}
    if facts.steps is not None:
        for number, name in enumerate(names):
            shape = source.tensors[name].shape
            states[number] = {"step": scalar(facts.steps), **{what: TensorSpec("float32", shape) for what in MOMENTS}}
    number_of = {name: number for number, name in enumerate(names)}
    groups = [{**group.settings, "params": [number_of[name] for name in group.names]} for group in facts.groups]
    value = {
        "state": states,
        "param_groups": groups,
        "param_names": [group.names for group in facts.groups],
        "buffer_names": [name for name, info in source.tensors.items() if info.kind == "buffer"],
        "aliases": {name: info.alias_of for name, info in source.tensors.items() if info.alias_of},
    }
    file = TorchFileWriter(folder / "optimizer.pt", [TorchFileLayout(value, "optimizer")])
    plan.files.append(file)
    for number, state in states.items():
        for what in MOMENTS:
            plan.send(names[number], what, [WriteSegment(file, state[what], 0, 0, state[what].numel)])
    return plan
