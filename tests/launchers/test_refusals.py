"""The scripts of launchers/ start what their environment says, or stop before they start anything,
with exit code 2, where a run cannot be the one meant.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from tests.support.helpers import ROOT

STARTED = ("torchrun", "deepspeed", "mpirun", "srun")
OWN = (
    "NNODES NODE_RANK RANK LOCAL_RANK WORLD_SIZE NPROC_PER_NODE MASTER_ADDR MASTER_PORT"
    " CONFIG_NAME DS_CONFIG HOSTFILE"
    " LATENT_DIM DTYPE LEARNING_RATE OPTIMIZER_LR GRAD_CLIP_NORM WARMUP_STEPS LATENT_LOSS_WEIGHT"
    " GRAD_ACCUM_STEPS L2T_CONFIG L2T_TRAIN_BS"
).split()


@pytest.fixture(scope="module")
def venv(tmp_path_factory):
    """A set-up environment with this mmldlm; what the scripts would start only prints its words,
    and every host is this one. UNCHECKED=1: `mmldlm config --check` passes.
    """
    venv = tmp_path_factory.mktemp("venv")
    (venv / "bin").mkdir()
    lines = {
        "python": f'exec {sys.executable} "$@"',
        "mmldlm": (
            '[ -z "$UNCHECKED" ] || exit 0\n'
            f'PYTHONPATH={ROOT} exec {sys.executable} -m mmldlm.cli "$@"'
        ),
        "ssh": 'for last; do :; done; exec sh -c "$last"',
    } | {name: f"printf '%s\\n' 'started {name}' \"$@\"" for name in STARTED}
    for name, line in lines.items():
        (venv / "bin" / name).write_text(f"#!/bin/sh\n{line}\n")
        (venv / "bin" / name).chmod(0o755)
    words = ["bash", "-c", f". launchers/_env.sh; mmldlm_stamp {venv}/bin/python {venv}"]
    stamp = subprocess.run(words, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    (venv / ".mmldlm-base").write_text(stamp)
    (venv / ".mmldlm-home").write_text(f"{venv}\n")
    return venv


def script(venv, name: str, *words: str, **environment: str) -> subprocess.CompletedProcess:
    own = {key: value for key, value in os.environ.items() if key not in OWN}
    own |= {
        "MMLDLM_VENV": str(venv),
        "PATH": f"{venv}/bin:{own['PATH']}",
        "OMP_NUM_THREADS": "1",
        **environment,
    }
    command = ["bash", f"launchers/{name}", *words]
    return subprocess.run(command, cwd=ROOT, env=own, capture_output=True, text=True, timeout=120)


def started(venv, name: str, *words: str, **environment: str) -> list[str]:
    """The words of the program that a script started."""
    run = script(venv, name, *words, UNCHECKED="1", **environment)
    assert run.returncode == 0, run.stderr
    first, *rest = run.stdout.splitlines()
    return [first.removeprefix("started "), *rest]


TWO = "hostfiles/two_nodes"
SLURM = {
    "SLURM_JOB_ID": "1",
    "SLURM_NTASKS": "2",
    "SLURM_JOB_NODELIST": "n1",
    "SLURM_SUBMIT_DIR": str(ROOT),
}
WHERE = {
    "single_node.sh": {"NPROC_PER_NODE": "2"},
    "multi_node.sh": {"NNODES": "2", "NODE_RANK": "0", "MASTER_ADDR": "n0", "NPROC_PER_NODE": "1"},
    "mpi.sh": {"NPROC_PER_NODE": "2"},
    "slurm.sh": SLURM,
}


@pytest.mark.parametrize("name", WHERE)
def test_without_a_store_no_rank_starts(venv, name):
    run = script(venv, name, CONFIG_NAME="tiny", **WHERE[name])
    assert run.returncode == 2 and "data.latent_data_root" in run.stderr, run.stderr
    assert "started" not in run.stdout and len(run.stderr.splitlines()) <= 6, (
        run.stdout + run.stderr
    )


def test_with_a_store_ranks_start(venv, store):
    words = (f"data.latent_data_root={store}", "logging.run_name=never_made")
    run = script(venv, "single_node.sh", *words, CONFIG_NAME="tiny", NPROC_PER_NODE="2")
    assert run.returncode == 0 and run.stdout.startswith("started torchrun\n"), run.stderr


def test_single_node_turns_the_environment_into_words(venv):
    words = started(
        venv,
        "single_node.sh",
        "training.loss_type=l2t",
        "a={b: 1}",
        NPROC_PER_NODE="2",
        OPTIMIZER_LR="5e-5",
        LATENT_DIM="32",
        DS_CONFIG="ds_configs/zero2.json",
    )
    assert words[:5] == ["torchrun", "--nnodes", "1", "--nproc_per_node", "2"]
    assert words[words.index("-m") :] == [
        "-m",
        "mmldlm.train",
        "--config-name",
        "mmdit_stable",
        "--deepspeed_config",
        "ds_configs/zero2.json",
        "optimizer.lr=5e-5",
        "model.latent_dim=32",
        "training.loss_type=l2t",
        "a={b: 1}",
    ]


def test_multi_node_by_torchrun_and_by_hostfile(venv):
    where = {"NNODES": "2", "RANK": "1", "MASTER_ADDR": "n0", "NPROC_PER_NODE": "8"}
    words = started(venv, "multi_node.sh", **where)
    assert words[:10] == [
        "torchrun",
        "--nnodes",
        "2",
        "--node_rank",
        "1",
        "--nproc_per_node",
        "8",
        "--master_addr",
        "n0",
        "--master_port",
    ]
    words = started(venv, "multi_node.sh", HOSTFILE=TWO, MASTER_ADDR="node1")
    assert words[:3] == ["deepspeed", "--hostfile", TWO] and "--force_multi" in words
    assert words[words.index("--master_addr") + 1] == "node1"
    # DeepSpeed's launcher would leave the ranks of this machine behind when a signal ends it.
    platform = {"RANK": "3", "WORLD_SIZE": "4"}
    words = started(venv, "multi_node.sh", HOSTFILE="hostfiles/two_ranks_here", **platform)
    assert words[:5] == ["torchrun", "--nnodes", "1", "--node_rank", "0"]
    assert words[5:9] == ["--nproc_per_node", "2", "--master_addr", "127.0.0.1"]


def test_no_python_is_a_clear_error(tmp_path):
    run = script(tmp_path / "venv", "single_node.sh", MMLDLM_PYTHON="no-such-python")
    assert run.returncode == 2 and run.stdout == "", run.stdout
    assert "expected Python 3.11 or newer" in run.stderr and "MMLDLM_PYTHON=" in run.stderr


@pytest.mark.parametrize(
    ("name", "environment", "words"),
    [
        (
            "single_node.sh",
            {"L2T_CONFIG": "mmdit_stable"},
            ("L2T_CONFIG", "--config-name mmdit_stable"),
        ),
        ("mpi.sh", {"L2T_TRAIN_BS": "4"}, ("L2T_TRAIN_BS", "training.train_batch_size=4")),
        (
            "single_node.sh",
            {"LEARNING_RATE": "1e-4", "OPTIMIZER_LR": "1e-5"},
            ("disagree", "keep one"),
        ),
        ("single_node.sh", {"NNODES": "2"}, ("launchers/multi_node.sh",)),
        ("single_node.sh", {"DS_CONFIG": "nowhere.json"}, ("nowhere.json cannot be read",)),
        ("single_node.sh", {"NPROC_PER_NODE": "all"}, ("NPROC_PER_NODE=all", "integer")),
        ("single_node.sh", {"HOSTFILE": "hostfiles/two_nodes"}, ("HOSTFILE", "multi_node.sh")),
        ("single_node.sh", {"NODE_RANK": "1"}, ("NODE_RANK=1", "multi_node.sh")),
        ("multi_node.sh", {}, ("neither HOSTFILE nor NNODES",)),
        ("multi_node.sh", {"NNODES": "2", "NODE_RANK": "0"}, ("MASTER_ADDR is not set",)),
        ("multi_node.sh", {"NNODES": "2", "MASTER_ADDR": "n0"}, ("NODE_RANK is not set",)),
        ("multi_node.sh", {"HOSTFILE": "nowhere"}, ("nowhere cannot be read",)),
        ("multi_node.sh", {"HOSTFILE": "LICENSE", "MASTER_ADDR": "n0"}, ("where slots=N",)),
        ("multi_node.sh", {"HOSTFILE": TWO}, ("MASTER_ADDR is not set",)),
        (
            "multi_node.sh",
            {"NNODES": "two", "MASTER_ADDR": "n0", "NODE_RANK": "0"},
            ("NNODES=two",),
        ),
        (
            "multi_node.sh",
            {"NNODES": "2", "MASTER_ADDR": "n0", "NODE_RANK": "2"},
            ("node number 2", "0 to 1"),
        ),
        (
            "multi_node.sh",
            {"NNODES": "2", "MASTER_ADDR": "n0", "NODE_RANK": "0", "RANK": "1"},
            ("unset RANK",),
        ),
        (
            "multi_node.sh",
            {"HOSTFILE": TWO, "MASTER_ADDR": "n0", "NNODES": "4"},
            ("names 2 node(s)",),
        ),
        (
            "multi_node.sh",
            {"HOSTFILE": TWO, "MASTER_ADDR": "n0", "NODE_RANK": "1"},
            ("unset one",),
        ),
        (
            "multi_node.sh",
            {"HOSTFILE": TWO, "MASTER_ADDR": "n0", "NPROC_PER_NODE": "4"},
            ("slots=8",),
        ),
        ("multi_node.sh", {"HOSTFILE": "hostfiles", "MASTER_ADDR": "n0"}, ("cannot be read",)),
        ("mpi.sh", {"NNODES": "2"}, ("no HOSTFILE",)),
        ("mpi.sh", {"HOSTFILE": "LICENSE"}, ("where slots=N",)),
        (
            "slurm.sh",
            {**SLURM, "NNODES": "4", "SLURM_NNODES": "2"},
            ("disagree", "sbatch --nodes=4"),
        ),
    ],
)
def test_an_environment_that_contradicts_itself_is_refused(venv, name, environment, words):
    run = script(venv, name, **environment)
    assert run.returncode == 2 and run.stdout == "", run.stdout + run.stderr
    assert [word for word in words if word not in run.stderr] == [], run.stderr


@pytest.mark.parametrize("name", ["quickstart.sh", "quickstart_images.sh"])
def test_a_quickstart_refuses_other_words_than_overrides_before_it_installs(tmp_path, name):
    done = script(tmp_path / "none", name, "optimizer.lr=1e-3", "images")
    assert done.returncode == 2 and "found images" in done.stderr
    assert done.stdout == "" and not (tmp_path / "none").exists()


def test_in_a_pod_of_kubernetes_rank_and_world_size_number_nodes(venv):
    """kubeflow/trainer#1790; MM-LDLM's guide exported them so, too."""
    pod = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "n0"}
    note = "RANK=1 and WORLD_SIZE=2 number the nodes of a platform: this is node 1 of 2"
    wrong = {"CONFIG_NAME": "no such preset"}
    assert note in script(venv, "multi_node.sh", **pod, **wrong).stderr
    assert "platform" not in script(venv, "multi_node.sh", **pod, NNODES="2", **wrong).stderr
    assert "platform" not in script(venv, "multi_node.sh", **pod, LOCAL_RANK="0").stderr
    alone = script(venv, "single_node.sh", **pod, **wrong).stderr
    assert "RANK=1, WORLD_SIZE=2 number the nodes" in alone and "this machine alone" in alone


def test_every_variable_of_the_scripts_is_documented():
    table = (ROOT / "docs" / "launchers.md").read_text()
    read = set()
    for path in (ROOT / "launchers").glob("*.sh"):
        read |= set(re.findall(r"\$\{!?([A-Z][A-Z0-9_]+):", path.read_text()))
        read |= set(re.findall(r"^([A-Z_]+) [a-z]+\.[a-z_]+$", path.read_text(), re.M))
    inner = {"BASH_SOURCE", "SLURM_CPUS_PER_TASK", "SLURM_JOB_ID", "SLURM_SUBMIT_DIR"}
    assert (
        len(read) > 20
        and [name for name in sorted(read - inner) if f"`{name}`" not in table] == []
    )


def test_an_environment_of_another_user_is_used_as_it_is(venv, tmp_path):
    """No lock is taken, and nothing is written, where all is installed."""
    before = sorted(path.name for path in venv.iterdir())
    run = script(venv, "single_node.sh", CONFIG_NAME="no such preset")
    assert run.returncode == 2 and "no such preset" in run.stderr
    assert sorted(path.name for path in venv.iterdir()) == before
