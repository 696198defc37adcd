"""Reader of `model.pt`: a torch.save'd dict name -> tensor, as the single and ddp engines write it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mmldlm.checkpoints.torch_file import TorchFile
from mmldlm.checkpoints.weights import Part, TensorInfo, WeightSource
from mmldlm.checkpoints.zero_pickle import TensorRef
from mmldlm.errors import UserError


def add_plain_tensors(
    source: WeightSource, file: TorchFile, state: dict[str, TensorRef], kinds: dict[str, str]
) -> None:
    """Adds a state_dict's tensors to `source` in their stored dtype.

    Two names over the very same elements of one storage are one tensor: the first keeps it, the other is an alias.
    """
    owners: dict[tuple, str] = {}
    for name, ref in state.items():
        file.check_ref(ref, name)
        place = (ref.key, ref.offset, ref.shape, ref.stride)
        owner = owners.setdefault(place, name) if ref.numel else name
        if owner != name:
            source.tensors[name] = TensorInfo(name, source.tensors[owner].dtype, ref.shape, "alias", owner)
            continue
        source.tensors[name] = TensorInfo(name, ref.dtype, ref.shape, kinds.get(name, "parameter"))
        source._parts[name] = [Part(file, ref, 0, ref.numel)] if ref.numel else []


def tensors_of(value: Any, path: Path, what: str, notes: list[str]) -> dict[str, TensorRef]:
    """The TensorRef entries of a state_dict; anything else in it is noted, a thing that is no dict is refused."""
    if not isinstance(value, dict):
        raise UserError(f"{what} in {path} to be a dict name -> tensor", type(value).__name__, "check what was saved")
    tensors = {}
    for name, ref in value.items():
        if isinstance(ref, TensorRef) and isinstance(name, str):
            tensors[name] = ref
        else:
            notes.append(f"{what} entry {str(name)[:80]!r} is no tensor and was left out")
    return tensors


class ModelFile(WeightSource):
    """A `model.pt` file opened for reading; see WeightSource."""

    engine = "model.pt"

    @classmethod
    def open(cls, path: Path | str, allow_nonfinite: bool = False) -> ModelFile:
        """Raises UserError where the file is damaged, unsafe, or holds no tensors."""
        source = cls(Path(path), allow_nonfinite)
        file = TorchFile(path)
        source.files.append(file)
        try:
            state = tensors_of(file.load(), source.path, "the file", source.notes)
            if not state:
                raise UserError(f"weights in {path}", "a dict without a single tensor", "give a model.pt of mmldlm")
            add_plain_tensors(source, file, state, {})
        except BaseException:
            source.close()
            raise
        return source
