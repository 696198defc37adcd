"""Find the model among the contents of a checkpoint: optimizers, averages, counters, random
states.

A torch.save'd object and a DCP folder are read as the same tree: dicts and lists, whose leaves are
StoredTensor, StoredValue or plain values. A path is the tuple of keys that leads to a node; users
write it with slashes (`--key state/model`), and `.` for the top level. The tensors of the chosen
state dict become those of a WeightSource (`add_tensors` in state_dict.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from mmldlm.checkpoints.files.dtypes import DTYPES, numel
from mmldlm.checkpoints.files.torch_file import TorchFile, corrupt_file_error
from mmldlm.checkpoints.files.unpickler import OpaqueObject, TensorRef
from mmldlm.checkpoints.formats.state_dict import is_opaque_tensor, refuse_opaque_tensor
from mmldlm.checkpoints.formats.weight_source import Parts, whole_tensor
from mmldlm.checkpoints.formats.wrapper_names import AVERAGED, is_averaged
from mmldlm.errors import UserError
from mmldlm.utils.formatting import count_noun, join_some

Keys = tuple[Any, ...]

TOP_LEVEL = "."
# Under these keys trainers save the model; any other state dict beside it is then not the model.
MODEL_KEYS = ("model", "state_dict", "model_state_dict", "module")
# What torch's optimizers keep of a parameter.
MOMENT_KEYS = frozenset(
    {
        "exp_avg",
        "exp_avg_sq",
        "max_exp_avg_sq",
        "exp_inf",
        "momentum_buffer",
        "square_avg",
        "grad_avg",
        "acc_delta",
        "mu_product",
        "row_var",
        "col_var",
        "exp_avg_diff",
        "neg_pre_grad",
    }
)
STATE_KEYS = MOMENT_KEYS | {"step", "sum", "variance", "prev", "step_size", "ax", "eta", "mu"}
# torch's name of the state that a module saves in addition to its tensors.
_EXTRA_STATE = "_extra_state"
MAX_DEPTH = 100


class NoWeights(UserError):
    """A file that holds something else than a model: the state of an optimizer, random states,
    ...
    """


class StoredTensor:
    """A tensor; subclasses know where it is stored."""

    dtype: str
    shape: tuple[int, ...]

    def parts(self) -> Parts:
        """Return where its elements are.

        Raises:
            UserError: a damaged file, or an order of elements that cannot be read so.
        """
        raise NotImplementedError


class StoredValue:
    """A value that is not read with the tree."""

    def load(self) -> Any:
        """Return it, with StoredTensor for its tensors.

        Raises:
            UserError: it cannot be read.
        """
        raise NotImplementedError


class Model(NamedTuple):
    """The state dict that was chosen.

    Attributes:
        path: Path of the model in the file.
        tensors: Name in the model -> tensor.
        other_models: Paths of the other state dicts, as users write them.
        optimizers: Path -> node of every optimizer.
        notes: Notes on what was chosen, and what was left out.
    """

    path: Keys
    tensors: dict[str, Any]
    other_models: list[str]
    optimizers: dict[Keys, dict]
    notes: list[str]


def select_model(root: Any, file: Path, key: str | None = None) -> Model:
    """Choose the model among the state dicts of a tree.

    A dict is a state dict if it has tensors of its own; counters, random states and schedules
    beside one with weights are none. One under a key of MODEL_KEYS is the model if all others lie
    beside it.

    Args:
        root: Root of the tree.
        file: File that errors name.
        key: State dict that the user chose; None for the only one.

    Raises:
        UserError: no state dict, several, or none at `key`; the error lists what there is.
    """
    tree = _scan(root)
    path = _choose(tree, root, file) if key is None else _resolve(tree, file, key)
    tensors, beside = _tensors_of(tree.nodes[path], path)
    for name, value in _items(tree.nodes[path]):
        refuse_opaque_tensor(str(file), name, value)
    unnamed = [
        state
        for state in tree.unnamed
        if _is_below(state.path, path) and len(state.path) <= len(path) + 1
    ]
    if key is None and any(state.path == path or state.has_matrices for state in unnamed):
        raise UserError(
            f"a name for every tensor of the model in {file}",
            "tensors in a list, or under keys that are not text:"
            f" {join_some(map(_describe, unnamed), 4)}",
            f"save the model's state_dict(); --key {write_path(path)} takes the tensors with names"
            " alone",
        )
    others = [
        state.path
        for state in _candidates(tree)
        if state.path != path and not _is_below(state.path, path)
    ]
    left = [
        state
        for state in tree.states.values()
        if state.path not in (path, *others) and (beside or not _is_below(state.path, path))
    ]
    notes = [*_notes_on_others(tree, path, others, left), *_notes_on_entries(tree, path, tensors)]
    return Model(path, tensors, [write_path(other) for other in others], tree.optimizers, notes)


def _notes_on_others(
    tree: _Tree, path: Keys, others: list[Keys], left: list[_State]
) -> Iterator[str]:
    """Yield notes on the model's path, and on the tensors elsewhere in the file."""
    if path:
        yield f"the weights are those under {write_path(path)!r} in the file"
    if others:
        listed = [_describe(tree.states[other]) for other in others]
        yield f"other state dicts were left out (choose one with --key): {join_some(listed, 8)}"
    if left:
        listed = [_describe_rest(state) for state in left]
        yield f"tensors that are not weights were left out: {join_some(listed, 8)}"
    if tree.unnamed:
        listed = [_describe(state) for state in tree.unnamed]
        yield f"tensors without names were left out: {join_some(listed, 8)}"


def _notes_on_entries(tree: _Tree, path: Keys, tensors: dict[str, Any]) -> Iterator[str]:
    """Yield notes on the entries of the model's own dict."""
    is_average = is_averaged(tensors)
    counters = [
        name
        for name, tensor in tensors.items()
        if "." not in name and not tensor.shape and not (is_average and name == AVERAGED)
    ]
    if not path and counters and len(counters) < len(tensors):
        yield (
            "kept among the weights, where they are, though they may be counters:"
            f" {join_some(counters)}"
        )
    known = {*tensors, *tree.merged_optimizers.get(path, {})}
    values = [
        name
        for name, value in _items(tree.nodes[path])
        if name not in known and not is_tensor(value) and not _has_tensors(value)
    ]
    if values:
        yield f"entries that are not tensors were left out: {join_some(values, 8)}"


def find_optimizers(root: Any) -> dict[Keys, dict]:
    """Return path -> node of every optimizer in a tree."""
    return _scan(root).optimizers


def write_path(path: Keys) -> str:
    """Return a path as users write it."""
    return "/".join(map(str, path)) or TOP_LEVEL


# -- the tree -------------------------------------------------------------------------------------


class _State(NamedTuple):
    """Tensors of one dict, those of nested ones not counted."""

    path: Keys
    tensors: dict[str, Any]

    @property
    def has_matrices(self) -> bool:
        return any(len(tensor.shape) > 1 for tensor in self.tensors.values())

    @property
    def has_vectors(self) -> bool:
        kinds = [DTYPES.get(tensor.dtype) for tensor in self.tensors.values() if tensor.shape]
        return any(kind is None or kind.is_float for kind in kinds)


class _Tree(NamedTuple):
    """Content of a tree, as _scan sorts it.

    Attributes:
        nodes: Path -> dict or list outside of optimizers.
        states: Path -> node with tensors of its own.
        optimizers: Path -> optimizer.
        merged_optimizers: Optimizers whose entries stand in one dict with others.
        unnamed: Tensors in lists, and under keys that are not text.
        opaque: Objects of a class under a key of MODEL_KEYS, such as a pickled module, and dicts
            with tensors of a class that is not read.
        num_values: Number of leaves that are not tensors.
    """

    nodes: dict[Keys, Any]
    states: dict[Keys, _State]
    optimizers: dict[Keys, dict]
    merged_optimizers: dict[Keys, dict]
    unnamed: list[_State]
    opaque: list[Keys]
    num_values: int


def _scan(root: Any) -> _Tree:
    tree = _Tree({}, {}, {}, {}, [], [], 0)
    seen: set[int] = set()
    num_values = 0
    waiting: list[tuple[Keys, Any]] = [((), root)]
    while waiting:
        path, node = waiting.pop()
        if not isinstance(node, dict | list | tuple):
            num_values += not is_tensor(node)
            if isinstance(node, OpaqueObject) and path and path[-1] in MODEL_KEYS:
                tree.opaque.append(path)
            elif is_opaque_tensor(node):
                tree.opaque.append(path[:-1])
            continue
        # One dict may stand under several keys.
        if id(node) in seen or len(path) > MAX_DEPTH:
            continue
        seen.add(id(node))
        if isinstance(node, dict) and is_optimizer(node):
            tree.optimizers[path] = node
            continue
        tree.nodes[path] = node
        merged = _merged_optimizer(node)
        if merged:
            tree.optimizers[path] = tree.merged_optimizers[path] = merged
        tensors = {
            name: value for name, value in _items(node) if is_tensor(value) and name not in merged
        }
        if tensors:
            tree.states[path] = _State(path, tensors)
        children = node.items() if isinstance(node, dict) else enumerate(node)
        unnamed = {
            str(key): item
            for key, item in children
            if is_tensor(item) and not isinstance(key, str)
        }
        if unnamed:
            tree.unnamed.append(_State(path, unnamed))
        children = node.items() if isinstance(node, dict) else enumerate(node)
        waiting += reversed(
            [((*path, key), child) for key, child in children if key not in merged]
        )
    return tree._replace(num_values=num_values)


def _items(node: Any) -> Iterator[tuple[str, Any]]:
    """Yield the named entries of a dict; what a list holds has no names."""
    return (
        ((key, value) for key, value in node.items() if isinstance(key, str))
        if isinstance(node, dict)
        else iter(())
    )


def is_tensor(value: Any) -> bool:
    """Return whether a leaf is a tensor."""
    return isinstance(value, StoredTensor)


def _has_tensors(value: Any) -> bool:
    """Return whether a value is a container with tensors in it."""
    if not isinstance(value, dict | list | tuple):
        return False
    tree = _scan(value)
    return bool(tree.states or tree.optimizers) or any(
        is_tensor(item)
        for node in tree.nodes.values()
        if not isinstance(node, dict)
        for item in node
    )


def is_optimizer(node: Any) -> bool:
    """Return whether a node is the state of an optimizer, by its structure.

    Torch's {"state", "param_groups"}; the same flattened to `state.NAME.exp_avg` and
    `param_groups.NAME.lr`; the states alone, {name or number: {"exp_avg": ...}}; and moments by
    kind, {"exp_avg": {name: ...}}.
    """
    if not isinstance(node, dict) or not node:
        return False
    inner = [value for value in node.values() if isinstance(value, dict)]
    if (
        all(isinstance(key, str) and key in STATE_KEYS for key in node)
        and MOMENT_KEYS & node.keys()
        and inner
    ):
        return True
    if len(inner) == len(node) and all(
        any(key in MOMENT_KEYS for key in entry) for entry in inner
    ):
        return True
    return len(_merged_optimizer(node)) == len(node)


def _merged_optimizer(node: Any) -> dict[str, Any]:
    """Return the entries of an optimizer in a dict that may have others, even weights."""
    if isinstance(node, dict) and "param_groups" in node:
        return {key: node[key] for key in ("state", "param_groups") if key in node}
    flat = {
        name: value
        for name, value in _items(node)
        if name.startswith("param_groups.")
        or (
            name.startswith("state.")
            and name.rpartition(".")[2] in STATE_KEYS
            and name.count(".") > 1
        )
    }
    is_one = any(
        name.startswith("param_groups.") or name.rpartition(".")[2] in MOMENT_KEYS for name in flat
    )
    return flat if is_one else {}


# -- the choice -----------------------------------------------------------------------------------


def _candidates(tree: _Tree) -> list[_State]:
    """Return the state dicts that may be a model: those with matrices, else with vectors, else
    with any tensor.
    """
    states = list(tree.states.values())
    of_model = [
        state
        for state in states
        if state.path and state.path[-1] in MODEL_KEYS and state.has_vectors
    ]
    for has in (
        lambda state: state.has_matrices or state in of_model,
        lambda state: state.has_vectors,
    ):
        if chosen := [state for state in states if has(state)]:
            return chosen
    return states


def _choose(tree: _Tree, root: Any, file: Path) -> Keys:
    candidates = _candidates(tree)
    if not candidates:
        raise _nothing(tree, root, file)
    if tree.num_values and not any(
        state.has_vectors or state.has_matrices for state in candidates
    ):
        # The model may be one of the other values.
        listed = join_some(map(_describe_rest, candidates), 4)
        raise NoWeights(
            f"weights in {file}",
            f"values without a weight among them (tensors: {listed})",
            f"{_GIVE}, or --key PATH for these tensors",
        )
    opaque = [path for path in tree.opaque if path and path[-1] in MODEL_KEYS]
    if opaque and not any(state.path and state.path[-1] in MODEL_KEYS for state in candidates):
        raise _several(
            tree, file, f"{write_path(opaque[0])}, which holds objects instead of tensors, beside"
        )
    if len(candidates) > 1:
        named = [state for state in candidates if state.path and state.path[-1] in MODEL_KEYS]
        beside = [
            state
            for state in named
            if all(_is_below(other.path, state.path[:-1]) and not _is_below(other.path, state.path)
                   for other in candidates if other is not state)
        ]  # fmt: skip
        if len(beside) != 1:
            raise _several(tree, file, "several state dicts:")
        candidates = beside
    path = candidates[0].path
    tensors, beside_it = _tensors_of(tree.nodes[path], path)
    # It may be a tree of parameters, or a model beside others: the user knows.
    if len(tensors) > len(candidates[0].tensors):
        raise _several(tree, file, "several state dicts:", below=path)
    return path


def _is_below(path: Keys, other: Keys) -> bool:
    return path[: len(other)] == other


def _resolve(tree: _Tree, file: Path, key: str) -> Keys:
    """Return the path that a user has written as `key`."""
    key = key.strip("/") or TOP_LEVEL
    for path in tree.nodes:
        if key in (write_path(path), ".".join(map(str, path)) or TOP_LEVEL):
            if not _tensors_of(tree.nodes[path], path)[0]:
                raise _several(tree, file, f"no tensors under --key {key}, but", key)
            return path
    what = (
        "an optimizer" if any(key == write_path(path) for path in tree.optimizers) else "nothing"
    )
    raise _several(tree, file, f"{what} under that key, but", key)


def _tensors_of(node: Any, path: Keys) -> tuple[dict[str, Any], bool]:
    """Return name -> tensor of a state dict, and whether nested dicts were left out.

    Names with dots are a module's, so what is nested beside them is something else; otherwise the
    dicts are a tree of parameters, whose names are joined by dots. Tensors at the top level of a
    file count alone.
    """
    merged = _merged_optimizer(node)
    tensors = {
        name: value for name, value in _items(node) if is_tensor(value) and name not in merged
    }
    if (not path and tensors) or any("." in name for name in tensors):
        return tensors, True
    joined: dict[str, Any] = {}
    for inner, state in _scan(node).states.items():
        if not any(str(key).rpartition(".")[2] == _EXTRA_STATE for key in inner):
            joined.update(
                {
                    ".".join(map(str, (*inner, name))): tensor
                    for name, tensor in state.tensors.items()
                }
            )
    order = list(tensors) + [name for name in joined if name not in tensors]
    return {name: joined[name] for name in order if name in joined}, False


def _describe(state: _State) -> str:
    elements = sum(numel(tensor.shape) for tensor in state.tensors.values())
    return (
        f"{write_path(state.path)} ({count_noun(len(state.tensors), 'tensor')}, {elements:,}"
        " elements)"
    )


def _describe_rest(state: _State) -> str:
    if len(state.tensors) > 3:
        return _describe(state)
    return ", ".join(write_path((*state.path, name)) for name in state.tensors)


def _several(
    tree: _Tree, file: Path, what: str, key: str | None = None, below: Keys | None = None
) -> UserError:
    states = (
        _candidates(tree)
        if below is None
        else [s for s in tree.states.values() if _is_below(s.path, below)]
    )
    listed = join_some(map(_describe, states), 12) if states else "no state dict"
    example = write_path(next((state.path for state in states), ("model",)))
    where = f"a state dict at --key {key} in {file}" if key is not None else f"one model in {file}"
    return UserError(
        where,
        f"{what} {listed}",
        f"choose one by its path: mmldlm convert SRC OUT --key {example}",
    )


_GIVE = "give a file with the state_dict of a model: torch.save(model.state_dict(), FILE)"


def _nothing(tree: _Tree, root: Any, file: Path) -> NoWeights:
    if tree.optimizers:
        inside = (
            f"the state of an optimizer alone, at {join_some(map(write_path, tree.optimizers))}"
        )
    elif isinstance(root, dict):
        keys = join_some(root, 8)
        inside = (
            f"a dict without a single named tensor (its keys: {keys})" if keys else "an empty dict"
        )
    elif isinstance(root, OpaqueObject):
        inside = f"an object of the class {root.kind}, which only its own code could read"
    else:
        inside = "a tensor without a name" if is_tensor(root) else f"a {type(root).__name__}"
    return NoWeights(f"weights in {file}", inside, _GIVE)


# -- Objects of torch.save ------------------------------------------------------------------------


class FileTensor(StoredTensor):
    """A tensor of a torch.save'd object."""

    def __init__(self, file: TorchFile, ref: TensorRef):
        self.file, self.ref, self.dtype, self.shape = file, ref, ref.dtype, ref.shape

    def parts(self) -> Parts:
        ref = self.ref
        self.file.check_ref(ref, f"a tensor of shape {ref.shape}")
        if not ref.is_contiguous:
            found = f"one of shape {ref.shape} with strides {ref.stride}"
            raise UserError(
                f"tensors in row-major order in {self.file.path}",
                found,
                "save them with .contiguous()",
            )
        return whole_tensor(self.file, ref)


def tree_of(
    file: TorchFile, value: Any, seen: dict[int, Any] | None = None, depth: int = 0
) -> Any:
    """Return a loaded object with FileTensor for its tensors.

    Raises:
        UserError: it is nested too deeply.
    """
    seen = {} if seen is None else seen
    if depth > MAX_DEPTH:
        raise corrupt_file_error(file.path, f"dicts and lists nested more than {MAX_DEPTH} deep")
    if isinstance(value, TensorRef):
        return FileTensor(file, value)
    if not isinstance(value, dict | list | tuple):
        return value
    if id(value) not in seen:
        # A dict may contain itself.
        seen[id(value)] = None
        if isinstance(value, dict):
            seen[id(value)] = {
                key: tree_of(file, entry, seen, depth + 1) for key, entry in value.items()
            }
        else:
            items = [tree_of(file, entry, seen, depth + 1) for entry in value]
            seen[id(value)] = items if isinstance(value, list) else tuple(items)
    return seen[id(value)]


def node_at(value: Any, path: tuple[Any, ...]) -> Any:
    """Return the value at a path of keys in a loaded object."""
    for key in path:
        value = value[key]
    return value
