"""Start the ranks of real trainings quickly, for tests and benchmarks.

A rank is a process of its own that runs `mmldlm/train.py` (or a script around it) as a launcher
would start it, with RANK, WORLD_SIZE and MASTER_* in its environment. Ranks are forked from one
process that has already imported torch and deepspeed: a start then takes a tenth of a second
instead of ten, and a benchmark may start hundreds. The workers of a test session and the
benchmarks that they start share one server (MMLDLM_RANK_SERVER).
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import pkgutil
import random
import runpy
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from mmldlm.utils.gpus import VISIBLE, count_visible_gpus

ROOT = Path(__file__).resolve().parents[2]
TRAIN = ROOT / "mmldlm" / "train.py"
SHARED = "MMLDLM_RANK_SERVER"
"""Variable with the socket of a server that a RankServer uses instead of one of its own."""


class Ranks:
    """The processes of one training; index = rank."""

    def __init__(self, server: RankServer, pids: list[int], logs: list[Path]):
        self._server, self.pids, self._logs = server, pids, logs
        self._codes: list[int | None] = [None] * len(pids)

    def codes(self) -> list[int | None]:
        """Exit codes so far: None while a rank runs, -9 after SIGKILL."""
        running = [pid for pid, code in zip(self.pids, self._codes) if code is None]
        found = self._server.ask(poll=running) if running else {}
        self._codes = [
            found.get(str(pid)) if code is None else code
            for pid, code in zip(self.pids, self._codes)
        ]
        return self._codes

    def kill(self, rank: int) -> None:
        """Send SIGKILL if the rank still runs.

        Only this class reaps it, so the pid is still its own.
        """
        if self._codes[rank] is None:
            os.kill(self.pids[rank], signal.SIGKILL)

    def wait(self, timeout: float, grace: float = 60.0) -> list[int]:
        """Wait for all ranks and return their exit codes.

        Ranks that still run after `timeout` seconds, or `grace` seconds after the first failure,
        are killed.
        """
        started = time.monotonic()
        deadline = started + timeout
        while None in (codes := self.codes()):
            now = time.monotonic()
            if any(codes):
                deadline = min(deadline, now + grace)
                grace = float("inf")
            if now > deadline:
                for rank in range(len(codes)):
                    self.kill(rank)
            # Asking takes half a millisecond of CPU: less often, the longer it takes.
            time.sleep(min(max((now - started) / 20, 0.02), 0.2))
        return codes

    def output(self, most: int = 3000) -> str:
        """The last `most` characters that each rank printed."""
        return "\n".join(
            f"--- rank {rank}\n{path.read_text()[-most:]}" for rank, path in enumerate(self._logs)
        )


class RankServer:
    """Starts ranks. Use as a context manager: entering it waits for the server, leaving it ends
    all of them.

    Args:
        logs: folder for what the ranks print.
        ranks: most ranks of a training. Where there are fewer GPUs, all trainings run on the CPU.

    Attributes:
        address: path of the server's socket, for SHARED.
    """

    def __init__(self, logs: str | Path, ranks: int = 4):
        self._logs, self._num_started = Path(logs), 0
        self._lock = threading.Lock()  # several threads may each run a training
        self._logs.mkdir(parents=True, exist_ok=True)
        self._process, self.address = None, os.environ.get(SHARED)
        if self.address is None:
            self._folder = tempfile.TemporaryDirectory(prefix="mmldlm_ranks_")
            self.address = f"{self._folder.name}/socket"
            self._process = _start_server(self.address, count_visible_gpus() >= ranks)

    def __enter__(self) -> RankServer:
        self._socket = self._connect()
        self._answers = self._socket.makefile(encoding="utf-8")
        return self

    def _connect(self, timeout: float = 300.0) -> socket.socket:
        deadline = time.monotonic() + timeout
        while True:
            connection = socket.socket(socket.AF_UNIX)
            try:
                connection.connect(self.address)
                return connection
            except (FileNotFoundError, ConnectionRefusedError):  # it still imports torch
                connection.close()
            has_exited = self._process is not None and self._process.poll() is not None
            if has_exited or time.monotonic() > deadline:
                raise RuntimeError(
                    "the process that forks ranks did not start; its message is above"
                )
            time.sleep(0.05)

    def __exit__(self, *_: object) -> None:
        self._answers.close()
        self._socket.shutdown(socket.SHUT_WR)
        self._socket.recv(1)  # until the server has ended this connection's ranks
        self._socket.close()
        if self._process is not None:
            self._process.stdin.close()
            self._process.wait()
            self._folder.cleanup()

    def ask(self, **request) -> dict:
        with self._lock:
            self._socket.sendall(json.dumps(request).encode() + b"\n")
            answer = self._answers.readline()
        if not answer:
            raise RuntimeError("the process that forks the ranks has exited; its message is above")
        return json.loads(answer)

    def start(self, world_size: int, words: list[str], script: Path = TRAIN) -> Ranks:
        """Start `script words` on world_size ranks of this machine."""
        shared = {
            "WORLD_SIZE": str(world_size),
            "LOCAL_WORLD_SIZE": str(world_size),
            "MASTER_ADDR": "127.0.0.1",
        }
        shared["MASTER_PORT"] = str(_rendezvous_port())
        with self._lock:
            self._num_started += 1
            logs = [
                self._logs / f"{self._num_started:04d}_rank{rank}.txt"
                for rank in range(world_size)
            ]
        pids = []
        for rank in range(world_size):
            environment = {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            answer = self.ask(
                script=str(script),
                words=[str(word) for word in words],
                environment=environment,
                log=str(logs[rank]),
            )
            pids.append(answer["pid"])
        return Ranks(self, pids, logs)

    def run_command(
        self,
        script: Path,
        words: list[str],
        *,
        cwd: Path,
        environment: dict[str, str | None],
        timeout: float,
    ) -> tuple[int, str]:
        """Run `script words` once, in a session of its own; return its exit code and its output.

        Args:
            cwd: working folder of the command.
            environment: variables to set; None removes one.

        Raises:
            TimeoutError: no end after `timeout` seconds. Everything that the command started is
                ended.
        """
        with self._lock:
            self._num_started += 1
            log = self._logs / f"{self._num_started:04d}_command.txt"
        request = {
            "script": str(script),
            "words": words,
            "environment": environment,
            "log": str(log),
        }
        pid = self.ask(**request, cwd=str(cwd), own_session=True)["pid"]
        ranks, deadline = Ranks(self, [pid], [log]), time.monotonic() + timeout
        while (code := ranks.codes()[0]) is None:
            if time.monotonic() > deadline:
                os.killpg(pid, signal.SIGKILL)
                ranks.wait(10)
                raise TimeoutError(f"no end after {timeout} s:\n{ranks.output()}")
            time.sleep(0.03)
        return code, log.read_text(encoding="utf-8", errors="replace")

    def run(
        self, world_size: int, words: list[str], script: Path = TRAIN, timeout: float = 1800
    ) -> None:
        """Start ranks and wait for them; exits this program when a rank failed."""
        ranks = self.start(world_size, words, script)
        codes = ranks.wait(timeout)
        if any(codes):
            sys.exit(
                f"{script} {' '.join(map(str, words))}\nended with {codes}:\n{ranks.output()}"
            )


def _rendezvous_port() -> int:
    """A free port below those that the system gives to outgoing connections, of which gloo opens
    many.
    """
    while True:
        port = random.SystemRandom().randrange(15_000, 32_000)
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port


# -- the process from which ranks are forked ------------------------------------------------------


def _start_server(address: str, on_gpus: bool) -> subprocess.Popen:
    """Start a server that ends with this process; it listens once it has imported torch."""
    inherited = os.environ.get("PYTHONPATH")
    environment = {
        **os.environ,
        # thread pools of ranks on one machine would fight for its cores
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(ROOT), *([inherited] if inherited else [])]),
    }
    if not on_gpus:
        environment |= {VISIBLE: "", "DS_ACCELERATOR": "cpu"}
    return subprocess.Popen(
        [sys.executable, __file__, address],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
    )


def _serve(address: str) -> dict | None:
    """Answer the requests of all connections until the parent ends (None); in a forked rank,
    return the request it must run.

    The ranks of a connection end with it.
    """
    _import_what_ranks_need()
    if not os.path.exists(os.path.dirname(address)):
        return None  # the parent ended meanwhile, as pytest does for a wrong argument
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address)
    listener.listen()
    selector, children = selectors.DefaultSelector(), dict[socket.socket, set[int]]()
    selector.register(listener, selectors.EVENT_READ)
    selector.register(sys.stdin, selectors.EVENT_READ)
    while True:
        for key, _ in selector.select():
            if key.fileobj is sys.stdin:
                for pids in children.values():
                    _end(pids)
                return None
            if key.fileobj is listener:
                connection, _ = listener.accept()
                children[connection] = set()
                selector.register(connection, selectors.EVENT_READ, connection.makefile())
                continue
            line = ""
            with contextlib.suppress(ConnectionError):  # a killed client, as one that has left
                line = key.data.readline()
            if not line:
                selector.unregister(key.fileobj)
                _end(children.pop(key.fileobj))
                key.data.close()
                key.fileobj.close()
                continue
            request = json.loads(line)
            if "poll" in request:
                answer = _poll(request["poll"], children[key.fileobj])
            else:
                pid = os.fork()
                if pid == 0:
                    for inherited in list(selector.get_map().values()):
                        if inherited.data is not None:
                            inherited.data.close()
                            inherited.fileobj.close()
                    return request
                children[key.fileobj].add(pid)
                answer = {"pid": pid}
            with contextlib.suppress(ConnectionError):
                key.fileobj.sendall(json.dumps(answer).encode() + b"\n")


def _poll(pids: list[int], children: set[int]) -> dict[int, int | None]:
    """Return the exit codes of children, None of those that run; forget those that do not."""
    codes = {}
    for pid in pids:
        done, status = os.waitpid(pid, os.WNOHANG)
        codes[pid] = os.waitstatus_to_exitcode(status) if done else None
        if done:
            children.discard(pid)
    return codes


def _end(pids: set[int]) -> None:
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


# Slow modules that a rank imports (torch's compiler too: torch's optimizers import it).
_SLOW_IMPORTS = """
matplotlib.backends.backend_agg matplotlib.pyplot fsspec networkx torch._dynamo torch.onnx
torch.distributed.checkpoint torch.distributed.fsdp torch.utils.serialization.config
deepspeed.module_inject.auto_ep_layer deepspeed.runtime.superoffload.superoffload_stage3
transformers.models.auto.modeling_auto transformers.models.auto.tokenization_auto
transformers.models.bert.modeling_bert transformers.models.t5.modeling_t5
""".split()  # noqa: E501


def _import_what_ranks_need() -> None:
    # an import may initialize CUDA, which does not survive a fork: every rank imports for itself
    if count_visible_gpus() > 0:
        return
    import mmldlm
    from mmldlm.engines.deepspeed import import_deepspeed

    import_deepspeed()
    own = [module.name for module in pkgutil.walk_packages(mmldlm.__path__, "mmldlm.")]
    for name in _SLOW_IMPORTS + [name for name in own if not name.endswith(".__main__")]:
        importlib.import_module(name)
    # A collection in a forked rank would touch, and so copy, every page of these modules: 1.5 s of
    # CPU per command.
    gc.freeze()


def _become(request: dict) -> None:
    """Turn a fresh fork into a rank: its output, its environment, its command line."""
    for path, flags, numbers in (
        ("/dev/null", os.O_RDONLY, (0,)),
        (request["log"], os.O_WRONLY | os.O_CREAT, (1, 2)),
    ):
        opened = os.open(path, flags, 0o644)
        for number in numbers:
            os.dup2(opened, number)
        os.close(opened)
    if request.get("own_session"):
        os.setsid()
    if "cwd" in request:
        os.chdir(request["cwd"])
    for name, value in request["environment"].items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    sys.argv = [request["script"], *request["words"]]
    sys.path[0] = str(Path(request["script"]).parent)
    if added := request["environment"].get("PYTHONPATH"):  # what is imported already stays
        sys.path[1:1] = added.split(os.pathsep)


def _run(script: str) -> int:
    """Run a script as python would; return its exit code."""
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        print(end.code, file=sys.stderr)
        return 1
    except Exception:
        sys.excepthook(*sys.exc_info())
        return 1
    return 0


if __name__ == "__main__":
    request = _serve(sys.argv[1])
    if request is not None:
        _become(request)
        code = _run(request["script"])
        from mmldlm.distributed.error_reporting import exit_without_teardown

        threading._shutdown()  # a command that hangs at its end hangs here too
        # The teardown would touch, and so copy, every page of the modules: half a second of CPU.
        exit_without_teardown(code & 0xFF)
