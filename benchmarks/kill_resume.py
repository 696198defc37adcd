"""Kill -9 a random rank at a random moment, repeatedly: the run must continue with unchanged
losses.

    python benchmarks/kill_resume.py [--data STORE] [--kills N] [--quick] [--engines NAME ...]
    [--seed N] [--json FILE]
    [key=value ...]

key=value are config overrides. Of images: --data STORE task=image_text data.shift_pixels=1

One run of two ranks on each of ddp, fsdp and ZeRO-1 to 3, saving every five steps, in the
background or not by turns. Each attempt of a run starts with training.resume=auto and ends with a
SIGKILL of one of its ranks: half of the kills come a random number of steps later, half as soon as
a checkpoint is being written, both plus up to a quarter of a second. The other rank must then end
by itself within 90 seconds. After the last kill the run is left to finish.

A kill is lost when the other rank did not end, the newest valid checkpoint is too old, a
checkpoint does not match its manifest, or the next attempt does not start from the newest valid
checkpoint. At most save_freq steps may be lost; with checkpoints.async_save also those trained
while the newest one was being written, at most save_freq more, because a save waits for the one
before. In the end the log must hold every step once, with the batch of the plan, every sample of
each finished epoch exactly once, and losses and a last evaluation that equal those of an
undisturbed run, bit for bit; if not, all kills of that run count as lost.
"""

from __future__ import annotations

import argparse
import json
import random
import secrets
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import _report
import _runs
import _store

ENGINES = ("ddp", "fsdp", "zero1", "zero2", "zero3")
WORLD_SIZE = 2
SAVE_FREQ = 5
MOST_STEPS = 8  # of a life, before it is killed
# Steps before the end, where a life is killed in any case: a run that is done cannot be.
MARGIN = 20
NUM_SAMPLES = 41  # six global batches of eight an epoch, the last one of a single sample
TIMEOUT, PEER_LIMIT = 60.0, 90.0  # seconds: engine.collective_timeout; what a peer may take to end
# Seconds of a life on a busy machine, and of the last one to the run's end.
LIFE_LIMIT, LAST_LIMIT = (
    300.0,
    3600.0,
)
AT_A_TIME = 3


class Run:
    """One run on one engine, through many lives."""

    def __init__(
        self,
        launcher: _runs.RankServer,
        data: str,
        folder: Path,
        engine: str,
        num_kills: int,
        overrides: list[str],
    ):
        self.launcher, self.data, self.folder, self.engine, self.num_kills = (
            launcher,
            data,
            folder,
            engine,
            num_kills,
        )
        self.overrides = overrides
        self.num_steps = 5 * num_kills + MARGIN + SAVE_FREQ
        self.run_dir = folder / engine
        self.in_background = True

    def words(self, name: str, *more: str) -> list[str]:
        own = [
            f"data.max_train_samples={NUM_SAMPLES}",
            f"training.num_train_steps={self.num_steps}",
            f"logging.save_freq={SAVE_FREQ}",
            f"engine.collective_timeout={TIMEOUT}",
            *_runs.ENGINES[self.engine],
            *self.overrides,
        ]
        return _runs.settings(self.data, self.folder, name, WORLD_SIZE, *own, *more)

    def start(self) -> _runs.Ranks:
        words = self.words(
            self.engine,
            "training.resume=auto",
            f"checkpoints.async_save={str(self.in_background).lower()}",
        )
        return self.launcher.start(WORLD_SIZE, words)

    def live_and_die(self, chance: random.Random, number: int) -> tuple[bool, str]:
        """One life. Returns whether the kill is lost, and a line for the screen."""
        from mmldlm.checkpoints.locate import find_latest_valid, list_checkpoints
        from mmldlm.checkpoints.manifest import verify

        self.in_background = (ENGINES.index(self.engine) + number) % 2 == 0
        while_saving, victim = chance.random() < 0.5, chance.randrange(WORLD_SIZE)
        num_steps, extra = chance.randint(1, MOST_STEPS), chance.uniform(0, 0.25)
        partials, lives = self.partials(), len(self.starts())
        expected = find_latest_valid(self.run_dir)
        ranks = self.start()
        first = self.wait_for_start(ranks, lives)
        if first is None:
            return True, f"did not start: {ranks.wait(0)}\n{ranks.output()}"
        problems = []
        if first != step_of(expected):
            problems.append(
                f"started from step {first}, but the newest valid checkpoint was"
                f" {step_of(expected)}"
            )
        deadline = time.monotonic() + LIFE_LIMIT
        while time.monotonic() < deadline and None in ranks.codes():
            last = self.last_step()
            if self.partials() - partials if while_saving else last >= first + num_steps:
                break
            if last >= self.num_steps - MARGIN:
                break
            time.sleep(0.005)
        time.sleep(extra)
        if None not in ranks.codes() or time.monotonic() >= deadline:
            return (
                True,
                f"ended or stood still before it was killed: {ranks.wait(0)}\n{ranks.output()}",
            )
        ranks.kill(victim)
        killed_at = time.monotonic()
        codes = ranks.wait(PEER_LIMIT, grace=PEER_LIMIT)
        seconds = time.monotonic() - killed_at
        if codes[victim] != -9 or codes[1 - victim] in (0, -9):
            problems.append(f"exit codes {codes} after killing rank {victim}")
        last = self.last_step()
        caught = "saving" if self.partials() - partials else "training"
        for _, path in list_checkpoints(self.run_dir):
            if (path / "manifest.json").exists() and verify(path, checksums=True):
                problems.append(
                    f"{path.name} does not match its manifest: {verify(path, checksums=True)[0]}"
                )
        saved = step_of(find_latest_valid(self.run_dir))
        bound = SAVE_FREQ * (2 if self.in_background else 1)
        if last - saved > bound:
            problems.append(f"{last - saved} steps lost")
        how = "async" if self.in_background else "sync"
        line = (
            f"{self.engine:6} {how:5} rank {victim} killed at step {last:3} ({caught:8}),"
            f" {last - saved} steps lost, peer ended after {seconds:4.1f} s {'; '.join(problems)}"
        )
        return bool(problems), line

    def wait_for_start(self, ranks: _runs.Ranks, lives: int) -> int | None:
        """The step from which a new life starts; None when it ends before."""
        deadline = time.monotonic() + LIFE_LIMIT
        while time.monotonic() < deadline and None in ranks.codes():
            if len(starts := self.starts()) > lives:
                return starts[-1]["step"]
            time.sleep(0.01)
        return None

    def starts(self) -> list[dict]:
        return [
            e
            for e in _runs.read_log(self.run_dir, "events.jsonl")
            if e["event"] in ("start", "resume")
        ]

    def last_step(self) -> int:
        return max(_runs.losses(self.run_dir), default=0)

    def partials(self) -> set[tuple[str, int]]:
        """Folders of checkpoints being written, told from older ones of the same name."""
        found = set()
        for path in (self.run_dir / "checkpoints").glob(".partial_step_*"):
            try:
                found.add((path.name, path.stat().st_ctime_ns))  # an inode may come back
            except FileNotFoundError:  # committed between the two calls
                pass
        return found

    def end(self) -> list[str]:
        """Let the run finish and compare it with an undisturbed one; returns what is wrong."""
        import numpy as np

        from mmldlm.data.batch_plan import BatchPlan
        from mmldlm.tasks.registry import find_task, load_config

        ranks = self.start()
        codes = ranks.wait(LAST_LIMIT)
        if any(codes):
            return [f"the last life ended with {codes}:\n{ranks.output()}"]
        self.launcher.run(WORLD_SIZE, self.words(f"{self.engine}_straight"))
        run_dirs = self.run_dir, self.folder / f"{self.engine}_straight"
        found, straight = map(_runs.read_log, run_dirs)
        problems = []
        if [r["step"] for r in found] != list(range(1, self.num_steps + 1)):
            problems.append("the log does not hold every step once, in order")
        for key in (
            "loss",
            "text_loss",
            "latent_loss",
            "grad_norm",
            "lr",
            "epoch",
            "batch_in_epoch",
            "samples",
        ):
            steps = [a["step"] for a, b in zip(found, straight) if a[key] != b[key]]
            if steps:
                problems.append(
                    f"{key} differs from the straight run's at {len(steps)} steps, first"
                    f" {steps[0]}"
                )
        evaluations = [_runs.read_log(run_dir, "eval_log.jsonl")[-1] for run_dir in run_dirs]
        if len({json.dumps({**values, "time": None}) for values in evaluations}) > 1:
            problems.append("the last evaluation differs from the straight run's")
        config = load_config("tiny", None, self.words(self.engine)[2:])
        plan = BatchPlan(
            find_task(config.task).open_data(config).train_lengths,
            _runs.GLOBAL_BATCH,
            config.training.seed,
            config.data.bucket_batches,
        )
        seen, consumed = Counter(), 0
        for record in found:
            batch = plan.batch(record["step"] - 1)
            consumed += len(batch.ids)
            if (record["epoch"], record["batch_in_epoch"], record["samples"]) != (
                batch.epoch,
                batch.index,
                consumed,
            ):
                problems.append(f"step {record['step']} had another batch than the plan's")
            seen.update((batch.epoch, int(sample)) for sample in batch.ids)
        num_epochs = self.num_steps // plan.batches_per_epoch
        counts = np.array(
            [[seen[epoch, sample] for sample in range(NUM_SAMPLES)] for epoch in range(num_epochs)]
        )
        if (counts != 1).any():
            problems.append("a sample is missing or twice in an epoch")
        return problems


def step_of(checkpoint: Path | None) -> int:
    """The step of a checkpoint's folder, 0 without one."""
    return 0 if checkpoint is None else int(checkpoint.name.removeprefix("step_"))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", help=_store.HELP)
    parser.add_argument("--optimizer", choices=_runs.OPTIMIZERS, default="adamw")
    parser.add_argument("--kills", type=int, help="number of kills (100)")
    parser.add_argument("--quick", action="store_true", help="4 kills")
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=list(ENGINES))
    parser.add_argument(
        "--seed", type=int, help="of the random choices (default: a new one, printed)"
    )
    parser.add_argument("--json", help="write conditions and claims here")
    parser.add_argument(
        "words", nargs="*", metavar="key=value", help="config, as task=image_text with its store"
    )
    args = parser.parse_args()
    sys.path.insert(0, str(_runs.ROOT))
    data = _store.given_or_made(args.data)
    engines, num_kills = args.engines, args.kills or (4 if args.quick else 100)
    seed = secrets.randbelow(2**31) if args.seed is None else args.seed
    print(f"{num_kills} kills, seed {seed}")
    with tempfile.TemporaryDirectory() as folder, _runs.RankServer(f"{folder}/output") as launcher:

        def kill_all(place: int) -> int:
            engine, own = engines[place], len(range(place, num_kills, len(engines)))
            run, chance, lost = (
                Run(
                    launcher,
                    data,
                    Path(folder),
                    engine,
                    own,
                    [*_runs.OPTIMIZERS[args.optimizer], *args.words],
                ),
                random.Random(f"{seed} {engine}"),
                0,
            )
            for number in range(own):
                is_lost, line = run.live_and_die(chance, number)
                lost += is_lost
                print(line, flush=True)
            problems = run.end()
            how = "; ".join(problems) or "like an undisturbed run"
            print(
                f"{engine:6} ended after {own} kills and {run.num_steps} steps {how}", flush=True
            )
            return own if problems else lost

        # Survivors spend most of a life's time on finding out who died: another run can use the
        # cores meanwhile.
        with ThreadPoolExecutor(AT_A_TIME) as pool:
            num_lost = sum(pool.map(kill_all, range(min(num_kills, len(engines)))))
    claims = [_report.claim("kills_lost", num_lost, "<=", 0)]
    used = {
        "kills": num_kills,
        "engines": engines,
        "seed": seed,
        "save_freq": SAVE_FREQ,
        "optimizer": args.optimizer,
        "overrides": args.words,
    }
    return _report.write(args.json, claims, args.quick, ranks=WORLD_SIZE, **used)


if __name__ == "__main__":
    sys.exit(main())
