"""A training of two hosts under `mmldlm launch --retries`, as its user sees it: screen, logs,
checkpoints, processes.

For benchmarks/chaos.py. Start and restart the launch, follow its output and logs, find its
processes on the virtual cluster. Nothing is evaluated here.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import _runs

from tests.support.launch_faults import start as start_launch
from tests.support.virtual_cluster import Host, VirtualCluster, end

# engine.collective_timeout: a rank that stands still is noticed after so many seconds.
ENGINE_TIMEOUT = 20.0
SAVE_FREQ, EVAL_FREQ = 20, 50
RETRIES = 4
LONGEST_RUN = 1_000_000  # steps; the last start of all names the real end
_ENDED = re.compile(r"^ended: (.*) \(exit (\d+)\)$")

# As some daemons and batch agents start their jobs: exit codes of children must not be lost.
IGNORING_CHILDREN = ("bash", "-c", "trap '' CHLD; exec \"$@\"", "bash")
# Parts of a launch -> end of argv[0], and a part of the command line.
PARTS = {
    "rank": ("python", "mmldlm/train.py"),
    "wrapper of a rank": ("python", "launch/rank_wrapper.py"),
    "launcher of a node": ("python", "deepspeed.launcher.launch"),
    "launcher": ("python", "deepspeed.launcher.runner"),
    "pdsh": ("pdsh", ""),
    "head": ("python", "mmldlm.launch"),
    "agent": ("python", "mmldlm.launch.node_agent import main"),
    "session of the watcher": ("ssh", "mmldlm.launch.node_agent import main"),
}
# `python -u -m MODULE`, `python -u SCRIPT`, `python -c TEXT`: the rest is passed on.
_FIRST_WORDS = 4
# Show the folder of their run; the others are not struck while two launches run.
_MARKED = (
    "rank",
    "head",
)


def words(*more: str) -> list[str]:
    """Return the arguments of a tiny ZeRO-2 training with a constant learning rate, independent of
    its last step.
    """
    return [
        "--level",
        "0",
        "engine.zero_stage=2",
        "optimizer.schedule=constant",
        "model.tie_embeddings=true",
        "data.num_workers=0",
        "logging.plot=false",
        "logging.eval_samples=0",
        f"engine.collective_timeout={ENGINE_TIMEOUT:g}",
        f"logging.eval_freq={EVAL_FREQ}",
        *more,
    ]


@dataclass(frozen=True)
class End:
    """End of an attempt of the launch, as printed."""

    reason: str
    code: int


class Launch:
    """One `mmldlm launch` on n1, from its start to its end; a thread follows its screen."""

    def __init__(
        self, cluster: VirtualCluster, store: Path, folder: Path, screen: Path, *more: str
    ):
        self.folder, self._screen = folder, screen
        self.lines: list[str] = []
        self.ends: list[End] = []
        self.process = start_launch(
            cluster, store, folder, *words(*more), prefix=IGNORING_CHILDREN
        )
        self._follower = threading.Thread(target=self._follow, daemon=True)
        self._follower.start()

    def _follow(self) -> None:
        with open(self._screen, "a", encoding="utf-8") as file:
            for line in self.process.stdout:
                file.write(line)
                file.flush()
                if found := _ENDED.match(line.rstrip()):
                    self.ends.append(End(found[1], int(found[2])))
                self.lines.append(line.rstrip("\n"))

    def code(self) -> int | None:
        """Exit code once it has ended and its last line is read; None while it runs. 128 + n after
        signal n.
        """
        code = self.process.poll()
        if code is None:
            return None
        self._follower.join(5)
        return code if code >= 0 else 128 - code

    def kill(self) -> None:
        """End it and all that nsenter started with it."""
        if self.process.poll() is None:
            end(self.process)
        self._follower.join(5)


class Training:
    """The training that gets the faults: one run folder, any number of launches."""

    def __init__(self, cluster: VirtualCluster, store: Path, folder: Path):
        self.cluster, self.store, self.folder = cluster, store, folder
        self.run_dir = folder / "runs" / "run"
        self.checkpoints = self.run_dir / "checkpoints"
        self.screen = folder / "screen.log"
        self.launches: list[Launch] = []
        self.num_steps = LONGEST_RUN
        self.nan_rows: frozenset[int] = frozenset()  # of the store's training samples

    # -- as its user ------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the launch with the same command each time; only the last one sets the number of
        steps.
        """
        more = (
            f"training.num_train_steps={self.num_steps}",
            f"logging.save_freq={SAVE_FREQ}",
            "training.resume=auto",
        )
        launch = Launch(
            self.cluster, self.store, self.folder, self.screen, "--retries", str(RETRIES), *more
        )
        self.launches.append(launch)

    @property
    def launch(self) -> Launch:
        """The launch that was started last."""
        return self.launches[-1]

    def kill(self) -> None:
        """End the launch and what it has left on the hosts."""
        for launch in self.launches:
            launch.kill()
        for host in self.cluster.hosts:
            for part in ("launcher", "launcher of a node", "wrapper of a rank", "rank"):
                self.signal(host, part, signal.SIGKILL)

    # -- what it shows ----------------------------------------------------------------------------

    def ends(self) -> list[End]:
        """Ends of all attempts so far."""
        return [one for launch in self.launches for one in launch.ends]

    def lines(self) -> list[str]:
        """The screen, from the first launch on."""
        return [line for launch in self.launches for line in launch.lines]

    def last_step(self) -> int:
        """The newest step in the log; 0 without one."""
        try:
            with open(self.run_dir / "training_log.jsonl", "rb") as file:
                file.seek(max(0, file.seek(0, os.SEEK_END) - 4096))
                *lines, _ = file.read().split(b"\n")
            return json.loads(lines[-1])["step"]
        except (OSError, ValueError, IndexError):
            return 0

    def events(self, *kinds: str) -> list[dict]:
        """Events of some kinds, oldest first."""
        return [
            event
            for event in _runs.read_log(self.run_dir, "events.jsonl")
            if event["event"] in kinds
        ]

    def starts(self) -> list[dict]:
        """Return one event per start or resume."""
        return self.events("start", "resume")

    def dropped(self) -> list[Path]:
        """Return the files with the log lines that a restart has dropped, oldest first."""
        found = self.run_dir.glob("training_log.dropped-*.jsonl")
        return sorted(found, key=lambda path: int(path.stem.rpartition("-")[2]))

    def complete_checkpoints(self) -> list[int]:
        """Steps of the checkpoints that have a manifest."""
        return sorted(
            int(path.parent.name[5:]) for path in self.checkpoints.glob("step_*/manifest.json")
        )

    def is_saving(self) -> bool:
        """Whether a checkpoint is being written."""
        return any(self.checkpoints.glob(".partial_step_*"))

    # -- its processes ----------------------------------------------------------------------------

    def pids(self, host: Host, part: str, folder: Path | None = None) -> list[int]:
        """Processes of a part of the launch on a host, seen from outside of it.

        Args:
            folder: of which launch a rank or head is; None: of this training's.
        """
        program, word = PARTS[part]
        mark = f"{folder or self.folder}/" if part in _MARKED else ""
        found = []
        for pid, words in host_processes(host):
            first = words if program == "ssh" else words[:_FIRST_WORDS]
            if (
                words[0].endswith(program)
                and any(word in one for one in first)
                and mark in " ".join(words)
            ):
                found.append(pid)
        return [pid for pid in found if _parent(pid) not in found]  # not what a process has forked

    def signal(self, host: Host, part: str, number: int, folder: Path | None = None) -> int:
        """Send a signal to a part of the launch on a host; how many processes got it."""
        pids = self.pids(host, part, folder)
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        if part == "head" and number == signal.SIGCONT:
            # nsenter stops itself when its child stops.
            self.launch.process.send_signal(number)
        return len(pids)

    def ranks(self) -> int:
        """Ranks that run on all hosts."""
        return sum(len(self.pids(host, "rank")) for host in self.cluster.hosts)

    def process_list(self) -> str:
        """Processes on the hosts, to diagnose why nothing moves."""
        parts = []
        for host in self.cluster.hosts:
            parts.append(f"--- {host.name}")
            parts += [
                f"{pid:8} {_stat(pid)[0]} {' '.join(words)[:160]}"
                for pid, words in host_processes(host)
            ]
        return "\n".join(parts)


def host_processes(host: Host) -> list[tuple[int, list[str]]]:
    """(pid as seen from outside, words of the command line) of every process of a host."""
    found = []
    own = os.readlink(f"/proc/{host.pid}/ns/pid")
    for entry in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/{entry}/ns/pid") == own:
                line = Path(f"/proc/{entry}/cmdline").read_bytes().decode(errors="replace")
                if line:
                    found.append((int(entry), line.rstrip("\0").split("\0")))
    return found


def _stat(pid: int) -> list[str]:
    """State, parent and so on of a process; `?` of one that is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(") ")[2].split()
    except OSError:
        return ["?", "0"]


def _parent(pid: int) -> int:
    return int(_stat(pid)[1])


def wait(condition: Callable[[], bool], seconds: float, pause: float = 0.05) -> bool:
    """Wait until a condition holds; whether it did."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(pause)
    return True


def run_to_end(launch: Launch, seconds: float) -> int | None:
    """Exit code of a launch that is left alone; None if it did not end in time (it is killed)."""
    if wait(lambda: launch.code() is not None, seconds):
        return launch.code()
    launch.kill()
    return None
