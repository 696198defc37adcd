"""Reader of `model.pt`, a torch.save'd dict name -> tensor, and of mmldlm's `optimizer.pt` next to it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mmldlm.checkpoints.formats.adam_state import group_names, moments_by_name, states_by_index
from mmldlm.checkpoints.formats.rank_files import check_keys
from mmldlm.checkpoints.formats.shard_index import check_listed, read_shard_index
from mmldlm.checkpoints.formats.state_dict import add_tensors, tensors_of
from mmldlm.checkpoints.formats.torch_save.reader import TorchFile
from mmldlm.checkpoints.formats.torch_save.unpickler import TensorRef, module_names_of
from mmldlm.checkpoints.formats.weight_source import WeightSource
from mmldlm.errors import UserError

_NESTED = ("model", "state_dict", "model_state_dict", "module")


def _state_dict(value: Any, notes: list[str]) -> Any:
    """Return what a file holds, or, if that has no tensors, the state_dict under a key that trainers use."""
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
    """Return the weights of an MM-LDLM trainer: the model under `model.`, without the noise schedules next to it."""
    schedules = [name for name in tensors if "noise_schedule" in name.partition(".")[0]]
    others = [name for name in tensors if name not in schedules]
    if not schedules or not others or not all(name.startswith("model.") for name in others):
        return tensors
    notes.append(f"the trainer's noise schedules ({len(schedules)} tensors) are not weights and were left out")
    return {name.removeprefix("model."): tensors[name] for name in others}


def _refuse_optimizer(path: Path, value: Any) -> None:
    """Raise UserError for what `optimizer.state_dict()` returns."""
    if isinstance(value, dict) and {"state", "param_groups"} <= value.keys() <= {"state", "param_groups", *_OPTIMIZER}:
        fix = "give the file of the weights, which trainers save beside it"
        raise UserError(f"weights in {path}", "the state of an optimizer alone", fix)


_OPTIMIZER = ("param_names", "buffer_names", "aliases")  # what mmldlm saves with it


class ModelFile(WeightSource):
    """An opened `model.pt`; see WeightSource."""

    engine = "model.pt"

    @classmethod
    def open(
        cls,
        path: Path | str,
        allow_nonfinite: bool = False,
        optimizer: Path | None = None,
        with_moments: bool = False,
        random_access: bool = False,
    ) -> ModelFile:
        """Open a file of weights.

        Args:
            allow_nonfinite: return NaN and infinite weights instead of raising.
            optimizer: the optimizer.pt saved with it, which records the trained weights: {"state", "param_groups"} of
                torch's AdamW, "param_names" [[names of group 0], ...], and optionally "buffer_names" and "aliases"
                {second name: name} of tied weights.
            with_moments: find the moments in it too.
            random_access: see torch_save/reader.

        Raises:
            UserError: a file is damaged, unsafe, without tensors, or the two do not match.
        """
        source = cls(Path(path), allow_nonfinite, random_access)
        try:
            file = source._open(source.path)
            value = file.load()
            check_keys(source.path, value)
            _refuse_optimizer(source.path, value)
            chosen = _state_dict(value, source.notes)
            source.module_names = module_names_of(chosen)
            state = tensors_of(chosen, source.path, "the file", source.notes)
            state = _of_trainer(state, source.notes)
            if not state:
                raise UserError(f"weights in {path}", "a dict without a single tensor", "give a model.pt of mmldlm")
            add_tensors(source, file, state, {})
            if optimizer is not None:
                source._read_optimizer(source._open(optimizer), with_moments)
        except BaseException:
            source.close()
            raise
        return source

    @classmethod
    def open_shards(cls, index: Path, allow_nonfinite: bool = False) -> ModelFile:
        """Open the files of an index of shards, each a torch.save'd dict name -> tensor.

        Raises:
            UserError: damaged or missing files, or an index that disagrees with the shards.
        """
        source = cls(index, allow_nonfinite)
        try:
            shard_of = read_shard_index(index)
            states = {}
            for name in sorted(set(shard_of.values())):
                file = source._open(index.parent / name)
                states[name] = tensors_of(file.load_dict(), file.path, "the file", source.notes)
                add_tensors(source, file, states[name], {})
            check_listed(index, shard_of, {name: set(state) for name, state in states.items()})
            source.tensors = {name: source.tensors[name] for name in shard_of}
        except BaseException:
            source.close()
            raise
        return source

    def _open(self, path: Path) -> TorchFile:
        file = TorchFile(path, self.random_access)
        self.files.append(file)
        return file

    def _read_optimizer(self, file: TorchFile, with_moments: bool) -> None:
        state = file.load_dict()
        if "param_names" not in state and not with_moments:
            return  # an old mmldlm did not save the names: only the weights can be used
        aliases = state.get("aliases")
        self.mark_tied(aliases if isinstance(aliases, dict) else {}, file.path)
        names = self.resolve_tied(group_names(file, state.get("param_names")), file.path)
        buffers = state.get("buffer_names") or []
        self.classify(set(names), set(buffers))
        if with_moments:
            states = states_by_index(file, state, len(names))
            shapes = {name: info.shape for name, info in self.tensors.items()}
            self.moments = moments_by_name(file, states, names, shapes) if states else {}
