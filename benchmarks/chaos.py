"""Random faults in a training of two hosts: it must end with the results of an undisturbed run.

    python benchmarks/chaos.py [--quick] [--minutes 30] [--faults 45] [--seed N] [--only KIND,...]
                               [--data STORE] [--keep DIR] [--json FILE]

ZeRO-2 on two of the three hosts of tests/support/virtual_cluster.py (root is needed), under
`mmldlm launch --retries`, with some NaN samples in the store. Faults of
benchmarks/_chaos_faults.py strike one after the other, at random moments: while it trains, saves,
evaluates or starts. If the launch ends, the same command with training.resume=auto is started
again, as a user or a batch system would. Then the training runs to its end, and once more from the
start, undisturbed.

`runs_ended_wrongly`: faults after which something ended that should not, or with the wrong exit
code, or with a reason that does not name what was struck, or with a traceback. `hangs`: faults
after which nothing moved, or nothing ended.
`steps_lost_beyond_promise`: steps done again, above two times logging.save_freq (plus one for each
save that failed) after a crash, and above none after a signal.
`final_loss_rel_diff_to_undisturbed`: the largest difference of any step's loss, also of those done
twice; infinite when any other logged value, a weight or a moment differs.

--quick strikes six times. --only KIND,KIND strikes with these kinds (_chaos_faults.FAULTS lists
them). --keep DIR keeps the screen, and for each fault that went wrong the run's logs and a list of
the processes.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(Path(__file__).resolve().parent)]

import _report  # noqa: E402
import _runs  # noqa: E402
import _store  # noqa: E402
from _chaos_faults import (  # noqa: E402
    CONTINUES,
    END_LIMIT,
    ENDED,
    EVALUATING,
    FAULTS,
    QUICK,
    RETRIED,
    SAVING,
    STARTING,
    TRAINING,
    Fault,
    Struck,
)
from _chaos_run import (  # noqa: E402
    ENGINE_TIMEOUT,
    EVAL_FREQ,
    RETRIES,
    SAVE_FREQ,
    Launch,
    Training,
    run_to_end,
    wait,
)

from tests.support.virtual_cluster import VirtualCluster, reason_to_skip  # noqa: E402

# Seconds without any sign: a first step may take three times engine.collective_timeout.
IDLE_LIMIT = 3 * ENGINE_TIMEOUT + 60
START_LIMIT = 120.0  # seconds from the command to the first step, on a busy machine
DISK = 320  # MiB of the checkpoint folder: six checkpoints
CONTINUED = "continued"
LAST_STEPS = 2 * SAVE_FREQ  # undisturbed, after the last fault
PASS_STEPS = 3  # steps that show that the run goes on
SAME = (
    "loss",
    "text_loss",
    "latent_loss",
    "length_loss",
    "grad_norm",
    "lr",
    "epoch",
    "batch_in_epoch",
    "samples",
    "bad_samples",
    "skipped",
)
_OWN_MOUNTS = "MMLDLM_CHAOS_MOUNTS"


@dataclass
class Row:
    """A fault and its consequences."""

    number: int
    clock: float
    kind: str
    moment: str
    step: int
    target: str = ""
    result: str = ""
    seconds: float = math.nan
    steps_lost: int = 0
    hang: bool = False
    problems: list[str] = field(default_factory=list)

    def line(self) -> str:
        """For the screen."""
        lost = f", {self.steps_lost} steps lost" if self.steps_lost else ""
        wrong = f"  WRONG: {'; '.join(self.problems)}" if self.problems else ""
        return (
            f"{self.clock:6.0f} s  {self.number:3}  {self.kind} ({self.target}) while"
            f" {self.moment}, step {self.step}: {self.result}, {self.seconds:.1f} s{lost}{wrong}"
        )


@dataclass(frozen=True)
class Snapshot:
    """Counts at the time of a fault; all of them only grow."""

    time: float
    step: int
    ends: int
    starts: int
    lines: int
    launches: int
    latest_checkpoint: int

    @staticmethod
    def of(training: Training) -> Snapshot:
        """Return the current counts."""
        return Snapshot(
            time.monotonic(),
            training.last_step(),
            len(training.ends()),
            len(training.starts()),
            len(training.lines()),
            len(training.launches),
            max(training.complete_checkpoints(), default=0),
        )


class Chaos:
    """Inject faults, wait for the recovery, and evaluate it."""

    def __init__(self, training: Training, rng: random.Random, keep: Path | None):
        self.training, self.rng, self.keep = training, rng, keep
        self.began = time.monotonic()
        self.rows: list[Row] = []
        self.excess_lost_steps = 0
        self.strikes: list[
            tuple[float, bool]
        ] = []  # when (seconds of the epoch), and whether no step may be lost
        self._num_starts, self._num_dropped = 1, 0

    def strike(
        self, fault: Fault, moment: str, last: bool = False, then_start: bool = False
    ) -> Row:
        """One fault, from the wait for its moment to the recovery.

        Args:
            last: the run's end is set when it has struck. then_start: return as soon as the next
                attempt's ranks start.
        """
        training = self.training
        self._wait_for_moment(moment)
        before = Snapshot.of(training)
        row = Row(len(self.rows) + 1, before.time - self.began, fault.kind, moment, before.step)
        self.rows.append(row)
        self.strikes.append((time.time(), False))
        struck = fault.strike(training, self.rng, moment)
        self.strikes[-1] = (self.strikes[-1][0], struck.graceful)
        if last:
            training.num_steps = training.last_step() + LAST_STEPS
        row.target, row.problems = struck.target, struck.problems
        self.wait_for_recovery(struck, before, row, then_start)
        self.evaluate(struck, before, row)
        if row.problems:
            self._keep(row, before)
        print(row.line(), flush=True)
        return row

    def _wait_for_moment(self, moment: str) -> None:
        training, begin = self.training, self.training.last_step()
        if moment == STARTING:
            time.sleep(self.rng.uniform(0, 10))
            return
        steps = begin + self.rng.randint(1, SAVE_FREQ)
        wait(
            lambda: training.last_step() >= steps or training.launch.code() is not None, IDLE_LIMIT
        )
        if moment == SAVING:
            wait(training.is_saving, IDLE_LIMIT, pause=0.01)
        elif moment == EVALUATING:
            wait(lambda: training.last_step() % EVAL_FREQ == 0, IDLE_LIMIT, pause=0.01)
        time.sleep(self.rng.uniform(0, 0.5))

    # -- the recovery -----------------------------------------------------------------------------

    def wait_for_recovery(
        self, struck: Struck, before: Snapshot, row: Row, then_start: bool
    ) -> None:
        """Wait until the training has recovered; restart the launch if it has ended."""
        training, signs, sign = self.training, None, time.monotonic()
        while not self._has_recovered(struck, before, then_start):
            found = (
                training.last_step(),
                len(training.lines()),
                len(training.launches),
                len(training.starts()),
            )
            if found != signs:
                signs, sign = found, time.monotonic()
            if training.launch.code() is not None:
                self.restart(struck, row)
            late = (
                self._has_ended(before) < (struck.then != CONTINUES)
                and time.monotonic() - before.time > END_LIMIT + 30
            )
            if late or time.monotonic() - sign > IDLE_LIMIT:
                row.hang = True
                row.problems.append(
                    "nothing ended" if late else f"nothing moved for {IDLE_LIMIT:.0f} s"
                )
                self._restart_after_hang(row)
                break
            self.count_lost_steps(row)
            time.sleep(0.1)
        self.count_lost_steps(row)
        row.seconds = time.monotonic() - before.time

    def _has_ended(self, before: Snapshot) -> bool:
        return (
            len(self.training.ends()) > before.ends
            or len(self.training.launches) > before.launches
        )

    def _has_recovered(self, struck: Struck, before: Snapshot, then_start: bool) -> bool:
        training = self.training
        if not self._has_ended(before):
            return struck.then == CONTINUES and training.last_step() >= before.step + PASS_STEPS
        if then_start:
            return training.launch.code() is None and training.ranks() > 0
        starts = training.starts()
        return (
            len(starts) > before.starts and training.last_step() >= starts[-1]["step"] + PASS_STEPS
        )

    def restart(self, struck: Struck, row: Row) -> None:
        """Restart the launch as its user would; check its exit code."""
        training, launch = self.training, self.training.launch
        code = launch.code()
        if code == 0:
            row.problems.append("exit 0 before the end")
        if struck.then == ENDED and struck.codes and code not in struck.codes:
            row.problems.append(f"exit {code}, not {' or '.join(map(str, struck.codes))}")
        if struck.then == CONTINUES or struck.then == RETRIED and len(launch.ends) <= RETRIES:
            row.problems.append(
                f"the launch ended with {code} after {len(launch.ends)} of {RETRIES + 1} attempts"
            )
        if not wait(lambda: training.ranks() == 0, END_LIMIT):
            row.problems.append(f"the launch ended and left {training.ranks()} rank(s)")
        training.start()

    def _restart_after_hang(self, row: Row) -> None:
        """Save diagnostics of a hang and continue with a new launch."""
        if self.keep is not None:
            folder = self.keep / f"fault_{row.number:03}"
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "processes.txt").write_text(self.training.process_list())
        self.training.kill()
        wait(lambda: self.training.ranks() == 0, END_LIMIT)
        self.training.start()
        started = len(self.training.starts())
        wait(lambda: len(self.training.starts()) > started, START_LIMIT)

    # -- what is right ----------------------------------------------------------------------------

    def count_lost_steps(self, row: Row) -> None:
        """Count the steps that restarts repeat, and those above the promise."""
        training, starts = self.training, self.training.starts()
        for index in range(self._num_starts, len(starts)):
            begin, since = starts[index]["step"], starts[index - 1]["time"]
            dropped = training.dropped()[self._num_dropped :]
            self._num_dropped += len(dropped)
            lost = (
                max((r["step"] for path in dropped for r in read_lines(path)), default=begin)
                - begin
            )
            strikes = [
                graceful
                for when, graceful in self.strikes
                if since <= iso(when) <= starts[index]["time"]
            ]
            allowed = (
                0
                if strikes and strikes[0]
                else SAVE_FREQ * (2 + self._failed_saves(starts[index]["time"]))
            )
            row.steps_lost += lost
            if lost > allowed:
                self.excess_lost_steps += lost - allowed
                row.problems.append(f"{lost} steps lost, {allowed} allowed")
        self._num_starts = max(len(starts), self._num_starts)

    def _failed_saves(self, until: str) -> int:
        """Saves that failed since the last one that did not."""
        kinds = [
            e["event"] for e in self.training.events("save", "save_failed") if e["time"] < until
        ]
        return next((n for n, kind in enumerate(reversed(kinds)) if kind == "save"), len(kinds))

    def evaluate(self, struck: Struck, before: Snapshot, row: Row) -> None:
        training = self.training
        ends, lines = training.ends()[before.ends :], training.lines()[before.lines :]
        text = "\n".join(lines)
        if struck.then == CONTINUES:
            row.result = CONTINUED
            row.problems += [f"ended: {end.reason} (exit {end.code})" for end in ends]
        elif ends:
            row.result = f"{ends[0].reason} (exit {ends[0].code})"
            if struck.codes and ends[0].code not in struck.codes:
                row.problems.append(
                    f"exit {ends[0].code}, not {' or '.join(map(str, struck.codes))}"
                )
            # Retries cannot reach a host that is still cut off.
            row.problems += [
                f"ended again: {end.reason}"
                for end in ends[1:]
                if "its agent did not start" not in end.reason
            ]
        else:
            row.result = f"ended with {training.launches[before.launches - 1].code()}"
        if struck.words and not any(word in text for word in struck.words):
            row.problems.append(f"the screen does not say {' or '.join(map(repr, struck.words))}")
        if struck.then == ENDED and any(line.startswith("attempt ") for line in lines):
            row.problems.append("the launch started again, though it was asked to end")
        if "Traceback (most recent call last)" in text:
            row.problems.append("a traceback on the screen")
        starts = training.starts()[before.starts :]
        if starts and starts[0]["step"] < before.latest_checkpoint:
            row.problems.append(
                f"began at step {starts[0]['step']}, though step {before.latest_checkpoint} was"
                " saved"
            )

    def _keep(self, row: Row, before: Snapshot) -> None:
        if self.keep is None:
            return
        folder, training = self.keep / f"fault_{row.number:03}", self.training
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "fault.txt").write_text(row.line() + "\n")
        (folder / "screen.txt").write_text(
            "\n".join(training.lines()[max(before.lines - 50, 0) :]) + "\n"
        )
        shutil.copytree(
            training.run_dir,
            folder / "run",
            ignore=shutil.ignore_patterns("checkpoints", "latest", "forensics"),
            dirs_exist_ok=True,
        )


def iso(seconds: float) -> str:
    """Seconds of the epoch as the logs write them."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds")


def read_lines(path: Path) -> list[dict]:
    """Records of a log; a torn line is left out."""
    found = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            found.append(json.loads(line))
        except ValueError:
            continue
    return [record for record in found if isinstance(record, dict) and "step" in record]


def choose(rng: random.Random, kinds: tuple[str, ...]) -> Iterator[tuple[Fault, str]]:
    """Faults and moments, without an end: each of the kinds once in random order, and again."""
    faults = [fault for fault in FAULTS if fault.kind in kinds]
    while True:
        rng.shuffle(faults)
        for fault in faults:
            yield fault, rng.choice(fault.moments)


def kinds_of(args: argparse.Namespace) -> tuple[str, ...]:
    """The kinds of fault that the command line asks for."""
    known = tuple(fault.kind for fault in FAULTS)
    kinds = tuple(args.only.split(",")) if args.only else QUICK if args.quick else known
    if unknown := set(kinds) - set(known):
        raise SystemExit(f"--only {', '.join(unknown)}: expected some of {', '.join(known)}")
    return kinds


def strike_all(chaos: Chaos, plan, num_faults: int, minutes: float) -> None:
    """Strike until there were enough faults for long enough; the last one is an interruption,
    after which it ends.
    """
    last = next(fault for fault in FAULTS if fault.kind == "interrupted")
    (fault, moment), just_ended = next(plan), False
    while len(chaos.rows) < num_faults - 1 or time.monotonic() - chaos.began < 60 * minutes:
        following, its_moment = next(plan)
        if moment == STARTING and not just_ended:
            moment = TRAINING
        row = chaos.strike(fault, moment, then_start=its_moment == STARTING)
        fault, moment, just_ended = following, its_moment, row.result != CONTINUED
    chaos.strike(last, TRAINING, last=True)


def compare(training: Training, undisturbed: Path) -> tuple[float, list[str]]:
    """(largest relative difference of a step's loss, what else differs), with the steps that were
    done twice.
    """
    reference = {record["step"]: record for record in _runs.read_log(undisturbed)}
    found = _runs.read_log(training.run_dir)
    problems = []
    if [record["step"] for record in found] != sorted(reference):
        problems.append("the log does not hold every step once, in order")
    again = [record for path in training.dropped() for record in read_lines(path)]
    worst = 0.0
    for record in found + again:
        other = reference.get(record["step"])
        if other is None:
            problems.append(f"step {record['step']} is not in the undisturbed run")
            continue
        worst = max(worst, abs(record["loss"] - other["loss"]) / abs(other["loss"]))
        problems += [
            f"{key} of step {record['step']} differs"
            for key in SAME
            if record.get(key) != other.get(key)
        ]
    command = [
        sys.executable,
        "-m",
        "mmldlm.cli",
        "convert",
        "diff",
        training.run_dir,
        undisturbed,
        "--optimizer",
    ]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, cwd=ROOT)
    if done.returncode != 0:
        problems.append(
            f"weights or moments differ: {(done.stdout + done.stderr).strip().splitlines()[-1:]}"
        )
    print(
        f"compared {len(found)} steps, and {len(again)} that were done again; convert diff: exit"
        f" {done.returncode}"
    )
    return worst, problems


def finish(chaos: Chaos) -> tuple[float, list[str]]:
    """Finish the training, repeat it undisturbed, and compare."""
    training = chaos.training
    code = run_to_end(training.launch, IDLE_LIMIT + LAST_STEPS)
    problems = [] if code == 0 else [f"the last launch ended with {code}"]
    num_steps = training.num_steps
    folder = training.folder.parent / "undisturbed"
    print(f"the same {num_steps} steps, undisturbed ...", flush=True)
    more = (
        f"training.num_train_steps={num_steps}",
        "logging.save_freq=1000000",
        "logging.eval_freq=1000000",
    )
    launch = Launch(training.cluster, training.store, folder, folder.with_suffix(".log"), *more)
    if run_to_end(launch, START_LIMIT + num_steps) != 0:
        return math.inf, [
            *problems,
            "the undisturbed run failed: " + "\n".join(launch.lines[-20:]),
        ]
    worst, differ = compare(training, folder / "runs" / "run")
    return (math.inf if differ else worst), problems + differ


def with_own_mounts() -> None:
    """Continue in a new mount namespace, from which the hosts get the disk of the checkpoint
    folder.
    """
    if _OWN_MOUNTS not in os.environ:
        os.environ[_OWN_MOUNTS] = "1"
        os.execvp(
            "unshare",
            ["unshare", "--mount", "--propagation", "private", sys.executable, *sys.argv],
        )


def tabulate(rows: list[Row]) -> None:
    """Kinds, how often each struck, and what it cost."""
    print(
        f"\n{'kind':30} {'struck':>6} {'wrong':>6} {'hangs':>6} {'longest recovery':>17}"
        f" {'most steps lost':>16}"
    )
    for kind, num in sorted(Counter(row.kind for row in rows).items()):
        own = [row for row in rows if row.kind == kind]
        print(
            f"{kind:30} {num:6} {sum(bool(row.problems) for row in own):6}"
            f" {sum(row.hang for row in own):6} {max(row.seconds for row in own):15.1f} s"
            f" {max(row.steps_lost for row in own):16}"
        )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--quick", action="store_true", help="six faults, one of each of six kinds"
    )
    parser.add_argument("--minutes", type=float, help="strike for at least so long (30)")
    parser.add_argument("--faults", type=int, help="strike at least so often (45)")
    parser.add_argument("--seed", type=int, help="of the plan (default: a new one, printed)")
    parser.add_argument(
        "--only",
        metavar="KIND,...",
        help="strike with these kinds only (and an interruption last)",
    )
    parser.add_argument(
        "--data",
        metavar="STORE",
        help="a prepared store (default: one is made of a few docstrings)",
    )
    parser.add_argument(
        "--keep", metavar="DIR", help="keep the screen, and the logs of what went wrong"
    )
    parser.add_argument("--json", metavar="FILE", help="write conditions and claims here")
    args = parser.parse_args()
    reason = reason_to_skip()
    if reason is not None:
        print(f"cannot run here: {reason}", file=sys.stderr)
        return 3
    kinds_of(args)
    with_own_mounts()
    # So that all it started is ended.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    # Under nohup a SIGHUP is ignored, also by the runs that are to be struck with one.
    for signum, handler in (
        (signal.SIGHUP, signal.SIG_DFL),
        (signal.SIGINT, signal.default_int_handler),
    ):
        if signal.getsignal(signum) == signal.SIG_IGN:
            signal.signal(signum, handler)
    seed = secrets.randbelow(2**31) if args.seed is None else args.seed
    num_faults = args.faults or (6 if args.quick else 45)
    minutes = (0 if args.quick else 30) if args.minutes is None else args.minutes
    rng = random.Random(seed)
    print(f"at least {num_faults} faults in {minutes:g} minutes, seed {seed}", flush=True)
    keep = None if args.keep is None else Path(args.keep).absolute()
    with tempfile.TemporaryDirectory(prefix="mmldlm_chaos_") as folder:
        chaos, difference, problems = run(args, Path(folder), rng, num_faults, minutes, keep)
    rows = chaos.rows
    tabulate(rows)
    for problem in problems:
        print(f"WRONG: {problem}")
    wrong = sum(bool(row.problems) and not row.hang for row in rows) + (difference == math.inf)
    claims = [
        _report.claim("faults_struck", len(rows), ">=", 6 if args.quick else 40),
        _report.claim("runs_ended_wrongly", wrong, "==", 0),
        _report.claim("hangs", sum(row.hang for row in rows), "==", 0),
        _report.claim("steps_lost_beyond_promise", chaos.excess_lost_steps, "==", 0),
        _report.claim("final_loss_rel_diff_to_undisturbed", difference, "==", 0),
    ]
    more = {
        "seed": seed,
        "minutes": (time.monotonic() - chaos.began) / 60,
        "save_freq": SAVE_FREQ,
        "quick": args.quick,
    }
    struck = [
        {"kind": row.kind, "moment": row.moment, "seconds": round(row.seconds, 1)} for row in rows
    ]
    return _report.write(args.json, claims, **more, steps=chaos.training.num_steps, faults=struck)


def run(
    args, folder: Path, rng: random.Random, num_faults: int, minutes: float, keep: Path | None
) -> tuple[Chaos, float, list[str]]:
    """Run the training with faults in a folder; return (chaos, loss difference, further
    problems).
    """
    from _chaos_store import plant_nan

    store, rows = plant_nan(Path(_store.given_or_made(args.data)), folder, rng)
    training = Training(None, store, folder / "chaos")
    training.nan_rows = rows
    training.checkpoints.mkdir(parents=True)
    disk = ("mount", "-t", "tmpfs", "-o", f"size={DISK}m", "none", str(training.checkpoints))
    subprocess.run(disk, check=True)
    try:
        with VirtualCluster(folder / "cluster") as cluster:
            training.cluster = cluster
            try:
                training.start()
                wait(
                    lambda: training.last_step() >= 1 or training.launch.code() is not None,
                    START_LIMIT,
                )
                if training.last_step() < 1:
                    raise AssertionError(
                        "the training did not start:\n" + "\n".join(training.lines()[-40:])
                    )
                chaos = Chaos(training, rng, keep)
                strike_all(chaos, choose(rng, kinds_of(args)), num_faults, minutes)
                return chaos, *finish(chaos)
            finally:
                training.kill()
                if keep is not None:
                    keep.mkdir(parents=True, exist_ok=True)
                    shutil.copy(training.screen, keep / "screen.log")
    finally:
        subprocess.run(["umount", "--lazy", str(training.checkpoints)], check=True)


if __name__ == "__main__":
    sys.exit(main())
