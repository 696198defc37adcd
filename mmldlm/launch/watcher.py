"""One attempt of a launch: start it, watch every node, end all of it when a part dies, and say which part was first."""

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
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from mmldlm.cluster.launcher_commands import torchrun_command
from mmldlm.errors import EXIT_DONE, EXIT_FAILED, EXIT_INTERRUPTED, EXIT_STABILITY, EXIT_USAGE
from mmldlm.launch import rank_wrapper as rank_module
from mmldlm.launch.launcher_start import launch_values, launcher_start, rank_script, rank_variables
from mmldlm.preflight.context import Context
from mmldlm.preflight.remote.ssh import CONNECT_SECONDS, Agent, AgentFailure, AgentPool
from mmldlm.utils.stop_signals import STOP_SIGNALS

POLL_SECONDS = 1.0
ANSWER_SECONDS = 5.0  # a node that says nothing for so long is called anew
CALL_SECONDS = 3  # and is lost when ssh does not reach it within so many
START_SECONDS = 60.0  # from the launcher's start to the first sign of it on every node
SETTLE_SECONDS = 3.0  # after the first failure: the others may be ending by themselves, with a better message
AGREED_SECONDS = 30.0  # the same, where all end by agreement: rank 0 has more to write than the others
STOP_GRACE = 2.0
# DeepSpeed's launcher tells its own plans, several lines a node: kept in launcher.log, not on the screen.
LAUNCHER_NOISE = re.compile(r"\[(INFO|WARNING)\] \[(launch|runner|multinode_runner|real_accelerator)\.py")
# Ends that all ranks reach together and by their own decision.
COLLECTIVE_EXIT_CODES = (EXIT_USAGE, EXIT_STABILITY, EXIT_INTERRUPTED)


@dataclass
class Outcome:
    """How an attempt ended: exit code, one sentence, the first failing rank's last lines, nodes that failed.

    interrupted: by a signal to this launch, so that no retry is wanted.
    """

    code: int
    reason: str = ""
    last: list[str] = field(default_factory=list)
    bad_nodes: list[str] = field(default_factory=list)
    interrupted: bool = False


class Watcher:
    """Start and watch one attempt.

    Args:
        context: of the preflight: nodes, launcher, the master's address. words: of train.py.
        logs: folder that all nodes see, made already; gets a log per rank, the launcher's own, and the hostfile.
    """

    def __init__(self, context: Context, words: list[str], logs: Path, grace: float = 120.0):
        self.context, self.words, self.logs, self.grace = context, words, logs, grace
        self.id = uuid.uuid4().hex
        self.fleet = AgentPool([self._agent(name) for name in context.names])
        self.process: subprocess.Popen | None = None
        self._follower: threading.Thread | None = None
        self._over = threading.Event()
        self.interrupts = 0
        self._seen: set[str] = set()

    def _agent(self, name: str, connect: int = CONNECT_SECONDS) -> Agent:
        context, options = self.context, self.context.options
        return Agent(name, context.local, options.ssh_port, options.ssh_option, "mmldlm.launch.node_agent", connect)

    # -- starting ----------------------------------------------------------------------------------------------------

    def run(self) -> Outcome:
        """Start, watch to the end, clean up; never leaves a process of the run behind on a node that answers."""
        # SIGHUP: the terminal is gone; nohup has it ignored, and so it stays.
        numbers = [n for n in (*STOP_SIGNALS, signal.SIGHUP) if signal.getsignal(n) is not signal.SIG_IGN]
        handlers = {n: signal.signal(n, self._interrupt) for n in numbers}
        try:
            self.fleet.start()
            if self.fleet.failures:
                name, failure = next(iter(self.fleet.failures.items()))
                return Outcome(EXIT_FAILED, f"{name}: no watcher there ({failure})", bad_nodes=[name])
            refused = self._prepare()
            if refused is None:
                self._start()
            outcome = refused or self._watch()
            outcome.interrupted = self.interrupts > 0
            return outcome
        finally:
            self._end_all(STOP_GRACE)
            self.fleet.ask("forget", {"launch": self.id}, timeout=10)
            self.fleet.stop()
            self._over.set()
            if self._follower is not None:
                self._follower.join(5)
            for number, handler in handlers.items():
                signal.signal(number, handler)

    def _interrupt(self, number, frame) -> None:
        self.interrupts += 1

    def _prepare(self) -> Outcome | None:
        """Hand the launch file to every node and hold the master port; why that cannot be, or None."""
        context = self.context
        self.variables = rank_variables(context)
        first, port = context.names[0], context.options.master_port
        reserved = self.fleet.ask("reserve", lambda name: {"port": port if name == first else None}, timeout=20)
        held = reserved.get(first, {})
        if "error" in held:
            by = f" (process {held['holder']['pid']}: {held['holder']['command']})" if held.get("holder") else ""
            reason = f"{first}: port {port} cannot be had: {held['error']}{by}; choose another --master_port"
            return Outcome(EXIT_FAILED, reason)
        # Variables may be secrets: they go through the sessions, not through a command line or a shared folder.
        values = launch_values(self.words, self.logs, self.variables)
        self.fleet.ask("prepare", {"launch": self.id, "values": values}, timeout=20)
        errors = {name: error for (name, what), error in self.fleet.errors.items() if what in ("reserve", "prepare")}
        errors |= {name: f"{name} is lost: {failure.said}" for name, failure in self.fleet.failures.items()}
        if errors:
            name, error = next(iter(errors.items()))
            return Outcome(EXIT_FAILED, error, bad_nodes=[name])
        return None

    def _start(self) -> None:
        script = rank_script(self.id)
        if self.context.launcher == "torchrun":
            self._start_torchrun(script)
            return
        # In a session of its own: Ctrl-C must reach the ranks through us, and the launcher is killed as a group.
        self.process = subprocess.Popen(
            **launcher_start(self.context, self.logs, script, self.variables),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        threading.Thread(target=self._copy_output, daemon=True).start()

    def _start_torchrun(self, script: list[str]) -> None:
        nodes, names = self.context.nodes, self.context.names
        address, port = self.context.master_address(), self.context.options.master_port

        def asked(node: str) -> dict:
            command = torchrun_command(nodes, names.index(node), address, port, script)
            log = str((self.logs / f"{node}_torchrun.log").absolute())
            return {"launch": self.id, "command": command, "environment": self.variables, "log": log}

        self.fleet.ask("start", asked, timeout=20)
        # torchrun's output stays on its node; what rank 0 says is read from its log, which all nodes see.
        self._follower = threading.Thread(target=self._follow_rank_0, daemon=True)
        self._follower.start()

    def _follow_rank_0(self) -> None:
        seen = 0
        while True:
            last = self._over.wait(0.5)
            for path in self.logs.glob("*_rank0.log"):
                with contextlib.suppress(OSError), open(path, "rb") as file:
                    file.seek(seen)
                    text = file.read()
                    seen += len(text)
                    sys.stdout.write(text.decode(errors="replace"))
                    sys.stdout.flush()
            if last:
                return

    def _copy_output(self) -> None:
        with open(self.logs / "launcher.log", "a") as log:
            for line in self.process.stdout:
                log.write(line)
                log.flush()
                if LAUNCHER_NOISE.search(line):
                    continue
                with contextlib.suppress(OSError):
                    sys.stdout.write(line)
                    sys.stdout.flush()

    # -- watching ----------------------------------------------------------------------------------------------------

    def _watch(self) -> Outcome:
        started = time.monotonic()
        asked_to_save = 0
        interrupted_at = None
        while True:
            before = time.monotonic()
            # Looked at before the ranks: a launcher that ends after them must not seem to have ended before them.
            ended = self.process is not None and self.process.poll() is not None
            views = self.fleet.ask("watch", self._watched, timeout=ANSWER_SECONDS)
            self._reconnect()
            if self.interrupts > asked_to_save:
                asked_to_save = self.interrupts
                if asked_to_save > 1:
                    return Outcome(EXIT_FAILED, "interrupted twice: ended at once")
                print("interrupted: the ranks save a checkpoint and end (again: end at once)", flush=True)
                interrupted_at = time.monotonic()
                self.fleet.ask("signal_ranks", {"launch": self.id, "signal": "SIGTERM"}, timeout=10)
            outcome = self._judge(views, ended, time.monotonic() - started)
            if outcome is not None:
                return outcome
            if interrupted_at is not None and time.monotonic() - interrupted_at > self.grace:
                return Outcome(EXIT_FAILED, f"the ranks did not end within {self.grace:.0f} s of the interruption")
            time.sleep(max(POLL_SECONDS - (time.monotonic() - before), 0))

    def _watched(self, name: str) -> dict:
        return {"launch": self.id, "slots": self.context.slots(name)}

    def _reconnect(self) -> None:
        """A session that broke, or a node that was slow to answer, is no dead node: it is one when ssh fails too."""
        silent = list(self.fleet.failures)
        if not silent:
            return
        with ThreadPoolExecutor(len(silent)) as pool:
            found = dict(zip(silent, pool.map(self._new_session, silent), strict=True))
        for name, agent in found.items():
            if agent is not None:
                self.fleet.agents[name].stop()
                self.fleet.agents[name] = agent
                del self.fleet.failures[name]

    def _new_session(self, name: str) -> Agent | None:
        agent = self._agent(name, CALL_SECONDS)
        try:
            agent.start()
            agent.request("watch", self._watched(name), ANSWER_SECONDS)
        except (AgentFailure, RuntimeError):
            agent.stop()
            return None
        return agent

    def _judge(self, views: dict[str, dict], launcher_ended: bool, age: float) -> Outcome | None:
        """None while all is well; how it ended otherwise."""
        if self.fleet.failures:
            name, failure = next(iter(self.fleet.failures.items()))
            return self._failed(f"{name} is lost: {failure.said}", views, [name])
        ranks = [state for view in views.values() for state in view["ranks"]]
        if any(
            state["exit"] not in (None, EXIT_DONE) or (state["exit"] is None and not state["alive"]) for state in ranks
        ):
            return self._failed_rank(views)
        done = [state for state in ranks if state["exit"] == EXIT_DONE]
        if len(done) == self.context.world_size and (self.process is None or launcher_ended):
            return Outcome(EXIT_DONE)
        if launcher_ended and len(done) < self.context.world_size:
            code = self.process.returncode
            if code == 0 and done and ranks == done and not any(view["processes"] for view in views.values()):
                # No launcher ends with 0 after a rank that failed; and one rank ends with 0 where all have finished.
                missing = self.context.world_size - len(done)
                print(f"{missing} rank(s) left no status, the launcher says 0: is a node's /tmp full?", flush=True)
                return Outcome(EXIT_DONE)
            how = f"signal {-code}" if code < 0 else f"status {code}"
            return self._failed(f"the launcher ended with {how} before its ranks", views, [])
        for name, view in views.items():
            finished = sum(state["exit"] == EXIT_DONE for state in view["ranks"]) == self.context.slots(name)
            if any(code != 0 for code in view["ended"]) and not view["ranks"]:
                return self._failed(f"{name}: torchrun ended before any rank started", views, [name])
            if any(state["orphan"] for state in view["ranks"]):
                return self._failed(f"{name}: its launcher ended before its ranks", views, [name])
            if view["processes"]:
                self._seen.add(name)
            elif not finished and name in self._seen:
                return self._failed(f"{name}: its launcher ended before its ranks", views, [name])
            elif not finished and age > START_SECONDS:
                return self._failed(f"{name}: nothing was started there within {START_SECONDS:.0f} s", views, [name])
        return None

    def _failed_rank(self, views: dict[str, dict]) -> Outcome:
        """A rank failed: give the others a moment, then find who was first."""
        noticed, patience = time.monotonic(), SETTLE_SECONDS
        while time.monotonic() - noticed < patience:
            # A node that is lost meanwhile keeps what it said last.
            views = {**views, **self.fleet.ask("watch", self._watched, timeout=ANSWER_SECONDS)}
            ranks = [state for view in views.values() for state in view["ranks"]]
            if len(ranks) == self.context.world_size and not any(state["alive"] for state in ranks):
                break
            if all(state["alive"] or state["exit"] in (EXIT_DONE, *COLLECTIVE_EXIT_CODES) for state in ranks):
                patience = AGREED_SECONDS
            time.sleep(0.3)
        failed = []
        for name, view in views.items():
            offset = self.context.clocks.get(name, (0.0, 0.0))[0]
            for state in view["ranks"]:
                if state["exit"] is None and not state["alive"]:
                    failed.append((0.0, name, {**state, "exit": 128 + signal.SIGKILL, "last": self._last_lines(state)}))
                elif state["exit"] not in (None, EXIT_DONE):
                    failed.append((state["ended"] - offset, name, state))
        _, name, first = min(failed, key=lambda entry: entry[0])
        codes = [state["exit"] for _, _, state in failed]
        names = {state["rank"]: name for name, view in views.items() for state in view["ranks"]}
        found = first.get("failure") or {"ranks": []}
        others = [names.get(rank, "") for rank in found["ranks"] if rank != first["rank"]]
        reason = f"rank {first['rank']} on {name} ended first, with status {first['exit']}{self._why(first, name)}"
        code = codes[0] if len(set(codes)) == 1 else max(codes)
        if code == EXIT_INTERRUPTED and self.interrupts:
            return Outcome(code, "interrupted, as asked for")
        if others and first["rank"] not in found["ranks"]:  # it ended because another one stands still or is gone
            return Outcome(code, found["sentence"], first.get("last") or [], sorted({*others} - {""}))
        return Outcome(code, reason, first.get("last") or [], [] if code in COLLECTIVE_EXIT_CODES else [name])

    def _why(self, state: dict, name: str) -> str:
        """What a rank's status says of its end, where that is not the rank's own message."""
        number = state["exit"] - 128
        if state.get("out_of_memory"):
            return f" (signal 9) while the kernel's OOM killer struck: out of memory, see dmesg on {name}"
        if number == signal.SIGKILL:
            return f" (signal 9): killed by hand, by the scheduler, or for want of memory (see dmesg on {name})"
        if number > 0:
            return f" (signal {number})"
        if state["exit"] == EXIT_INTERRUPTED and not self.interrupts:
            return ": it was sent a signal, and not by this launch"
        return ""

    @staticmethod
    def _last_lines(state: dict) -> list[str]:
        with contextlib.suppress(OSError):
            return Path(state["log"]).read_text(errors="replace").splitlines()[-rank_module.LAST_LINES :]
        return []

    def _failed(self, reason: str, views: dict[str, dict], nodes: list[str]) -> Outcome:
        last: list[str] = []
        states = [state for name in nodes or views for state in views.get(name, {}).get("ranks", ())]
        for state in states:
            last = state.get("last") or self._last_lines(state)
        return Outcome(EXIT_FAILED, reason, last, nodes)

    def _end_all(self, grace: float) -> None:
        """Stop the run on every node that answers, and the launcher here."""
        if self.process is not None and self.context.launcher == "deepspeed":
            self._kill_launcher()  # first: nothing that ends on a node must make it act
        self.fleet.ask("stop", {"launch": self.id, "grace": grace}, timeout=grace + 8)
        if self.process is not None:
            self._kill_launcher()

    def _kill_launcher(self) -> None:
        if self.process.poll() is None:
            with contextlib.suppress(OSError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
