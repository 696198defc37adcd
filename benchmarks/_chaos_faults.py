"""Faults that benchmarks/chaos.py injects into a training, and their expected consequences.

A fault is a function that injects it, removes it again where necessary, and returns a Struck. It
may wait for its first effect, never for the recovery.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from _chaos_run import ENGINE_TIMEOUT, SAVE_FREQ, Launch, Training, run_to_end, wait

from tests.support.virtual_cluster import Host

CONTINUES, RETRIED, ENDED = "continues", "is restarted by the launch", "ends"
TRAINING, SAVING, EVALUATING, STARTING = "training", "saving", "evaluating", "starting"
ANY = (TRAINING, SAVING, EVALUATING, STARTING)
RUNNING = (TRAINING, SAVING, EVALUATING)
RANK_OF = {"n1": 0, "n2": 1}  # by the hostfile
INTERRUPTED = 5
START_LIMIT = 90.0  # seconds from the command to the ranks, on a busy machine
END_LIMIT = ENGINE_TIMEOUT + 40  # seconds from a fault to the end of what it ends
IDLE_TIMEOUT = 25.0  # seconds without a request of the head after which nodes end their part


@dataclass
class Struck:
    """An injected fault and its expected consequence.

    Attributes:
        target: the process, host or folder.
        then: the launch continues, restarts by itself, or ends.
        codes: valid exit codes of an attempt that ends; empty: any but 0.
        words: one of these must be on the screen; it names the host or rank.
        graceful: no step may be lost.
        problems: problems found so far.
    """

    target: str
    then: str = CONTINUES
    codes: tuple[int, ...] = ()
    words: tuple[str, ...] = ()
    graceful: bool = False
    problems: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Fault:
    """A kind of fault: strike(training, rng, moment), and the moments at which it may strike."""

    kind: str
    strike: Callable[[Training, random.Random, str], Struck]
    moments: tuple[str, ...] = ANY


# -- processes that are killed --------------------------------------------------------------------


def _any_host(training: Training, rng: random.Random) -> Host:
    return training.cluster[rng.choice(tuple(RANK_OF))]


def _signal(training: Training, host: Host, part: str, number: int, problems: list[str]) -> None:
    """Signal a part of the launch, waiting for it to start."""
    if not wait(lambda: training.pids(host, part), START_LIMIT):
        problems.append(f"there was no {part} on {host.name}")
    training.signal(host, part, number)


def _kill_rank(part: str) -> Callable:
    def strike(training: Training, rng: random.Random, moment: str) -> Struck:
        host = _any_host(training, rng)
        words = (f"rank {RANK_OF[host.name]} on {host.name} ended first, with status 137",)
        struck = Struck(f"{part} on {host.name}", RETRIED, (137,), words)
        _signal(training, host, part, signal.SIGKILL, struck.problems)
        return struck

    return strike


def _kill_both_ranks(training: Training, rng: random.Random, moment: str) -> Struck:
    struck = Struck("ranks on n1 and n2", RETRIED, (137,), ("ended first, with status 137",))
    for name in RANK_OF:
        _signal(training, training.cluster[name], "rank", signal.SIGKILL, struck.problems)
    return struck


def _kill_node_launcher(training: Training, rng: random.Random, moment: str) -> Struck:
    host = _any_host(training, rng)
    words = (f"{host.name}: its launcher ended",)
    struck = Struck(f"launcher of {host.name}", RETRIED, (), words)
    _signal(training, host, "launcher of a node", signal.SIGKILL, struck.problems)
    return struck


def _kill_launcher(training: Training, rng: random.Random, moment: str) -> Struck:
    part = rng.choice(("launcher", "pdsh"))
    struck = Struck(f"{part} on n1", RETRIED, (), ("the launcher ended",))
    _signal(training, training.cluster["n1"], part, signal.SIGKILL, struck.problems)
    return struck


def _kill_agent(training: Training, rng: random.Random, moment: str) -> Struck:
    part = rng.choice(("agent", "session of the watcher"))
    host = _any_host(training, rng) if part == "agent" else training.cluster["n1"]
    struck = Struck(f"{part} on {host.name}")
    _signal(training, host, part, signal.SIGKILL, struck.problems)
    return struck


def _kill_head(training: Training, rng: random.Random, moment: str) -> Struck:
    """Kill the head; the nodes must stop their part by themselves before the user restarts."""
    struck = Struck("head on n1", ENDED, (137,))
    _signal(training, training.cluster["n1"], "head", signal.SIGKILL, struck.problems)
    if not wait(lambda: training.ranks() == 0, END_LIMIT):
        struck.problems.append(
            f"{training.ranks()} rank(s) still train {END_LIMIT:.0f} s after the head was killed"
        )
    return struck


# -- processes that are stopped and continued -----------------------------------------------------


def _stop_for(part: str, shortest: float, longest: float) -> Callable:
    def strike(training: Training, rng: random.Random, moment: str) -> Struck:
        host = training.cluster["n1"] if part == "head" else _any_host(training, rng)
        seconds = rng.uniform(shortest, longest)
        struck = Struck(f"{part} on {host.name} for {seconds:.1f} s")
        _signal(training, host, part, signal.SIGSTOP, struck.problems)
        wait(lambda: False, seconds)
        training.signal(host, part, signal.SIGCONT)
        return struck

    return strike


def _stop_rank_forever(training: Training, rng: random.Random, moment: str) -> Struck:
    """Stop a rank forever; every other rank must report it within engine.collective_timeout."""
    host = _any_host(training, rng)
    rank = f"rank {RANK_OF[host.name]} on {host.name}"
    words = tuple(
        f"{rank} (pid {{}}) {how}" for how in ("has sent no heartbeat", "has made no progress")
    )
    struck = Struck(f"rank on {host.name} until the attempt ends", RETRIED, (), words)
    before = len(training.ends())
    pids = training.pids(host, "rank")
    struck.words = tuple(word.format(_own_pid(pid)) for word in words for pid in pids)
    _signal(training, host, "rank", signal.SIGSTOP, struck.problems)
    wait(lambda: len(training.ends()) > before or training.launch.code() is not None, END_LIMIT)
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)
    return struck


def _own_pid(pid: int) -> int:
    """The pid that a process has in its own namespace."""
    lines = Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines()
    return int(next(line for line in lines if line.startswith("NSpid:")).split()[-1])


def _stop_head_for_long(training: Training, rng: random.Random, moment: str) -> Struck:
    """Stop the head for longer than the nodes wait for a request: they stop their part, and the
    head restarts.
    """
    struck = Struck(f"head on n1 for {IDLE_TIMEOUT + 15:.0f} s", RETRIED)
    _signal(training, training.cluster["n1"], "head", signal.SIGSTOP, struck.problems)
    if not wait(lambda: training.ranks() == 0, IDLE_TIMEOUT + 15):
        struck.problems.append("the nodes continued without a head")
    training.signal(training.cluster["n1"], "head", signal.SIGCONT)
    return struck


# -- the network ----------------------------------------------------------------------------------


def _cut_for_a_moment(training: Training, rng: random.Random, moment: str) -> Struck:
    host, seconds = _any_host(training, rng), rng.uniform(0.5, 3.0)
    with training.cluster.cable_pulled(host):
        wait(lambda: False, seconds)
    return Struck(f"link of {host.name} for {seconds:.1f} s")


def _cut_until_lost(training: Training, rng: random.Random, moment: str) -> Struck:
    """Cut a link; the head on n1 reports n2 in either case.

    Retries fail until the link is back.
    """
    host, more, before = _any_host(training, rng), rng.uniform(0, 8), len(training.ends())
    with training.cluster.cable_pulled(host):
        wait(
            lambda: len(training.ends()) > before or training.launch.code() is not None, END_LIMIT
        )
        wait(lambda: False, more)
    return Struck(
        f"link of {host.name} until n2 is lost and {more:.1f} s more", RETRIED, (), ("n2 is lost",)
    )


# -- the checkpoint folder ------------------------------------------------------------------------


def _until_a_save_fails(
    training: Training, struck: Struck, hurt: contextlib.AbstractContextManager
) -> Struck:
    """Break saving until one save fails (a warning, the run continues); repaired, it must save
    again.
    """
    failed, saved = len(training.events("save_failed")), len(training.events("save"))
    begin = training.last_step()

    def is_over() -> bool:
        return training.launch.code() is not None or training.last_step() > begin + 4 * SAVE_FREQ

    with hurt as hurt_again:

        def is_hurt() -> bool:
            hurt_again()
            return len(training.events("save_failed")) > failed or is_over()

        wait(is_hurt, END_LIMIT + 30)
    if len(training.events("save_failed")) == failed:
        struck.problems.append("no save failed")
    begin, saved = training.last_step(), len(training.events("save"))
    wait(lambda: len(training.events("save")) > saved or is_over(), END_LIMIT)
    if len(training.events("save")) == saved:
        struck.problems.append("no checkpoint was saved after the repair")
    return struck


@contextlib.contextmanager
def _filled(folder: Path, room: int):
    """Leave `room` bytes on the disk of a folder; the yielded function fills freed space again."""
    ballast = folder / ".ballast"

    def fill() -> None:
        found = os.statvfs(folder)
        spare = found.f_bavail * found.f_frsize - room
        if spare > 0:
            with (
                contextlib.suppress(OSError),
                open(ballast, "ab") as file,
            ):
                # A save may take it at the same time.
                os.posix_fallocate(file.fileno(), file.tell(), spare)

    try:
        fill()
        yield fill
    finally:
        ballast.unlink(missing_ok=True)


def _fill_folder(training: Training, rng: random.Random, moment: str) -> Struck:
    # Less than a checkpoint takes, whose size follows from the store's vocabulary.
    files = (training.run_dir / "latest").resolve().rglob("*")
    size = sum(path.stat().st_size for path in files if path.is_file())
    room = rng.choice((0, 2**20, size // 2))
    struck = Struck(f"checkpoints, {room / 2**20:.3g} MiB left")
    return _until_a_save_fails(training, struck, _filled(training.checkpoints, room))


@contextlib.contextmanager
def _read_only(hosts: list[Host], folder: Path):
    with contextlib.ExitStack() as stack:
        for host in hosts:
            stack.enter_context(host.bound(folder, folder))
            assert wait(lambda host=host: _is_made_read_only(host, folder), 30), (
                f"{folder} is busy"
            )
        yield lambda: None


def _is_made_read_only(host: Host, folder: Path) -> bool:
    """Whether the mount became read-only; it does not while a save has a file open for writing."""
    try:
        host.sh("mount", "-o", "remount,bind,ro", folder)
    except AssertionError as error:
        if "busy" not in str(error):
            raise
        return False
    return True


@contextlib.contextmanager
def _hidden(hosts: list[Host], folder: Path):
    """Hide a folder behind an empty one on these hosts, like an unmounted file system."""
    with contextlib.ExitStack() as stack:
        for host in hosts:
            stack.enter_context(host.tmpfs(folder, "size=64m"))
        yield lambda: None


def _some_hosts(training: Training, rng: random.Random) -> list[Host]:
    return [training.cluster[name] for name in rng.choice((("n1",), ("n2",), ("n1", "n2")))]


def _read_only_folder(training: Training, rng: random.Random, moment: str) -> Struck:
    hosts = _some_hosts(training, rng)
    struck = Struck(f"checkpoints on {', '.join(host.name for host in hosts)}")
    return _until_a_save_fails(training, struck, _read_only(hosts, training.checkpoints))


def _vanished_folder(training: Training, rng: random.Random, moment: str) -> Struck:
    hosts = _some_hosts(training, rng)
    struck = Struck(f"checkpoints on {', '.join(host.name for host in hosts)}")
    return _until_a_save_fails(training, struck, _hidden(hosts, training.checkpoints))


# -- samples, launches, signals -------------------------------------------------------------------


def _wait_for_nan_sample(training: Training, rng: random.Random, moment: str) -> Struck:
    """Wait for the next NaN sample of the store; the undisturbed run has it too."""
    before = len(training.events("bad_sample"))
    struck = Struck("a sample of the store")
    wait(
        lambda: len(training.events("bad_sample")) > before or training.launch.code() is not None,
        240,
    )
    found = training.events("bad_sample")[before:]
    if not found:
        struck.problems.append("no bad sample was met")
        return struck
    event = found[0]
    struck.target = f"row {event['row']}, rank {event['rank']}, step {event['step']}"
    if (
        event["row"] not in training.nan_rows
        or "NaN" not in event["reason"]
        and "finite" not in event["reason"]
    ):
        struck.problems.append(
            f"the event names row {event['row']} of {event['file']}: {event['reason']}"
        )
    return struck


def _second_launch(training: Training, rng: random.Random, moment: str) -> Struck:
    """End another run of the same user on the same hosts; this one must not be affected."""
    name = f"beside{len(list(training.folder.parent.glob('beside*'))) + 1}"
    folder, method = (
        training.folder.parent / name,
        rng.choice(("SIGINT", "SIGTERM", "kill its rank", "kill its head")),
    )
    struck = Struck(f"a second launch: {method}")
    more = (
        "--master_port",
        "29700",
        "training.num_train_steps=100000",
        "logging.save_freq=100000",
    )
    launch = Launch(training.cluster, training.store, folder, folder.with_suffix(".log"), *more)
    try:
        _end_second(training, launch, rng, method, struck)
    finally:
        launch.kill()
    return struck


def _end_second(
    training: Training, launch: Launch, rng: random.Random, method: str, struck: Struck
) -> None:
    n1, n2, folder = training.cluster["n1"], training.cluster["n2"], launch.folder
    if not wait(
        lambda: training.pids(n2, "rank", folder) or launch.code() is not None, START_LIMIT
    ):
        struck.problems.append("the second launch did not start")
    log = folder / "runs" / "run" / "training_log.jsonl"
    is_training = rng.random() < 0.7 or method.startswith("SIG")
    if is_training:
        wait(
            lambda: (log.exists() and log.stat().st_size > 0) or launch.code() is not None,
            START_LIMIT,
        )
    host, part = (n2, "rank") if method == "kill its rank" else (n1, "head")
    number = getattr(signal, method, signal.SIGKILL)
    training.signal(host, part, number, folder)
    code = run_to_end(launch, END_LIMIT)
    expected = INTERRUPTED if method.startswith("SIG") else 137
    if code != expected:
        ends = "; ".join(end.reason for end in launch.ends)
        struck.problems.append(f"the second launch ended with {code}, not {expected} ({ends})")
    if not wait(
        lambda: not training.pids(n1, "rank", folder) + training.pids(n2, "rank", folder),
        END_LIMIT,
    ):
        struck.problems.append("ranks of the second launch are left")


def _same_folder(training: Training, rng: random.Random, moment: str) -> Struck:
    """A second launch into this run's folder is refused."""
    struck = Struck("a second launch into the same folder")
    more = ("--master_port", "29701", "training.resume=auto", "training.num_train_steps=100000")
    launch = Launch(
        training.cluster,
        training.store,
        training.folder,
        training.folder.with_suffix(".log"),
        *more,
    )
    try:
        code = run_to_end(launch, START_LIMIT + END_LIMIT)
    finally:
        launch.kill()
    if code != 2 or not any("trains in it" in line for line in launch.lines):
        struck.problems.append(f"the second launch into the folder was not refused: exit {code}")
    return struck


def _interrupt(training: Training, rng: random.Random, moment: str) -> Struck:
    """Interrupt the launch; before training begins there is nothing to save, and the signal itself
    may end it.
    """
    name, before = rng.choice(("SIGTERM", "SIGINT", "SIGHUP")), len(training.starts())
    struck = Struck(f"{name} to the head on n1", ENDED, (INTERRUPTED,), graceful=True)
    _signal(training, training.cluster["n1"], "head", getattr(signal, name), struck.problems)
    if moment == STARTING:
        wait(lambda: training.launch.code() is not None, END_LIMIT)
        if len(training.starts()) == before:
            struck.codes = (
                INTERRUPTED,
                *(128 + n for n in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)),
            )
    return struck


def _signal_rank(training: Training, rng: random.Random, moment: str) -> Struck:
    """Signal a rank from outside the launch: all ranks save and exit, and the launch restarts."""
    name, host = rng.choice(("SIGTERM", "SIGUSR1", "SIGINT", "SIGHUP")), _any_host(training, rng)
    words = ("it received a signal that this launch did not send",)
    struck = Struck(
        f"{name} to the rank on {host.name}", RETRIED, (INTERRUPTED,), words, graceful=True
    )
    _signal(training, host, "rank", getattr(signal, name), struck.problems)
    return struck


FAULTS = (
    Fault("rank killed", _kill_rank("rank")),
    Fault("wrapper of a rank killed", _kill_rank("wrapper of a rank"), RUNNING),
    Fault("all ranks killed", _kill_both_ranks, RUNNING),
    Fault("launcher of a node killed", _kill_node_launcher),
    Fault("launcher killed", _kill_launcher),
    Fault("agent killed", _kill_agent),
    Fault("head killed", _kill_head),
    Fault("rank stopped", _stop_for("rank", 1, 5), RUNNING),
    Fault("rank stopped forever", _stop_rank_forever, RUNNING),
    Fault("agent stopped", _stop_for("agent", 1, 12), RUNNING),
    Fault("launcher of a node stopped", _stop_for("launcher of a node", 1, 8), RUNNING),
    Fault("head stopped", _stop_for("head", 1, 12), RUNNING),
    Fault("head stopped for long", _stop_head_for_long, RUNNING),
    Fault("host cut off for a moment", _cut_for_a_moment, RUNNING),
    Fault("host cut off", _cut_until_lost, RUNNING),
    Fault("NaN sample", _wait_for_nan_sample, RUNNING),
    Fault("checkpoint folder full", _fill_folder, RUNNING),
    Fault("checkpoint folder read-only", _read_only_folder, RUNNING),
    Fault("checkpoint folder vanished", _vanished_folder, RUNNING),
    Fault("second launch ended", _second_launch, (TRAINING,)),
    Fault("second launch into the folder", _same_folder, (TRAINING,)),
    Fault("interrupted", _interrupt),
    Fault("rank signalled", _signal_rank, RUNNING),
)
# Faults of --quick, before the final interruption.
QUICK = (
    "rank killed",
    "agent killed",
    "NaN sample",
    "checkpoint folder full",
    "host cut off for a moment",
)
