"""Small jobs of three real processes in which something happens to one of them; started by
test_heartbeat.py.

python tests/engines/heartbeat_worker.py FOLDER CASE...    forks each case's ranks (torch is imported once)
python -m torch.distributed.run ... heartbeat_worker.py FOLDER torchrun:CASE    is one rank of a case

A case is ACT@RANK, or ACT@RANK@agent: there a process of its own keeps the store, as torchrun's
agent does. Each rank's stderr goes to FOLDER/CASE/stderr_RANK, its pid to pid_RANK, and the exit
codes (None: still there when the time was up) to FOLDER/results.json.
"""  # noqa: E501

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
import traceback
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch  # noqa: E402

from mmldlm.distributed.environment import prepare_environment  # noqa: E402
from mmldlm.distributed.heartbeat import Heartbeat  # noqa: E402
from mmldlm.distributed.process_group import WRITERS  # noqa: E402
from mmldlm.errors import StabilityStop  # noqa: E402

WORLD, TIMEOUT, FAULT_STEP = 3, 12.0, 3
CASES_AT_ONCE = 5  # on two cores more would starve each other
ALL_END_WITHIN = 60.0  # far more than any case needs: only a hang reaches it


def act(case: str, alive: Heartbeat, step: int) -> None:
    """What happens to the chosen rank after its step FAULT_STEP, in its data phase."""
    what = case.split("@")[0]
    if what == "exit":
        os._exit(3)
    elif what == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif what == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif what == "sleep":
        time.sleep(1000)
    elif what == "raise":
        raise ValueError("row 7 is damaged")
    elif what == "evaluate":
        # One rank works, beating, for longer than the timeout; the others wait for it.
        end = time.monotonic() + 1.5 * TIMEOUT
        while time.monotonic() < end:
            alive.enter_phase(step, "data")
            time.sleep(0.1)


def train(case: str, folder: Path) -> None:
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    from datetime import timedelta

    # The group's own limit is far away: what ends these jobs in time is the watch alone.
    torch.distributed.init_process_group("gloo", timeout=timedelta(seconds=300))
    # DeepSpeed's copy of the world, with torch's default limit, and a group with its own.
    groups = [
        torch.distributed.new_group(list(range(world))),
        torch.distributed.new_group(timeout=timedelta(seconds=77), group_desc=WRITERS),
    ]
    what, guilty = case.split("@")[:2]
    with Heartbeat(rank, world, TIMEOUT, logs=folder / "logs") as alive:
        backends = [group._get_backend(torch.device("cpu")) for group in groups]
        limits = [backend.options._timeout.total_seconds() for backend in backends]
        (folder / f"limits_{rank}").write_text(json.dumps(limits))
        for step in range(8):
            alive.enter_phase(step, "data")
            if step == FAULT_STEP:
                time.sleep(3 * alive.interval)  # so that this step has been published
            if step == FAULT_STEP and rank == int(guilty):
                act(case, alive, step)
            alive.enter_phase(step, "step")
            torch.distributed.all_reduce(torch.ones(1))
            if what == "agreed" and step == FAULT_STEP:
                raise StabilityStop("all ranks stop")


def run_rank(case: str, folder: Path) -> int:
    (folder / f"pid_{os.environ['RANK']}").write_text(str(os.getpid()))
    try:
        train(case, folder)
    except StabilityStop as error:
        return error.exit_code
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def fork_store() -> tuple[int, int]:
    """(pid, port) of a process that keeps a store.

    This one stays without threads: it goes on forking.
    """
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        os.write(write, str(store.port).encode())
        time.sleep(1000)
    return pid, int(os.read(read, 10))


def fork_case(case: str, folder: Path) -> tuple[dict[int, int], int | None]:
    keeper = None
    if case.endswith("@agent"):
        keeper, port = fork_store()
    else:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
    pids = {}
    for rank in range(WORLD):
        pid = os.fork()
        if pid:
            pids[pid] = rank
            continue
        code = 70
        try:
            os.dup2(os.open(folder / f"stderr_{rank}", os.O_WRONLY | os.O_CREAT), 2)
            os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(WORLD))
            os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
            os.environ["TORCHELASTIC_USE_AGENT_STORE"] = str(keeper is not None)
            code = run_rank(case, folder)
        finally:
            os._exit(code)
    return pids, keeper


def run_together(folder: Path, cases: list[str]) -> dict[str, list[int | None]]:
    ranks, keepers, codes = {}, [], {case: [None] * WORLD for case in cases}
    for case in cases:
        (folder / case).mkdir(parents=True)
        pids, keeper = fork_case(case, folder / case)
        ranks |= {pid: (case, rank) for pid, rank in pids.items()}
        keepers += [] if keeper is None else [keeper]
    deadline = time.monotonic() + ALL_END_WITHIN
    stopped = {pid for pid, (case, rank) in ranks.items() if case.startswith(f"stop@{rank}")}
    while ranks.keys() - stopped and time.monotonic() < deadline:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid:
            case, rank = ranks.pop(pid)
            codes[case][rank] = os.waitstatus_to_exitcode(status)
        else:
            time.sleep(0.05)
    for pid in [*ranks, *keepers]:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    return codes


def main(folder: Path, cases: list[str]) -> None:
    prepare_environment(TIMEOUT)
    codes = {}
    for first in range(0, len(cases), CASES_AT_ONCE):
        codes |= run_together(folder, cases[first : first + CASES_AT_ONCE])
    (folder / "results.json").write_text(json.dumps(codes))


if __name__ == "__main__":
    where, *names = sys.argv[1:]
    if names[0].startswith("torchrun:"):
        prepare_environment(TIMEOUT)
        sys.exit(run_rank(names[0].removeprefix("torchrun:"), Path(where)))
    main(Path(where), names)
