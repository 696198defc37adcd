"""Command lines of the launchers: DeepSpeed's real runner and a real shell read what
deepspeed_command hands them.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time

import pytest

from mmldlm.cluster.hostfile import Node
from mmldlm.cluster.launcher_commands import deepspeed_command, mpi_command, srun_command
from mmldlm.errors import UserError

NODES = [Node("n1", 1), Node("n2", 1)]
ARGS = ["a=$(touch pwned)", "b=`touch pwned`", "c= '\"", "d=%h%n", "e=;x\ny", "f=é", "g=~ *"]
# What pdsh does with its words: one line, with %h, %n and %u expanded, for the login shell of each
# node.
PDSH = """#!{python}
import subprocess, sys
words = sys.argv[sys.argv.index("-w") + 2:]
line = " ".join(words).replace("%h", "n1").replace("%n", "0").replace("%u", "root")
if "pkill" in line:
    open("pkilled", "w").write(line)
    sys.exit(0)
sys.exit(subprocess.call(["bash", "-c", line]))
"""
# In place of deepspeed.launcher.launch on the node: starts the script with its words.
LAUNCH = """
import os, sys
words = [word for word in sys.argv[1:] if not word.startswith("--")]
os.execv(sys.executable, [sys.executable, *words])
"""
SAYS = (
    "import json, sys, time; print(json.dumps(sys.argv[1:]), flush=True);"
    " time.sleep(float({seconds}))"
)


@pytest.fixture
def runner(tmp_path, monkeypatch):
    """Starts DeepSpeed's runner with a pdsh that runs its line here; only the node's launch.py is
    another.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "pdsh").write_text(PDSH.format(python=sys.executable))
    (tmp_path / "bin" / "pdsh").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    (tmp_path / "deepspeed_launch.py").write_text(LAUNCH)
    (tmp_path / "hostfile").write_text("n1 slots=1\nn2 slots=1\n")

    def start(seconds: int) -> subprocess.Popen:
        (tmp_path / "says.py").write_text(SAYS.format(seconds=seconds))
        line = deepspeed_command(
            NODES, False, "hostfile", "n1", 29500, None, [str(tmp_path / "says.py"), *ARGS]
        )
        pdsh = (tmp_path / "bin" / "pdsh").read_text()
        swap = f'.replace("-m deepspeed.launcher.launch", "{tmp_path}/deepspeed_launch.py")'
        (tmp_path / "bin" / "pdsh").write_text(pdsh.replace('"root")', f'"root"){swap}'))
        environment = {**os.environ, "DS_ACCELERATOR": "cpu"}
        return subprocess.Popen(
            line, env=environment, stdout=subprocess.PIPE, text=True, start_new_session=True
        )

    return start


def test_arguments_pass_deepspeeds_shells_and_no_pkill_runs(runner, tmp_path):
    process = runner(seconds=20)
    try:
        found = next(json.loads(line) for line in process.stdout if line.startswith('["a='))
        assert found == ARGS
        for number in (signal.SIGINT, signal.SIGTERM):
            os.kill(process.pid, number)
        time.sleep(1)
        assert (
            process.poll() is None
            and not (tmp_path / "pkilled").exists()
            and not (tmp_path / "pwned").exists()
        )
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        process.stdout.close()


@pytest.mark.parametrize("what", ["folder", "address", "PYTHONPATH"])
def test_values_that_deepspeed_pastes_must_be_plain(what, monkeypatch):
    bad = "/x$(touch pwned)"
    monkeypatch.setenv("PYTHONPATH", bad if what == "PYTHONPATH" else "/x")
    address, folder = (bad if what == "address" else "n1"), (bad if what == "folder" else "/x")
    with pytest.raises(UserError, match="touch pwned") as caught:
        deepspeed_command(
            NODES, False, "hostfile", address, 29500, None, ["rank.py", "id"], folder
        )
    assert caught.value.exit_code == 2


def test_srun_passes_address_and_arguments_unchanged(tmp_path):
    line = srun_command(
        NODES,
        "$(touch pwned)",
        29500,
        ["-c", "import os, sys; print(os.environ['MASTER_ADDR'], sys.argv)", *ARGS],
    )
    environment = {**os.environ, "SLURM_LOCALID": "0", "SLURM_NTASKS": "2"}
    environment["SLURMD_NODENAME"] = "n1"
    own = line[line.index("bash") :]  # what srun starts on a node
    done = subprocess.run(
        own, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout == f"$(touch pwned) {['-c', *ARGS]}\n" and not (tmp_path / "pwned").exists()


@pytest.mark.skipif(shutil.which("mpirun") is None, reason="no mpirun")
def test_mpirun_passes_the_master_of_the_launch(monkeypatch):
    """Not what this shell exports, which only the ranks of this machine would get."""
    monkeypatch.setenv("MASTER_PORT", "29777")
    monkeypatch.setenv("MASTER_ADDR", "n9")
    says = "import os; print(os.environ['MASTER_ADDR'], os.environ['MASTER_PORT'])"
    carry = ["LD_LIBRARY_PATH", "NOT_SET"]
    monkeypatch.setenv("LD_LIBRARY_PATH", "/opt/lib")
    line = mpi_command(
        [Node("localhost", 1)], True, "10.0.0.1", 29611, None, [], ["-c", says], carry
    )
    done = subprocess.run(line, capture_output=True, text=True, timeout=60)
    assert done.stdout == "10.0.0.1 29611\n", done.stderr
    assert "LD_LIBRARY_PATH" in line and "NOT_SET" not in line


@pytest.mark.parametrize(
    ("programs", "is_named"), [(("mpirun", "orted"), True), (("mpirun",), False), ((), False)]
)
def test_mpirun_of_a_module_is_named_by_its_path(programs, is_named, tmp_path, monkeypatch):
    """Open MPI finds its daemon on other nodes by it; but not that of a wrapper or the system."""
    for name in programs:
        (tmp_path / name).write_text("#!/bin/sh\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    line = mpi_command(NODES, False, "10.0.0.1", 29500, None, [], ["rank.py"])
    assert line[0] == (f"{tmp_path}/mpirun" if is_named else "mpirun")


def test_srun_starts_ranks_in_the_order_of_the_hostfile():
    """Slurm's own is that of its names: node-1 would have rank 0 here, and node-9 the master."""
    nodes = [Node("node-9", 2), Node("node-1", 2), Node("node-10", 2)]
    says = "import os; print(*(os.environ[name] for name in ('RANK', 'LOCAL_RANK', 'WORLD_SIZE')))"
    line = srun_command(nodes, "10.0.0.9", 29500, ["-c", says])
    assert line[line.index("--ntasks") + 1] == "6"

    def task(name: str, local_rank: int) -> subprocess.CompletedProcess:
        of_slurm = {"SLURMD_NODENAME": name, "SLURM_LOCALID": str(local_rank), "SLURM_NTASKS": "6"}
        command = line[line.index("bash") :]
        environment = {**os.environ, **of_slurm, "SLURM_PROCID": "5"}
        return subprocess.run(command, env=environment, capture_output=True, text=True)

    tasks = [task(node.name, local_rank).stdout for node in nodes for local_rank in (0, 1)]
    assert tasks == [f"{rank} {rank % 2} 6\n" for rank in range(6)]
    assert "Slurm's node node-2 is none of the hostfile's" in task("node-2", 0).stderr
