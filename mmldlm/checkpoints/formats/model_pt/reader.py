"""Reader of `model.pt`: a torch.save'd dict name -> tensor, and of the `optimizer.pt` that mmldlm writes beside it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mmldlm.checkpoints.formats.adam_state import group_names, moments_by_name, states_by_index
from mmldlm.checkpoints.formats.deepspeed.files import load_dict
from mmldlm.checkpoints.formats.torch_save.reader import TorchFile
from mmldlm.checkpoints.formats.torch_save.unpickler import TensorRef
from mmldlm.checkpoints.formats.weight_source import FileRange, TensorInfo, WeightSource
from mmldlm.errors import UserError

_NESTED = ("model", "state_dict", "model_state_dict", "module")


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
        source._parts[name] = [FileRange(file, ref, 0, ref.numel)] if ref.numel else []


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


def _state_dict(value: Any, notes: list[str]) -> Any:
    """What a file holds, or the state_dict under a key of it that trainers use where it holds no tensor itself."""
    if not isinstance(value, dict) or any(isinstance(item, TensorRef) for item in value.values()):
        return value
    nested = {
        key: item
        for key, item in value.items()
        if isinstance(item, dict) and any(isinstance(entry, TensorRef) for entry in item.values())
    }
    key = next((key for key in _NESTED if key in nested), next(iter(nested), None) if len(nested) == 1 else None)
    if key is None:
        return value
    notes.append(f"the weights are those under {key!r} in the file")
    return nested[key]


def _of_trainer(tensors: dict[str, TensorRef], notes: list[str]) -> dict[str, TensorRef]:
    """MM-LDLM saves its trainer: the model under `model.`, and beside it the tables of its noise schedules."""
    schedules = [name for name in tensors if "noise_schedule" in name.partition(".")[0]]
    rest = [name for name in tensors if name not in schedules]
    if not schedules or not rest or not all(name.startswith("model.") for name in rest):
        return tensors
    notes.append(f"the trainer's noise schedules ({len(schedules)} tensors) are no weights and were left out")
    return {name.removeprefix("model."): tensors[name] for name in rest}


class ModelFile(WeightSource):
    """A `model.pt` file opened for reading; see WeightSource."""

    engine = "model.pt"

    @classmethod
    def open(
        cls,
        path: Path | str,
        allow_nonfinite: bool = False,
        optimizer: Path | None = None,
        with_moments: bool = False,
        is_ranged: bool = False,
    ) -> ModelFile:
        """Opens a file of weights.

        Args:
            optimizer: the optimizer.pt saved with it: {"state", "param_groups"} of torch's AdamW, and "param_names",
                [[names of group 0], ...]; optionally "buffer_names", and "aliases" {second name: name} of tied weights.
                It tells which weights are trained.
            with_moments: find AdamW's moments in it too.
            is_ranged: see torch_file.

        Raises:
            UserError: a file is damaged, unsafe, or holds no tensors, or the two do not fit each other.
        """
        source = cls(Path(path), allow_nonfinite, is_ranged)
        try:
            file = source._open(source.path)
            state = tensors_of(_state_dict(file.load(), source.notes), source.path, "the file", source.notes)
            state = _of_trainer(state, source.notes)
            if not state:
                raise UserError(f"weights in {path}", "a dict without a single tensor", "give a model.pt of mmldlm")
            add_plain_tensors(source, file, state, {})
            if optimizer is not None:
                source._read_optimizer(source._open(optimizer), with_moments)
        except BaseException:
            source.close()
            raise
        return source

    def _open(self, path: Path) -> TorchFile:
        file = TorchFile(path, self.is_ranged)
        self.files.append(file)
        return file

    def _read_optimizer(self, file: TorchFile, with_moments: bool) -> None:
        state = load_dict(file)
        if "param_names" not in state and not with_moments:
            return  # of an mmldlm that did not save the names: the weights alone are all there
        aliases = state.get("aliases")
        self.mark_aliases(aliases if isinstance(aliases, dict) else {}, file.path)
        names = self.owners_of(group_names(file, state.get("param_names")), file)
        buffers = state.get("buffer_names") or []
        self.set_kinds(set(names), set(buffers))
        if with_moments:
            states = states_by_index(file, state, len(names))
            shapes = {name: info.shape for name, info in self.tensors.items()}
            self.moments = moments_by_name(file, states, names, shapes) if states else {}
