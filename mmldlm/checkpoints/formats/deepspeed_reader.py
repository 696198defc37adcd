"""Reader of DeepSpeed's ZeRO-0/1/2/3 and universal checkpoints, without torch or deepspeed, in
bounded memory.

Layouts (DeepSpeed 0.19, deepspeed/runtime/engine.py, zero/stage_1_and_2.py, zero/stage3.py,
bf16_optimizer.py):

* ZeRO-1 and 2: a parameter group is flat, its parameters in the order of `param_shapes`, padded to
  a multiple of 2 * world size and cut into equal slices, one per rank. Masters are saved without
  the tail padding.
* BF16_Optimizer (ZeRO-1 with fp32 accumulation): the same, but the padding is saved too.
* ZeRO-3: every parameter gives ceil(numel / world size) elements to every rank, padded at its own
  end; a sub-group is flat on each rank.
* ZeRO-0: the module, and for 16-bit engines the masters without names (see zero0_masters).
* Universal (ds_to_universal): one file per parameter and state (see universal_folder).

`param_slice_mappings` is not used: it disagrees with the data under round_robin_gradients.

Of ZeRO-1 and 2, names and order come from `param_shapes` of rank 0's model states, values from
`single_partition_of_fp32_groups` of every rank, sliced by offsets that follow from the shapes. The
module's 16-bit weights are read beside them, and every master must round to its own. Weights that
were frozen, and buffers, come from the module. World size, stage, sizes and counters
(deepspeed_counters.py) are compared when the checkpoint is opened; finiteness, rounding and CRCs
while the values are read (`WeightSource`).
"""

from __future__ import annotations

from collections.abc import Container
from pathlib import Path
from typing import Any

from mmldlm.checkpoints.files.dtypes import numel
from mmldlm.checkpoints.files.torch_file import SAME_SAVE_HINT, TorchFile, corrupt_file_error
from mmldlm.checkpoints.files.unpickler import TensorRef
from mmldlm.checkpoints.formats.deepspeed_counters import (
    check_model_files,
    check_optimizer_files,
    compare_steps,
    torch_optimizer,
)
from mmldlm.checkpoints.formats.deepspeed_files import (
    GatheredParts,
    buffer_names,
    check_ranks,
    configured_stage,
    count_of,
    find_states,
    flat_groups,
    frozen_shapes,
    inner_optimizer,
    inner_paddings,
    list_files,
    missing_file_error,
    open_named,
    param_shapes,
    saved_stage,
    slice_parts,
    slice_sizes,
)
from mmldlm.checkpoints.formats.optimizer import (
    TensorState,
    flat_moments,
    moments_by_name,
    named_groups,
    states_by_index,
)
from mmldlm.checkpoints.formats.state_dict import add_tensors, tensors_of
from mmldlm.checkpoints.formats.universal_folder import (
    add_universal,
    is_universal,
    universal_steps,
)
from mmldlm.checkpoints.formats.weight_source import (
    Parts,
    TensorInfo,
    WeightSource,
    tied_names,
    whole_tensor,
)
from mmldlm.checkpoints.formats.zero0_masters import Masters, match_masters
from mmldlm.errors import UserError
from mmldlm.utils.formatting import join_some


class ZeroCheckpoint(WeightSource):
    """An opened DeepSpeed checkpoint; see WeightSource."""

    engine = "deepspeed"
    world_size: int

    def _read(self) -> None:
        """Read a folder of *_states.pt files, or one that contains it (`latest`, zero/,
        engine/zero/).
        """
        folder = find_states(self.path)
        if folder is None:
            raise UserError(
                f"a DeepSpeed checkpoint at {self.path}",
                "no *_states.pt files there or under its `latest`",
                "give the folder that holds the mp_rank_* and zero_pp_rank_* files",
            )
        self.path = folder
        optim, model, model3 = list_files(self.path)
        model_files = [self._open(path) for _, path in sorted((model3 or model).items())]
        models = [file.load_dict() for file in model_files]
        self.step = count_of(model_files[0], models[0], "global_steps")
        self.world_size = count_of(model_files[0], models[0], "dp_world_size")
        check_model_files(model_files, models)
        if optim:
            self._read_partitions(optim, model3, model_files, models)
        elif is_universal(self.path):
            self.stage = configured_stage(models[0])
            self._read_universal(model_files, models)
        elif stage := configured_stage(models[0]) or (3 if model3 else 0):
            files = f"the {self.world_size} zero_pp_rank_*_optim_states.pt files of ZeRO-{stage}"
            raise missing_file_error(self.path, files, "none")
        else:
            self.stage = 0
            self._read_zero0(model_files[0], models[0])
        if self.stage in (2, 3) and models[0].get("frozen_param_shapes", {}) is None:
            self.notes.append(
                "saved with exclude_frozen_parameters: frozen weights, if the model has any, are"
                " not in it"
            )

    def _read_partitions(
        self,
        optim: dict[int, Path],
        model3: dict[int, Path],
        model_files: list[TorchFile],
        models: list[dict],
    ) -> None:
        """Read ZeRO-1, 2 or 3; the optimizer files record which of them it is."""
        check_ranks(self.path, optim, self.world_size, "optim_states")
        optim_files = [self._open(path) for _, path in sorted(optim.items())]
        inners = [inner_optimizer(file) for file in optim_files]
        self.stage = saved_stage(optim_files[0], inners[0])
        counters = check_optimizer_files(optim_files, inners, self.world_size)
        self._compare_steps(model_files[0], models[0], optim_files[0].path, counters)
        if (self.stage == 3) != bool(model3):
            found = (
                f"a model file of {'ZeRO-3' if model3 else 'another stage'}, with optimizer files"
                f" of ZeRO-{self.stage}"
            )
            raise corrupt_file_error(model_files[0].path, found, SAME_SAVE_HINT)
        if self.stage == 3:
            check_ranks(self.path, model3, self.world_size, "model_states")
            self._read_zero3(model_files, models, optim_files, inners)
        else:
            self._read_zero12(model_files[0], models[0], optim_files, inners)

    def _read_universal(self, model_files: list[TorchFile], models: list[dict]) -> None:
        """Read masters and moments by name, frozen parameters and buffers from the model files."""
        file, state = model_files[0], models[0]
        module = tensors_of(state.get("module"), file.path, "module", self.notes)
        groups = param_shapes(file, state)
        trainable = {name: shape for group in groups for name, shape in group.items()}
        buffers = buffer_names(state)
        plain = {
            name: ref
            for name, ref in module.items()
            if (name in buffers if self.stage == 3 else name not in trainable)
        }
        kinds = {**dict.fromkeys(plain, "frozen"), **dict.fromkeys(buffers, "buffer")}
        add_universal(self, groups, self.options.with_moments)
        self._check_universal_steps(file, state, list(trainable))
        if self.stage in (1, 2):
            self._add_universal_copies(file, module, trainable)
        shared = tied_names(state.get("shared_params"), file.path)
        own = {name: ref for name, ref in plain.items() if name not in shared or not ref.numel}
        add_tensors(self, file, own, kinds)
        self._add_frozen3(model_files, models if self.stage == 3 else [{}])
        self._mark_tied(file, state)
        self._order_like(module)

    def _add_universal_copies(
        self, file: TorchFile, module: dict, trainable: dict[str, tuple[int, ...]]
    ) -> None:
        """Find the low-precision weights in the model file of ZeRO-1 or 2, which the masters must
        round to.

        ZeRO-3 leaves none there.
        """
        _check_in_module(file, module, trainable, module)
        for name in trainable:
            file.check_ref(module[name], name)
            if module[name].is_contiguous and module[name].numel:
                self.low_precision_copies[name] = whole_tensor(file, module[name])

    def _check_universal_steps(self, model: TorchFile, state: dict, names: list[str]) -> None:
        """Compare the optimizer's steps with each other and with the model file's.

        Raises:
            UserError: they are of two saves.
        """
        counted = universal_steps(self, names)
        for path, step in counted:
            if step != counted[0][1]:
                found = (
                    f"optimizer step {step} while {counted[0][0].parent.name} is at"
                    f" {counted[0][1]}"
                )
                raise corrupt_file_error(path, found, SAME_SAVE_HINT)
        if counted:
            self._compare_steps(model, state, counted[0][0], {"step": [counted[0][1]]})

    def _compare_steps(
        self, model: TorchFile, state: dict, optimizer: Path, counters: dict[str, Any]
    ) -> None:
        """Compare the optimizer's steps with the model file's, unless a manifest says that they
        are of one save.
        """
        if not self.options.is_one_save and (
            note := compare_steps(model.path, state, optimizer, counters)
        ):
            self.notes.append(note)

    def _order_like(self, module: dict) -> None:
        """Sort the tensors in the model's order, and list those that ZeRO-3 did not save.

        Raises:
            UserError: the module names another tensor that is not stored.
        """
        self.absent = [name for name in module if name not in self.tensors]
        if any(module[name].numel or self.stage != 3 for name in self.absent):
            found = f"{join_some(self.absent)} named in module, without weights in the checkpoint"
            raise corrupt_file_error(self.files[0].path, found)
        if self.absent:
            self.notes.append(
                f"{join_some(self.absent)}: named in the model, without a value in the checkpoint"
                " (DeepSpeed saves none of a trainable parameter that its optimizer does not have)"
            )
        order = [name for name in module if name in self.tensors]
        order += [name for name in self.tensors if name not in module]
        self.tensors = {name: self.tensors[name] for name in order}

    def _open(self, path: Path) -> TorchFile:
        file = open_named(path, self.options.random_access)
        self.files.append(file)
        return file

    def _mark_tied(self, file: TorchFile, state: dict) -> None:
        """Add the second names of tied weights, which may have been saved twice: mmldlm does when
        it saves a copy asynchronously.

        DeepSpeed names them from ZeRO-1 on; under ZeRO-0 mmldlm does, in the client state.
        """
        aliases = state.get("shared_params") or state.get("aliases")
        if self.stage == 3:
            # Only the owner was saved: without it the weight is lost.
            for alias, owner in tied_names(aliases, file.path).items():
                if owner not in self.tensors:
                    raise corrupt_file_error(
                        file.path,
                        f"{alias} tied to {owner}, which has no weights in the checkpoint",
                    )
        self.mark_tied(aliases, file.path)

    def _add_trainable(self, name: str, shape: tuple[int, ...], parts: Parts) -> None:
        self.tensors[name] = TensorInfo(name, "float32", shape, "trainable")
        self.parts[name] = parts

    # -- ZeRO-0 -----------------------------------------------------------------------------------

    def _read_zero0(self, file: TorchFile, state: dict) -> None:
        module = tensors_of(state.get("module"), file.path, "module", self.notes)
        add_tensors(self, file, module, dict.fromkeys(buffer_names(state), "buffer"))
        self._mark_tied(file, state)
        mirrors = {
            name: parts
            for name, parts in self.parts.items()
            if self.tensors[name].kind == "parameter"
        }
        shapes = {name: self.tensors[name].shape for name in mirrors}
        names = state.get("optimizer_param_names")
        optimizer: Any = state.get("optimizer")
        masters = None
        if isinstance(optimizer, dict):
            masters = match_masters(file, optimizer, names, mirrors, shapes)
        if masters is not None:
            self._add_masters(masters, shapes)
            trained = [name for group in masters.groups for name in group]
        else:
            if any(self.tensors[name].dtype in ("bfloat16", "float16") for name in mirrors):
                self.notes.append("no fp32 masters were saved: the weights are those of 16 bits")
            if names is None or not isinstance(optimizer, dict):
                # Which weights were trained is not recorded.
                return
            groups = named_groups(self, file, names)
            trained = [name for group in groups for name in group]
            for name in mirrors:
                self.set_kind_and_dtype(name, "trainable" if name in trained else "frozen")
        self.update_aliases()
        if self.options.with_moments and not self.unclassified:
            states = states_by_index(
                file, optimizer.get("optimizer_state_dict", optimizer), len(trained)
            )
            self.moments = moments_by_name(file, states, trained, shapes) if states else {}

    def _add_masters(self, masters: Masters, shapes: dict[str, tuple[int, ...]]) -> None:
        for name, shape in shapes.items():
            if name in masters.parts:
                self.low_precision_copies[name] = self.parts[name]
                held = masters.parts[name]
                self._add_trainable(name, shape, [held] if held.count else [])
            elif name not in masters.unknown:
                self.set_kind_and_dtype(name, "frozen")
        if masters.unknown:
            self.without_masters = masters.unknown
            self.optimizer_left_out = masters.reason
            self.notes.append(
                f"the fp32 masters of {join_some(masters.unknown)} cannot be told apart, nor"
                f" can the optimizer be carried over: {masters.reason}"
            )
        elif self.options.with_moments and not masters.groups:
            # No engine of mmldlm saves FP16_Optimizer's one flat tensor per group.
            raise UserError(
                "AdamW's moments of every parameter in the checkpoint",
                "fp32_groups_flat (FusedAdam under ZeRO-0), whose moments are flat too",
                "take the weights alone with training.init_from, or save under ZeRO-1",
            )
        self.names_of_groups = masters.groups

    # -- ZeRO-1 and 2 -----------------------------------------------------------------------------

    def _read_zero12(
        self, file: TorchFile, state: dict, optim: list[TorchFile], inners: list[dict]
    ) -> None:
        module = tensors_of(state.get("module"), file.path, "module", self.notes)
        groups = param_shapes(file, state)
        trainable = {name: shape for group in groups for name, shape in group.items()}
        kinds = {**dict.fromkeys(module, "frozen"), **dict.fromkeys(buffer_names(state), "buffer")}
        # Trainable names first: of two tied names, the one in param_shapes must own the weights.
        names = [
            *(name for name in module if name in trainable),
            *(name for name in module if name not in trainable),
        ]
        # First the module's own weights, in low precision; the masters then take their places.
        add_tensors(self, file, {name: module[name] for name in names}, kinds)
        self._mark_tied(file, state)
        _check_in_module(file, module, trainable, self.parts)
        states = self._states(optim, inners, len(groups))
        flats_by_rank = [
            flat_groups(f, i, "single_partition_of_fp32_groups", len(groups))
            for f, i in zip(optim, inners)
        ]
        for index, group in enumerate(groups):
            flats = [of_rank[index] for of_rank in flats_by_rank]
            pads = inner_paddings(optim[0], inners[0], index, len(group))
            needed = sum(map(numel, group.values())) + sum(pads)
            sizes = slice_sizes(needed, len(optim))
            # BF16_Optimizer saves the tail padding, ZeRO-1 and 2 do not; no field says so.
            is_padded = sum(flat.numel for flat in flats) == sum(padded for padded, _ in sizes)
            expected = [padded if is_padded else held for padded, held in sizes]
            _check_sizes(optim, flats, expected, f"group {index}")
            moments = flat_moments(optim, states, index, sizes) if states else {}
            offset = 0
            for (name, shape), pad in zip(group.items(), pads):
                self.low_precision_copies[name] = self.parts[name]
                self._add_trainable(name, shape, slice_parts(optim, flats, offset, numel(shape)))
                for key, flat in moments.items():
                    self.moments.setdefault(key, {})[name] = slice_parts(
                        optim, flat, offset, numel(shape)
                    )
                offset += numel(shape) + pad
        self.update_aliases()
        self.tensors = {name: self.tensors[name] for name in module}

    def _states(
        self, optim: list[TorchFile], inners: list[dict], count: int
    ) -> list[list[TensorState]]:
        """Return the inner optimizers' states per rank; [] if not requested, or before the first
        step.

        Raises:
            UserError: some ranks have states and some have not.
        """
        if not self.options.with_moments:
            return []
        states = [
            states_by_index(file, torch_optimizer(inner), count)
            for file, inner in zip(optim, inners)
        ]
        for file, rank in zip(optim, states):
            if bool(rank) != bool(states[0]):
                found = f"{'an' if rank else 'no'} optimizer state, unlike {optim[0].path.name}"
                raise corrupt_file_error(file.path, found, SAME_SAVE_HINT)
        return states if states[0] else []

    # -- ZeRO-3 -----------------------------------------------------------------------------------

    def _read_zero3(
        self,
        model_files: list[TorchFile],
        models: list[dict],
        optim: list[TorchFile],
        inners: list[dict],
    ) -> None:
        file, state = model_files[0], models[0]
        module = tensors_of(state.get("module"), file.path, "module", self.notes)
        groups = param_shapes(file, state)
        for other, other_state in zip(model_files[1:], models[1:]):
            if param_shapes(other, other_state) != groups:
                raise corrupt_file_error(
                    other.path,
                    f"param_shapes that differ from those in {file.path.name}",
                    SAME_SAVE_HINT,
                )
        names = buffer_names(state)
        buffers = {name: ref for name, ref in module.items() if name in names}
        add_tensors(self, file, buffers, dict.fromkeys(buffers, "buffer"))
        world = len(optim)
        states = self._states(optim, inners, len(groups))
        all_flats = [
            flat_groups(f, i, "fp32_flat_groups", len(groups)) for f, i in zip(optim, inners)
        ]
        for index, group in enumerate(groups):
            flats = [flats[index] for flats in all_flats]
            needed = sum(-(-numel(shape) // world) for shape in group.values())
            _check_sizes(optim, flats, [needed] * world, f"sub-group {index}")
            moments = flat_moments(optim, states, index, [[needed]] * world) if states else {}
            offset = 0
            for name, shape in group.items():
                self._add_trainable(name, shape, GatheredParts(optim, flats, offset, numel(shape)))
                for key, flat in moments.items():
                    parts = GatheredParts(optim, flat, offset, numel(shape))
                    self.moments.setdefault(key, {})[name] = parts
                offset += -(-numel(shape) // world)
        self._add_frozen3(model_files, models)
        self._mark_tied(file, state)
        self._order_like(module)

    def _add_frozen3(self, files: list[TorchFile], models: list[dict]) -> None:
        shapes = frozen_shapes(files[0], models[0])
        fragments = [model.get("frozen_param_fragments") for model in models]
        for name, shape in shapes.items():
            size = -(-numel(shape) // len(files))
            flats = []
            for file, held in zip(files, fragments):
                ref = held.get(name) if isinstance(held, dict) else None
                if not isinstance(ref, TensorRef) or ref.numel != size or not ref.is_contiguous:
                    found = (
                        f"a fragment {getattr(ref, 'shape', ref)} of frozen {name} instead of"
                        f" ({size},)"
                    )
                    raise corrupt_file_error(file.path, found)
                file.check_ref(ref, name)
                flats.append(ref)
            if len({flat.dtype for flat in flats}) > 1:
                raise corrupt_file_error(
                    files[0].path,
                    f"fragments of frozen {name} have different dtypes over the ranks",
                )
            self.tensors[name] = TensorInfo(name, flats[0].dtype, tuple(shape), "frozen")
            self.parts[name] = GatheredParts(files, flats, 0, numel(shape))


def _check_in_module(
    file: TorchFile,
    module: dict[str, TensorRef],
    trainable: dict[str, tuple[int, ...]],
    stored: Container[str],
) -> None:
    """Raise UserError unless every trainable parameter is among `stored`, with its shape in
    `module`.
    """
    for name, shape in trainable.items():
        if name not in stored or module[name].shape != shape:
            found = module[name].shape if name in module else "nothing of that name"
            raise corrupt_file_error(
                file.path, f"{name} {shape} in param_shapes, {found} in module"
            )


def _check_sizes(
    files: list[TorchFile], flats: list[TensorRef], sizes: list[int], what: str
) -> None:
    """Raise UserError unless every rank's flat tensor has the size of its partition, all in one
    dtype.
    """
    for rank, (file, flat, size) in enumerate(zip(files, flats, sizes)):
        if flat.numel != size or flat.dtype != flats[0].dtype:
            found = (
                f"{flat.numel} {flat.dtype} elements of {what} on rank {rank}, whose partition has"
                f" {size}"
            )
            raise corrupt_file_error(file.path, found, SAME_SAVE_HINT)
