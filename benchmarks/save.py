"""What saving costs: the share of the training time that is lost to checkpoints.

    python benchmarks/save.py --data STORE [--quick] [--every N] [--json FILE]

The quickstart's model (12M parameters, 148 MB of masters and moments) on two ranks under ZeRO-2 and FSDP2: runs without
checkpoints, runs that save every N steps (default 25) in the background (checkpoints.async=true), and one that waits
for the disk, in turns. The time of N steps, from the log's timestamps, is compared by its median over all runs of a
kind; the first N steps, which warm up, do not count. `CPU time` compares the processor time of all ranks likewise: the
better figure on a busy machine. `blocked` is what the loop itself spent in saving, measured around it: under async the
copy off the device, the agreement on the folder and the commit. The rest of the loss is the writing thread, which on
CPUs takes cores from training; on GPUs it takes none.
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

KINDS = {"none": [], "async": ["checkpoints.async=true"], "sync": ["checkpoints.async=false"]}
CYCLES = 5  # of N steps a run (--cycles); the first one is left out


def rank_main(report: str, words: list[str]) -> None:
    """One rank: the product's own entry, with a clock around everything that saves."""
    import mmldlm.train as product
    from mmldlm.run import RunFolder
    from mmldlm.run_checkpoints import RunCheckpoints

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
                    blocked[self.state.step] = blocked.get(self.state.step, 0.0) + time.perf_counter() - started

        return call

    log_step = RunFolder.log_step

    def log_step_and_clock(self, *args):
        cpu[self.state.step] = time.process_time()
        log_step(self, *args)

    RunFolder.log_step = log_step_and_clock
    for name in ("save", "finish_save"):
        setattr(RunCheckpoints, name, timed(getattr(RunCheckpoints, name)))
    code = product.main(words)
    Path(f"{report}_rank{os.environ['RANK']}.json").write_text(json.dumps({"blocked": blocked, "cpu": cpu}))
    product.end_process(code)


class Measurement:
    """Runs of each kind on one engine."""

    def __init__(self, launcher: _runs.Launcher, folder: Path, engine: str, args: argparse.Namespace):
        self.launcher, self.folder, self.engine = launcher, folder, engine
        self.data, self.every, self.quick = str(Path(args.data).resolve()), args.every, args.quick
        self.num_cycles, self._number = args.cycles, 0
        self.cycles: dict[str, list[float]] = {kind: [] for kind in KINDS}
        self.cpu: dict[str, list[float]] = {kind: [] for kind in KINDS}
        self.blocked: dict[str, list[float]] = {kind: [] for kind in KINDS}

    def run(self, kind: str) -> None:
        self._number += 1
        name = f"{self.engine}_{kind}_{self._number}"
        num_steps = self.num_cycles * self.every
        words = [
            "--config-name",
            "tiny" if self.quick else "quickstart",
            f"data.latent_data_root={self.data}",
            "data.max_validation_samples=16",
            f"logging.save_dir={self.folder}",
            f"logging.run_name={name}",
            "logging.log_freq=1000000",
            f"logging.save_freq={1000000 if kind == 'none' else self.every}",
            "logging.eval_freq=1000000",
            f"training.num_train_steps={num_steps}",
            "model.token_embedding_init=random",
            *KINDS[kind],
            *_runs.ENGINES[self.engine],
        ]
        report = self.folder / f"report_{name}"
        self.launcher.run(2, [report, *words], Path(__file__), timeout=7200)
        log = _runs.read_log(self.folder / name)
        times = {r["step"]: datetime.fromisoformat(r["time"]).timestamp() for r in log}
        # A cycle begins at a step with a save and ends before the next one.
        starts = range(self.every, num_steps, self.every)
        self.cycles[kind] += [times[start + self.every] - times[start] for start in starts]
        told = [json.loads(Path(f"{report}_rank{rank}.json").read_text()) for rank in range(2)]
        clocks = [{int(step): seconds for step, seconds in answer["cpu"].items()} for answer in told]
        self.cpu[kind] += [sum(clock[start + self.every] - clock[start] for clock in clocks) for start in starts]
        within = [seconds for step, seconds in told[0]["blocked"].items() if self.every <= int(step) < num_steps]
        self.blocked[kind].append(sum(within) / len(starts))

    def share_lost(self, kind: str) -> float:
        return 1 - median(self.cycles["none"]) / median(self.cycles[kind])

    def share_of_cpu(self, kind: str) -> float:
        return 1 - median(self.cpu["none"]) / median(self.cpu[kind])

    def share_blocked(self, kind: str) -> float:
        return median(self.blocked[kind]) / median(self.cycles[kind])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, help="a store made by `mmldlm prepare`")
    parser.add_argument("--quick", action="store_true", help="the tiny model, few steps")
    parser.add_argument("--every", type=int, help="steps between two checkpoints (25)")
    parser.add_argument("--cycles", type=int, default=CYCLES, help=f"times that many steps a run ({CYCLES})")
    parser.add_argument("--json", help="write conditions and claims here")
    args = parser.parse_args()
    every = args.every = args.every or (4 if args.quick else 25)
    order = ["none", "async", "sync"] if args.quick else ["none", "async", "none", "async", "sync"]
    shares, figures = [], {}
    head = f"seconds a {every} steps"
    print(f"{'engine':8} {'checkpoints':12} {head:>20} {'time lost':>10} {'CPU time':>9} {'blocked':>8}")
    with tempfile.TemporaryDirectory() as folder, _runs.Launcher(f"{folder}/output") as launcher:
        for engine in ("zero2", "fsdp"):
            measured = Measurement(launcher, Path(folder), engine, args)
            for kind in order:
                measured.run(kind)
            for kind in KINDS:
                lost, cpu, blocked = (
                    f(kind) for f in (measured.share_lost, measured.share_of_cpu, measured.share_blocked)
                )
                seconds = median(measured.cycles[kind])
                figures[f"{engine}_{kind}"] = {"seconds": seconds, "lost": lost, "cpu": cpu, "blocked": blocked}
                print(f"{engine:8} {kind:12} {seconds:20.2f} {lost:10.1%} {cpu:9.1%} {blocked:8.1%}", flush=True)
            shares.append(measured.share_lost("async"))
    claims = [_report.claim("save_stall_share", max(shares), "<=", 0.05)]
    preset = "tiny" if args.quick else "quickstart"
    return _report.write(
        args.json, claims, save_freq=every, cycles=args.cycles, preset=preset, ranks=2, figures=figures
    )


if __name__ == "__main__":
    if len(sys.argv) > 2 and sys.argv[2] == "--config-name":
        rank_main(sys.argv[1], sys.argv[2:])
    sys.exit(main())
