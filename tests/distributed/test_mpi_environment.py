import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from mmldlm.distributed.environment import set_env_from_mpi
from mmldlm.errors import UserError

ROOT = Path(__file__).resolve().parents[2]
NAMES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def test_other_launchers_are_left_alone(monkeypatch):
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
    set_env_from_mpi()
    assert "RANK" not in os.environ
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "1")
    monkeypatch.setenv("RANK", "5")
    set_env_from_mpi()
    assert os.environ["RANK"] == "5" and "WORLD_SIZE" not in os.environ


def test_a_missing_libmpi_is_said(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "0")
    monkeypatch.setitem(sys.modules, "mpi4py", None)  # what an uninstalled package looks like
    with pytest.raises(UserError, match="libmpi"):
        set_env_from_mpi()


def test_ranks_under_mpirun_keep_a_given_master(tmp_path):
    if shutil.which("mpirun") is None:
        pytest.skip("mpirun is not installed (Debian: openmpi-bin)")
    code = (
        "import os; from mmldlm.distributed.environment import set_env_from_mpi;"
        " set_env_from_mpi(); "
        # A file a rank: mpirun mixes the ranks' lines.
        f"file = open(os.path.join({str(tmp_path)!r}, os.environ['RANK']), 'w'); "
        f"file.write(' '.join(os.environ[n] for n in {NAMES!r}))"
    )
    environment = {key: value for key, value in os.environ.items() if key not in NAMES}
    environment |= {
        "PYTHONPATH": str(ROOT),
        "MASTER_ADDR": "10.9.9.9",
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    }
    command = ["mpirun", "--oversubscribe", "-n", "2", sys.executable, "-c", code]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    found = [
        (tmp_path / rank).read_text().split() for rank in ("0", "1") if (tmp_path / rank).exists()
    ]
    assert [row[:4] for row in found] == [
        ["0", "0", "2", "10.9.9.9"],
        ["1", "1", "2", "10.9.9.9"],
    ], done.stderr
    assert found[0][4] == found[1][4]
