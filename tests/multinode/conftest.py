"""The bed, once a session, and what runs on it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))

from bed import Bed, reason_to_skip  # noqa: E402
from short_run import losses, words_of  # noqa: E402

from tests.helpers import ROOT, environment, train_words


@pytest.fixture(scope="session")
def bed(tmp_path_factory):
    reason = reason_to_skip()
    if reason is not None:
        pytest.skip(reason)
    with Bed(tmp_path_factory.mktemp("bed") / "hosts") as bed:
        yield bed


@pytest.fixture(scope="session")
def saved_run(store, tmp_path_factory):
    """Folder of a finished run: one rank, global batch 12, two steps."""
    folder = tmp_path_factory.mktemp("saved")
    words = ["engine.kind=single", "training.train_batch_size=12", "training.num_train_steps=2", "logging.save_freq=2"]
    command = [sys.executable, str(ROOT / "mmldlm" / "train.py"), *train_words(store, folder, "saved", *words)]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "saved"


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """Where the launchers' runs go, side by side."""
    return tmp_path_factory.mktemp("launchers")


@pytest.fixture(scope="session")
def one_host(bed, store, folder):
    """Losses of ZeRO-2 on one host with two ranks."""
    line = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    line += [ROOT / "mmldlm" / "train.py", *words_of(store, folder, "one_host", 2)]
    done = bed["n1"].run(*line, env={"OMP_NUM_THREADS": "1"}, timeout=280)
    assert done.returncode == 0, done.stdout[-3000:]
    return losses(folder, "one_host")
