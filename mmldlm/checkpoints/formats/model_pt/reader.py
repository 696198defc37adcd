"""Reader of `model.pt`, a torch.save'd dict name -> tensor, and of mmldlm's `optimizer.pt` next to
it.
"""

from __future__ import annotations

import re
from pathlib import Path

from mmldlm.checkpoints.formats.adam_state import group_names, moments_by_name, states_by_index
from mmldlm.checkpoints.formats.named_optimizer import add_named_optimizer
from mmldlm.checkpoints.formats.rank_files import check_keys
from mmldlm.checkpoints.formats.selection import Keys, find_optimizers, select_model
from mmldlm.checkpoints.formats.shard_index import check_listed, read_shard_index
from mmldlm.checkpoints.formats.state_dict import add_tensors, node_at, tensors_of, tree_of
from mmldlm.checkpoints.formats.torch_save.reader import TorchFile
from mmldlm.checkpoints.formats.torch_save.unpickler import TensorRef, module_names_of
from mmldlm.checkpoints.formats.weight_source import WeightSource

# accelerate and the Hugging Face Trainer save the optimizer of FSDP's full state dict in a file
# beside it.
_ACCELERATE = re.compile(r"pytorch_model_fsdp(_\d+)?\.bin")


def _optimizer_beside(path: Path) -> Path | None:
    found = _ACCELERATE.fullmatch(path.name)
    beside = path.parent / f"optimizer{found[1] or ''}.bin" if found else path
    return beside if found and beside.is_file() else None


def _of_trainer(tensors: dict[str, TensorRef], notes: list[str]) -> dict[str, TensorRef]:
    """Return the weights of an MM-LDLM trainer: the model under `model.`, without the noise
    schedules next to it.
    """
    schedules = [name for name in tensors if "noise_schedule" in name.partition(".")[0]]
    others = [name for name in tensors if name not in schedules]
    if not schedules or not others or not all(name.startswith("model.") for name in others):
        return tensors
    notes.append(
        f"the trainer's noise schedules ({len(schedules)} tensors) are not weights and were"
        " left out"
    )
    return {name.removeprefix("model."): tensors[name] for name in others}


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
        key: str | None = None,
    ) -> ModelFile:
        """Open a file of weights.

        Args:
            allow_nonfinite: return NaN and infinite weights instead of raising.
            optimizer: the optimizer.pt saved with it, which records the trained weights: {"state",
                "param_groups"} of torch's AdamW, "param_names" [[names of group 0], ...], and
                optionally "buffer_names" and "aliases" {second name: name} of tied weights.
            with_moments: find the moments in it too; without an optimizer.pt, those of an
                optimizer beside the model that names its parameters.
            random_access: see torch_save/reader.
            key: which state dict of the file is the model, if there are several.

        Raises:
            UserError: a file is damaged, unsafe, without tensors, or the two do not match.
        """
        source = cls(Path(path), allow_nonfinite, random_access)
        try:
            file = source._open(source.path)
            value = file.load()
            check_keys(source.path, value)
            model = select_model(tree_of(file, value), source.path, key)
            source.notes += model.notes
            source.other_models = model.other_models
            source.module_names = module_names_of(node_at(value, model.path))
            refs = {name: tensor.ref for name, tensor in model.tensors.items()}
            add_tensors(source, file, _of_trainer(refs, source.notes), {})
            if optimizer is None and with_moments:
                source._read_named_optimizer(model.optimizers, model.path)
            elif optimizer is not None:
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

    def _read_named_optimizer(self, optimizers: dict[Keys, dict], path: Keys) -> None:
        beside = _optimizer_beside(self.path)
        if beside is not None:
            file = self._open(beside)
            optimizers = optimizers | find_optimizers(tree_of(file, file.load()))
        add_named_optimizer(self, optimizers, path)

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
