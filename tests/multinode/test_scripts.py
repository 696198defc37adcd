"""The scripts of launchers/ on real hosts: MM-LDLM's variables in, the losses of one host out."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

from tests.support import slurm_cluster
from tests.support.helpers import LONG, ROOT, read_log
from tests.support.short_run import NODES, close, losses, more_words

pytestmark = LONG
PROGRAMS = {
    "mmldlm": "mmldlm.cli",
    "deepspeed": "deepspeed.launcher.runner",
    "torchrun": "torch.distributed.run",
}


@pytest.fixture(scope="module")
def variables(tmp_path_factory):
    """What a user exports; the virtual environment is the one these tests run in, marked as set
    up.
    """
    venv = tmp_path_factory.mktemp("venv")
    (venv / "bin").mkdir()
    lines = {"python": f'exec {sys.executable} "$@"'} | {
        name: f'PYTHONPATH={ROOT} exec {sys.executable} -m {module} "$@"'
        for name, module in PROGRAMS.items()
    }
    for name, line in lines.items():
        (venv / "bin" / name).write_text(f"#!/bin/sh\n{line}\n")
        (venv / "bin" / name).chmod(0o755)
    words = ["bash", "-c", f". launchers/_env.sh; mmldlm_stamp {venv}/bin/python {venv}"]
    stamp = subprocess.run(words, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    (venv / ".mmldlm-base").write_text(stamp)
    (venv / ".mmldlm-home").write_text(f"{venv}\n")
    return {
        "MMLDLM_VENV": str(venv),
        "CONFIG_NAME": "tiny",
        "DTYPE": "fp32",
        "OMP_NUM_THREADS": "1",
    }


def words(store, folder, name):
    more = [
        f"data.latent_data_root={store}",
        f"logging.save_dir={folder}",
        f"logging.run_name={name}",
    ]
    return [*more, "data.max_validation_samples=16", *more_words(2)]


def test_mpi(cluster, store, folder, one_host, variables):
    (folder / "hostfile").write_text(NODES)
    own = {**variables, "HOSTFILE": str(folder / "hostfile")}
    done = cluster["n1"].run(
        "bash", "launchers/mpi.sh", *words(store, folder, "mpi_sh"), cwd=ROOT, env=own, timeout=280
    )
    assert done.returncode == 0, done.stdout[-3000:]
    close(losses(folder, "mpi_sh"), one_host)


def test_multi_node_with_a_hostfile(cluster, store, folder, one_host, variables):
    (folder / "hostfile").write_text(NODES)
    own = {**variables, "HOSTFILE": str(folder / "hostfile"), "MASTER_ADDR": "10.77.0.1"}
    script = ["bash", "launchers/multi_node.sh", *words(store, folder, "multi_node_sh")]
    done = cluster["n1"].run(*script, cwd=ROOT, env=own, timeout=280)
    assert done.returncode == 0, done.stdout[-3000:]
    close(losses(folder, "multi_node_sh"), one_host)


def test_multi_node_on_each_host(cluster, store, folder, one_host, variables):
    def start(name, rank):
        own = {
            **variables,
            "NNODES": "2",
            "NODE_RANK": rank,
            "MASTER_ADDR": "10.77.0.1",
            "NPROC_PER_NODE": "1",
        }
        script = ["bash", "launchers/multi_node.sh", *words(store, folder, "each_node_sh")]
        return cluster[name].popen(*script, cwd=ROOT, env=own, stdin=-3, stdout=-1, stderr=-2)

    ranks = [start(name, rank) for name, rank in (("n1", "0"), ("n2", "1"))]
    outputs = [process.communicate(timeout=280)[0] for process in ranks]
    assert [process.returncode for process in ranks] == [0, 0], outputs[0][-3000:]
    close(losses(folder, "each_node_sh"), one_host)


@pytest.fixture(scope="module")
def slurm_variables(cluster, tmp_path_factory):
    reason = slurm_cluster.reason_to_skip()
    if reason is not None:
        pytest.skip(reason)
    with slurm_cluster.slurm_cluster(
        cluster, tmp_path_factory.mktemp("slurm") / "run", ["n1", "n2"]
    ) as found:
        yield found


def test_slurm_job(cluster, store, folder, one_host, variables, slurm_variables):
    script = [
        "sbatch",
        "--wait",
        "--nodes=2",
        "--ntasks-per-node=1",
        "--gpus-per-node=0",
        "--cpus-per-task=1",
    ]
    script += [
        f"--output={folder}/job.log",
        "launchers/slurm.sh",
        *words(store, folder, "slurm_sh"),
    ]
    done = cluster["n1"].run(*script, cwd=ROOT, env={**variables, **slurm_variables}, timeout=280)
    log = (folder / "job.log").read_text() if (folder / "job.log").exists() else ""
    assert done.returncode == 0, done.stdout + log[-3000:]
    close(losses(folder, "slurm_sh"), one_host)


def test_an_interrupted_slurm_job_requeues_itself_and_continues(
    cluster, store, folder, variables, slurm_variables
):
    """SIGUSR1, as before the time limit: save, exit with 5, requeue, resume, end."""
    own = {**variables, **slurm_variables, "REQUEUES": "1"}
    script = ["sbatch", "--parsable", "--nodes=2", "--ntasks-per-node=1", "--gpus-per-node=0"]
    script += ["--cpus-per-task=1", f"--output={folder}/requeued.log", "launchers/slurm.sh"]
    more = ["training.num_train_steps=200", "logging.save_freq=1000"]
    started = cluster["n1"].run(
        *script, *words(store, folder, "requeued"), *more, cwd=ROOT, env=own
    )
    assert started.returncode == 0, started.stdout
    job, screen = started.stdout.strip(), folder / "requeued.log"
    steps = folder / "requeued" / "training_log.jsonl"

    def wait(reached, seconds):
        deadline = time.monotonic() + seconds
        while not reached():
            assert time.monotonic() < deadline, screen.read_text()[-3000:]
            time.sleep(0.5)

    wait(lambda: steps.exists() and len(steps.read_text().splitlines()) > 3, 120)
    cluster["n1"].run("scancel", "--signal=USR1", job, env=own)
    wait(lambda: "restart 1 of at most 1" in screen.read_text(), 60)
    # Slurm itself waits about two minutes before it starts a requeued job.
    wait(lambda: "done: 200 steps" in screen.read_text(), 400)
    assert [r["step"] for r in read_log(folder, "requeued")] == list(range(1, 201))


def test_launch_in_a_slurm_allocation(cluster, store, folder, one_host, slurm_variables):
    """Preflight, srun, watcher; the variables arrive as srun carries them."""
    (folder / "hostfile").write_text(NODES)
    line = [
        "salloc",
        "--quiet",
        "--nodes=2",
        "--ntasks-per-node=1",
        sys.executable,
        "-m",
        "mmldlm.launch",
    ]
    line += ["--launcher", "slurm", "--hostfile", folder / "hostfile", "--config-name", "tiny"]
    own = {**slurm_variables, "PYTHONPATH": str(ROOT)}
    done = cluster["n1"].run(
        *line, *words(store, folder, "slurm_launch"), cwd=ROOT, env=own, timeout=280
    )
    assert done.returncode == 0, done.stdout[-3000:]
    close(losses(folder, "slurm_launch"), one_host)
