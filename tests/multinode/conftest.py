"""The virtual cluster, once per session, and runs on it."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.support.helpers import ROOT, environment, train_words
from tests.support.short_run import losses, words_of
from tests.support.virtual_cluster import VirtualCluster, reason_to_skip


@pytest.fixture(scope="session")
def cluster(tmp_path_factory):
    reason = reason_to_skip()
    if reason is not None:
        pytest.skip(reason)
    with VirtualCluster(tmp_path_factory.mktemp("cluster") / "hosts") as cluster:
        yield cluster


@pytest.fixture(scope="session")
def saved_run(store, tmp_path_factory):
    """Folder of a finished run: one rank, global batch 12, two steps."""
    folder = tmp_path_factory.mktemp("saved")
    words = [
        "engine.kind=single",
        "training.train_batch_size=12",
        "training.num_train_steps=2",
        "logging.save_freq=2",
    ]
    command = [
        sys.executable,
        str(ROOT / "mmldlm" / "train.py"),
        *train_words(store, folder, "saved", *words),
    ]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "saved"


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """Where the launchers' runs go, side by side."""
    return tmp_path_factory.mktemp("launchers")


@pytest.fixture(scope="session")
def one_host(cluster, store, folder):
    """Losses of ZeRO-2 on one host with two ranks."""
    line = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    line += [ROOT / "mmldlm" / "train.py", *words_of(store, folder, "one_host", 2)]
    done = cluster["n1"].run(*line, env={"OMP_NUM_THREADS": "1"}, timeout=280)
    assert done.returncode == 0, done.stdout[-3000:]
    return losses(folder, "one_host")
