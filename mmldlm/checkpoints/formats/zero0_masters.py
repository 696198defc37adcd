"""The fp32 masters of ZeRO-0's 16-bit engines, which DeepSpeed saves as a list without names.

A rounded master equals the module's weight bit for bit, so the weights identify the names.
"""

from __future__ import annotations

import zlib
from typing import Any

from mmldlm.checkpoints.files.dtypes import DTYPES, cast, numel
from mmldlm.checkpoints.files.torch_file import CHUNK_BYTES, TorchFile, corrupt_file_error
from mmldlm.checkpoints.files.unpickler import TensorRef
from mmldlm.checkpoints.formats.weight_source import FileRange, read_parts
from mmldlm.errors import UserError


def match_masters(
    file: TorchFile,
    optimizer: dict,
    names: Any,
    low_precision_copies: dict[str, list[FileRange]],
    shapes: dict[str, tuple[int, ...]],
) -> dict[str, FileRange] | None:
    """Return name -> fp32 master; None if the optimizer keeps none (an fp32 engine).

    Args:
        optimizer: Saved state of the optimizer, from `optimizer` of the model file.
        names: `optimizer_param_names` of the model file: the names of every group in order, if the
            training program recorded them (client_state); None otherwise.
        low_precision_copies: Low-precision weights of all parameters, trainable or frozen, in the
            module's order.
        shapes: Shapes of these parameters.

    Raises:
        UserError: masters that match no weight (files of different steps), or that are ambiguous.
    """
    if "fp32_groups_flat" in optimizer:
        return _flat_masters(file, optimizer["fp32_groups_flat"], names, shapes)
    groups = optimizer.get("fp32_groups")
    if groups is None:
        return None
    if not isinstance(groups, list) or not all(isinstance(group, list) for group in groups):
        raise corrupt_file_error(file.path, "fp32_groups that are not a list of lists of tensors")
    flat = [(index, ref) for index, group in enumerate(groups) for ref in group]
    for _, ref in flat:
        if not isinstance(ref, TensorRef) or not ref.is_contiguous:
            raise corrupt_file_error(
                file.path, "something other than plain tensors in fp32_groups"
            )
        file.check_ref(ref, "fp32_groups")
    has_names = isinstance(names, list) and all(isinstance(group, list) for group in names)
    if has_names and list(map(len, names)) == list(map(len, groups)):
        return _named(file, flat, [name for group in names for name in group], shapes)
    return _by_value(file, flat, low_precision_copies, shapes)


def names_of_groups(optimizer: dict, masters: dict[str, FileRange]) -> list[list[str]]:
    """Return the names of the masters of every parameter group, in the order of the optimizer's
    state.
    """
    names = {id(part.ref): name for name, part in masters.items()}
    groups = optimizer.get("fp32_groups")
    # FP16_Optimizer has one flat tensor per group, which no engine of mmldlm saves.
    if groups is None:
        raise UserError(
            "AdamW's moments of every parameter in the checkpoint",
            "fp32_groups_flat (FusedAdam under ZeRO-0), whose moments are flat too",
            "take the weights alone with training.init_from, or save under ZeRO-1",
        )
    return [[names[id(ref)] for ref in group] for group in groups]


def _named(file: TorchFile, flat: list, names: list[str], shapes: dict) -> dict[str, FileRange]:
    masters = {}
    for name, (_, ref) in zip(names, flat):
        if shapes.get(name) != ref.shape:
            raise corrupt_file_error(
                file.path,
                f"a master of {name} of shape {ref.shape}, the weight has {shapes.get(name)}",
            )
        masters[name] = FileRange(file, ref, 0, ref.numel)
    return masters


def _flat_masters(file: TorchFile, groups: Any, names: Any, shapes: dict) -> dict[str, FileRange]:
    """Split the flat tensors of FP16_Optimizer, one per group, its parameters back to back."""
    if not (isinstance(groups, list) and isinstance(names, list) and len(names) == len(groups)):
        raise UserError(
            f"the names of the flat fp32 masters in {file.path}",
            "fp32_groups_flat without names (FusedAdam under ZeRO-0 does not save their order)",
            "save with client_state={'optimizer_param_names': [[names of group 0], ...]}, or train"
            " with ZeRO-1",
        )
    masters = {}
    for ref, group in zip(groups, names):
        if not isinstance(ref, TensorRef) or len(ref.shape) != 1 or not isinstance(group, list):
            raise corrupt_file_error(
                file.path, "something other than flat tensors in fp32_groups_flat"
            )
        file.check_ref(ref, "fp32_groups_flat")
        offset = 0
        for name in group:
            if name not in shapes:
                raise corrupt_file_error(
                    file.path,
                    f"{name!r} in optimizer_param_names, which is not a parameter of the module",
                )
            count = numel(shapes[name])
            masters[name] = FileRange(file, ref, offset, count)
            offset += count
        if offset != ref.numel:
            raise corrupt_file_error(
                file.path,
                f"a flat group of {ref.numel} masters for parameters of {offset} elements",
            )
    return masters


def _by_value(
    file: TorchFile, flat: list, copies: dict[str, list[FileRange]], shapes: dict
) -> dict[str, FileRange]:
    """Match masters with the low-precision weights to which they round."""
    low_dtypes = {parts[0].ref.dtype for parts in copies.values() if parts}
    candidates: dict[tuple, list[str]] = {}
    for name, parts in copies.items():
        if parts and parts[0].ref.is_contiguous:
            fingerprint, _ = _fingerprint(parts[0], parts[0].ref.dtype)
            candidates.setdefault((shapes[name], fingerprint), []).append(name)
    matches: dict[tuple, list[tuple[int, TensorRef, bool]]] = {}
    for group, ref in flat:
        part = FileRange(file, ref, 0, ref.numel)
        for low in sorted(low_dtypes):
            fingerprint, is_exact = _fingerprint(part, low)
            key = (ref.shape, fingerprint)
            if key in candidates:
                matches.setdefault(key, []).append((group, ref, is_exact))
                break
        else:
            raise UserError(
                f"fp32 masters in {file.path} of the weights in it",
                f"one of shape {ref.shape} that rounds to none of the weights of that shape",
                "restore the file from an intact save",
            )
    masters = {}
    for key, group_masters in matches.items():
        names = candidates[key]
        # With one master per name, all of one group, the order of the parameters decides.
        is_ordered = (
            len(group_masters) == len(names) and len({g for g, _, _ in group_masters}) == 1
        )
        is_exact = all(exact for _, _, exact in group_masters)
        if len(group_masters) > len(names) or not (is_ordered or is_exact):
            raise UserError(
                f"distinguishable fp32 masters in {file.path}",
                f"{len(group_masters)} masters for {', '.join(names)}, whose 16-bit weights are"
                " identical",
                "save with client_state={'optimizer_param_names': [[names of group 0], ...]}, or"
                " train with ZeRO-1",
            )
        masters.update(
            {
                name: FileRange(file, ref, 0, ref.numel)
                for name, (_, ref, _) in zip(names, group_masters)
            }
        )
    return masters


def _fingerprint(part: FileRange, low: str) -> tuple[tuple, bool]:
    """Return two checksums of a tensor's elements rounded to dtype `low`, and whether the rounding
    was exact.
    """
    source = part.ref.dtype
    step = CHUNK_BYTES // DTYPES[source].itemsize
    crc, adler, is_exact = 0, 1, True
    for start in range(0, part.count, step):
        chunk = read_parts([part], start, min(step, part.count - start))
        rounded = cast(chunk, source, low)
        crc, adler = zlib.crc32(rounded, crc), zlib.adler32(rounded, adler)
        is_exact = is_exact and bool((cast(rounded, low, source) == chunk).all())
    return (low, crc, adler), is_exact
