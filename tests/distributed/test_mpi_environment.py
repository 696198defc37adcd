import os
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

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


class World:
    """Two ranks of MPI, of which this process is one."""

    def __init__(self, rank: int, num_local: int, sent: object = None):
        self.rank, self.num_local, self.sent = rank, num_local, sent

    def Get_rank(self) -> int:
        return self.rank

    def Get_size(self) -> int:
        return 2

    def Split_type(self, kind: object) -> SimpleNamespace:
        local_rank = self.rank if self.num_local == 2 else 0
        return SimpleNamespace(Get_rank=lambda: local_rank, Get_size=lambda: self.num_local)

    def bcast(self, value: object, root: int) -> object:
        self.sent = value if self.rank == root else self.sent
        return self.sent


@pytest.mark.parametrize(
    ("given", "resolved", "num_local", "found"),
    [
        ("", "10.0.0.1", 1, "10.0.0.1"),
        ("10.9.9.9", None, 1, "10.9.9.9"),  # a name that nobody needs
        ("", None, 2, "127.0.0.1"),  # one host
        ("", "127.0.1.1", 1, "its name n1 is 127.0.1.1 there, which no other host reaches"),
        ("127.0.0.1", None, 1, "MASTER_ADDR=127.0.0.1, which no other host reaches"),
        ("", None, 1, "its name n1 does not resolve there"),
    ],
)
def test_the_address_of_rank_0_is_that_of_all(given, resolved, num_local, found, monkeypatch):
    """It alone looks its name up, and an error is one of all ranks."""

    def look_up(name: str) -> str:
        assert name == "n1", "only rank 0 looks a name up"
        if resolved is None:
            raise socket.gaierror(-2, "Name or service not known")
        return resolved

    monkeypatch.setattr(socket, "gethostbyname", look_up)
    sent = None
    for rank in (0, 1):
        own = {"OMPI_COMM_WORLD_RANK": str(rank)}
        if rank == 0 and given:
            own["MASTER_ADDR"] = given
        monkeypatch.setattr(os, "environ", own)
        monkeypatch.setattr(socket, "gethostname", lambda rank=rank: ("n1", "n2")[rank])
        world = World(rank, num_local, sent)
        mpi = SimpleNamespace(COMM_WORLD=world, COMM_TYPE_SHARED=0)
        monkeypatch.setitem(sys.modules, "mpi4py", SimpleNamespace(MPI=mpi))
        if " " in found or "=" in found:
            with pytest.raises(UserError, match=re.escape(found)):
                set_env_from_mpi()
        else:
            set_env_from_mpi()
            assert own["MASTER_ADDR"] == found
        sent = world.sent


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
