"""One attempt of a launch: start it, watch every node, stop all of it if a part fails, report the
first failure.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from mmldlm.cluster.agent import CONNECT_SECONDS, Agent, AgentFailure, AgentPool
from mmldlm.cluster.env_propagation import (
    DEEPSPEED_EXPORTS,
    env_files,
    read_env_file,
    run_variables,
)
from mmldlm.cluster.launcher_commands import (
    START_SECONDS,
    pdsh_environment,
    plain_library_path,
    torchrun_command,
)
from mmldlm.errors import EXIT_DONE, EXIT_FAILED, EXIT_INTERRUPTED
from mmldlm.launch import rank_wrapper
from mmldlm.launch.local_launcher import COLLECTIVE_EXIT_CODES
from mmldlm.launch.outcome import (
    Outcome,
    Views,
    failed_rank_outcome,
    has_failed,
    hung_outcome,
    node_outcome,
    rank_states,
)
from mmldlm.launch.script_heartbeat import HEARTBEAT_TIMEOUT, HangWatch
from mmldlm.preflight.context import Context
from mmldlm.utils.stop_signals import handle_stop_signals
from mmldlm.utils.streams import print_line

POLL_SECONDS = 1.0
# An agent without an answer for so long is reconnected.
ANSWER_SECONDS = 5.0
# The node counts as lost if ssh does not reach it within so many seconds.
CALL_SECONDS = 3
# Seconds for a new session to a silent node, whose login may hang (a home file system that is
# away). The other nodes get no request meanwhile, and end their ranks after IDLE_TIMEOUT.
RECONNECT_SECONDS = 10
# After the first failure, other ranks may be ending with a better message.
SETTLE_SECONDS = 3.0
# The same for collective exits: rank 0 has more to write than the others.
AGREED_SECONDS = 30.0
# Seconds without an answer of all nodes at the same time, while each of them can be reached
UNANSWERED_SECONDS = 30.0
# Seconds between a signal and the same one again, from which that means "stop immediately"
REPEAT_SECONDS = 1.0
STOP_GRACE = 2.0
# DeepSpeed's launcher logs its plan, several lines per node. They are kept in launcher.log, not
# shown on the screen.
LAUNCHER_NOISE = re.compile(
    r"\[(INFO|WARNING)\] \[(launch|runner|multinode_runner|real_accelerator)\.py"
)


class Watcher:
    """Start and watch one attempt.

    Args:
        context: Context of the preflight, with nodes, launcher and master address.
        command: Script that every rank runs, and its arguments.
        log_dir: Existing folder that all nodes share, for one log per rank, the launcher's log and
            the hostfile.
        grace: Seconds for saving a checkpoint after an interrupt.
        heartbeat_timeout: Seconds without `mmldlm.heartbeat` after which a rank counts as hung.

    Attributes:
        returned_nodes: Asked once a second for absent nodes that the ranks should end for, after
            a checkpoint; by default there are none.
    """

    def __init__(
        self,
        context: Context,
        command: list[str],
        log_dir: Path,
        grace: float = 120.0,
        heartbeat_timeout: float = HEARTBEAT_TIMEOUT,
    ):
        self.context, self.command = context, command
        self.log_dir, self.grace = log_dir, grace
        self._hang_watch = HangWatch(heartbeat_timeout)
        self.launch_id = uuid.uuid4().hex
        self.pool = AgentPool([self._agent(name) for name in context.names])
        self.process: subprocess.Popen | None = None
        self.interrupts = 0  # 2: stop immediately
        self._signalled: dict[int, float] = {}  # signal -> time of the first
        self._told: dict[str, set[int]] = {}  # node -> pids of ranks that have had SIGTERM
        self.returned_nodes: Callable[[], list[str]] = list
        self._returned: list[str] = []
        self._follower: threading.Thread | None = None
        self._finished = threading.Event()
        self._started_nodes: set[str] = set()

    def _agent(self, name: str, connect: int = CONNECT_SECONDS) -> Agent:
        context, options = self.context, self.context.options
        return Agent(
            name,
            "mmldlm.launch.node_agent",
            context.local,
            options.ssh_port,
            options.ssh_option,
            connect,
        )

    def run(self) -> Outcome:
        """Start, watch to the end, clean up; no process of the run is left on any
        reachable node.
        """
        handlers = handle_stop_signals(self._count_interrupt)
        try:
            self.pool.start()
            if self.pool.failures:
                name, failure = next(iter(self.pool.failures.items()))
                return Outcome(
                    EXIT_FAILED,
                    f"{name}: its agent did not start ({failure})",
                    failed_nodes=[name],
                )
            refused = self._prepare_nodes()
            if refused is None and self.interrupts:
                refused = Outcome(EXIT_INTERRUPTED, "interrupted before the ranks were started")
            if refused is None:
                self._start()
            outcome = refused or self._watch()
            outcome.interrupted = self.interrupts > 0
            if outcome.code == EXIT_INTERRUPTED and not outcome.interrupted:
                outcome.returned = self._returned
            return outcome
        finally:
            self._stop_all(STOP_GRACE)
            self.pool.call("release", {"launch": self.launch_id}, timeout=10)
            self.pool.stop()
            self._finished.set()
            if self._follower is not None:
                self._follower.join(5)
            for signum, handler in handlers.items():
                signal.signal(signum, handler)

    def _count_interrupt(self, signum: int, frame: object) -> None:
        # A session that closes sends SIGHUP and SIGTERM, Slurm SIGTERM some time after SIGUSR1: a
        # save must not end by that.
        now = time.monotonic()
        is_again = now - self._signalled.setdefault(signum, now) > REPEAT_SECONDS
        self.interrupts = max(self.interrupts, 2 if is_again else 1)

    def _prepare_nodes(self) -> Outcome | None:
        """Write the launch file on every node and reserve the master port; return the outcome of a
        failure.
        """
        context = self.context
        self.variables = rank_variables(context)
        first, port = context.names[0], context.options.master_port
        reserved = self.pool.call(
            "reserve_port", lambda name: {"port": port if name == first else None}, timeout=20
        )
        answer = reserved.get(first, {})
        if "error" in answer:
            owner = answer.get("holder")
            by = f" (process {owner['pid']}: {owner['command']})" if owner else ""
            reason = (
                f"{first}: port {port} is not available: {answer['error']}{by}; choose another"
                " --master_port"
            )
            return Outcome(EXIT_FAILED, reason)
        # Variables may be secrets: they are sent over ssh, not in a command line or a shared
        # folder.
        values = {
            "script": self.command[0],
            "args": self.command[1:],
            "environment": self.variables,
            "folder": os.getcwd(),
            "logs": str(self.log_dir.absolute()),
        }
        self.pool.call(
            "write_launch_file", {"launch": self.launch_id, "values": values}, timeout=20
        )
        actions = ("reserve_port", "write_launch_file")
        errors = {
            name: error for (name, action), error in self.pool.errors.items() if action in actions
        }
        errors |= {
            name: f"{name} is lost: {failure.message}"
            for name, failure in self.pool.failures.items()
        }
        if errors:
            name, error = next(iter(errors.items()))
            return Outcome(EXIT_FAILED, error, failed_nodes=[name])
        return None

    def _start(self) -> None:
        # Every launcher starts this script instead of train.py, because its command line contains
        # no text of the user.
        script = [rank_wrapper.__file__, self.launch_id]
        if self.context.launcher == "torchrun":
            self._start_torchrun(script)
            return
        # The launcher has its own session: Ctrl-C reaches the ranks through this process, and the
        # launcher is killed as a group.
        self.process = subprocess.Popen(
            **launcher_start(self.context, self.log_dir, script, self.variables),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        threading.Thread(
            target=self._copy_output, args=(self.process.stdout,), daemon=True
        ).start()

    def _start_torchrun(self, script: list[str]) -> None:
        nodes, names = self.context.nodes, self.context.names
        address, port = self.context.master_address(), self.context.options.master_port

        def start_args(node: str) -> dict:
            command = torchrun_command(nodes, names.index(node), address, port, script)
            log = str((self.log_dir / f"{node}_torchrun.log").absolute())
            return {
                "launch": self.launch_id,
                "command": command,
                "environment": self.variables,
                "log": log,
            }

        self.pool.call("start_launcher", start_args, timeout=20)
        # torchrun's output stays on its node; rank 0's is read from its log, which all nodes
        # share.
        self._follower = threading.Thread(target=self._follow_rank_0, daemon=True)
        self._follower.start()

    def _follow_rank_0(self) -> None:
        offset = 0
        while True:
            finished = self._finished.wait(0.5)
            for path in self.log_dir.glob("*_rank0.log"):
                with contextlib.suppress(OSError), open(path, "rb") as file:
                    file.seek(offset)
                    text = file.read()
                    offset += len(text)
                    sys.stdout.write(text.decode(errors="replace"))
                    sys.stdout.flush()
            if finished:
                return

    def _copy_output(self, lines: Iterable[str]) -> None:
        with contextlib.ExitStack() as stack:
            log = None
            # A full disk must not end this thread: nobody else reads the pipe, in which the
            # launcher and its ranks would then wait for room.
            with contextlib.suppress(OSError):
                path = self.log_dir / "launcher.log"
                log = stack.enter_context(open(path, "ab", buffering=0))
            for line in lines:
                if log is not None:
                    with contextlib.suppress(OSError):
                        log.write(line.encode())
                if LAUNCHER_NOISE.search(line):
                    continue
                with contextlib.suppress(OSError):
                    sys.stdout.write(line)
                    sys.stdout.flush()

    def _watch(self) -> Outcome:
        start_time = complete_time = time.monotonic()
        handled_interrupts = 0
        signal_time = None
        while True:
            poll_time = time.monotonic()

            # The launcher is polled before the ranks: if it ends after them, it must not seem to
            # have ended before them.
            launcher_ended = self.process is not None and self.process.poll() is not None
            views = self.pool.call("report_ranks", self._report_args, timeout=ANSWER_SECONDS)
            self._reconnect()
            if self.interrupts > handled_interrupts:
                handled_interrupts = self.interrupts
                if handled_interrupts > 1:
                    return Outcome(EXIT_FAILED, "interrupted twice: stopped immediately")
                print_line(f"interrupted: the ranks {self._at_signal} (again: stop immediately)")
            elif signal_time is None and (returned := self.returned_nodes()):
                self._returned = returned
                print_line(f"{', '.join(returned)} can train again: the ranks {self._at_signal}")
            if signal_time is None and (self.interrupts or self._returned):
                signal_time = time.monotonic()
            if signal_time is not None:
                self._signal_ranks()
            # A node that did not answer and was reached again answers in the next round: without
            # it, its ranks would seem to have vanished.
            outcome = None
            if self.pool.failures or len(views) == len(self.context.names):
                complete_time = time.monotonic()
                outcome = self.evaluate(views, launcher_ended, complete_time - start_time)
            elif time.monotonic() - complete_time > UNANSWERED_SECONDS:
                outcome = self._unanswered(views)
            if outcome is not None:
                return outcome
            if signal_time is not None and time.monotonic() - signal_time > self.grace:
                return Outcome(
                    EXIT_FAILED,
                    f"the ranks did not exit within {self.grace:.0f} s of the signal",
                )
            time.sleep(max(POLL_SECONDS - (time.monotonic() - poll_time), 0))

    def _signal_ranks(self) -> None:
        """Send SIGTERM to the ranks that have not had it: some may have started since."""

        def signal_args(name: str) -> dict:
            told = sorted(self._told.get(name, ()))
            return {"launch": self.launch_id, "signal": "SIGTERM", "told": told}

        for name, pids in self.pool.call("signal_ranks", signal_args, timeout=10).items():
            self._told.setdefault(name, set()).update(pids)

    def _unanswered(self, views: Views) -> Outcome:
        name = next(name for name in self.context.names if name not in views)
        error = self.pool.errors.get((name, "report_ranks"), "its sessions end without an answer")
        reason = f"{name}: it does not report its ranks: {error}"
        return node_outcome(reason, views, [name])

    @property
    def _at_signal(self) -> str:
        """What the ranks do at SIGTERM."""
        if self.context.script is None:
            return "save a checkpoint and exit"
        return f"get SIGTERM, and {self.grace:.0f} s to end"

    def _report_args(self, name: str) -> dict:
        return {"launch": self.launch_id, "slots": self.context.slots(name)}

    def _reconnect(self) -> None:
        """Open new sessions to nodes without an answer; a node is lost only if that fails too."""
        silent = list(self.pool.failures)
        if not silent:
            return
        with ThreadPoolExecutor(len(silent)) as executor:
            agents = dict(zip(silent, executor.map(self._new_session, silent), strict=True))
        for name, agent in agents.items():
            if agent is not None:
                self.pool.agents[name].stop()
                self.pool.agents[name] = agent
                del self.pool.failures[name]

    def _new_session(self, name: str) -> Agent | None:
        agent = self._agent(name, CALL_SECONDS)
        try:
            agent.start(RECONNECT_SECONDS)
            agent.request("report_ranks", self._report_args(name), ANSWER_SECONDS)
        except (AgentFailure, RuntimeError):
            agent.stop()
            return None
        return agent

    def evaluate(self, views: Views, launcher_ended: bool, age: float) -> Outcome | None:
        """Return how the attempt ended; None while it is healthy.

        Args:
            views: Node -> answer of its agent.
            launcher_ended: Whether the launcher on the head had ended before the views were taken.
            age: Seconds since the start.
        """
        if self.pool.failures:
            name, failure = next(iter(self.pool.failures.items()))
            return node_outcome(f"{name} is lost: {failure.message}", views, [name])
        states = rank_states(views)
        if any(map(has_failed, states)):
            return self.evaluate_failed_rank(views)
        num_done = sum(state["exit"] == EXIT_DONE for state in states)
        if num_done == self.context.world_size and (self.process is None or launcher_ended):
            return Outcome(EXIT_DONE)
        if self.process is not None and launcher_ended and num_done < self.context.world_size:
            code = self.process.returncode
            if (
                code == 0
                and num_done
                and len(states) == num_done
                and not any(v["processes"] for v in views.values())
            ):
                # No launcher returns 0 after a failed rank, and a rank returns 0 only when all
                # have finished.
                missing = self.context.world_size - num_done
                print_line(
                    f"{missing} rank(s) left no status, the launcher returned 0: is /tmp full on a"
                    " node?"
                )
                return Outcome(EXIT_DONE)
            status = f"signal {-code}" if code < 0 else f"status {code}"
            return node_outcome(f"the launcher ended with {status} before its ranks", views, [])
        for name, view in views.items():
            reason = self._node_failure(name, view, age)
            if reason is not None:
                return node_outcome(f"{name}: {reason}", views, [name])
        hung = self._hang_watch.find_hung(views, time.monotonic())
        return None if hung is None else hung_outcome(hung, views)

    def _node_failure(self, name: str, view: dict, age: float) -> str | None:
        """Return why the launcher's part on a node has failed; None while it is healthy."""
        finished = sum(
            state["exit"] == EXIT_DONE for state in view["ranks"]
        ) == self.context.slots(name)
        if any(code != 0 for code in view["ended"]) and not view["ranks"]:
            return "torchrun ended before any rank started"
        if any(state["orphan"] for state in view["ranks"]):
            return "its launcher ended before its ranks"
        if view["processes"]:
            self._started_nodes.add(name)
        elif not finished and name in self._started_nodes:
            return "its launcher ended before its ranks"
        elif not finished and age > START_SECONDS:
            return f"no process was started within {START_SECONDS:.0f} s"
        return None

    def evaluate_failed_rank(self, views: Views) -> Outcome:
        """Wait briefly for the other ranks, then find the first failure."""
        start_time, timeout = time.monotonic(), SETTLE_SECONDS
        while time.monotonic() - start_time < timeout:
            # A node that is lost meanwhile keeps its last answer.
            views = {
                **views,
                **self.pool.call("report_ranks", self._report_args, timeout=ANSWER_SECONDS),
            }
            states = rank_states(views)
            if len(states) == self.context.world_size and not any(
                state["alive"] for state in states
            ):
                break
            if self.context.script is None and all(
                state["alive"] or state["exit"] in (EXIT_DONE, *COLLECTIVE_EXIT_CODES)
                for state in states
            ):
                timeout = AGREED_SECONDS
            time.sleep(0.3)
        offsets = {name: offset for name, (offset, _) in self.context.clocks.items()}
        is_script = self.context.script is not None
        signalled = self.interrupts > 0 or bool(self._returned)
        return failed_rank_outcome(views, offsets, signalled, is_script)

    def _stop_all(self, grace: float) -> None:
        """Stop the run on every reachable node, and the launcher on this machine."""
        if self.context.launcher == "deepspeed":
            # First the launcher: it must not react to processes that end on a node.
            self._kill_launcher()
        self.pool.call("stop", {"launch": self.launch_id, "grace": grace}, timeout=grace + 8)
        self._kill_launcher()

    def _kill_launcher(self) -> None:
        if self.process is not None and self.process.poll() is None:
            with contextlib.suppress(OSError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


def rank_variables(context: Context) -> dict[str, str]:
    """Return the variables that every rank gets, by value: those of the head override those of
    .deepspeed_env.
    """
    variables: dict[str, str] = {}
    if context.launcher == "deepspeed" and not context.local:
        for path in env_files():
            variables.update(read_env_file(path)[0])
        variables["PYTHONPATH"] = _python_path()
        # DeepSpeed exports these in addition to the variables of all launchers.
        for name, value in os.environ.items():
            if name.startswith(DEEPSPEED_EXPORTS) and name != "PYTHONPATH":
                variables[name] = value
    variables.update(run_variables())
    # None: no node was asked, and this machine may be a login node without GPUs.
    if context.has_gpus() is False:
        variables.setdefault("DS_ACCELERATOR", "cpu")
        cores_per_rank = [
            memory["cores"] // context.slots(node)
            for node, memory in context.probe_values("memory").items()
        ]
        variables.setdefault("OMP_NUM_THREADS", str(max(min(cores_per_rank, default=1), 1)))
    return variables


def _python_path() -> str:
    """Return PYTHONPATH with absolute paths, because the runner works in /.

    The current folder, which DeepSpeed's runner puts first, is left out: its modules would replace
    others of the same names.
    """
    parts = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    return os.pathsep.join(os.path.abspath(part) for part in parts if part)


def launcher_start(
    context: Context, log_dir: Path, script: list[str], variables: dict[str, str]
) -> dict:
    """Return the Popen arguments of the launcher on the head: "args", "env", "cwd".

    Raises:
        UserError: a value that DeepSpeed would pass through a shell on every node is not plain
            text.
    """
    args = context.launcher_command(script, log_dir.absolute() / "hostfile", folder="/")
    environment, folder = {**os.environ, **variables}, os.getcwd()
    if context.launcher == "deepspeed":
        folder = "/"
        if not context.local:
            environment = _runner_environment(log_dir.absolute() / "deepspeed_env")
            environment |= pdsh_environment(context.options.ssh_option)
    return {"args": args, "env": environment, "cwd": folder}


def _runner_environment(env_file: Path) -> dict[str, str]:
    """Return the environment of DeepSpeed's runner, without variables that it would paste into
    shell lines.

    Ranks get these variables, and those of .deepspeed_env, from the launch file. PYTHONPATH is
    kept for the node's launch.py; deepspeed_command rejects one that is not plain.
    LD_LIBRARY_PATH, without which launch.py may not start, is passed by `env_file`, in place of
    .deepspeed_env.
    """
    libraries = plain_library_path()
    env_file.write_text(f"LD_LIBRARY_PATH={libraries}\n" if libraries else "", encoding="utf-8")
    environment = {k: v for k, v in os.environ.items() if not k.startswith(DEEPSPEED_EXPORTS)}
    python_path = [
        part for part in os.environ.get("PYTHONPATH", "").split(os.pathsep) if os.path.isabs(part)
    ]
    if python_path:
        environment["PYTHONPATH"] = os.pathsep.join(python_path)
    return {**environment, "DS_ENV_FILE": str(env_file)}
