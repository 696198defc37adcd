"""Agents on the nodes: one persistent ssh session per node, all nodes in parallel.

`Agent` and `AgentPool` are the head's end of the sessions, `serve` is the node's. A request is one
line of JSON; an answer follows MARK, which distinguishes it from the output of the login shell.
"""

from __future__ import annotations

import json
import os
import queue
import resource
import select
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mmldlm.errors import UserError
from mmldlm.utils.resources import raise_open_files

MARK = "@mmldlm "
ROOT = Path(__file__).resolve().parents[2]
CONNECT_SECONDS = 5
START_SECONDS = 20.0
# Simultaneous logins; each server sees only one, far below sshd's MaxStartups.
FAN_OUT = 64
# Files that the head has open beside the sessions, with a margin.
_OTHER_FILES = 100
# Bytes of the login shell's output that are kept.
_KEPT_BYTES = 2000
_NO_CWD, _NO_PYTHON = 70, 71
# What the dynamic loader says of an interpreter that it cannot start.
_NO_LIBRARY = "error while loading shared libraries"
# For sh, not for the login shell: csh and fish read redirections and tests in another way.
BOOTSTRAP = (
    "cd {cwd} 2>/dev/null || exit 70; [ -x {python} ] || command -v {python} >/dev/null || exit"
    " 71; {exports}exec {python} -c {code}"
)
# A login over ssh does not load the environment modules of this shell, without whose libraries
# their Python does not start. The login's own value is kept for the probe `environment`.
LOGIN_LIBRARIES = "MMLDLM_LOGIN_LD_LIBRARY_PATH"
_EXPORT_LIBRARIES = (
    "export " + LOGIN_LIBRARIES + '="$LD_LIBRARY_PATH"; export LD_LIBRARY_PATH={libraries}; '
)
# The working folder, which -c puts on the path, is left out: a random.py of the user there would
# replace Python's.
_CODE = (
    "import sys; sys.path[:] = [{root!r}, *filter(None, sys.path)]; from {module} import main;"
    " sys.exit(main())"
)
# Causes of failure and the messages of OpenSSH 7 to 10.
_CAUSES = (
    ("name", ("Could not resolve hostname",)),
    ("key_changed", ("REMOTE HOST IDENTIFICATION HAS CHANGED",)),
    ("key_unknown", ("Host key verification failed", "host key is known for")),
    ("denied", ("Permission denied", "Too many authentication failures")),
    ("refused", ("Connection refused",)),
    (
        "unreachable",
        (
            "Connection timed out",
            "No route to host",
            "Network is unreachable",
            "Operation timed out",
        ),
    ),
    ("closed", ("Connection closed by", "Connection reset by", "kex_exchange_identification")),
)


@dataclass
class AgentFailure(Exception):
    """A node whose agent does not answer.

    Attributes:
        cause: Cause of the failure: client (no ssh here), name, key_unknown, key_changed, denied,
            refused, unreachable, closed, mtu, cwd, python, library, import, shell, silent or
            ended.
        message: Last line that ssh or the node printed.
    """

    cause: str
    message: str

    def __str__(self) -> str:
        return f"{self.cause}: {self.message}"


def classify(code: int | None, stderr: str, printed: bytes | None = b"") -> AgentFailure:
    """Return why an agent did not start or has ended.

    Args:
        code: Exit status of ssh (or of the agent, on this machine).
        stderr: Error output of ssh and the agent.
        printed: Output before the agent's greeting; None for an agent that had started.
    """
    lines = [line for line in stderr.strip().splitlines() if line.strip()]
    last = lines[-1].strip() if lines else f"status {code}"
    if code == _NO_CWD:
        return AgentFailure("cwd", f"no such folder: {os.getcwd()}")
    if code == _NO_PYTHON:
        return AgentFailure("python", f"no such interpreter: {sys.executable}")
    if missing := next((line for line in lines if _NO_LIBRARY in line), None):
        return AgentFailure("library", missing.strip())
    if code == 255:
        for cause, marks in _CAUSES:
            hit = next(
                (line.strip() for line in lines if any(mark in line for mark in marks)), None
            )
            if hit is not None:
                return AgentFailure(cause, hit)
        return AgentFailure("ended", last)
    if printed is None:
        return AgentFailure("ended", last)
    if not lines:
        # Python would have printed a reason: the login shell did not start it.
        return AgentFailure(
            "shell", f"its login shell ended with status {code}{_shell_output(printed)}"
        )
    return AgentFailure("import", last)


def _shell_output(printed: bytes | None) -> str:
    """Return the end of the login shell's output before the greeting, without control characters,
    for a message.
    """
    text = "".join(
        c if c.isprintable() else " " for c in (printed or b"").decode(errors="replace")
    ).strip()
    return f", after printing '{text[-120:]}'" if text else ""


def _parse_answer(line: bytes) -> dict | None:
    """Return the agent's answer in a line; a shell may have printed text before it on the same
    line.
    """
    _, mark, answer = line.partition(MARK.encode())
    try:
        return json.JSONDecoder().raw_decode(answer.decode())[0] if mark else None
    except ValueError:
        return None


def ssh_command(
    name: str, port: int | None, options: Iterable[str] = (), connect: int = CONNECT_SECONDS
) -> list[str]:
    """Return an ssh command without prompts and with a connection timeout of `connect` seconds.

    The user's options come first: of each, ssh takes the first value that it finds. It uses a
    connection that is shared already (ControlPath), and shares none: other sessions, such as the
    launcher's, would end with it.
    """
    batch = [
        "-o",
        "BatchMode=yes",
        "-o",
        f"ConnectTimeout={connect}",
        "-o",
        "ServerAliveInterval=5",
        "-o",
        "ControlMaster=no",
        "-T",
    ]
    return ["ssh", *options, *batch, *(["-p", str(port)] if port else []), name]


class Agent:
    """Session to the agent of one node. Threads may share it; requests are sent one at a time.

    Args:
        name: Host name for ssh.
        module: Module with a function `main` that calls `serve`.
        local: Whether the agent runs on this machine, without ssh.
        port: Port of sshd; None for the default.
        options: Additional arguments of ssh.
        connect: Timeout of the connection in seconds.
    """

    def __init__(
        self,
        name: str,
        module: str,
        local: bool = False,
        port: int | None = None,
        options: Iterable[str] = (),
        connect: int = CONNECT_SECONDS,
    ):
        self.name, self.local = name, local
        python = shlex.quote(sys.executable)
        code = _CODE.format(root=str(ROOT), module=module)
        libraries = os.environ.get("LD_LIBRARY_PATH")
        exports = _EXPORT_LIBRARIES.format(libraries=shlex.quote(libraries)) if libraries else ""
        bootstrap = BOOTSTRAP.format(
            cwd=shlex.quote(os.getcwd()),
            python=python,
            exports=exports,
            code=shlex.quote(code),
        )
        self.command = (
            ["sh", "-c", bootstrap]
            if local
            else [
                *ssh_command(name, port, options, connect),
                f"exec sh -c {shlex.quote(bootstrap)}",
            ]
        )
        self._answers: queue.Queue = queue.Queue()
        self._stderr: list[str] = []
        # End of the output before the greeting; None after it.
        self._printed: bytes | None = b""
        # subprocess.Popen from start() on; its type would make every pipe optional.
        self._process: Any = None
        self._request_id = 0
        self._lock = threading.Lock()

    def start(self, seconds: float | None = None) -> None:
        """Log in and wait for the agent's greeting.

        Args:
            seconds: Time limit of the greeting (default: START_SECONDS).

        Raises:
            AgentFailure: with the cause.
        """
        try:
            self._process = subprocess.Popen(
                self.command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                # Ctrl-C ends the head, not the sessions, whose input is then closed.
                start_new_session=True,
            )
        except OSError as error:
            raise AgentFailure(
                "client", f"{self.command[0]} cannot be started: {error.strerror}"
            ) from error
        threading.Thread(target=self._read_answers, daemon=True).start()
        self._errors = threading.Thread(target=self._read_errors, daemon=True)
        self._errors.start()
        self._wait(seconds or START_SECONDS, "no agent was started")

    def request(self, action: str, args: dict | None = None, timeout: float = 30) -> Any:
        """Run an action of the agent and return its value.

        Raises:
            AgentFailure: no answer in time, or the session ended.
            RuntimeError: the action failed on the node.
        """
        with self._lock:
            self._request_id += 1
            try:
                request = (
                    json.dumps({"id": self._request_id, "do": action, "args": args or {}}) + "\n"
                )
                self._process.stdin.write(request.encode())
                self._process.stdin.flush()
            except (OSError, ValueError):
                # The session has ended; _wait raises the cause.
                pass
            answer = self._wait(timeout, f"no answer to '{action}'")
            while answer.get("id") != self._request_id:
                # An answer to an abandoned request may arrive late.
                answer = self._wait(timeout, f"no answer to '{action}'")
        if "error" in answer:
            raise RuntimeError(f"{self.name}: {answer['error']}")
        return answer["value"]

    def _wait(self, timeout: float, symptom: str) -> dict:
        """Return the next answer, or raise an AgentFailure."""
        try:
            answer = self._answers.get(timeout=timeout)
        except queue.Empty:
            output = _shell_output(self._printed)
            cause = "shell" if output else "silent"
            raise AgentFailure(cause, f"{symptom} within {timeout:.0f} s{output}") from None
        if answer is None:
            self._answers.put(None)
            code = self._process.wait()
            self._errors.join(1)
            raise classify(code, "".join(self._stderr), self._printed)
        return answer

    def _read_answers(self) -> None:
        partial = b""
        while chunk := self._process.stdout.read1(1 << 16):
            if self._printed is not None:
                # Read in chunks, not lines: a prompt has no line end.
                self._printed = (self._printed + chunk)[-_KEPT_BYTES:]
            *lines, partial = (partial + chunk).split(b"\n")
            for answer in filter(None, map(_parse_answer, lines)):
                self._printed = None
                self._answers.put(answer)
        self._answers.put(None)

    def _read_errors(self) -> None:
        for line in self._process.stderr:
            self._stderr.append(line.decode(errors="replace"))

    def stop(self) -> None:
        """End the session; the agent exits at the end of its input."""
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


def _allow_open_files(num_agents: int) -> None:
    """Let this process open the files that sessions to so many nodes need.

    Raises:
        UserError: the hard limit is lower.
    """
    # Three pipes each, three more and a pipe of Popen for each that is starting, and what else is
    # open.
    needed = 3 * num_agents + 5 * min(num_agents, FAN_OUT) + _OTHER_FILES
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if needed > soft and (hard := raise_open_files()) < needed:
        raise UserError(
            f"a limit of at least {needed:,} open files for sessions to {num_agents:,} nodes",
            f"a hard limit of {hard:,} (ulimit -Hn)",
            "raise it on this machine (nofile in /etc/security/limits.conf, then log in again), or"
            " use fewer nodes",
        )


class AgentPool:
    """The agents of all nodes; a failure of one does not affect the others.

    Args:
        agents: Agents to start, each of another node.

    Raises:
        UserError: this process may not open as many files as their sessions need.

    Attributes:
        agents: Node -> Agent.
        failures: Node -> AgentFailure; these nodes get no further requests.
        errors: (node, action) -> error of an action.
    """

    def __init__(self, agents: list[Agent]):
        _allow_open_files(len(agents))
        self.agents = {agent.name: agent for agent in agents}
        self.failures: dict[str, AgentFailure] = {}
        self.errors: dict[tuple[str, str], str] = {}
        self._executor = ThreadPoolExecutor(max(len(agents), 1))
        self._login = threading.Semaphore(FAN_OUT)

    def start(self) -> None:
        """Start all agents in parallel."""

        def login(agent: Agent) -> None:
            with self._login:
                agent.start()

        self._each(self.agents, login, "start")

    def call(
        self, action: str, args: dict | Callable[[str], dict] | None = None, timeout: float = 30
    ) -> dict[str, Any]:
        """Run an action on all nodes; return node -> value.

        `args` may be a function of the node name.
        """

        def one(agent: Agent) -> Any:
            return agent.request(action, args(agent.name) if callable(args) else args, timeout)

        return self._each([name for name in self.agents if name not in self.failures], one, action)

    def request(
        self, name: str, action: str, args: dict | None = None, timeout: float = 30
    ) -> Any:
        """Run an action on one node; return its value, None if it failed."""
        return self._each(
            [name] if name not in self.failures else [],
            lambda agent: agent.request(action, args, timeout),
            action,
        ).get(name)

    def _each(
        self, names: Iterable[str], work: Callable[[Agent], Any], action: str
    ) -> dict[str, Any]:
        pending = {name: self._executor.submit(work, self.agents[name]) for name in names}
        values = {}
        for name, future in pending.items():
            try:
                values[name] = future.result()
            except AgentFailure as failure:
                self.failures[name] = failure
            except RuntimeError as error:
                self.errors[(name, action)] = str(error)
        return values

    def clocks(self) -> dict[str, tuple[float, float]]:
        """Return node -> (clock offset to the head, half round trip) in seconds; the fastest of
        five exchanges.
        """

        def offset(agent: Agent) -> tuple[float, float]:
            best = (0.0, float("inf"))
            for _ in range(5):
                before = time.time()
                remote = agent.request("clock", timeout=10)
                after = time.time()
                if (after - before) / 2 < best[1]:
                    best = (remote - (before + after) / 2, (after - before) / 2)
            return best

        return self._each(
            [name for name in self.agents if name not in self.failures], offset, "clock"
        )

    def stop(self) -> None:
        """End all sessions."""
        for future in [self._executor.submit(agent.stop) for agent in self.agents.values()]:
            future.result()
        self._executor.shutdown()


def serve(
    actions: Mapping[str, Callable[[dict], object]], idle_timeout: float | None = None
) -> None:
    """Answer requests until the input ends, or until `idle_timeout` seconds without a request."""
    # The login shell may have printed an incomplete line (a prompt, a terminal title).
    print("\n" + MARK + json.dumps({"hello": os.getpid()}), flush=True)
    partial = b""
    while True:
        if idle_timeout is not None and not select.select([0], [], [], idle_timeout)[0]:
            return
        chunk = os.read(0, 1 << 16)
        if not chunk:
            return
        *lines, partial = (partial + chunk).split(b"\n")
        for line in lines:
            request = json.loads(line)
            try:
                answer = {"value": actions[request["do"]](request.get("args", {}))}
            except Exception as error:
                answer = {"error": f"{type(error).__name__}: {error}"}
            print(MARK + json.dumps({"id": request["id"], **answer}), flush=True)
