"""Real trainings for the benchmarks: their settings, their ranks, their logs.

A rank is a process of its own that runs `mmldlm/train.py` (or a script around it) as a launcher would start it, with
RANK, WORLD_SIZE and MASTER_* in its environment. Ranks are forked from one process that has imported torch and
deepspeed already: a start then costs a tenth of a second and not ten, and a benchmark may start hundreds.
"""

from __future__ import annotations

import importlib
import json
import os
import random
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TRAIN = ROOT / "mmldlm" / "train.py"
GLOBAL_BATCH, ACCUMULATION = 8, 2

ENGINES: dict[str, list[str]] = {
    "single": ["engine.kind=single"],
    "ddp": ["engine.kind=ddp"],
    "fsdp": ["engine.kind=fsdp"],
    "hsdp": ["engine.kind=fsdp", "engine.replicas=2"],
    **{f"zero{stage}": [f"engine.zero_stage={stage}"] for stage in range(4)},
    "zero3_offload": [f"engine.deepspeed_config={ROOT / 'ds_configs' / 'zero3_offload.json'}"],
}


def settings(data: str, folder: str | Path, name: str, world_size: int, *more: str) -> list[str]:
    """Command line of a tiny training; the global batch is the same whatever the world size."""
    return [
        "--config-name",
        "tiny",
        f"data.latent_data_root={data}",
        "data.max_validation_samples=16",
        f"logging.save_dir={folder}",
        f"logging.run_name={name}",
        f"training.train_batch_size={GLOBAL_BATCH // ACCUMULATION // world_size}",
        f"training.grad_accum_steps={ACCUMULATION}",
        "model.tie_embeddings=true",  # a weight shared by two modules is where partitioning goes wrong first
        "logging.plot=false",  # 0.7 s, most of a tiny run
        "logging.log_freq=1000000",
        "logging.save_freq=1000000",  # both happen at the end anyway
        "logging.eval_freq=1000000",
        *more,
    ]


def read_log(run_dir: str | Path, file: str = "training_log.jsonl") -> list[dict]:
    """Whole lines of a run's log, [] before it exists; a line being written is left out."""
    path = Path(run_dir) / file
    if not path.exists():
        return []
    *lines, _ = path.read_text().split("\n")
    return [json.loads(line) for line in lines]


def losses(run_dir: str | Path) -> dict[int, float]:
    """step -> loss of a run."""
    return {record["step"]: record["loss"] for record in read_log(run_dir)}


def loss_difference(found: dict[int, float], reference: dict[int, float], first: int, last: int) -> float:
    """Largest relative difference over the steps first .. last; infinite where a step or a finite loss is missing."""
    worst = 0.0
    for step in range(first, last + 1):
        ours, theirs = found.get(step), reference.get(step)
        if ours is None or theirs is None:
            return float("inf")
        worst = max(worst, abs(ours - theirs) / abs(theirs))
    return worst


class Ranks:
    """The processes of one training."""

    def __init__(self, launcher: Launcher, pids: list[int], logs: list[Path]):
        self._launcher, self.pids, self._logs = launcher, pids, logs
        self._codes: list[int | None] = [None] * len(pids)

    def codes(self) -> list[int | None]:
        """Exit codes so far: None of a rank that runs, -9 of a killed one."""
        running = [pid for pid, code in zip(self.pids, self._codes) if code is None]
        found = self._launcher.ask(poll=running) if running else {}
        self._codes = [found.get(str(pid)) if code is None else code for pid, code in zip(self.pids, self._codes)]
        return self._codes

    def kill(self, rank: int) -> None:
        """SIGKILL, if it still runs. Nothing else reaps it, so its id is its own."""
        if self._codes[rank] is None:
            os.kill(self.pids[rank], signal.SIGKILL)

    def wait(self, timeout: float, grace: float = 60.0) -> list[int]:
        """Exit codes when all have ended; what is left is killed after timeout seconds, or grace after a failure."""
        deadline = time.monotonic() + timeout
        while None in (codes := self.codes()):
            if any(codes):
                deadline = min(deadline, time.monotonic() + grace)
                grace = float("inf")
            if time.monotonic() > deadline:
                for rank in range(len(codes)):
                    self.kill(rank)
            time.sleep(0.02)
        return codes

    def output(self, most: int = 3000) -> str:
        """The end of what each rank printed, in characters at most."""
        return "\n".join(f"--- rank {rank}\n{path.read_text()[-most:]}" for rank, path in enumerate(self._logs))


class Launcher:
    """Starts ranks. Use as a context manager; on leaving, all of them end."""

    def __init__(self, logs: str | Path):
        self._logs, self._num_started = Path(logs), 0
        self._lock = threading.Lock()  # several threads may each run a training
        self._logs.mkdir(parents=True, exist_ok=True)
        inherited = os.environ.get("PYTHONPATH")
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",  # thread pools of ranks on one machine would fight for its cores
            "PYTHONPATH": os.pathsep.join([str(ROOT), *([inherited] if inherited else [])]),
        }
        if not _has_gpu():
            environment["DS_ACCELERATOR"] = "cpu"
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self._server = subprocess.Popen([sys.executable, __file__], env=environment, text=True, **pipes)

    def __enter__(self) -> Launcher:
        return self

    def __exit__(self, *_: object) -> None:
        self._server.stdin.close()
        self._server.wait()
        self._server.stdout.close()

    def ask(self, **request) -> dict:
        with self._lock:
            self._server.stdin.write(json.dumps(request) + "\n")
            self._server.stdin.flush()
            answer = self._server.stdout.readline()
        if not answer:
            raise RuntimeError("the process that forks the ranks is gone; its message is above")
        return json.loads(answer)

    def start(self, world_size: int, words: list[str], script: Path = TRAIN) -> Ranks:
        """Start `script words` on some ranks of this machine."""
        shared = {"WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": str(world_size), "MASTER_ADDR": "127.0.0.1"}
        shared["MASTER_PORT"] = str(_free_port())
        with self._lock:
            self._num_started += 1
            logs = [self._logs / f"{self._num_started:04d}_rank{rank}.txt" for rank in range(world_size)]
        pids = []
        for rank in range(world_size):
            environment = {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            answer = self.ask(
                script=str(script), words=[str(word) for word in words], environment=environment, log=str(logs[rank])
            )
            pids.append(answer["pid"])
        return Ranks(self, pids, logs)

    def run(self, world_size: int, words: list[str], script: Path = TRAIN, timeout: float = 1800) -> None:
        """Start and wait; ends this program when a rank failed."""
        ranks = self.start(world_size, words, script)
        codes = ranks.wait(timeout)
        if any(codes):
            sys.exit(f"{script} {' '.join(map(str, words))}\nended with {codes}:\n{ranks.output()}")


def _has_gpu() -> bool:
    return os.path.exists("/dev/nvidiactl")


def _free_port() -> int:
    """Below the ports that the system gives to outgoing connections, which gloo opens many of."""
    while True:
        port = random.SystemRandom().randrange(15_000, 32_000)
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port


# -- the process that ranks are forked from ----------------------------------------------------------------------------


def _serve() -> dict | None:
    """Answer requests until the benchmark ends (None); in a forked rank, return the request that it is to run."""
    _import_what_ranks_need()
    children: set[int] = set()
    for line in sys.stdin:
        request = json.loads(line)
        if "poll" in request:
            answer = {}
            for pid in request["poll"]:
                done, status = os.waitpid(pid, os.WNOHANG)
                answer[pid] = os.waitstatus_to_exitcode(status) if done else None
                children.discard(done)
        else:
            pid = os.fork()
            if pid == 0:
                return request
            children.add(pid)
            answer = {"pid": pid}
        print(json.dumps(answer), flush=True)
    for pid in children:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    return None


# What a rank imports on its way (torch's compiler too: deepspeed and torch's optimizers look at it).
_PRELOADED = """
matplotlib.backends.backend_agg matplotlib.pyplot fsspec networkx torch._dynamo torch._inductor.compile_fx torch.onnx
torch.distributed.checkpoint torch.distributed.fsdp mmldlm.train mmldlm.models mmldlm.training.checkpointer
mmldlm.checkpoints.init_from mmldlm.checkpoints.resume_reader mmldlm.tasks.translation.embedding_init mmldlm.engines.ddp
mmldlm.engines.deepspeed.engine mmldlm.engines.fsdp mmldlm.distributed.heartbeat mmldlm.engines.single
mmldlm.tasks.translation.validation mmldlm.tasks.translation.freezing
""".split()


def _import_what_ranks_need() -> None:
    if _has_gpu():  # CUDA may be started by an import, and does not survive a fork: let every rank import by itself
        return
    for name in _PRELOADED:
        importlib.import_module(name)
    from mmldlm.engines.deepspeed.engine import import_deepspeed

    import_deepspeed()


def _become(request: dict) -> None:
    """Turn a fresh fork into a rank: its output, its environment, its command line."""
    for path, flags, numbers in (("/dev/null", os.O_RDONLY, (0,)), (request["log"], os.O_WRONLY | os.O_CREAT, (1, 2))):
        opened = os.open(path, flags, 0o644)
        for number in numbers:
            os.dup2(opened, number)
        os.close(opened)
    os.environ.update(request["environment"])
    sys.argv = [request["script"], *request["words"]]
    sys.path[0] = str(Path(request["script"]).parent)


if __name__ == "__main__":
    order = _serve()
    if order is not None:
        _become(order)
        runpy.run_path(order["script"], run_name="__main__")
