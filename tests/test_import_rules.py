"""Holds the import order of docs/architecture.md, on the source: nothing is imported, so no rule hides behind `if`."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[1] / "mmldlm"
# A room imports only from rooms before it.
ORDER = (
    "errors", "utils", "config", "diffusion", "models", "data", "distributed", "engines", "checkpoints", "convert",
    "tasks", "observe", "stability", "debug", "sampling", "evaluation", "cluster", "preflight", "launch", "training",
    "commands", "train", "cli",
)  # fmt: skip
MOST_FILES = 14  # in one folder
DISTRIBUTED = ("torch.distributed", "deepspeed", "mpi4py")
LAZY = ("mpi4py", "wandb", "matplotlib")  # needed by few commands, slow or absent elsewhere
FEW_NODES_NEED_TORCH = ("cluster", "preflight", "launch")  # what runs on every node starts without torch


def imports(tree):
    """(dotted name, line, runs when the module is imported) of every import and every `torch.distributed`."""
    lazy = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)) or _is_type_checking(node)
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
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def types_only(tree) -> set[int]:
    """Lines of imports that only a type checker follows."""
    return {
        inner.lineno
        for node in ast.walk(tree)
        if _is_type_checking(node)
        for inner in ast.walk(node)
        if isinstance(inner, (ast.Import, ast.ImportFrom))
    }


def absolute(name, module, is_package):
    """Resolve a relative name (`.blocks.Block`) seen in `module`."""
    level = len(name) - len(name.lstrip("."))
    if level == 0:
        return name
    parts = module.split(".")
    parts = parts[: len(parts) - level + is_package]
    return ".".join([*parts, *filter(None, [name[level:]])])


def under(name, roots):
    return any(name == root or name.startswith(root + ".") for root in roots)


def violations(source, module, is_package=False):
    """What a module's imports break; `module` is its dotted name."""
    parts = module.split(".")
    room = parts[1] if len(parts) > 1 else None
    if room is not None and room not in ORDER:
        return [f"{module}: docs/architecture.md knows no room {room}"]
    tree, found = ast.parse(source), []
    for_types = types_only(tree)
    for raw, line, now in imports(tree):
        name = absolute(raw, module, is_package)
        where = f"{module}:{line} imports {name}"
        if now and under(name, LAZY):
            found.append(f"{where}: only inside the function that needs it")
        if room in ("models", "diffusion") and under(name, DISTRIBUTED):
            found.append(f"{where}: {room} knows nothing of ranks")
        if room in FEW_NODES_NEED_TORCH and now and under(name, ["torch", "deepspeed", "transformers"]):
            found.append(f"{where}: {room} imports torch only inside the GPU checks")
        target = name.split(".")[1] if name.startswith("mmldlm.") else None
        if target is None or target == room or target.startswith("__") or line in for_types:
            continue
        if target not in ORDER:
            found.append(f"{where}: no such room")
        elif room is None:
            found.append(f"{where}: {module} comes before all rooms")
        elif parts[-1] == "__main__" and target == "commands":
            continue  # `python -m mmldlm.ROOM` is a second name of the room's command
        elif ORDER.index(target) > ORDER.index(room):
            found.append(f"{where}: {target} comes after {room}")
        elif room == "engines" and target == "models":
            found.append(f"{where}: engines import no model")
    return found


def modules():
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = ("mmldlm", *path.relative_to(PACKAGE).with_suffix("").parts)
        is_package = parts[-1] == "__init__"
        yield path, ".".join(parts[:-1] if is_package else parts), is_package


def test_the_package_keeps_the_order():
    found = [
        fault for path, module, is_package in modules() for fault in violations(path.read_text(), module, is_package)
    ]
    assert found == []


def test_no_folder_is_crowded():
    crowded = {
        str(folder.relative_to(PACKAGE)): count
        for folder in {path.parent for path, _, _ in modules()}
        if (count := len(list(folder.glob("*.py"))) - 1) > MOST_FILES
    }
    assert crowded == {}


def test_no_import_circle():
    """Between files; a package's __init__ counts as the files that it imports."""
    known = {module for _, module, _ in modules()}
    graph = {}
    for path, module, is_package in modules():
        tree = ast.parse(path.read_text())
        names = [absolute(raw, module, is_package) for raw, _, now in imports(tree) if now]
        graph[module] = {max((k for k in known if under(name, [k])), key=len, default=None) for name in names} - {None}
    done, path = set(), []

    def visit(module):
        assert module not in path, " -> ".join([*path[path.index(module) :], module])
        if module in done:
            return
        path.append(module)
        for target in sorted(graph.get(module, ()) - {module, "mmldlm"}):
            visit(target)
        path.pop()
        done.add(module)

    for module in sorted(graph):
        visit(module)


BAD = [
    ("import mmldlm.data.store.store", "mmldlm.models.mmdit.model", "data comes after models"),
    ("from mmldlm.tasks.translation import objective", "mmldlm.diffusion.masked", "tasks comes after diffusion"),
    ("from mmldlm import observe", "mmldlm.engines.base", "observe comes after engines"),
    ("from ...sampling import text", "mmldlm.data.batching.loader", "sampling comes after data"),
    ("from ... import sampling", "mmldlm.data.batching.loader", "sampling comes after data"),
    ("def f():\n    from mmldlm.train import main", "mmldlm.launch.watcher", "train comes after launch"),
    ("from mmldlm import show", "mmldlm.observe.loss_plots", "no such room"),
    ("import torch.distributed as dist", "mmldlm.models.mmdit.model", "knows nothing of ranks"),
    ("from torch.distributed import all_reduce", "mmldlm.diffusion.masked", "knows nothing of ranks"),
    ("import torch\ndef f(x):\n    torch.distributed.all_reduce(x)", "mmldlm.models.layers", "knows nothing of ranks"),
    ("def f():\n    import deepspeed", "mmldlm.models.mmdit.model", "knows nothing of ranks"),
    ("from mmldlm.models.mmdit.model import MultimodalMMDiT", "mmldlm.engines.fsdp", "engines import no model"),
    ("import torch", "mmldlm.preflight.collect", "only inside the GPU checks"),
    (
        "try:\n    from torch import cuda\nexcept ImportError:\n    pass",
        "mmldlm.launch.watcher",
        "inside the GPU checks",
    ),
    ("from mpi4py import MPI", "mmldlm.launch.launcher", "only inside the function"),
    ("import wandb", "mmldlm.observe.wandb_logger", "only inside the function"),
    ("from mmldlm.config import load", "mmldlm.utils.output_paths", "config comes after utils"),
    ("from mmldlm.models import mmdit", "mmldlm", "comes before all rooms"),
    ("", "mmldlm.callbacks.base", "knows no room callbacks"),
]


@pytest.mark.parametrize("source, module, reason", BAD)
def test_the_checker_sees_a_breach(source, module, reason):
    assert len(found := violations(source, module)) == 1 and reason in found[0]


GOOD = [
    ("from mmldlm.models import mmdit\nfrom mmldlm.errors import UserError", "mmldlm.data.batching.batch_plan"),
    ("from .batch_plan import BatchPlan\nimport torch", "mmldlm.data.batching.loader"),
    ("import torch.distributed\nimport deepspeed", "mmldlm.engines.deepspeed.engine"),
    ("def check():\n    import torch", "mmldlm.preflight.probes.gpu"),
    ("def f():\n    import wandb", "mmldlm.observe.wandb_logger"),
    ("if TYPE_CHECKING:\n    from mmldlm.tasks import base", "mmldlm.data.batching.loader"),
    ("from mmldlm.observe import console\nfrom mmldlm.models import mmdit\nfrom mmldlm import train", "mmldlm.cli"),
]


@pytest.mark.parametrize("source, module", GOOD)
def test_the_checker_lets_good_imports_pass(source, module):
    assert violations(source, module) == []


def test_relative_imports_of_a_package_are_resolved():
    assert violations("from ..train import main", "mmldlm.launch", is_package=True)
    assert not violations("from .watcher import Watcher", "mmldlm.launch", is_package=True)


def test_preflight_starts_without_torch():
    names = [module for _, module, _ in modules() if module.startswith(("mmldlm.preflight.", "mmldlm.cluster."))]
    code = f"import sys, {', '.join(names)}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=PACKAGE.parent).returncode == 0
