"""State dicts of torch.save files as tensors of a WeightSource."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mmldlm.checkpoints.formats.selection import MAX_DEPTH, StoredTensor, refuse_opaque_tensor
from mmldlm.checkpoints.formats.torch_save.reader import TorchFile, corrupt_file_error
from mmldlm.checkpoints.formats.torch_save.unpickler import TensorRef
from mmldlm.checkpoints.formats.weight_source import FileRange, TensorInfo, WeightSource
from mmldlm.errors import UserError


class FileTensor(StoredTensor):
    """A tensor of a torch.save'd object."""

    def __init__(self, file: TorchFile, ref: TensorRef):
        self.file, self.ref, self.dtype, self.shape = file, ref, ref.dtype, ref.shape

    def parts(self) -> list[FileRange]:
        ref = self.ref
        self.file.check_ref(ref, f"a tensor of shape {ref.shape}")
        if not ref.is_contiguous:
            found = f"one of shape {ref.shape} with strides {ref.stride}"
            raise UserError(
                f"tensors in row-major order in {self.file.path}",
                found,
                "save them with .contiguous()",
            )
        return [FileRange(self.file, ref, 0, ref.numel)] if ref.numel else []


def tree_of(
    file: TorchFile, value: Any, seen: dict[int, Any] | None = None, depth: int = 0
) -> Any:
    """Return a loaded object with FileTensor for its tensors.

    Raises:
        UserError: it is nested too deeply.
    """
    seen = {} if seen is None else seen
    if depth > MAX_DEPTH:
        raise corrupt_file_error(file.path, f"dicts and lists nested more than {MAX_DEPTH} deep")
    if isinstance(value, TensorRef):
        return FileTensor(file, value)
    if not isinstance(value, dict | list | tuple):
        return value
    if id(value) not in seen:
        seen[id(value)] = None  # a dict that contains itself
        if isinstance(value, dict):
            seen[id(value)] = {
                key: tree_of(file, entry, seen, depth + 1) for key, entry in value.items()
            }
        else:
            items = [tree_of(file, entry, seen, depth + 1) for entry in value]
            seen[id(value)] = items if isinstance(value, list) else tuple(items)
    return seen[id(value)]


def node_at(value: Any, path: tuple[Any, ...]) -> Any:
    """Return what is at a path of keys in a loaded object."""
    for key in path:
        value = value[key]
    return value


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
        kinds: name -> TensorInfo.kind; "parameter" for names that are not in it.
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
        source.parts[name] = [FileRange(file, ref, 0, ref.numel)] if ref.numel else []
