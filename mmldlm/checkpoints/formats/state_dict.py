"""The tensors of a state dict in a file for torch.load, as those of a WeightSource."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mmldlm.checkpoints.files.torch_file import TorchFile
from mmldlm.checkpoints.files.unpickler import OpaqueObject, TensorRef
from mmldlm.checkpoints.formats.weight_source import TensorInfo, WeightSource, whole_tensor
from mmldlm.errors import UserError


def tensors_of(value: Any, path: Path, what: str, notes: list[str]) -> dict[str, TensorRef]:
    """Return the TensorRef entries of a state_dict; note all others.

    Raises:
        UserError: `value` is not a dict, or an entry of it is a tensor of a kind that is not read.
    """
    if not isinstance(value, dict):
        raise UserError(
            f"a dict name -> tensor as {what} in {path}",
            type(value).__name__,
            "check what was saved",
        )
    tensors = {}
    for name, ref in value.items():
        if isinstance(ref, TensorRef) and isinstance(name, str):
            tensors[name] = ref
        else:
            refuse_opaque_tensor(f"{what} of {path}", name, ref)
            notes.append(f"{what} entry {str(name)[:80]!r} is not a tensor and was left out")
    return tensors


def add_tensors(
    source: WeightSource, file: TorchFile, state: dict[str, TensorRef], kinds: dict[str, str]
) -> None:
    """Add a state_dict's tensors to `source` in their stored dtype.

    Two names of the same elements of one storage are one tensor: the first owns it, the other is
    an alias.

    Args:
        kinds: Name -> TensorInfo.kind; "parameter" for names that are not in it.
    """
    owners: dict[tuple, str] = {}
    for name, ref in state.items():
        file.check_ref(ref, name)
        location = (
            ref.key,
            ref.dtype,
            ref.offset,
            ref.shape,
            ref.stride,
            ref.negated,
            ref.conjugated,
        )
        owner = owners.setdefault(location, name) if ref.numel else name
        if owner != name:
            source.tensors[name] = TensorInfo(
                name, source.tensors[owner].dtype, ref.shape, "alias", owner
            )
            continue
        source.tensors[name] = TensorInfo(name, ref.dtype, ref.shape, kinds.get(name, "parameter"))
        source.parts[name] = whole_tensor(file, ref)


def refuse_opaque_tensor(where: str, name: object, value: Any) -> None:
    """Raise UserError if a leaf stands for a tensor that cannot be read."""
    if is_opaque_tensor(value):
        fix = (
            "save plain dense tensors of common types: .full_tensor(), .to_dense(), .dequantize(),"
            " .to(dtype)"
        )
        raise UserError(
            f"plain tensors in {where}", f"{str(name)[:80]!r}, saved as {value.kind}", fix
        )


def is_opaque_tensor(value: Any) -> bool:
    """Return whether a leaf stands for a tensor that cannot be read, of a subclass or another
    layout.
    """
    return isinstance(value, OpaqueObject) and value.may_be_tensor
