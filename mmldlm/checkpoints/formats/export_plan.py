"""The plan of an export of weights: which tensors are written, under which name and dtype."""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence
from typing import NamedTuple

from mmldlm.checkpoints.files.dtypes import WIDE_FLOATS
from mmldlm.checkpoints.files.tensor_writer import TensorSpec
from mmldlm.checkpoints.formats.weight_source import TensorInfo, WeightSource
from mmldlm.errors import UserError
from mmldlm.utils.formatting import join_some

DTYPE_NAMES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "keep": None}


class PlannedTensor(NamedTuple):
    """One tensor to write.

    Attributes:
        info: Tensor in the source.
        name: Name in the output.
        spec: Tensor in the output.
    """

    info: TensorInfo
    name: str
    spec: TensorSpec


class ExportPlan(NamedTuple):
    """Plan of an export.

    Attributes:
        tensors: Source name -> what to write, in the model's order.
        aliases: Second name of a tied weight in the output -> its first name.
        names: All names in the output, in the model's order.
    """

    tensors: dict[str, PlannedTensor]
    aliases: dict[str, str]
    names: tuple[str, ...] = ()

    def source_names(self) -> dict[str, str]:
        """Return every name in the output -> source name of its tensor; tied weights share one."""
        stored = {planned.name: name for name, planned in self.tensors.items()}
        return {name: stored[self.aliases.get(name, name)] for name in self.names}

    @property
    def num_parameters(self) -> int:
        """Number of elements of the parameters, without buffers and aliases."""
        infos = (planned.info for planned in self.tensors.values())
        return sum(info.numel for info in infos if info.kind != "buffer")

    @property
    def dtype(self) -> str | None:
        """The dtype of most elements of the parameters; None without parameters of wide floats."""
        sizes: dict[str, int] = {}
        for planned in self.tensors.values():
            dtype = planned.spec.dtype
            if dtype in WIDE_FLOATS and planned.info.kind != "buffer":
                sizes[dtype] = sizes.get(dtype, 0) + planned.info.numel
        return max(sizes, key=lambda name: sizes[name]) if sizes else None


def plan_export(
    weights: WeightSource, dtype: str, only: Sequence[str] = (), strip_prefix: str = ""
) -> ExportPlan:
    """Plan what to write of a source.

    Args:
        weights: Source of the weights.
        dtype: Key of DTYPE_NAMES.
        only: Names to write, as shell patterns; empty: all.
        strip_prefix: Prefix that is removed from the names that begin with it, before `only` is
            applied.

    Raises:
        UserError: an unknown dtype, a source without tensors, patterns or a prefix without a
            match, or 16-bit weights that would be written as fp32 though their masters are in the
            checkpoint.
    """
    if dtype not in DTYPE_NAMES:
        raise UserError(f"--dtype one of {', '.join(DTYPE_NAMES)}", dtype, "choose one of them")
    if all(info.alias_of for info in weights.tensors.values()):
        raise UserError(
            f"weights in {weights.path}",
            "a checkpoint without a single tensor",
            "check what was saved",
        )
    if not only:
        check_values_present(weights, "--only '*' converts all others")
    bare = _strip_names(weights, strip_prefix)
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
    tensors, aliases = {}, {}
    for name, info in weights.tensors.items():
        if info.alias_of:
            if info.alias_of in selected and name in chosen:
                aliases[bare[name]] = bare[info.alias_of]
        elif name in selected:
            is_cast = info.kind != "buffer" and info.dtype in WIDE_FLOATS
            target = (DTYPE_NAMES[dtype] if is_cast else None) or info.dtype
            tensors[name] = PlannedTensor(info, bare[name], TensorSpec(target, info.shape))
    _check_masters(weights, tensors)
    names = tuple(
        bare[name] for name in weights.tensors if name in tensors or bare[name] in aliases
    )
    return ExportPlan(tensors, aliases, names)


def _check_masters(weights: WeightSource, tensors: dict[str, PlannedTensor]) -> None:
    """Raise UserError if 16-bit weights whose masters cannot be told apart would be widened."""
    rounded = [
        name
        for name in weights.without_masters
        if name in tensors and tensors[name].spec.dtype != tensors[name].info.dtype
    ]
    if rounded:
        low = {"bfloat16": "bf16", "float16": "fp16"}.get(tensors[rounded[0]].info.dtype, "keep")
        raise UserError(
            f"the fp32 masters of every weight in {weights.path}",
            f"none that are known to be those of {join_some(rounded)}:"
            f" {weights.optimizer_left_out}",
            f"--dtype {low} takes the 16-bit weights, --dtype keep these and the masters that are"
            " known; a checkpoint saved with"
            " client_state={'optimizer_param_names': [[names of group 0], ...]} has the names",
        )


def check_values_present(weights: WeightSource, fix: str) -> None:
    """Raise UserError if the checkpoint lacks the value of a tensor of the model."""
    if weights.absent:
        raise UserError(
            f"a value of every tensor of the model in {weights.path}",
            f"none of {join_some(weights.absent)}: DeepSpeed saves none of a trainable parameter"
            " that its optimizer does not have",
            fix,
        )


def _strip_names(weights: WeightSource, prefix: str) -> dict[str, str]:
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
