"""Reader of DeepSpeed ZeRO-0/1/2/3 checkpoints, without torch or deepspeed, in bounded memory.

Layouts (DeepSpeed 0.19, deepspeed/runtime/engine.py, zero/stage_1_and_2.py, zero/stage3.py, bf16_optimizer.py):

* ZeRO-1 and 2: a parameter group is flat, its parameters in the order of `param_shapes`, padded to a multiple of
  2 * world size and cut into equal slices, one per rank. Masters are saved without the tail padding.
* BF16_Optimizer (ZeRO-1 with fp32 accumulation): the same, but the padding is saved too.
* ZeRO-3: every parameter gives ceil(numel / world size) elements to every rank, padded at its own end; a sub-group
  is flat on each rank.
* ZeRO-0: the module, and for 16-bit engines the masters as a list without names.

`param_slice_mappings` is never used: it disagrees with the data under round_robin_gradients.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mmldlm.checkpoints.dtypes import DTYPES
from mmldlm.checkpoints.model_file import add_plain_tensors, tensors_of
from mmldlm.checkpoints.torch_file import TorchFile, damaged
from mmldlm.checkpoints.weights import Part, TensorInfo, WeightSource
from mmldlm.checkpoints.zero0_masters import match_masters
from mmldlm.checkpoints.zero_pickle import Inert, TensorRef
from mmldlm.errors import UserError

_OPTIM = re.compile(r"(bf16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_?optim_states\.pt")
_MODEL = re.compile(r"mp_rank_(\d+)_model_states\.pt")
_MODEL3 = re.compile(r"zero_pp_rank_(\d+)_mp_rank_(\d+)_model_states\.pt")
_FOREIGN = re.compile(r"(layer_\d+.*|.*expert_\d+.*)[_-](model|optim)_states\.pt")


def is_zero_folder(folder: Path) -> bool:
    """Whether files of a DeepSpeed checkpoint lie directly in `folder`."""
    return folder.is_dir() and any(folder.glob("*_states.pt"))


def find_zero_folder(path: Path) -> Path | None:
    """The folder with the *_states.pt files for an engine folder, a tag folder or a step folder; None if there is none."""
    if is_zero_folder(path):
        return path
    latest = path / "latest"
    if latest.is_file():
        tag = latest.read_text(errors="replace").strip()
        if not tag or "/" in tag or tag in (".", ".."):
            return None
        if not is_zero_folder(path / tag):
            raise UserError(
                f"the checkpoint {tag!r} that {latest} names",
                "no *_states.pt files there",
                f"give the folder of the checkpoint itself, one of those in {path}",
            )
        return path / tag
    for candidate in (path / "zero", path / "engine", path / "engine" / "zero"):
        if is_zero_folder(candidate):
            return candidate
    return None


class ZeroCheckpoint(WeightSource):
    """A DeepSpeed checkpoint opened for reading; see WeightSource for what it offers."""

    engine = "deepspeed"

    @classmethod
    def open(cls, path: Path | str, allow_nonfinite: bool = False) -> ZeroCheckpoint:
        """Opens a folder of *_states.pt files, or one that contains it (`latest`, zero/, engine/zero/).

        Raises:
            UserError: missing, extra, renamed, damaged or mismatched files; layouts that are not supported
                (tensor, pipeline and expert parallel). The message names the file.
        """
        folder = find_zero_folder(Path(path))
        if folder is None:
            raise UserError(
                f"a DeepSpeed checkpoint at {path}",
                "no *_states.pt files there or under its `latest`",
                "give the folder that holds the mp_rank_* and zero_pp_rank_* files",
            )
        source = cls(folder, allow_nonfinite)
        try:
            source._open_folder()
        except BaseException:
            source.close()
            raise
        return source

    # -- files ----------------------------------------------------------------------------------------------------

    def _open_folder(self) -> None:
        optim, model, model3 = self._list_files()
        model_files = [self._open(path) for _, path in sorted((model3 or model).items())]
        models = [self._dict(file) for file in model_files]
        self.step = self._number(model_files[0], models[0], "global_steps")
        self.world_size = self._number(model_files[0], models[0], "dp_world_size")
        for file, state in zip(model_files[1:], models[1:]):
            for key in ("global_steps", "dp_world_size", "ds_version"):
                if state.get(key) != models[0].get(key):
                    raise damaged(
                        file.path,
                        f"{key} = {state.get(key)!r}, but {models[0].get(key)!r} in {model_files[0].path.name}",
                        "restore all files from one and the same save",
                    )
        stage = self._configured_stage(models[0])
        if not optim:
            if stage != 0 or model3:
                raise self._missing(
                    f"the {self.world_size} zero_pp_rank_*_optim_states.pt files of ZeRO-{stage or 3}", "none"
                )
            self.stage = 0
            self._read_zero0(model_files[0], models[0])
            return
        self._check_ranks(optim, "optim_states")
        optim_files = [self._open(path) for _, path in sorted(optim.items())]
        states = [self._inner(file) for file in optim_files]
        self.stage = self._saved_stage(states[0], stage)
        self._check_same_step(optim_files, states)
        if self.stage == 3:
            if not model3:
                raise self._missing(f"{self.world_size} zero_pp_rank_*_model_states.pt files (ZeRO-3)", "none")
            self._check_ranks(model3, "model_states")
            self._read_zero3(model_files, models, optim_files, states)
        else:
            if model3:
                raise damaged(
                    model_files[0].path,
                    f"a model file of ZeRO-3 beside optimizer files of ZeRO-{self.stage}",
                    "remove the files of the other checkpoint",
                )
            self._read_zero12(model_files[0], models[0], optim_files, states)

    def _list_files(self) -> tuple[dict[int, Path], dict[int, Path], dict[int, Path]]:
        optim: dict[int, Path] = {}
        model: dict[int, Path] = {}
        model3: dict[int, Path] = {}
        for path in sorted(self.path.glob("*_states.pt")):
            name = path.name
            if found := _OPTIM.fullmatch(name):
                rank, mp, into = int(found[2]), int(found[3]), optim
            elif found := _MODEL3.fullmatch(name):
                rank, mp, into = int(found[1]), int(found[2]), model3
            elif found := _MODEL.fullmatch(name):
                rank, mp, into = 0, int(found[1]), model
            else:
                kind = "pipeline or expert parallel" if _FOREIGN.fullmatch(name) else "unknown"
                raise UserError(
                    f"ZeRO files only in {self.path}",
                    f"{name} ({kind})",
                    "convert such checkpoints with DeepSpeed's own tools",
                )
            if mp != 0:
                raise UserError(
                    f"a checkpoint without tensor parallelism in {self.path}",
                    f"{name} (mp_rank {mp})",
                    "merge the tensor-parallel parts with the tool that made them",
                )
            if rank in into:
                raise damaged(
                    path,
                    f"a second file of rank {rank}, beside {into[rank].name}",
                    "remove the one that belongs to another save",
                )
            into[rank] = path
        if model and model3:
            raise damaged(
                model[0],
                f"model files of ZeRO-3 ({model3[min(model3)].name}) beside one of another stage",
                "remove the files of the other checkpoint",
            )
        if not model and not model3:
            raise self._missing("mp_rank_00_model_states.pt or zero_pp_rank_*_model_states.pt", "neither")
        return optim, model, model3

    def _missing(self, expected: str, found: str) -> UserError:
        return UserError(f"{expected} in {self.path}", found, "copy the checkpoint again with all of its files")

    def _open(self, path: Path) -> TorchFile:
        file = TorchFile(path)
        self.files.append(file)
        # torch names the zip's top folder after the file; writers that go through a buffer say "archive".
        if file.top not in (path.stem, "archive"):
            raise damaged(
                path,
                f"it was saved as {file.top}.pt and renamed since: rank files are swapped",
                f"restore the files in {self.path} under the names they were saved with",
            )
        return file

    def _check_ranks(self, files: dict[int, Path], what: str) -> None:
        wanted = set(range(self.world_size or 0))
        missing, extra = sorted(wanted - set(files)), sorted(set(files) - wanted)
        if missing:
            raise self._missing(
                f"{self.world_size} {what} files, one for each rank", f"none for rank(s) {_short(missing)}"
            )
        if extra:
            raise damaged(
                files[extra[0]],
                f"a file of rank {extra[0]}, but the checkpoint is of {self.world_size} ranks (dp_world_size)",
                "remove the files that an older run of more ranks left behind",
            )

    # -- fields of the saved dicts ----------------------------------------------------------------------------------

    def _dict(self, file: TorchFile) -> dict:
        state = file.load()
        if not isinstance(state, dict):
            raise damaged(file.path, f"a {type(state).__name__} where DeepSpeed saves a dict")
        return state

    def _inner(self, file: TorchFile) -> dict:
        inner = self._dict(file).get("optimizer_state_dict")
        if not isinstance(inner, dict):
            raise damaged(file.path, "no optimizer_state_dict in it: no optimizer file of ZeRO")
        return inner

    def _number(self, file: TorchFile, state: dict, key: str) -> int:
        value = state.get(key)
        if type(value) is not int or value < 0:
            raise damaged(file.path, f"{key} = {value!r} where a count should stand")
        return value

    @staticmethod
    def _configured_stage(state: dict) -> int:
        config = state.get("ds_config")
        zero = config.get("zero_optimization") if isinstance(config, dict) else None
        stage = zero.get("stage", 0) if isinstance(zero, dict) else 0
        return stage if isinstance(stage, int) else 0

    def _saved_stage(self, inner: dict, configured: int) -> int:
        stage: Any = inner.get("zero_stage")
        if isinstance(stage, Inert) and len(stage.args) == 1:
            stage = stage.args[0]
        if stage is None and "single_partition_of_fp32_groups" in inner:
            stage = 1  # BF16_Optimizer does not say
        if stage not in (1, 2, 3):
            raise damaged(self.path, f"zero_stage {stage!r} in the optimizer files (configured: {configured})")
        return stage

    def _check_same_step(self, files: list[TorchFile], states: list[dict]) -> None:
        """The optimizer's own step counters must agree over the ranks: the only trace of the step in these files."""
        first = None
        for file, state in zip(files, states):
            steps = [_read_scalar(file, ref) for ref in _step_refs(state)]
            first = first if first is not None else steps
            if steps != first:
                raise damaged(
                    file.path,
                    f"optimizer step {steps} while {files[0].path.name} is at {first}",
                    "restore all rank files from one and the same save",
                )
            for key in ("partition_count",):
                counts = state.get(key)
                counts = counts if isinstance(counts, list) else [counts]
                if any(type(count) is int and count != self.world_size for count in counts):
                    raise damaged(
                        file.path,
                        f"{key} = {counts}, but dp_world_size is {self.world_size}",
                        "restore all files from one and the same save",
                    )

    def _param_shapes(self, file: TorchFile, state: dict) -> list[dict[str, tuple[int, ...]]]:
        groups = state.get("param_shapes")
        if not isinstance(groups, list) or not all(isinstance(group, dict) for group in groups):
            raise damaged(file.path, "no param_shapes in it: the order of the flat weights is unknown")
        for name, shape in ((n, s) for group in groups for n, s in group.items()):
            if not (
                isinstance(name, str) and isinstance(shape, tuple) and all(type(d) is int and d >= 0 for d in shape)
            ):
                raise damaged(file.path, f"param_shapes says {name!r}: {shape!r}")
        names = [name for group in groups for name in group]
        if len(names) != len(set(names)):
            raise damaged(file.path, "param_shapes names a parameter twice")
        return groups

    def _buffers(self, state: dict) -> set[str]:
        names = state.get("buffer_names")
        return {name for name in names if isinstance(name, str)} if isinstance(names, list) else set()

    def _flats(self, file: TorchFile, inner: dict, key: str, count: int) -> list[TensorRef]:
        flats = inner.get(key)
        if not isinstance(flats, list) or len(flats) != count or not all(isinstance(flat, TensorRef) for flat in flats):
            found = f"{len(flats)} entries" if isinstance(flats, list) else type(flats).__name__
            raise damaged(file.path, f"{key} should hold {count} flat tensors (one for each group), it has {found}")
        for flat in flats:
            file.check_ref(flat, key)
            if not flat.is_contiguous or not DTYPES[flat.dtype].is_float or DTYPES[flat.dtype].itemsize == 1:
                raise damaged(file.path, f"{key} holds a {flat.dtype} tensor of shape {flat.shape}")
        return flats

    def _add_trainable(self, name: str, shape: tuple[int, ...], parts: list[Part]) -> None:
        self.tensors[name] = TensorInfo(name, "float32", shape, "trainable")
        self._parts[name] = [part for part in parts if part.count]

    # -- ZeRO-0 -----------------------------------------------------------------------------------------------------

    def _read_zero0(self, file: TorchFile, state: dict) -> None:
        module = tensors_of(state.get("module"), file.path, "module", self.notes)
        add_plain_tensors(self, file, module, dict.fromkeys(self._buffers(state), "buffer"))
        optimizer = state.get("optimizer")
        if not isinstance(optimizer, dict):
            return
        names = state.get("optimizer_param_names")
        mirrors = {name: parts for name, parts in self._parts.items() if self.tensors[name].kind == "parameter"}
        shapes = {name: self.tensors[name].shape for name in mirrors}
        masters = match_masters(file, optimizer, names, mirrors, shapes)
        if masters is None:
            return  # an fp32 engine: the module is the master
        for name in mirrors:
            if name in masters:
                self._mirrors[name] = self._parts[name]
                self._add_trainable(name, shapes[name], [masters[name]])
            else:
                info = self.tensors[name]
                self.tensors[name] = TensorInfo(name, info.dtype, info.shape, "frozen")
        self._retype_aliases()

    def _retype_aliases(self) -> None:
        for name, info in self.tensors.items():
            if info.kind == "alias":
                owner = self.tensors[info.alias_of or ""]
                self.tensors[name] = TensorInfo(name, owner.dtype, owner.shape, "alias", owner.name)

    # -- ZeRO-1 and 2 -----------------------------------------------------------------------------------------------

    def _read_zero12(self, file: TorchFile, state: dict, optim: list[TorchFile], inners: list[dict]) -> None:
        module = tensors_of(state.get("module"), file.path, "module", self.notes)
        groups = self._param_shapes(file, state)
        trainable = {name: shape for group in groups for name, shape in group.items()}
        kinds = {**dict.fromkeys(module, "frozen"), **dict.fromkeys(self._buffers(state), "buffer")}
        # Owners first in the eyes of add_plain_tensors: an alias must point to the name that param_shapes has.
        ordered = {name: module[name] for name in [*(n for n in module if n in trainable), *module] if name in module}
        add_plain_tensors(self, file, ordered, kinds)
        for name, shape in trainable.items():
            if name not in module or module[name].shape != shape or name not in self._parts:
                found = module[name].shape if name in module else "nothing"
                raise damaged(file.path, f"param_shapes has {name} {shape}, module has {found}")
        all_flats = [self._flats(f, i, "single_partition_of_fp32_groups", len(groups)) for f, i in zip(optim, inners)]
        for number, group in enumerate(groups):
            flats = [flats[number] for flats in all_flats]
            pads = self._inner_paddings(optim[0], inners[0], number, len(group))
            needed = sum(_numel(shape) for shape in group.values()) + sum(pads)
            total = sum(flat.numel for flat in flats)
            whole = -(-needed // (2 * len(flats))) * 2 * len(flats)
            if total not in (needed, whole) or len({flat.dtype for flat in flats}) > 1:
                raise damaged(
                    self.path,
                    f"group {number} has {total} master elements in the optimizer files of all ranks; "
                    f"its parameters need {needed} ({whole} with padding)",
                    "restore all files from one and the same save",
                )
            self._check_slices(optim, flats, needed, whole, number)
            offset = 0
            for (name, shape), pad in zip(group.items(), pads):
                count = _numel(shape)
                self._mirrors[name] = self._parts[name]
                self._add_trainable(name, shape, _slice(optim, flats, offset, count))
                offset += count + pad
        self._retype_aliases()
        self.tensors = {name: self.tensors[name] for name in module}

    def _check_slices(
        self, optim: list[TorchFile], flats: list[TensorRef], needed: int, whole: int, group: int
    ) -> None:
        """Every rank must hold its equal slice, the tail stripped or not: sizes that merely add up are not enough."""
        size = whole // len(flats)
        for rank, (file, flat) in enumerate(zip(optim, flats)):
            stripped = max(0, min(size, needed - rank * size))
            if flat.numel not in (size, stripped):
                raise damaged(
                    file.path,
                    f"rank {rank} holds {flat.numel} elements of group {group}, "
                    f"its slice is {size} ({stripped} without padding)",
                    "restore all files from one and the same save",
                )

    def _inner_paddings(self, file: TorchFile, inner: dict, group: int, count: int) -> list[int]:
        groups = inner.get("param_alignment_paddings")
        if groups is None:  # DeepSpeed before 0.19.8, and BF16_Optimizer
            return [0] * count
        try:
            pads = list(groups[group])
        except (TypeError, IndexError, KeyError):
            pads = []
        if len(pads) != count or not all(type(pad) is int and pad >= 0 for pad in pads):
            raise damaged(
                file.path, f"param_alignment_paddings of group {group} is {str(pads)[:80]}, for {count} parameters"
            )
        return pads

    # -- ZeRO-3 -----------------------------------------------------------------------------------------------------

    def _read_zero3(self, model_files: list, models: list[dict], optim: list[TorchFile], inners: list[dict]) -> None:
        file, state = model_files[0], models[0]
        module = tensors_of(state.get("module"), file.path, "module", self.notes)
        groups = self._param_shapes(file, state)
        for other, other_state in zip(model_files[1:], models[1:]):
            if self._param_shapes(other, other_state) != groups:
                raise damaged(
                    other.path,
                    f"its param_shapes differ from those in {file.path.name}",
                    "restore all files from one and the same save",
                )
        buffers = {name: ref for name, ref in module.items() if name in self._buffers(state)}
        add_plain_tensors(self, file, buffers, dict.fromkeys(buffers, "buffer"))
        world = len(optim)
        all_flats = [self._flats(f, i, "fp32_flat_groups", len(groups)) for f, i in zip(optim, inners)]
        for number, group in enumerate(groups):
            flats = [flats[number] for flats in all_flats]
            needed = sum(-(-_numel(shape) // world) for shape in group.values())
            for rank_file, flat in zip(optim, flats):
                if flat.numel != needed or flat.dtype != flats[0].dtype:
                    raise damaged(
                        rank_file.path,
                        f"sub-group {number} has {flat.numel} {flat.dtype} elements, its "
                        f"parameters need {needed} on every one of {world} ranks",
                        "restore all files from one and the same save",
                    )
            offset = 0
            for name, shape in group.items():
                self._add_trainable(name, shape, _gather(optim, flats, offset, _numel(shape)))
                offset += -(-_numel(shape) // world)
        self._add_frozen3(model_files, models)
        self._add_shared3(file, state)
        unknown = [name for name, ref in module.items() if name not in self.tensors]
        if unknown:
            raise damaged(file.path, f"module names {_short(unknown)}, whose weights are nowhere in the checkpoint")
        order = [*module, *(name for name in self.tensors if name not in module)]
        self.tensors = {name: self.tensors[name] for name in order}

    def _add_frozen3(self, files: list[TorchFile], models: list[dict]) -> None:
        shapes = models[0].get("frozen_param_shapes") or {}
        fragments = [model.get("frozen_param_fragments") or {} for model in models]
        for name, shape in shapes.items():
            share = -(-_numel(shape) // len(files))
            flats = []
            for file, held in zip(files, fragments):
                ref = held.get(name)
                if not isinstance(ref, TensorRef) or ref.numel != share or not ref.is_contiguous:
                    raise damaged(
                        file.path, f"its fragment of frozen {name} is {getattr(ref, 'shape', ref)}, not ({share},)"
                    )
                file.check_ref(ref, name)
                flats.append(ref)
            if len({flat.dtype for flat in flats}) > 1:
                raise damaged(files[0].path, f"fragments of frozen {name} have different dtypes over the ranks")
            self.tensors[name] = TensorInfo(name, flats[0].dtype, tuple(shape), "frozen")
            self._parts[name] = [part for part in _gather(files, flats, 0, _numel(shape)) if part.count]

    def _add_shared3(self, file: TorchFile, state: dict) -> None:
        for alias, owner in (state.get("shared_params") or {}).items():
            if owner not in self.tensors:
                raise damaged(file.path, f"{alias} is tied to {owner}, whose weights are nowhere in the checkpoint")
            info = self.tensors[owner]
            self.tensors[alias] = TensorInfo(alias, info.dtype, info.shape, "alias", owner)


def _slice(files: list[TorchFile], flats: list[TensorRef], offset: int, count: int) -> list[Part]:
    """[offset, offset + count) of the concatenation of all ranks' flats (ZeRO-1 and 2)."""
    parts = []
    base = 0
    for file, flat in zip(files, flats):
        low, high = max(offset, base), min(offset + count, base + flat.numel)
        if low < high:
            parts.append(Part(file, flat, low - base, high - low))
        base += flat.numel
    return parts


def _gather(files: list[TorchFile], flats: list[TensorRef], offset: int, numel: int) -> list[Part]:
    """A parameter of `numel` elements cut into equal shares that start at `offset` on every rank (ZeRO-3)."""
    share = -(-numel // len(files))
    counts = [max(0, min(share, numel - rank * share)) for rank in range(len(files))]
    return [Part(file, flat, offset, count) for file, flat, count in zip(files, flats, counts)]


def _numel(shape: tuple[int, ...]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count


def _step_refs(inner: dict) -> list[Any]:
    """The `step` of every parameter state of the inner optimizer, in a fixed order."""
    base = inner.get("base_optimizer_state", inner.get("optimizer_state_dict"))
    states: Any = base
    if isinstance(base, dict):
        states = [value for _, value in sorted((base.get("state") or {}).items(), key=lambda item: str(item[0]))]
    return [state.get("step") for state in states if isinstance(state, dict)] if isinstance(states, list) else []


def _read_scalar(file: TorchFile, value: Any) -> Any:
    if not isinstance(value, TensorRef):
        return value if isinstance(value, (int, float)) else None
    if value.numel != 1 or value.dtype not in ("float32", "float64", "int64", "int32"):
        return None
    file.check_ref(value, "step")
    return file.read_elements(value, 0, 1)[0].item()


def _short(values: list) -> str:
    text = ", ".join(str(value) for value in values[:4])
    return text + (f" and {len(values) - 4} more" if len(values) > 4 else "")
