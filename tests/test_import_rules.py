"""The checker of the import order sees what breaks it; test_house.py asks it of the package."""

import subprocess
import sys

import pytest
import torch

from tests.support.import_rules import PACKAGE, find_circle, modules, violations


def test_a_circle_is_found():
    graph = {"a": {"b"}, "b": {"c"}, "c": {"d", "b"}, "d": set()}
    assert find_circle(graph) == ["b", "c", "b"]


BAD = [
    (
        "from mmldlm.commands.prepare import run_rank",
        "mmldlm.data.prepare.pipeline",
        "commands comes after data",
    ),
    ("import mmldlm.data.store", "mmldlm.models.mmdit", "data comes after models"),
    (
        "from mmldlm.tasks.translation import objective",
        "mmldlm.diffusion.masked",
        "tasks comes after diffusion",
    ),
    ("from mmldlm import observe", "mmldlm.engines.base", "observe comes after engines"),
    ("from ..sampling import text", "mmldlm.data.loader", "sampling comes after data"),
    ("from .. import sampling", "mmldlm.data.loader", "sampling comes after data"),
    (
        "def f():\n    from mmldlm.train import main",
        "mmldlm.launch.watcher",
        "train comes after launch",
    ),
    ("from mmldlm import show", "mmldlm.observe.plots", "no such room"),
    ("import torch.distributed as dist", "mmldlm.models.mmdit", "knows nothing of ranks"),
    (
        "from torch.distributed import all_reduce",
        "mmldlm.diffusion.masked",
        "knows nothing of ranks",
    ),
    (
        "import torch\ndef f(x):\n    torch.distributed.all_reduce(x)",
        "mmldlm.models.layers",
        "knows nothing of ranks",
    ),
    ("def f():\n    import deepspeed", "mmldlm.models.mmdit", "knows nothing of ranks"),
    (
        "from mmldlm.models.mmdit import MultimodalMMDiT",
        "mmldlm.engines.fsdp",
        "engines import no model",
    ),
    ("import torch", "mmldlm.preflight.runner", "only inside the GPU checks"),
    (
        "try:\n    from torch import cuda\nexcept ImportError:\n    pass",
        "mmldlm.launch.watcher",
        "inside the GPU checks",
    ),
    ("from mpi4py import MPI", "mmldlm.launch.launcher", "only inside the function"),
    ("import wandb", "mmldlm.observe.trackers.wandb", "only inside the function"),
    ("from mmldlm.config import load", "mmldlm.utils.paths", "config comes after utils"),
    ("from mmldlm.models import mmdit", "mmldlm", "comes before all rooms"),
    (
        "if TYPE_CHECKING:\n    from mmldlm.tasks import base",
        "mmldlm.data.loader",
        "tasks comes after data",
    ),
    ("", "mmldlm.callbacks.base", "knows no room callbacks"),
]


@pytest.mark.parametrize("source, module, reason", BAD)
def test_the_checker_sees_a_breach(source, module, reason):
    assert len(found := violations(source, module)) == 1 and reason in found[0]


GOOD = [
    ("from mmldlm.cli import main", "mmldlm.data.prepare.__main__"),
    (
        "from mmldlm.models import mmdit\nfrom mmldlm.errors import UserError",
        "mmldlm.data.batch_plan",
    ),
    ("from .batch_plan import BatchPlan\nimport torch", "mmldlm.data.loader"),
    ("import torch.distributed\nimport deepspeed", "mmldlm.engines.deepspeed"),
    ("def check():\n    import torch", "mmldlm.preflight.checks.gpu"),
    ("def load():\n    from mmldlm.models import mmdit", "mmldlm"),
    ("def f():\n    import wandb", "mmldlm.observe.trackers.wandb"),
    (
        (
            "from mmldlm.observe import console\nfrom mmldlm.models import mmdit\nfrom mmldlm"
            " import train"
        ),
        "mmldlm.cli",
    ),
]


@pytest.mark.parametrize("source, module", GOOD)
def test_the_checker_lets_good_imports_pass(source, module):
    assert violations(source, module) == []


def test_relative_imports_of_a_package_are_resolved():
    assert violations("from ..train import main", "mmldlm.launch", is_package=True)
    assert not violations("from .watcher import Watcher", "mmldlm.launch", is_package=True)


def test_preflight_and_a_rank_start_without_torch():
    """A rank sets OMP_NUM_THREADS first, which torch reads when it is imported."""
    names = [
        module
        for _, module, _ in modules()
        if module.startswith(("mmldlm.preflight.", "mmldlm.cluster.")) or module == "mmldlm.train"
    ]
    code = f"import sys, {', '.join(names)}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=PACKAGE.parent).returncode == 0


@pytest.mark.parametrize(
    ("words", "absent"),
    [
        # Each takes as long to import as everything else that a conversion needs.
        ("convert SRC OUT", ("torch", "pydantic", "rich")),
        ("--version", ("numpy", "pydantic", "rich")),
    ],
)
def test_a_command_starts_without_what_it_does_not_need(tmp_path, words, absent):
    torch.save({"weight": torch.ones(3)}, tmp_path / "model.pt")
    code = (
        "import sys\n"
        "from mmldlm.cli import main\n"
        "try:\n"
        "    code = main(sys.argv[2:])\n"
        "except SystemExit as ended:\n"
        "    code = ended.code\n"
        "assert code == 0, code\n"
        "found = [name for name in sys.argv[1].split(',') if name in sys.modules]\n"
        "assert not found, found\n"
    )
    places = {"SRC": str(tmp_path / "model.pt"), "OUT": str(tmp_path / "out")}
    command = [sys.executable, "-c", code, ",".join(absent)]
    command += [places.get(word, word) for word in words.split()]
    done = subprocess.run(command, cwd=PACKAGE.parent, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
