"""The import order of docs/architecture.md, checked on the source: nothing is imported, so `if`
hides nothing. Imports inside functions and for types alone count like all others.
"""

import ast
import functools
from pathlib import Path

parse = functools.cache(ast.parse)
"""Several rules read the same files."""
PACKAGE = Path(__file__).resolve().parents[2] / "mmldlm"
# A room imports only from rooms before it.
ORDER = (
    "errors",
    "utils",
    "config",
    "diffusion",
    "models",
    "data",
    "distributed",
    "engines",
    "checkpoints",
    "sampling",
    "tasks",
    "inference",
    "tasks.corrector",  # it writes training data with a trained model, and searches
    "observe",
    "stability",
    "evaluation",
    "cluster",
    "preflight",
    "launch",
    "training",
    "debug",
    "commands",
    "train",
    "cli",
    "__main__",
)
DISTRIBUTED = ("torch.distributed", "deepspeed", "mpi4py")
LAZY = ("mpi4py", "wandb", "matplotlib")  # needed by few commands, slow or absent elsewhere
# What runs on every node starts without torch.
FEW_NODES_NEED_TORCH = (
    "cluster",
    "preflight",
    "launch",
)


def imports(tree):
    """(dotted name, line, runs when the module is imported) of every import and every
    `torch.distributed`.
    """
    lazy = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
        or _is_type_checking(node)
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        now = id(node) not in lazy
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno, now) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = "." * node.level + (node.module or "")
            join = "" if base.endswith(".") else "."
            yield from ((f"{base}{join}{alias.name}", node.lineno, now) for alias in node.names)
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            if (node.value.id, node.attr) == ("torch", "distributed"):
                yield "torch.distributed", node.lineno, now


def _is_type_checking(node) -> bool:
    return (
        isinstance(node, ast.If)
        and isinstance(node.test, ast.Name)
        and node.test.id == "TYPE_CHECKING"
    )


def absolute(name, module, is_package):
    """Resolve a relative name (`.blocks.Block`) seen in `module`."""
    level = len(name) - len(name.lstrip("."))
    if level == 0:
        return name
    parts = module.split(".")
    parts = parts[: len(parts) - level + is_package]
    return ".".join([*parts, *filter(None, [name[level:]])])


def under(name, roots):
    """Whether a dotted name is one of `roots` or below one."""
    return any(name == root or name.startswith(root + ".") for root in roots)


def _room(parts: list[str]) -> str | None:
    """Return the room of a module: its folder, or the folder below that ORDER names by itself."""
    nested = ".".join(parts[1:3])
    return nested if nested in ORDER else parts[1] if len(parts) > 1 else None


def violations(source, module, is_package=False):
    """One line per import of a module that breaks a rule; `module` is its dotted name."""
    parts = module.split(".")
    room = _room(parts)
    if room is not None and room not in ORDER:
        return [f"{module}: docs/architecture.md knows no room {room}"]
    tree, found = parse(source), []
    for raw, line, now in imports(tree):
        name = absolute(raw, module, is_package)
        where = f"{module}:{line} imports {name}"
        if now and under(name, LAZY):
            found.append(f"{where}: only inside the function that needs it")
        if room in ("models", "diffusion") and under(name, DISTRIBUTED):
            found.append(f"{where}: {room} knows nothing of ranks")
        if (
            room in FEW_NODES_NEED_TORCH
            and now
            and under(name, ["torch", "deepspeed", "transformers"])
        ):
            found.append(f"{where}: {room} imports torch only inside the GPU checks")
        target = _room(name.split(".")) if name.startswith("mmldlm.") else None
        if target is None or target == room or target.startswith("__"):
            continue
        if target not in ORDER:
            found.append(f"{where}: no such room")
        elif room is None:
            # `mmldlm.load` starts a room when it is called.
            if now:
                found.append(f"{where}: {module} comes before all rooms")
        elif target == "cli" and parts[-1] == "__main__":
            pass  # `python -m mmldlm.ROOM` is one of the thin entry points
        elif ORDER.index(target) > ORDER.index(room):
            found.append(f"{where}: {target} comes after {room}")
        elif room == "engines" and target == "models":
            found.append(f"{where}: engines import no model")
    return found


def modules():
    """(path, dotted name, is a package) of every file of the package."""
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = ("mmldlm", *path.relative_to(PACKAGE).with_suffix("").parts)
        is_package = parts[-1] == "__init__"
        yield path, ".".join(parts[:-1] if is_package else parts), is_package


def all_violations():
    """One line per import of the package that breaks a rule."""
    return [
        line
        for path, module, is_package in modules()
        for line in violations(path.read_text(), module, is_package)
    ]


def import_graph():
    """Module -> modules that it imports, now, in a function or for types; a package's __init__
    counts as the files it imports.
    """
    known = {module for _, module, _ in modules()}
    graph = {}
    for path, module, is_package in modules():
        tree = parse(path.read_text())
        names = [absolute(raw, module, is_package) for raw, _, _ in imports(tree)]
        graph[module] = {_file_of(name, known) for name in names} - {"", module, "mmldlm"}
    return graph


def _file_of(name: str, known: set[str]) -> str:
    """Return the module that holds a dotted name, "" if none of `known` does."""
    while name and name not in known:
        name = name.rpartition(".")[0]
    return name


def find_circle(graph):
    """The modules of one import circle, the first of them also last; [] if there is none."""
    done, path = set(), []

    def visit(module):
        if module in path:
            return [*path[path.index(module) :], module]
        if module in done:
            return []
        path.append(module)
        for target in sorted(graph.get(module, ())):
            if circle := visit(target):
                return circle
        path.pop()
        done.add(module)
        return []

    return next(filter(None, map(visit, sorted(graph))), [])
