"""What saving costs: the share of the training time that is lost to checkpoints.

    python benchmarks/checkpoint_overhead.py [--data STORE] [--quick] [--every N] [--pairs P]
    [--json FILE]

A model of 12M parameters (148 MB of masters and moments; the quickstart's recipe with 4 blocks and
MLPs of 4 widths) on two ranks under ZeRO-2 and FSDP2. A run saves every 2 N steps (default N: 50,
half a minute), so that windows of N steps that begin with a save alternate with windows without
one; each is compared with the one after it (`time lost`: 1 - median of without / with). `CPU time`
compares the processor time of all ranks likewise: the better figure on a busy machine. `blocked`
is what the loop itself spent in saving, measured around it: with checkpoints.async_save the copy
off the device, agreeing on the folder, the commit. The rest of the loss is the writing thread,
which on CPUs takes cores from training; on GPUs it takes none. All shares are of a window of N
steps, so of a run that saves every N steps; the first two windows, which warm up, do not count.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from datetime import datetime
from pathlib import Path
from statistics import median

import _report
import _runs
import _store

KINDS = {"async": ["checkpoints.async_save=true"], "sync": ["checkpoints.async_save=false"]}
QUICK_PRESET = "tiny"
# The size for which the bound was set, whatever the preset has.
FULL_MODEL = ("quickstart", "model.n_blocks=4", "model.mlp_ratio=4")
PAIRS = 4  # of windows with and without a save (--pairs), after a pair that is left out


def rank_main(report: str, words: list[str]) -> None:
    """One rank: the product's own entry, with a clock around everything that saves."""
    import mmldlm.train as product
    from mmldlm.distributed.error_reporting import exit_without_teardown
    from mmldlm.training.checkpointer import Checkpointer
    from mmldlm.training.run_logger import RunLogger

    blocked, cpu, depth = {}, {}, 0

    def timed(method):
        def call(self):
            nonlocal depth
            depth, started = depth + 1, time.perf_counter()
            try:
                return method(self)
            finally:
                depth -= 1
                if depth == 0:
                    blocked[self.state.step] = (
                        blocked.get(self.state.step, 0.0) + time.perf_counter() - started
                    )

        return call

    log_step = RunLogger.log_step

    def log_step_and_clock(self, *args):
        cpu[self.state.step] = time.process_time()
        log_step(self, *args)

    RunLogger.log_step = log_step_and_clock
    for name in ("save", "finish_save"):
        setattr(Checkpointer, name, timed(getattr(Checkpointer, name)))
    code = product.main(words)
    Path(f"{report}_rank{os.environ['RANK']}.json").write_text(
        json.dumps({"blocked": blocked, "cpu": cpu}), encoding="utf-8"
    )
    exit_without_teardown(code)


class Measurement:
    """One run of a kind on an engine: windows with and without a save in turns."""

    def __init__(
        self,
        launcher: _runs.RankServer,
        folder: Path,
        engine: str,
        kind: str,
        args: argparse.Namespace,
    ):
        name = f"{engine}_{kind}"
        every, num_steps = args.every, 2 * args.every * (1 + args.pairs) + 1
        words = [
            "--config-name",
            *((QUICK_PRESET,) if args.quick else FULL_MODEL),
            f"data.latent_data_root={args.data}",
            "data.max_validation_samples=16",
            f"logging.save_dir={folder}",
            f"logging.run_name={name}",
            "logging.log_freq=1000000",
            f"logging.save_freq={2 * every}",
            "logging.eval_freq=1000000",
            f"training.num_train_steps={num_steps}",
            "model.token_embedding_init=random",
            *KINDS[kind],
            *_runs.ENGINES[engine],
        ]
        report = folder / f"report_{name}"
        launcher.run(2, [report, *words], Path(__file__), timeout=7200)
        times = {
            r["step"]: datetime.fromisoformat(r["time"]).timestamp()
            for r in _runs.read_log(folder / name)
        }
        reports = [
            json.loads(Path(f"{report}_rank{rank}.json").read_text(encoding="utf-8"))
            for rank in range(2)
        ]
        clocks = [
            {int(step): seconds for step, seconds in answer["cpu"].items()} for answer in reports
        ]
        saves = range(2 * every, num_steps - 1, 2 * every)
        # The record of a step is written before its save: a window from it to the next one holds
        # the save.
        self.seconds = [self._pair(times, step, every) for step in saves]
        self.cpu = [
            [sum(part) for part in zip(*(self._pair(clock, step, every) for clock in clocks))]
            for step in saves
        ]
        spans = [range(step, step + every) for step in saves]
        blocked = {int(step): seconds for step, seconds in reports[0]["blocked"].items()}
        self.blocked = [sum(blocked.get(step, 0.0) for step in span) for span in spans]

    @staticmethod
    def _pair(clock: dict[int, float], step: int, every: int) -> list[float]:
        """Seconds of the window that begins with a save, and of the one after it."""
        return [clock[step + every] - clock[step], clock[step + 2 * every] - clock[step + every]]

    @property
    def share_lost(self) -> float:
        return 1 - median(without / saved for saved, without in self.seconds)

    @property
    def share_of_cpu(self) -> float:
        return 1 - median(without / saved for saved, without in self.cpu)

    @property
    def share_blocked(self) -> float:
        return median(
            blocked / saved for blocked, (saved, _) in zip(self.blocked, self.seconds, strict=True)
        )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", help=_store.HELP)
    parser.add_argument("--quick", action="store_true", help="the tiny model, few steps")
    parser.add_argument("--every", type=int, help="steps of a window (50)")
    parser.add_argument("--pairs", type=int, help=f"windows with and without a save ({PAIRS})")
    parser.add_argument("--json", help="write conditions and claims here")
    args = parser.parse_args()
    args.data = _store.given_or_made(args.data)
    args.every = args.every or (4 if args.quick else 50)
    args.pairs = args.pairs or (1 if args.quick else PAIRS)
    shares, figures = [], {}
    head = f"seconds a {args.every} steps"
    print(
        f"{'engine':8} {'checkpoints':12} {head:>20} {'time lost':>10} {'CPU time':>9}"
        f" {'blocked':>8}"
    )
    with tempfile.TemporaryDirectory() as folder, _runs.RankServer(f"{folder}/output") as launcher:
        for engine in ("zero2", "fsdp"):
            for kind in KINDS:
                measured = Measurement(launcher, Path(folder), engine, kind, args)
                lost, cpu, blocked = (
                    measured.share_lost,
                    measured.share_of_cpu,
                    measured.share_blocked,
                )
                seconds = median(without for _, without in measured.seconds)
                figures[f"{engine}_{kind}"] = {
                    "seconds": seconds,
                    "lost": lost,
                    "cpu": cpu,
                    "blocked": blocked,
                }
                print(
                    f"{engine:8} {kind:12} {seconds:20.2f} {lost:10.1%} {cpu:9.1%} {blocked:8.1%}",
                    flush=True,
                )
                if kind == "async":
                    shares.append(lost)
    claims = [_report.claim("save_stall_share", max(shares), "<=", 0.05, measured=True)]
    preset = QUICK_PRESET if args.quick else " ".join(FULL_MODEL)
    return _report.write(
        args.json,
        claims,
        args.quick,
        save_freq=args.every,
        pairs=args.pairs,
        preset=preset,
        ranks=2,
        figures=figures,
    )


if __name__ == "__main__":
    if len(sys.argv) > 2 and sys.argv[2] == "--config-name":
        rank_main(sys.argv[1], sys.argv[2:])
    sys.exit(main())
