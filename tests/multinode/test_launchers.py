"""Real launchers over ssh between real hosts: two hosts of one rank train like one host of two."""

from __future__ import annotations

import sys

import pytest

from tests.support.helpers import LONG, ROOT
from tests.support.short_run import NODES, close, losses, words_of

TRAIN = str(ROOT / "mmldlm" / "train.py")
PYTHON = sys.executable


@pytest.mark.parametrize("stage", [2, pytest.param(3, marks=LONG)])
def test_deepspeed_with_pdsh(cluster, store, folder, one_host, stage):
    hostfile = folder / "hostfile"
    hostfile.write_text(NODES)
    line = [
        PYTHON,
        "-m",
        "deepspeed.launcher.runner",
        "--hostfile",
        hostfile,
        "--master_addr",
        "n1",
        TRAIN,
    ]
    done = cluster["n1"].run(*line, *words_of(store, folder, f"pdsh{stage}", stage), timeout=280)
    assert done.returncode == 0, done.stdout[-3000:]
    close(losses(folder, f"pdsh{stage}"), one_host)


@LONG
def test_torchrun_on_each_host(cluster, store, folder, one_host):
    def start(host, rank):
        line = [
            PYTHON,
            "-m",
            "torch.distributed.run",
            "--nnodes",
            "2",
            "--node_rank",
            rank,
            "--nproc_per_node",
            "1",
        ]
        line += [
            "--master_addr",
            "n1",
            "--master_port",
            "29511",
            TRAIN,
            *words_of(store, folder, "torchrun", 2),
        ]
        return host.popen(*line, stdin=-3, stdout=-1, stderr=-2)

    ranks = [start(cluster[name], rank) for rank, name in enumerate(("n1", "n2"))]
    outputs = [process.communicate(timeout=280)[0] for process in ranks]
    assert [process.returncode for process in ranks] == [0, 0], outputs[0][-3000:]
    close(losses(folder, "torchrun"), one_host)


def test_mpirun(cluster, store, folder, one_host):
    line = [
        "mpirun",
        "--allow-run-as-root",
        "-np",
        "2",
        "--host",
        "n1:1,n2:1",
        "--bind-to",
        "none",
        PYTHON,
        TRAIN,
    ]
    done = cluster["n1"].run(*line, *words_of(store, folder, "mpirun", 2), timeout=280)
    assert done.returncode == 0, done.stdout[-3000:]
    close(losses(folder, "mpirun"), one_host)
