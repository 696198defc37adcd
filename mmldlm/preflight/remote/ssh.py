"""Talk to the agents: one ssh session a node, kept open, all nodes at the same time."""

from __future__ import annotations

import json
import os
import queue
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mmldlm.preflight.remote.agent import MARK

ROOT = Path(__file__).resolve().parents[3]
CONNECT_SECONDS = 5
START_SECONDS = 20.0
# Logins that start at the same time; sshd's default MaxStartups drops connections above 10 that are not logged in yet,
# but that counts for one server, and each server here sees one.
FAN_OUT = 64
_KEPT = 2000  # bytes of what a login shell printed

_NO_CWD, _NO_PYTHON = 70, 71
BOOTSTRAP = (
    "cd {cwd} 2>/dev/null || exit 70; [ -x {python} ] || command -v {python} >/dev/null || exit 71; "
    "exec {python} -c {code}"
)
_CODE = "import sys; sys.path.insert(0, {root!r}); from {module} import main; sys.exit(main())"

# What ssh writes (OpenSSH 7 to 10), and what it means.
_CAUSES = (
    ("name", ("Could not resolve hostname",)),
    ("key_changed", ("REMOTE HOST IDENTIFICATION HAS CHANGED",)),
    ("key_unknown", ("Host key verification failed", "host key is known for")),
    ("denied", ("Permission denied", "Too many authentication failures")),
    ("refused", ("Connection refused",)),
    ("unreachable", ("Connection timed out", "No route to host", "Network is unreachable", "Operation timed out")),
    ("closed", ("Connection closed by", "Connection reset by", "kex_exchange_identification")),
)


@dataclass
class AgentFailure(Exception):
    """A node that gave no (more) answer.

    cause: name, key_unknown, key_changed, denied, refused, unreachable, closed, mtu, cwd, python, import, shell, silent
        or ended.
    said: last line of what ssh or the node wrote.
    """

    cause: str
    said: str

    def __str__(self) -> str:
        return f"{self.cause}: {self.said}"


def classify(code: int | None, stderr: str, printed: bytes | None = b"") -> AgentFailure:
    """Why an agent did not start, from ssh's status, what it wrote, and what came before the agent's first word.

    printed is None for an agent that had started.
    """
    lines = [line for line in stderr.strip().splitlines() if line.strip()]
    last = lines[-1].strip() if lines else f"status {code}"
    if code == _NO_CWD:
        return AgentFailure("cwd", os.getcwd())
    if code == _NO_PYTHON:
        return AgentFailure("python", sys.executable)
    if code == 255:
        for cause, marks in _CAUSES:
            hit = next((line.strip() for line in lines if any(mark in line for mark in marks)), None)
            if hit is not None:
                return AgentFailure(cause, hit)
        return AgentFailure("ended", last)
    if printed is None:
        return AgentFailure("ended", last)
    if not lines:  # Python would have written why: the login shell never came to start it
        return AgentFailure("shell", f"its login shell ended with status {code}{_instead(printed)}")
    return AgentFailure("import", last)


def _instead(printed: bytes | None) -> str:
    """The end of what a login shell printed where the agent's first word was due, without control characters."""
    text = "".join(c if c.isprintable() else " " for c in (printed or b"").decode(errors="replace")).strip()
    return f", after printing '{text[-120:]}'" if text else ""


def _answer_in(line: bytes) -> dict | None:
    """The agent's answer in a line, wherever it begins: a shell may have printed before it on the same line."""
    _, mark, answer = line.partition(MARK.encode())
    try:
        return json.JSONDecoder().raw_decode(answer.decode())[0] if mark else None
    except ValueError:
        return None


def ssh_command(name: str, port: int | None, options: Iterable[str] = (), connect: int = CONNECT_SECONDS) -> list[str]:
    """ssh that asks nothing and gives up after `connect` seconds."""
    batch = ["-o", "BatchMode=yes", "-o", f"ConnectTimeout={connect}", "-o", "ServerAliveInterval=5", "-T"]
    return ["ssh", *batch, *(["-p", str(port)] if port else []), *options, name]


class Agent:
    """The agent of one node. Requests may come from any thread, one at a time."""

    def __init__(
        self,
        name: str,
        local: bool = False,
        port: int | None = None,
        options: Iterable[str] = (),
        module: str = "mmldlm.preflight.remote.agent",
        connect: int = CONNECT_SECONDS,
    ):
        self.name, self.local = name, local
        python = shlex.quote(sys.executable)
        code = _CODE.format(root=str(ROOT), module=module)
        stub = BOOTSTRAP.format(cwd=shlex.quote(os.getcwd()), python=python, code=shlex.quote(code))
        self._command = ["sh", "-c", stub] if local else [*ssh_command(name, port, options, connect), stub]
        self._answers: queue.Queue = queue.Queue()
        self._stderr: list[str] = []
        self._printed: bytes | None = b""  # the end of what came before the agent's first word; None after that
        self._process: subprocess.Popen | None = None
        self._number = 0
        self._lock = threading.Lock()

    def start(self) -> None:
        """Log in and wait for the agent's first word.

        Raises:
            AgentFailure: with the cause.
        """
        self._process = subprocess.Popen(
            self._command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C ends the head, which closes their input; not the sessions one by one
        )
        threading.Thread(target=self._read_answers, daemon=True).start()
        self._errors = threading.Thread(target=self._read_errors, daemon=True)
        self._errors.start()
        self._wait(START_SECONDS, "started no agent")

    def request(self, action: str, args: dict | None = None, timeout: float = 30) -> Any:
        """Value of an action of the agent.

        Raises:
            AgentFailure: no answer in time, or the session ended. RuntimeError: the action failed there.
        """
        with self._lock:
            self._number += 1
            try:
                request = json.dumps({"id": self._number, "do": action, "args": args or {}}) + "\n"
                self._process.stdin.write(request.encode())
                self._process.stdin.flush()
            except (OSError, ValueError):
                pass  # the session is gone; _wait says how
            answer = self._wait(timeout, f"did not answer '{action}'")
            while answer.get("id") != self._number:  # a late answer to a request that was given up
                answer = self._wait(timeout, f"did not answer '{action}'")
        if "error" in answer:
            raise RuntimeError(f"{self.name}: {answer['error']}")
        return answer["value"]

    def _wait(self, timeout: float, what: str) -> dict:
        try:
            answer = self._answers.get(timeout=timeout)
        except queue.Empty:
            instead = _instead(self._printed)
            raise AgentFailure("shell" if instead else "silent", f"{what} within {timeout:.0f} s{instead}") from None
        if answer is None:
            self._answers.put(None)
            code = self._process.wait()
            self._errors.join(1)
            raise classify(code, "".join(self._stderr), self._printed)
        return answer

    def _read_answers(self) -> None:
        waiting = b""
        while chunk := self._process.stdout.read1(1 << 16):
            if self._printed is not None:  # by chunks, not lines: what a shell prints may never end its line
                self._printed = (self._printed + chunk)[-_KEPT:]
            *lines, waiting = (waiting + chunk).split(b"\n")
            for answer in filter(None, map(_answer_in, lines)):
                self._printed = None
                self._answers.put(answer)
        self._answers.put(None)

    def _read_errors(self) -> None:
        for line in self._process.stderr:
            self._stderr.append(line.decode(errors="replace"))

    def stop(self) -> None:
        """End the session; the agent ends with its input."""
        if self._process is not None:
            try:
                self._process.stdin.close()
            except OSError:
                pass
            try:
                self._process.wait(0.5)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()


class AgentPool:
    """All agents; what one node does or does not answer never stops the others.

    Attributes:
        failures: node -> AgentFailure of those that are out; they are asked nothing more.
    """

    def __init__(self, agents: list[Agent]):
        self.agents = {agent.name: agent for agent in agents}
        self.failures: dict[str, AgentFailure] = {}
        self.errors: dict[tuple[str, str], str] = {}
        self._pool = ThreadPoolExecutor(max(len(agents), 1))
        self._login = threading.Semaphore(FAN_OUT)

    def start(self) -> None:
        """Start every agent at the same time."""

        def begin(agent: Agent):
            with self._login:
                agent.start()

        self._each(self.agents, begin, "start")

    def ask(self, action: str, args: dict | Callable[[str], dict] | None = None, timeout: float = 30) -> dict[str, Any]:
        """node -> value of an action, of the nodes that answered. `args` may depend on the node's name."""

        def one(agent: Agent):
            return agent.request(action, args(agent.name) if callable(args) else args, timeout)

        return self._each([name for name in self.agents if name not in self.failures], one, action)

    def _each(self, names: Iterable[str], work: Callable[[Agent], Any], what: str) -> dict[str, Any]:
        pending = {name: self._pool.submit(work, self.agents[name]) for name in names}
        values = {}
        for name, future in pending.items():
            try:
                values[name] = future.result()
            except AgentFailure as failure:
                self.failures[name] = failure
            except RuntimeError as error:
                self.errors[(name, what)] = str(error)
        return values

    def clocks(self, times: int = 5) -> dict[str, tuple[float, float]]:
        """node -> (its clock minus the head's, half the round trip), both in seconds; the fastest of some exchanges."""

        def offset(agent: Agent) -> tuple[float, float]:
            best = (0.0, float("inf"))
            for _ in range(times):
                before = time.time()
                theirs = agent.request("clock", timeout=10)
                after = time.time()
                if (after - before) / 2 < best[1]:
                    best = (theirs - (before + after) / 2, (after - before) / 2)
            return best

        return self._each([name for name in self.agents if name not in self.failures], offset, "clock")

    def stop(self) -> None:
        """End all sessions."""
        for future in [self._pool.submit(agent.stop) for agent in self.agents.values()]:
            future.result()
        self._pool.shutdown()
