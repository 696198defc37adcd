"""Holds ARCHITECTURE's import rules, on the source: nothing is imported, so no rule can hide behind an `if`."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[1] / "mmldlm"
ROOMS = (
    "config", "models", "diffusion", "objectives", "data", "engines", "stability", "checkpoints", "preflight", "launch",
    "sampling", "evaluation", "observe",
)  # fmt: skip
GROUND = ("errors", "utils")  # stand under all rooms; every other file beside the rooms (cli, train) stands on top
DISTRIBUTED = ("torch.distributed", "deepspeed", "mpi4py")
LAZY = ("mpi4py", "wandb", "matplotlib")  # wanted by few commands, slow or absent elsewhere


def imports(tree):
    """(dotted name, line, runs when the module is imported) of every import and every `torch.distributed`."""
    lazy = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
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
    room = parts[1] if len(parts) > 1 else "__init__"
    found = []
    on_top = len(parts) == 2 and not is_package and room not in (*ROOMS, *GROUND)
    if room not in (*ROOMS, *GROUND, "__init__") and not on_top:
        return [f"{module}: ARCHITECTURE knows no room {room}"]
    for raw, line, now in imports(ast.parse(source)):
        name = absolute(raw, module, is_package)
        where = f"{module}:{line} imports {name}"
        if now and under(name, LAZY):
            found.append(f"{where}: only inside the function that needs it")
        if room in ("models", "diffusion", "objectives") and under(name, DISTRIBUTED):
            found.append(f"{where}: {room} knows nothing of ranks")
        if room == "preflight" and now and under(name, ["torch", "deepspeed", "transformers"]):
            found.append(f"{where}: preflight imports torch only inside the GPU checks")
        target = name.split(".")[1] if name.startswith("mmldlm.") else None
        if on_top or target is None or target == room or target in GROUND or target.startswith("__"):
            continue
        if target not in ROOMS:
            found.append(f"{where}: no room imports {target}")
        elif room in (*GROUND, "__init__"):
            found.append(f"{where}: {module} stands under all rooms")
        elif room == "engines" and target == "models":
            found.append(f"{where}: engines import no model")
        elif ROOMS.index(target) > ROOMS.index(room):
            found.append(f"{where}: {target} comes after {room}")
    return found


def modules():
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = ("mmldlm", *path.relative_to(PACKAGE).with_suffix("").parts)
        is_package = parts[-1] == "__init__"
        yield path, ".".join(parts[:-1] if is_package else parts), is_package


def test_the_package_keeps_the_rules():
    found = [
        fault for path, module, is_package in modules() for fault in violations(path.read_text(), module, is_package)
    ]
    assert found == []


BAD = [
    ("import mmldlm.data.store.store", "mmldlm.models.mmdit.model", "data comes after models"),
    (
        "from mmldlm.tasks.translation.objective import l2t",
        "mmldlm.diffusion.masked",
        "objectives comes after diffusion",
    ),
    ("from mmldlm import observe", "mmldlm.engines.base", "observe comes after engines"),
    ("from ..sampling import text", "mmldlm.data.batching.batch_plan", "sampling comes after data"),
    ("from .. import sampling", "mmldlm.data.batching.batch_plan", "sampling comes after data"),
    ("def f():\n    from mmldlm.train import main", "mmldlm.launch.watch", "no room imports train"),
    ("from mmldlm.commands import config as show", "mmldlm.observe.loss_plots", "no room imports show"),
    ("import torch.distributed as dist", "mmldlm.models.mmdit.model", "knows nothing of ranks"),
    ("from torch import distributed", "mmldlm.tasks.translation.objective.text", "knows nothing of ranks"),
    ("from torch.distributed import all_reduce", "mmldlm.diffusion.masked", "knows nothing of ranks"),
    (
        "import torch\ndef f(x):\n    torch.distributed.all_reduce(x)",
        "mmldlm.models.mmdit.model",
        "knows nothing of ranks",
    ),
    ("def f():\n    import deepspeed", "mmldlm.models.mmdit.model", "knows nothing of ranks"),
    ("from mmldlm.models.mmdit.model import MultimodalMMDiT", "mmldlm.engines.fsdp", "engines import no model"),
    ("import torch", "mmldlm.preflight.network", "only inside the GPU checks"),
    (
        "try:\n    from torch import cuda\nexcept ImportError:\n    pass",
        "mmldlm.preflight.gpu",
        "only inside the GPU checks",
    ),
    ("from mpi4py import MPI", "mmldlm.launch.mpi", "only inside the function"),
    ("import wandb", "mmldlm.observe.wandb_logger", "only inside the function"),
    ("from mmldlm.config import load", "mmldlm.utils.output_paths", "stands under all rooms"),
    ("from mmldlm.models.mmdit import model as mmdit", "mmldlm", "stands under all rooms"),
    ("", "mmldlm.callbacks.base", "knows no room callbacks"),
]


@pytest.mark.parametrize("source, module, reason", BAD)
def test_the_checker_sees_a_breach(source, module, reason):
    assert len(found := violations(source, module)) == 1 and reason in found[0]


GOOD = [
    (
        "from mmldlm.models.mmdit import model as mmdit\nfrom mmldlm.errors import UserError",
        "mmldlm.data.batching.batch_plan",
    ),
    ("from .store import Store\nfrom . import plan\nimport torch", "mmldlm.data.batching.loader"),
    ("import torch.distributed\nimport deepspeed", "mmldlm.engines.deepspeed.engine"),
    ("def check():\n    import torch", "mmldlm.preflight.gpu"),
    ("def f():\n    import wandb", "mmldlm.observe.wandb_logger"),
    (
        "from mmldlm.observe import loss_plots as plots\nfrom mmldlm.models.mmdit import model as mmdit\nfrom mmldlm import train",
        "mmldlm.cli",
    ),
]


@pytest.mark.parametrize("source, module", GOOD)
def test_the_checker_lets_good_imports_pass(source, module):
    assert violations(source, module) == []


def test_relative_imports_of_a_package_are_resolved():
    assert violations("from ..train import main", "mmldlm.launch", is_package=True)
    assert not violations("from .watch import main", "mmldlm.launch", is_package=True)


def test_preflight_starts_without_torch():
    names = [module for _, module, _ in modules() if module.startswith("mmldlm.preflight.")]
    if not names:
        pytest.skip("the room preflight is not built yet")
    code = f"import sys, {', '.join(names)}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=PACKAGE.parent).returncode == 0
