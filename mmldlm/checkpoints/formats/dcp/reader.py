"""Reader of torch.distributed.checkpoint folders (FSDP2), without torch and without executing a
pickle.

The folder itself is described in folder.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from mmldlm.checkpoints.formats.adam_state import check_no_other_moment
from mmldlm.checkpoints.formats.dcp.folder import DcpFolder, DcpTensor
from mmldlm.checkpoints.formats.named_optimizer import add_named_optimizer
from mmldlm.checkpoints.formats.selection import Keys, find_optimizers, select_model
from mmldlm.checkpoints.formats.state_dict import FileTensor, add_tensors
from mmldlm.checkpoints.formats.torch_save.reader import TorchFile, corrupt_file_error
from mmldlm.checkpoints.formats.torch_save.unpickler import TensorRef
from mmldlm.checkpoints.formats.weight_source import TensorInfo, WeightSource
from mmldlm.checkpoints.layout import DCP_METADATA, TRAINABLE_FILE
from mmldlm.errors import UserError
from mmldlm.utils.formatting import join_some
from mmldlm.utils.input_files import read_bytes
from mmldlm.utils.moments import MOMENTS, moment_keys

# accelerate and the Hugging Face Trainer save the optimizer of pytorch_model_fsdp_0 in optimizer_0
# beside it.
_ACCELERATE_MODEL = "pytorch_model_fsdp_"
_STACKED_LAYERS = re.compile(
    r"(^|\.)(decoder|encoder)\.layers\.(mlp|self_attention|cross_attention|input_layernorm|pre_mlp_layernorm|mixer)\."
)


class DcpCheckpoint(WeightSource):
    """An opened DCP folder; see WeightSource.

    mmldlm saves {"model": ..., "optim": {"exp_avg": ..., "exp_avg_sq": ...}}. `trainable.json`
    next to it lists the trained weights: {"trainable": [names]}, and optionally "buffers":
    [names], "aliases": {second name: name} and "groups": [{"names": [names], "settings": {...}}],
    which tell Muon's weights. In folders of other programs selection finds the model, and
    named_optimizer an optimizer that names its parameters.
    """

    engine = "fsdp"

    @classmethod
    def open(
        cls,
        path: Path | str,
        allow_nonfinite: bool = False,
        with_moments: bool = False,
        random_access: bool = False,
        key: str | None = None,
    ) -> DcpCheckpoint:
        """Open a folder with a .metadata file.

        Args:
            key: which state dict is the model, if there are several.

        Raises:
            UserError: missing or truncated files, a hostile or unknown .metadata, compressed
                tensors, tensors cut along another dimension than the first, chunks that do not
                cover a tensor exactly.
        """
        source = cls(Path(path), allow_nonfinite, random_access)
        source._folders: list[DcpFolder] = []
        try:
            source._read(with_moments, key)
        except BaseException:
            source.close()
            raise
        return source

    def close(self) -> None:
        super().close()
        for folder in self._folders:
            folder.close()

    def _read(self, with_moments: bool, key: str | None) -> None:
        _refuse_megatron(self.path)
        folder = self._open(self.path)
        names_file = _read_trainable(self.path)
        if key is None and names_file is not None and "model" in folder.tree:
            key = "model"
        model = select_model(folder.tree, folder.metadata_path, key)
        _refuse_stacked_layers(self.path, model.tensors)
        pickled: dict[TorchFile, dict[str, TensorRef]] = {}
        for name, tensor in model.tensors.items():
            if isinstance(tensor, FileTensor):
                pickled.setdefault(tensor.file, {})[name] = tensor.ref
            else:
                self.tensors[name] = TensorInfo(name, tensor.dtype, tensor.shape, "parameter")
                self.parts[name] = tensor.parts()
        for file, refs in pickled.items():
            add_tensors(self, file, refs, {})
        self.other_models = model.other_models
        if names_file is not None:
            self._set_kinds(names_file)
            if with_moments:
                self._read_moments(folder, _moment_keys(self.path, names_file))
        else:
            self.notes += model.notes
            if with_moments:
                self._read_named_optimizer(model.optimizers, model.path)
        self.files += [item for folder in self._folders for item in folder.items]
        self.files.sort(key=lambda item: (item.path.parent.name, item.path.name, item.offset))

    def _open(self, path: Path) -> DcpFolder:
        self._folders.append(DcpFolder(path, self.random_access))
        return self._folders[-1]

    def _set_kinds(self, names_file: dict[str, Any]) -> None:
        path = self.path / TRAINABLE_FILE
        trained, buffers = names_file["trainable"], names_file.get("buffers", [])
        aliases = names_file.get("aliases", {})
        unknown = [
            name
            for name in [*trained, *buffers, *aliases, *aliases.values()]
            if name not in self.tensors
        ]
        if unknown:
            raise corrupt_file_error(
                path, f"names that {DCP_METADATA} does not have: {join_some(unknown)}"
            )
        self.classify(set(trained), set(buffers))
        self.mark_tied(aliases, path)

    def _read_moments(self, folder: DcpFolder, keys_of: dict[str, tuple[str, ...]]) -> None:
        """Read mmldlm's own {"optim": {"exp_avg": {name: ...}}}."""
        path = folder.metadata_path
        optim = folder.tree.get("optim")
        saved = {
            key: optim[key]
            for key in MOMENTS
            if isinstance(optim, dict) and isinstance(optim.get(key), dict)
        }
        if not saved:
            return
        for name, info in self.tensors.items():
            if info.kind != "trainable":
                continue
            keys = keys_of.get(name, MOMENTS)
            check_no_other_moment(
                path, [key for key, table in saved.items() if name in table], keys, name
            )
            for key in keys:
                moment = saved.get(key, {}).get(name)
                if not isinstance(moment, DcpTensor):
                    found = f"no optim.{key}.{name}, while other weights have their moments"
                    raise corrupt_file_error(path, found)
                if moment.shape != info.shape:
                    found = f"optim.{key}.{name} has shape {moment.shape}, the weight {info.shape}"
                    raise corrupt_file_error(path, found)
                self.moments.setdefault(key, {})[name] = moment.parts()

    # -- optimizers of other programs
    # -----------------------------------------------------------------------------

    def _read_named_optimizer(self, optimizers: dict[Keys, dict], path: Keys) -> None:
        number = self.path.name.removeprefix(_ACCELERATE_MODEL)
        beside = self.path.parent / f"optimizer_{number}"
        if number != self.path.name and (beside / DCP_METADATA).is_file():
            optimizers = optimizers | find_optimizers(self._open(beside).tree)
        add_named_optimizer(self, optimizers, path)


# -- Megatron-core
# -------------------------------------------------------------------------------------------------


def _refuse_megatron(path: Path) -> None:
    """Raise UserError for a checkpoint of Megatron-core, which stores all layers of a stack as one
    tensor.
    """
    try:
        backend = json.loads(read_bytes(path / "metadata.json")).get("sharded_backend")
    except (OSError, ValueError, AttributeError, RecursionError):
        backend = None
    if backend or (path / "common.pt").is_file():
        raise _megatron_error(
            path, f"one of Megatron-core ({'metadata.json' if backend else 'common.pt'} beside it)"
        )


def _refuse_stacked_layers(path: Path, names: Iterable[str]) -> None:
    """Raise UserError for Megatron-core's names without a layer's number, in folders that lack its
    other files.
    """
    if stacked := [name for name in names if _STACKED_LAYERS.search(name)]:
        raise _megatron_error(
            path, f"all layers of Megatron-core as one tensor: {join_some(stacked)}"
        )


def _megatron_error(path: Path, found: str) -> UserError:
    return UserError(
        f"a checkpoint under the names of its model in {path}",
        found,
        "export it with Megatron's own tools (Megatron Bridge, or tools/checkpoint/convert.py) and"
        " give their output",
    )


# -- trainable.json
# -------------------------------------------------------------------------------------------------


def _read_trainable(folder: Path) -> dict[str, Any] | None:
    path = folder / TRAINABLE_FILE
    if not os.path.lexists(path):
        return None
    try:
        content = json.loads(read_bytes(path))
        lists = [
            content["trainable"],
            content.get("buffers", []),
            list(content.get("aliases", {}).values()),
        ]
        if not all(
            isinstance(names, list) and all(isinstance(name, str) for name in names)
            for names in lists
        ):
            raise ValueError("names that are not text")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise corrupt_file_error(
            path, f"something other than a JSON object with a list `trainable` ({error!r})"
        ) from error
    return content


def _moment_keys(folder: Path, content: dict[str, Any]) -> dict[str, tuple[str, ...]]:
    """Return name -> which moments it has, for the names of all groups; files of an older mmldlm
    name no groups.
    """
    try:
        return {
            name: moment_keys(group["settings"])
            for group in content.get("groups", [])
            for name in group["names"]
        }
    except (TypeError, AttributeError, KeyError) as error:
        found = f"groups that are not a list of names and settings ({error!r})"
        raise corrupt_file_error(folder / TRAINABLE_FILE, found) from error
