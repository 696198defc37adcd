"""Slurm on hosts of the virtual cluster: slurmctld on the first, slurmd on each, without
authentication.
"""

from __future__ import annotations

import contextlib
import shutil
import time
from pathlib import Path

from tests.support.virtual_cluster import SBIN, VirtualCluster, end

PROGRAMS = ("slurmctld", "slurmd", "srun", "sbatch", "scontrol", "sinfo")


def reason_to_skip() -> str | None:
    """Return why Slurm cannot be used; None if it can.

    Nothing is installed: its packages start services.
    """
    missing = [program for program in PROGRAMS if shutil.which(program, path=SBIN) is None]
    return (
        f"no {', '.join(missing)} (Debian: apt-get install slurmctld slurmd slurm-client)"
        if missing
        else None
    )


def _config(cluster: VirtualCluster, folder: Path, names: list[str]) -> str:
    return f"""
ClusterName=cluster
SlurmctldHost={names[0]}({cluster[names[0]].address})
SlurmUser=root
SlurmdUser=root
AuthType=auth/none
CredType=cred/none
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/linear
SchedulerType=sched/builtin
JobAcctGatherType=jobacct_gather/none
SwitchType=switch/none
ReturnToService=2
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd_%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd_%n.log
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool_%n
NodeName={",".join(names)} CPUs=2 RealMemory=512 State=UNKNOWN
PartitionName=all Nodes={",".join(names)} Default=YES MaxTime=INFINITE State=UP OverSubscribe=YES
"""


@contextlib.contextmanager
def slurm_cluster(cluster: VirtualCluster, folder: Path, names: list[str]):
    """Slurm over some hosts while the context is open; gives the variables that its
    commands need.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("state", *(f"spool_{name}" for name in names)):
        (folder / name).mkdir()
    path = folder / "slurm.conf"
    path.write_text(_config(cluster, folder, names))
    # Named, or slurmd looks for a mounted cgroup file system, which these hosts have not; no
    # plugin above uses it.
    (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
    variables = {"SLURM_CONF": str(path)}
    with contextlib.ExitStack() as stack:
        quiet = {"stdin": -3, "stdout": -3, "stderr": -3, "env": variables}
        commands = [(names[0], ["slurmctld", "-D"])] + [
            (name, ["slurmd", "-D", "-N", name]) for name in names
        ]
        for name, command in commands:
            stack.callback(end, cluster[name].popen(*command, **quiet))
        deadline = time.monotonic() + 30
        while True:
            done = cluster[names[0]].run("sinfo", "-h", "-o", "%D %t", env=variables)
            if done.stdout.split() == [str(len(names)), "idle"]:
                break
            logs = "".join(path.read_text()[-1500:] for path in folder.glob("*.log"))
            assert time.monotonic() < deadline, f"{done.stdout}\n{logs}"
            time.sleep(0.3)
        yield variables
