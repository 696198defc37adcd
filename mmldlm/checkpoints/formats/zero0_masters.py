"""The fp32 masters of ZeRO-0's 16-bit engines, which DeepSpeed saves as lists without names.

A rounded master equals the module's weight bit for bit, so the weights identify the names.
Weights of equal bits, such as fresh LayerNorms, share their candidates; the order of the
parameters, which is the module's in every group, decides between them where it can. What remains
is known in 16 bits alone.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Iterable
from typing import Any, NamedTuple

from mmldlm.checkpoints.files.dtypes import DTYPES, cast, numel
from mmldlm.checkpoints.files.torch_file import CHUNK_BYTES, TorchFile, corrupt_file_error
from mmldlm.checkpoints.files.unpickler import TensorRef
from mmldlm.checkpoints.formats.weight_source import FileRange, Parts, read_parts
from mmldlm.errors import UserError
from mmldlm.utils.formatting import join_some

Shapes = dict[str, tuple[int, ...]]


class Masters(NamedTuple):
    """The masters of an optimizer.

    Attributes:
        parts: Name -> fp32 master.
        groups: Names of every parameter group, in the order of the optimizer's state; empty if
            they are not all known, or the masters of a group are one tensor.
        unknown: Names of the weights that may have a master, but which one cannot be told.
        reason: Why there are such weights.
    """

    parts: dict[str, FileRange]
    groups: list[list[str]]
    unknown: list[str] = []
    reason: str = ""


def match_masters(
    file: TorchFile,
    optimizer: dict,
    names: Any,
    low_precision_copies: dict[str, Parts],
    shapes: Shapes,
) -> Masters | None:
    """Return the masters by name; None if the optimizer keeps none (an fp32 engine).

    Args:
        optimizer: Saved state of the optimizer, from `optimizer` of the model file.
        names: `optimizer_param_names` of the model file: the names of every group in order, if the
            training program recorded them (client_state); None otherwise.
        low_precision_copies: Low-precision weights of all parameters, trainable or frozen, in the
            module's order.
        shapes: Shapes of these parameters.

    Raises:
        UserError: masters that match no weight (files of different steps), or names that do not
            fit.
    """
    has_names = isinstance(names, list) and all(isinstance(group, list) for group in names)
    if "fp32_groups_flat" in optimizer:
        flats = optimizer["fp32_groups_flat"]
        if has_names and isinstance(flats, list) and len(names) == len(flats):
            return Masters(_flat_masters(file, flats, names, shapes), [])
        reason = "DeepSpeed saves no order of the masters of FusedAdam under ZeRO-0"
        return Masters({}, [], list(shapes), reason)
    groups = optimizer.get("fp32_groups")
    if groups is None:
        return None
    if not isinstance(groups, list) or not all(isinstance(group, list) for group in groups):
        raise corrupt_file_error(file.path, "fp32_groups that are not a list of lists of tensors")
    for ref in (ref for group in groups for ref in group):
        if not isinstance(ref, TensorRef) or not ref.is_contiguous:
            raise corrupt_file_error(
                file.path, "something other than plain tensors in fp32_groups"
            )
        file.check_ref(ref, "fp32_groups")
    if has_names and list(map(len, names)) == list(map(len, groups)):
        return Masters(_named(file, groups, names, shapes), names)
    return _by_value(file, groups, low_precision_copies, shapes)


def _named(
    file: TorchFile, groups: list[list[TensorRef]], names: list[list[str]], shapes: Shapes
) -> dict[str, FileRange]:
    masters = {}
    pairs = (pair for group in zip(names, groups) for pair in zip(*group))
    for name, ref in pairs:
        if shapes.get(name) != ref.shape:
            raise corrupt_file_error(
                file.path,
                f"a master of {name} of shape {ref.shape}, the weight has {shapes.get(name)}",
            )
        masters[name] = FileRange(file, ref, 0, ref.numel)
    return masters


def _flat_masters(
    file: TorchFile, flats: list[Any], names: list[list[str]], shapes: Shapes
) -> dict[str, FileRange]:
    """Split the flat tensors of FP16_Optimizer, one per group, its parameters back to back."""
    masters = {}
    for ref, group in zip(flats, names):
        if not isinstance(ref, TensorRef) or len(ref.shape) != 1:
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


# -- Names by value -------------------------------------------------------------------------------


def _by_value(
    file: TorchFile,
    groups: list[list[TensorRef]],
    copies: dict[str, Parts],
    shapes: Shapes,
) -> Masters:
    """Match masters with the low-precision weights to which they round."""
    names = list(copies)
    rounded: dict[tuple, list[int]] = {}
    for position, name in enumerate(names):
        stored = copies[name]
        if not stored:
            rounded.setdefault((shapes[name], _EMPTY), []).append(position)
        elif stored[0].ref.is_contiguous:
            fingerprint, _ = _fingerprint(stored[0], stored[0].ref.dtype)
            rounded.setdefault((shapes[name], fingerprint), []).append(position)
    low_dtypes = sorted({parts[0].ref.dtype for parts in copies.values() if parts})
    found: list[list[int | None]] = []
    unknown: set[int] = set()
    for group in groups:
        matches = [_candidates(file, ref, rounded, low_dtypes) for ref in group]
        in_order = _narrow([candidates for candidates, _ in matches])
        # Rounding changed nothing of an exact master: the candidates have its value, too.
        found.append(
            [
                candidates[0] if len(candidates) == 1 or is_exact else None
                for candidates, (_, is_exact) in zip(in_order, matches)
            ]
        )
        unknown.update(
            position
            for candidates, chosen in zip(in_order, found[-1])
            if chosen is None
            for position in candidates
        )
    counts = Counter(position for chosen in found for position in chosen)
    unknown.update(
        position for position in counts if position is not None and counts[position] > 1
    )
    parts = {
        names[position]: FileRange(file, ref, 0, ref.numel)
        for chosen, group in zip(found, groups)
        for position, ref in zip(chosen, group)
        if position is not None and position not in unknown
    }
    if not unknown:
        return Masters(parts, [[names[p] for p in chosen if p is not None] for chosen in found])
    listed = [names[position] for position in sorted(unknown)]
    reason = f"the 16-bit weights of {join_some(listed)} are equal, their masters are not"
    return Masters(parts, [], listed, reason)


def _candidates(
    file: TorchFile, ref: TensorRef, rounded: dict[tuple, list[int]], low_dtypes: Iterable[str]
) -> tuple[list[int], bool]:
    """Return the positions of the weights to which a master rounds, and whether the rounding was
    exact.
    """
    part = FileRange(file, ref, 0, ref.numel)
    for low in low_dtypes:
        fingerprint, is_exact = _fingerprint(part, low)
        if positions := rounded.get((ref.shape, fingerprint)):
            return positions, is_exact
    raise UserError(
        f"fp32 masters in {file.path} of the weights in it",
        f"one of shape {ref.shape} that rounds to none of the weights of that shape",
        "restore the file from an intact save",
    )


def _narrow(candidates: list[list[int]]) -> list[list[int]]:
    """Return which of the candidates remain if the chosen positions increase along the list; all
    of them if no choice does, as where an optimizer got its parameters in another order.
    """
    first, last = -1, max((max(positions) for positions in candidates), default=0) + 1
    earliest: list[int] = []
    latest: list[int] = []
    for positions in candidates:
        first = min((position for position in positions if position > first), default=-1)
        if first < 0:
            return candidates
        earliest.append(first)
    for positions in reversed(candidates):
        last = max(position for position in positions if position < last)
        latest.append(last)
    return [
        [position for position in positions if low <= position <= high]
        for positions, low, high in zip(candidates, earliest, reversed(latest))
    ]


# The fingerprint of a tensor without elements.
_EMPTY = ("", 0, 1)


def _fingerprint(part: FileRange, low: str) -> tuple[tuple[str, int, int], bool]:
    """Return two checksums of a tensor's elements rounded to dtype `low`, and whether the rounding
    was exact.
    """
    if not part.count:
        return _EMPTY, True
    source = part.ref.dtype
    step = CHUNK_BYTES // DTYPES[source].itemsize
    crc, adler, is_exact = 0, 1, True
    for start in range(0, part.count, step):
        chunk = read_parts([part], start, min(step, part.count - start))
        rounded = cast(chunk, source, low)
        crc, adler = zlib.crc32(rounded.data, crc), zlib.adler32(rounded.data, adler)
        is_exact = is_exact and bool((cast(rounded, low, source) == chunk).all())
    return (low, crc, adler), is_exact
