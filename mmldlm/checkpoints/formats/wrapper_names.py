"""The parts that torch's own wrappers add to the names of a model's tensors, and their removal.

torch.compile, FullyShardedDataParallel and activation checkpointing keep the model under an
attribute that no model has by itself. DistributedDataParallel, DataParallel and AveragedModel keep
it under `module`, which is also an ordinary name of a child: a state_dict alone does not say which
of the two wrote it. `module` is therefore removed only where something else reveals a wrapper.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import NamedTuple

from mmldlm.utils.formatting import join_some

MODULE = "module"
# Attribute -> the wrapper that has it.
WRAPPERS = {
    "_orig_mod": "torch.compile",
    "_fsdp_wrapped_module": "FullyShardedDataParallel",
    "_fpw_module": "FullyShardedDataParallel",
    "_checkpoint_wrapped_module": "activation checkpointing",
}
# The counter of AveragedModel, next to its `module`.
AVERAGED = "n_averaged"


class BareNames(NamedTuple):
    """Names without wrappers.

    Attributes:
        names: Name in the file -> name of the model, without what is not the model's.
        notes: Notes for the user; empty if the names are the model's as they are.
    """

    names: dict[str, str]
    notes: list[str]


def remove_wrappers(
    names: Collection[str], module_names: Collection[str] | None = None
) -> BareNames:
    """Return the model's names of the tensors of a state_dict.

    Args:
        names: Names as they are in the file.
        module_names: Names of all modules, as the `_metadata` of a state_dict lists them; None if
            unknown.
    """
    same = BareNames({name: name for name in names}, [])
    is_average = is_averaged(names)
    of_model = [name for name in names if not (is_average and name == AVERAGED)]
    root = _common_root(of_model)
    if module_names is not None:
        root = _only_children(root, module_names)
    is_wrapped = is_average or any(part in WRAPPERS for part in root)
    if root and not is_wrapped:
        prefix = ".".join(root) + "."
        same.notes.append(
            f"all names begin with {prefix!r}: DistributedDataParallel and DataParallel add this"
            " prefix, or the model has a child of that name. They were kept; --strip-prefix"
            f" {prefix} removes it"
        )
    depth = len(root) if is_wrapped else 0
    bare = {
        name: ".".join(part for part in name.split(".")[depth:] if part not in WRAPPERS)
        for name in of_model
    }
    # Two names would become one: those in the file are right.
    if len(set(bare.values())) < len(bare) or "" in bare.values():
        return same
    removed = {part for name in of_model for part in name.split(".") if part in WRAPPERS}
    if not removed and not depth:
        return same
    wrappers = sorted({WRAPPERS[part] for part in removed})
    if depth and MODULE in root:
        wrappers.append(
            "AveragedModel" if is_average else "DistributedDataParallel or DataParallel"
        )
    what = (
        f"the prefix {'.'.join(root)!r}"
        if depth
        else "the parts " + join_some(sorted(map(repr, removed)))
    )
    notes = [
        f"{what} of {join_some(wrappers)} was removed from the names of the tensors; --keep-names"
        " keeps it"
    ]
    if is_average:
        notes.append(f"{AVERAGED}, the counter of AveragedModel, is not a weight and was left out")
    return BareNames(bare, notes)


def is_averaged(names: Collection[str]) -> bool:
    """Return whether the names are those of an AveragedModel: `module.` and its counter."""
    of_model = [name for name in names if name != AVERAGED]
    return 0 < len(of_model) < len(names) and all(
        name.startswith(f"{MODULE}.") for name in of_model
    )


def prefix_to_match(names: Iterable[str], wanted: Collection[str]) -> str:
    """Return the prefix of wrappers without which most names are those of a known model; "" if
    none helps.
    """
    names = list(names)
    root = _common_root(names)
    prefixes = ["", *(".".join(root[:depth]) + "." for depth in range(1, len(root) + 1))]

    def num_known(prefix: str) -> int:
        return sum(name.removeprefix(prefix) in wanted for name in names)

    return max(prefixes, key=num_known)


def _common_root(names: list[str]) -> list[str]:
    """Return the parts of wrappers with which all names begin, with one `module` at most."""
    root: list[str] = []
    for parts in zip(*(name.split(".")[:-1] for name in names)):
        part = parts[0]
        if len(set(parts)) > 1 or not (
            part in WRAPPERS or (part == MODULE and MODULE not in root)
        ):
            break
        root.append(part)
    return root


def _only_children(root: list[str], module_names: Collection[str]) -> list[str]:
    """Return the parts of `root` up to a module that has other children: it is not a wrapper of
    torch's.
    """
    for depth, part in enumerate(root):
        parents = [name.split(".") for name in module_names if name]
        children = {
            parts[depth]
            for parts in parents
            if len(parts) > depth and parts[:depth] == root[:depth]
        }
        if part == MODULE and children - {part}:
            return root[:depth]
    return root
