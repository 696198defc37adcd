"""A month's run in small: does anything grow that should not?

    python benchmarks/soak.py [--data STORE] [--quick] [--steps N] [--engines NAME ...]
    [--json FILE]

The tiny preset on two ranks under ZeRO-2 and under FSDP2 (20,000 steps each; --quick: 100): a NaN
on rank 1 every 97 steps, which is skipped, a save every 250 steps in the background, an evaluation
every 500, a moving average of the weights, layer statistics. After a tenth of the steps the run is
stopped by SIGTERM and resumed, after a fifth a rank is killed and the run resumed; the rest, one
life, is measured. Every 25 steps each rank notes its resident memory, what malloc has given out of
it, open files, threads and CPU time.

- `rss_growth_mib_per_10k_steps`: slope of the resident memory over the measured life without its
  first 5,000 steps (or third), Theil-Sen over medians of 250 steps, of the worst rank. It swings
  by a few MiB with the pages that malloc has touched and not given back.
- `anonymous_growth_mib_per_10k_steps`: the same of the resident memory that no file backs.
- `heap_growth_mib_per_10k_steps`: the same of what malloc has given out, which a leak raises.
- `open_files_growth`, `threads_growth`: last quarter of the life against its first, medians.
- `step_time_drift`: CPU time of a step, last quarter against first, medians, of both ranks. The
  speed of a shared machine changes by more than its bound: `step_time_change` has its sign, and
  `machine_change` is the same of a fixed piece of work that each rank does at every note.
- `monitor_growth_mib`: peak memory of `mmldlm monitor RUN --once` at the end, less that at a tenth
  of the log.
- `steps_not_logged_once`: steps that the log lacks or holds twice.
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import json
import math
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

import _report
import _runs
import _store

RANKS = 2
STEPS, QUICK_STEPS = 20_000, 100
SETTLED = 5_000  # steps of a life that are left out of the growth of memory
ENGINES = ("zero2", "fsdp")
MONITOR = """
import sys
from mmldlm.cli import main
main(sys.argv[1:])
print(open("/proc/self/status").read())
"""
WINDOW = 10  # notes in a median of memory


def rank_main(notes: str, every: int, nan_every: int, words: list[str]) -> None:
    """One rank: the product's own entry, with NaNs in its batches and notes about its process."""
    import mmldlm.train as product
    from mmldlm.data.loader import MicroBatches
    from mmldlm.distributed.error_reporting import exit_without_teardown
    from mmldlm.training.run_logger import RunLogger

    make, log_step = MicroBatches.__getitem__, RunLogger.log_step

    def poisoned(self, item):
        batch: Any = make(self, item)
        step, micro = divmod(item, self.accum)
        if self.plan.shuffle and self.rank == 1 and micro == 0 and step % nan_every == 3:
            batch.latent_weights.fill_(math.nan)
        return batch

    with open(f"{notes}_rank{os.environ['RANK']}.jsonl", "a", encoding="utf-8") as file:

        def log_and_note(self, *args):
            log_step(self, *args)
            if self.state.step % every == every // 2:
                file.write(json.dumps({"step": self.state.step, **process_figures()}) + "\n")
                file.flush()

        with (
            mock.patch.object(MicroBatches, "__getitem__", poisoned),
            mock.patch.object(RunLogger, "log_step", log_and_note),
        ):
            code = product.main(words)
    exit_without_teardown(code)


def process_figures() -> dict[str, float]:
    """Resident MiB and those of them without a file, MiB of malloc, open files, threads and CPU
    seconds of this process.
    """
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    kib = {name: int(size) for name, size in re.findall(r"^(\w+):\s+(\d+) kB$", status, re.M)}
    return {
        "pid": os.getpid(),
        "rss": kib["VmRSS"] / 1024,
        "anonymous": kib["RssAnon"] / 1024,
        "heap": heap_in_use() / 2**20,
        "files": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "cpu": time.process_time(),
        "fixed_work": seconds_of_fixed_work(),
    }


def seconds_of_fixed_work() -> float:
    """CPU seconds of a thousand small operations of torch: how fast the machine is now."""
    import torch

    begin, x = time.thread_time(), torch.ones(64, 64)
    for _ in range(500):
        x = (x @ x).tanh()
    return time.thread_time() - begin


class _Mallinfo2(ctypes.Structure):
    """mallinfo(3), of glibc 2.33 and later."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    ]


def heap_in_use() -> int:
    """Bytes that malloc has given out, in its arenas and as mappings of their own."""
    mallinfo2 = ctypes.CDLL(None).mallinfo2
    mallinfo2.restype = _Mallinfo2
    info = mallinfo2()
    return info.uordblks + info.hblkhd


class Soak:
    """One run on one engine, through three lives."""

    def __init__(self, launcher: _runs.RankServer, folder: Path, engine: str, args):
        self.launcher, self.engine, self.args = launcher, engine, args
        self.run_dir, self.notes = folder / engine, folder / f"notes_{engine}"
        save_freq = max(args.steps // 80, 5)
        self.words = [
            *_runs.settings(args.data, folder, engine, RANKS),
            "training.train_batch_size=2",
            "training.grad_accum_steps=1",
            f"training.num_train_steps={args.steps}",
            f"logging.save_freq={save_freq}",
            f"logging.eval_freq={2 * save_freq}",
            f"logging.log_freq={save_freq}",
            "logging.layer_stats_freq=100",
            "optimizer.ema_decay=0.99",
            "optimizer.warmup_steps=10",
            "checkpoints.async_save=true",
            "stability.max_consecutive_skips=3",
            "training.resume=auto",
            *_runs.ENGINES[engine],
        ]
        self.every = 25 if args.steps >= 2_000 else 2

    def run(self) -> dict[str, float]:
        """Live three times and return the figures of the claims."""
        tenth = self.args.steps // 10
        self._live(until=tenth, then=signal.SIGTERM, rank=0)
        monitor_before = self._monitor_mib()
        self._live(until=2 * tenth, then=signal.SIGKILL, rank=1)
        self._live(until=None)
        counts = Counter(record["step"] for record in _runs.read_log(self.run_dir))
        wrong = [step for step in range(1, self.args.steps + 1) if counts[step] != 1]
        ranks = [self._last_life(rank) for rank in range(RANKS)]
        if self.args.notes is not None:
            Path(self.args.notes).mkdir(parents=True, exist_ok=True)
            (Path(self.args.notes) / f"{self.engine}.json").write_text(json.dumps(ranks))
        change_of_steps = relative_change(seconds_of_steps(ranks))
        return {
            "rss_growth_mib_per_10k_steps": max(1e4 * slope(settled(n, "rss")) for n in ranks),
            "anonymous_growth_mib_per_10k_steps": max(
                1e4 * slope(settled(n, "anonymous")) for n in ranks
            ),
            "heap_growth_mib_per_10k_steps": max(1e4 * slope(settled(n, "heap")) for n in ranks),
            "open_files_growth": max(change(rank, "files") for rank in ranks),
            "threads_growth": max(change(rank, "threads") for rank in ranks),
            "step_time_drift": abs(change_of_steps),
            "step_time_change": change_of_steps,
            "machine_change": relative_change(
                [sum(note["fixed_work"] for note in notes) for notes in zip(*ranks, strict=False)]
            ),
            "monitor_growth_mib": self._monitor_mib() - monitor_before,
            "steps_not_logged_once": len(wrong),
        }

    def _live(self, until: int | None, then: int = 0, rank: int = 0) -> None:
        """Start the run, and send a signal to one rank once the log has `until` steps."""
        nan_every = 97 if self.args.steps >= 2_000 else 23
        command = ["rank", self.notes, self.every, nan_every, *self.words]
        ranks = self.launcher.start(RANKS, command, Path(__file__).resolve())
        while until is not None and None in ranks.codes():
            if self._last_step() >= until:
                os.kill(ranks.pids[rank], then)
                break
            time.sleep(0.2)
        codes = ranks.wait(12 * 3600, grace=120)
        expected = {0: [0, 0], signal.SIGTERM: [5, 5]}.get(then)
        if codes != expected if expected else codes[rank] != -signal.SIGKILL:
            sys.exit(f"{self.engine}: ended with {codes}\n{ranks.output()}")

    def _last_step(self) -> int:
        log = self.run_dir / "training_log.jsonl"
        if not log.exists():
            return 0
        with log.open("rb") as file:
            file.seek(max(log.stat().st_size - 4096, 0))
            lines = file.read().split(b"\n")[1:-1]
        return json.loads(lines[-1])["step"] if lines else 0

    def _last_life(self, rank: int) -> list[dict[str, float]]:
        """The notes of the last process of a rank."""
        text = Path(f"{self.notes}_rank{rank}.jsonl").read_text(encoding="utf-8")
        notes = [json.loads(line) for line in text.splitlines()]
        return [note for note in notes if note["pid"] == notes[-1]["pid"]]

    def _monitor_mib(self) -> float:
        """Peak resident MiB of `mmldlm monitor RUN --once`.

        Not by getrusage, whose peak is at least that of the process that started it.
        """
        words = ["monitor", str(self.run_dir), "--once"]
        done = subprocess.run(
            [sys.executable, "-c", MONITOR, *words], cwd=_runs.ROOT, capture_output=True, text=True
        )
        (peak,) = re.findall(r"^VmHWM:\s+(\d+) kB$", done.stdout, re.MULTILINE)
        return int(peak) / 1024


def settled(notes: list[dict[str, float]], name: str) -> list[tuple[float, float]]:
    """(step, MiB) of a life without its beginning: medians of WINDOW notes."""
    first, last = notes[0]["step"], notes[-1]["step"]
    begin = first + min(SETTLED, (last - first) // 3)
    kept = [note for note in notes if note["step"] >= begin]
    size = min(WINDOW, max(len(kept) // 4, 1))
    parts = [kept[i : i + size] for i in range(0, len(kept) - size + 1, size)]
    return [
        (median(note["step"] for note in part), median(note[name] for note in part))
        for part in parts
    ]


def slope(points: list[tuple[float, float]]) -> float:
    """Theil-Sen: the median of the slopes between all pairs of points."""
    pairs = itertools.combinations(points, 2)
    return median((y2 - y1) / (x2 - x1) for (x1, y1), (x2, y2) in pairs)


def quarters(values: list[float]) -> tuple[float, float]:
    """Medians of the first and of the last quarter."""
    count = max(len(values) // 4, 1)
    return median(values[:count]), median(values[-count:])


def change(notes: list[dict[str, float]], name: str) -> float:
    first, last = quarters([note[name] for note in notes])
    return last - first


def relative_change(values: list[float]) -> float:
    first, last = quarters(values)
    return last / first - 1


def seconds_of_steps(ranks: list[list[dict[str, float]]]) -> list[float]:
    """CPU seconds of all ranks between two notes, without the fixed work."""
    return [
        sum(after["cpu"] - before["cpu"] - before["fixed_work"] for before, after in pairs)
        for pairs in zip(*(itertools.pairwise(notes) for notes in ranks), strict=False)
    ]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", help=_store.HELP)
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_STEPS} steps per engine")
    parser.add_argument("--steps", type=int, help=f"steps per engine ({STEPS:,})")
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=list(ENGINES))
    parser.add_argument("--notes", help="keep the notes of the measured lives in this folder")
    parser.add_argument("--json", help="write conditions and claims here")
    args = parser.parse_args()
    args.data = _store.given_or_made(args.data)
    args.steps = args.steps or (QUICK_STEPS if args.quick else STEPS)
    figures = {}
    with tempfile.TemporaryDirectory() as folder, _runs.RankServer(f"{folder}/output") as launcher:
        for engine in args.engines:
            figures[engine] = Soak(launcher, Path(folder), engine, args).run()
            print(engine, {name: round(value, 3) for name, value in figures[engine].items()})

    def worst(name: str, op: str, bound: float, measured: bool) -> dict:
        value = max(found[name] for found in figures.values())
        return _report.claim(name, value, op, bound, measured=measured)

    claims = [
        worst("rss_growth_mib_per_10k_steps", "<=", 1.0, measured=True),
        worst("heap_growth_mib_per_10k_steps", "<=", 1.0, measured=True),
        worst("step_time_drift", "<=", 0.03, measured=True),
        worst("open_files_growth", "==", 0, measured=False),
        worst("threads_growth", "==", 0, measured=False),
        worst("monitor_growth_mib", "<=", 2.0, measured=True),
        worst("steps_not_logged_once", "==", 0, measured=False),
    ]
    return _report.write(
        args.json, claims, args.quick, ranks=RANKS, steps=args.steps, figures=figures
    )


if __name__ == "__main__":
    if len(sys.argv) > 1 and sys.argv[1] == "rank":
        rank_main(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), sys.argv[5:])
    sys.exit(main())
