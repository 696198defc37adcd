"""Faults of a running launch on the virtual cluster, and how `mmldlm launch` must end; for tests
and benchmarks.
"""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tests.support.virtual_cluster import ROOT, VirtualCluster, end

PYTHON = sys.executable


@dataclass(frozen=True)
class LaunchFault:
    """A fault: act(cluster, stack) before or after the group has formed; the screen must contain
    one of `words`.
    """

    name: str
    after: bool
    act: Callable[[VirtualCluster, contextlib.ExitStack], None]
    words: tuple[str, ...]


def _kill(host, pattern: str, signal: str = "-KILL") -> None:
    """Kill without pkill, whose calls `pkill_logged` counts."""
    host.sh("kill", signal, *pids(host, pattern))


def _cut(cluster, stack) -> None:
    stack.enter_context(cluster.cable_pulled(cluster["n2"]))


_ACTS = {
    "rank killed": (
        lambda cluster, stack: _kill(cluster["n2"], "mmldlm/train.py"),
        ("rank 1 on n2 ended first",),
    ),
    "node's launcher killed": (
        lambda cluster, stack: _kill(cluster["n2"], "deepspeed.launcher.launch"),
        ("n2: its launcher ended",),
    ),
    "launcher killed": (
        lambda cluster, stack: _kill(cluster["n1"], "^pdsh "),
        ("the launcher ended",),
    ),
    "host cut off": (_cut, ("n2 is lost",)),
}
LAUNCH_FAULTS = [
    LaunchFault(f"{name} {'after' if after else 'before'} the group forms", after, act, words)
    for name, (act, words) in _ACTS.items()
    for after in (False, True)
]


@dataclass(frozen=True)
class Neighbor:
    """A launch next to another one: act(cluster, name) ends it without an effect on the other."""

    name: str
    port: int
    act: Callable[[VirtualCluster, str], None]
    codes: tuple[int, ...]


def head_pattern(name: str) -> str:
    """Pattern of the head's process of a launch."""
    return f"python -m mmldlm.launch .*run_name={name}( |$)"


NEIGHBORS = [
    Neighbor(
        "interrupted",
        29600,
        lambda cluster, name: _kill(cluster["n1"], head_pattern(name), "-INT"),
        (5,),
    ),
    Neighbor(
        "rank_killed",
        29700,
        lambda cluster, name: _kill(cluster["n2"], f"train.py .*run_name={name}( |$)"),
        (137,),
    ),
    Neighbor(
        "head_killed",
        29800,
        lambda cluster, name: _kill(cluster["n1"], head_pattern(name)),
        (-9, 137),
    ),
]


def start(
    cluster: VirtualCluster,
    store: Path,
    folder: Path,
    *words: str,
    launcher: str = "deepspeed",
    name: str = "run",
    host: str = "n1",
    env: dict[str, str] | None = None,
    prefix: tuple[str, ...] = (),
    hosts: int = 2,
) -> subprocess.Popen:
    """`mmldlm launch` for n1, n2, ...; `prefix` wraps the command, so that it inherits what that
    sets.
    """
    folder.mkdir(parents=True, exist_ok=True)
    nodes = "".join(f"n{number} slots=1\n" for number in range(1, hosts + 1))
    (folder / "hostfile").write_text(nodes)
    command = [
        PYTHON,
        "-m",
        "mmldlm.launch",
        "--hostfile",
        folder / "hostfile",
        "--launcher",
        launcher,
    ]
    command += [
        "--config-name",
        "tiny",
        f"data.latent_data_root={store}",
        f"logging.save_dir={folder}/runs",
    ]
    command += [
        "data.max_validation_samples=16",
        f"logging.run_name={name}",
        "logging.plot=false",
        "logging.eval_samples=0",
        "training.train_batch_size=4",
        *words,
    ]
    return cluster[host].popen(
        *prefix,
        *command,
        env={
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
            **(env or {}),
        },  # the hosts share one machine's cores
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


class Screen:
    """What a launch prints, read while it runs."""

    def __init__(self, process: subprocess.Popen):
        self.text = ""
        self._process = process
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        for line in self._process.stdout:
            self.text += line


def wait_for(
    condition: Callable[[], bool], process: subprocess.Popen, seconds: float = 240
) -> None:
    """Wait until a condition holds while a launch runs."""
    deadline = time.monotonic() + seconds
    while not condition():
        if process.poll() is not None or time.monotonic() > deadline:
            raise AssertionError(
                f"the launch did not reach this point:\n{process.stdout.read()[-4000:]}"
            )
        time.sleep(0.1)


def pids(host, pattern: str) -> list[int]:
    """Processes on a host whose command line matches."""
    done = host.run("pgrep", "-f", pattern)
    return [int(line) for line in done.stdout.split()] if done.returncode == 0 else []


def ranks_on(host, name: str | None = None) -> list[int]:
    """Processes of train.py on a host, of one run or of all."""
    return pids(host, "mmldlm/train.py" + (f" .*run_name={name}( |$)" if name else ""))


def left_on(host, name: str | None = None, seconds: float = 60) -> list[int]:
    """Ranks that a host still has after some seconds, in which it may end them by itself."""
    deadline = time.monotonic() + seconds
    while (left := ranks_on(host, name)) and time.monotonic() < deadline:
        time.sleep(0.5)
    return left


def steps_of(folder: Path, name: str = "run") -> int:
    """Steps that a launch has logged."""
    path = folder / "runs" / name / "training_log.jsonl"
    return len(path.read_text().splitlines()) if path.exists() else 0


@contextlib.contextmanager
def pkill_logged(cluster: VirtualCluster, folder: Path):
    """Every pkill on a host leaves a line in the file that this gives, and then does its work."""
    folder.mkdir(parents=True, exist_ok=True)
    log, script = folder / "pkill.log", folder / "pkill_logged"
    for name in ("pgrep", "pkill"):  # one program with two names
        shutil.copy(shutil.which("pgrep"), folder / name)
    log.touch()
    script.write_text(f"""#!/bin/sh
case "$0" in *pkill) echo "$(hostname): $*" >> {log};; esac
exec {folder}/$(basename "$0") "$@"
""")
    script.chmod(0o755)
    with contextlib.ExitStack() as stack:
        for host in cluster.hosts:
            stack.enter_context(host.bound(script, Path(shutil.which("pgrep")).resolve()))
        yield log


@dataclass(frozen=True)
class Ended:
    """End of a neighbor: code, screen, remaining ranks, and whether the kept launch continued to
    train.
    """

    neighbor: Neighbor
    code: int
    output: str
    left: list[int]
    kept_trains: bool
    pkills: str


def play_beside(
    cluster: VirtualCluster, store: Path, folder: Path, neighbors: list[Neighbor]
) -> list[Ended]:
    """Train with one launch, start its neighbors in the same second, end them one after
    the other.
    """
    long, found = (
        ("--level", "0", "training.num_train_steps=100000", "logging.save_freq=100000"),
        [],
    )
    with contextlib.ExitStack() as stack:
        log = stack.enter_context(pkill_logged(cluster, folder / "pkill"))
        kept = start(cluster, store, folder, *long, name="kept")
        stack.callback(end, kept)
        wait_for(lambda: steps_of(folder, "kept") >= 2, kept)
        beside = [
            start(cluster, store, folder, *long, "--master_port", str(n.port), name=n.name)
            for n in neighbors
        ]
        for process in beside:
            stack.callback(end, process)
        for neighbor, process in zip(neighbors, beside, strict=True):
            wait_for(lambda name=neighbor.name: steps_of(folder, name) >= 2, process, 400)
        for neighbor, process in zip(neighbors, beside, strict=True):
            neighbor.act(cluster, neighbor.name)
            output, _ = process.communicate(timeout=240)
            # Without a head, the nodes end their parts by themselves.
            left = [pid for host in ("n1", "n2") for pid in left_on(cluster[host], neighbor.name)]
            seen, deadline = steps_of(folder, "kept"), time.monotonic() + 60
            while (
                steps_of(folder, "kept") < seen + 3
                and kept.poll() is None
                and time.monotonic() < deadline
            ):
                time.sleep(0.2)
            trains = kept.poll() is None and steps_of(folder, "kept") >= seen + 3
            found.append(
                Ended(neighbor, process.returncode, output, left, trains, log.read_text())
            )
    return found


def play(
    cluster: VirtualCluster, store: Path, folder: Path, fault: LaunchFault
) -> tuple[float, int, str, list[int]]:
    """Start a long run and inject the fault.

    Returns:
        (seconds until the launch had ended, exit code, screen, ranks that remained on n1 at its
        end, and on n2, which may have been cut off, a minute after its cable is back).
    """
    with contextlib.ExitStack() as stack:
        process = start(
            cluster, store, folder, "training.num_train_steps=100000", "logging.save_freq=100000"
        )
        stack.callback(end, process)
        wait_for(lambda: len(ranks_on(cluster["n2"])) > 0, process)
        if fault.after:
            wait_for(lambda: steps_of(folder) >= 3, process)
        fault.act(cluster, stack)
        happened = time.monotonic()
        output, _ = process.communicate(timeout=120)
        seconds = time.monotonic() - happened
        left = ranks_on(cluster["n1"])
    return seconds, process.returncode, output, left + left_on(cluster["n2"])
