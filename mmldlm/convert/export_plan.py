"""Plan an export: which tensors under which names and dtypes, in which files."""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence
from typing import NamedTuple

from mmldlm.checkpoints.formats.dtypes import nbytes
from mmldlm.checkpoints.formats.weight_source import TensorInfo, WeightSource
from mmldlm.checkpoints.layout import SAFETENSORS_FILE
from mmldlm.errors import UserError
from mmldlm.utils.formatting import join_some

DTYPE_NAMES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "keep": None}
WIDE_FLOATS = ("float64", "float32", "float16", "bfloat16")


class PlannedTensor(NamedTuple):
    """One tensor to write.

    Attributes:
        info: the tensor in the source.
        name: its name in the output.
        dtype: its dtype in the output.
    """

    info: TensorInfo
    name: str
    dtype: str

    @property
    def nbytes(self) -> int:
        """Number of bytes in the output."""
        return nbytes(self.info.shape, self.dtype)


class ExportPlan(NamedTuple):
    """What to write.

    Attributes:
        tensors: source name -> what to write, in the model's order.
        aliases: second name of a tied weight in the output -> its name.
        names: all names in the output, in the model's order.
    """

    tensors: dict[str, PlannedTensor]
    aliases: dict[str, str]
    names: tuple[str, ...] = ()

    @property
    def nbytes(self) -> int:
        """Number of bytes of all tensors."""
        return sum(planned.nbytes for planned in self.tensors.values())


def plan_tensors(
    weights: WeightSource, dtype: str, only: Sequence[str] = (), strip_prefix: str = ""
) -> ExportPlan:
    """Plan what to write of a source.

    Args:
        weights: the source.
        dtype: one of DTYPE_NAMES.
        only: names to write, as shell patterns; empty: all.
        strip_prefix: removed from the names that begin with it, before `only` is applied.

    Raises:
        UserError: an unknown dtype, a source without tensors, patterns or a prefix without a
            match.
    """
    if dtype not in DTYPE_NAMES:
        raise UserError(f"--dtype one of {', '.join(DTYPE_NAMES)}", dtype, "choose one of them")
    if all(info.alias_of for info in weights.tensors.values()):
        raise UserError(
            f"weights in {weights.path}",
            "a checkpoint without a single tensor",
            "check what was saved",
        )
    bare = strip_names(weights, strip_prefix)
    chosen = {
        name
        for name in bare
        if not only or any(fnmatch.fnmatchcase(bare[name], pattern) for pattern in only)
    }
    # A tied weight is stored under its first name, and selected by any of its names.
    selected = {weights.tensors[name].alias_of or name for name in chosen}
    if not selected:
        raise UserError(
            f"a tensor that matches {' or '.join(only)}",
            "none",
            "see `mmldlm convert inspect` for the names",
        )
    target = DTYPE_NAMES[dtype]
    tensors, aliases = {}, {}
    for name, info in weights.tensors.items():
        if info.alias_of:
            if info.alias_of in selected and name in chosen:
                aliases[bare[name]] = bare[info.alias_of]
        elif name in selected:
            is_cast = target is not None and info.kind != "buffer" and info.dtype in WIDE_FLOATS
            tensors[name] = PlannedTensor(
                info, bare[name], target if is_cast and target else info.dtype
            )
    names = tuple(
        bare[name] for name in weights.tensors if name in tensors or bare[name] in aliases
    )
    return ExportPlan(tensors, aliases, names)


def strip_names(weights: WeightSource, prefix: str) -> dict[str, str]:
    """Return name -> name without `prefix`; the same name where it does not begin with it.

    Raises:
        UserError: no name begins with it, or two names would become one.
    """
    bare = {name: name.removeprefix(prefix) for name in weights.tensors}
    expected = f"names in {weights.path} that begin with --strip-prefix {prefix!r}"
    if prefix and all(name == new for name, new in bare.items()):
        raise UserError(
            expected, f"none, e.g. {join_some(bare)}", "see `mmldlm convert inspect` for the names"
        )
    if not prefix and "" in bare:
        raise UserError(
            f"names of tensors in {weights.path}",
            "an empty one",
            "give it a name in the model and save again",
        )
    if len(set(bare.values())) < len(bare) or "" in bare.values():
        raise UserError(
            f"{expected}, different without it",
            "two names that become one",
            "leave --strip-prefix out",
        )
    return bare


def split_into_files(plan: ExportPlan, shard_bytes: int | None) -> dict[str, list[str]]:
    """Return file name -> source names in it, in the model's order, filled greedily."""
    groups: list[list[str]] = [[]]
    size = 0
    for name, planned in plan.tensors.items():
        if shard_bytes is not None and groups[-1] and size + planned.nbytes > shard_bytes:
            groups.append([])
            size = 0
        groups[-1].append(name)
        size += planned.nbytes
    if len(groups) == 1:
        return {SAFETENSORS_FILE: groups[0]}
    return {
        f"model-{number:05d}-of-{len(groups):05d}.safetensors": group
        for number, group in enumerate(groups, 1)
    }
