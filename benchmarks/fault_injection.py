"""Fault injection on real ranks: every fault on every engine, with and without accumulation.

    python benchmarks/fault_injection.py [--data STORE] [--quick] [--json FILE]

For each of 17 faults x 6 engines x accumulation 1 and 3, two gloo ranks train 8 steps with the
fault at step 5. A cell holds if nothing hangs, all ranks agree, the event names the right step,
sample, tensor or rank, the saved state is finite, and every later loss is bitwise equal to a
reference run of the same engine. The reference gets the same batches without the faulty step (a
skip), without the sample (a corrupted row), or without the fault (all others: after a rollback or
a resume, and where nothing but files was hit). Where a half of the batch has no weight, the losses
are those of the other engines. A fault of saving costs at most one checkpoint. A run in which no
step is applied ends with exit code 4 on every rank, and one whose newest training state has wrong
values is resumed from the checkpoint before. Two of them mount a disk that only one rank sees,
which needs root. --quick: every engine and every fault, but few of their pairs, half of them with
accumulation.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import _injected_faults
import _mounts
import _report
import _runs
import _store
from _injected_faults import (
    ENDED,
    ENGINES,
    FAULT_STEP,
    FAULTS,
    LEFT_OUT,
    LOST_STEP,
    MOUNTING,
    NOT_SAVED,
    REFERENCES,
    RESUMED,
    ROLLED_BACK,
    SAVE_EVERY,
    SAVING,
    SKIPPED,
    STEPS,
    STOPPED,
    UNSCORED,
    slug,
)

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = ROOT / "benchmarks" / "_injected_faults.py"
LIMIT = 300.0  # seconds within which a launch must end
LIMIT_ENDED = 120.0  # the same for a job with a dead rank; engine.collective_timeout is 15 s
AT_ONCE = 3  # jobs with a dead rank: they mostly wait
ACCUMULATIONS = (1, 3)
# Every engine skips and rolls back; what follows from data or files alone needs no more than two.
# tests/integration/test_engines.py has a NaN and an Inf on one rank of every engine.
QUICK = {
    "ddp": (
        3,
        (
            "NaN loss on one rank",
            "NaN in a weight",
            "micro-batch with nothing scored",
            "wrong values in the newest training state",
        ),
    ),
    "fsdp": (
        1,
        (
            "Inf loss on all ranks",
            "NaN in Adam's second moment",
            "NaN loss in every step",
            *SAVING,
        ),
    ),
    "zero0": (
        1,
        (
            "Inf in one gradient element on one rank",
            "token id out of range",
            "NaN in a weight",
        ),
    ),
    "zero1": (
        3,
        (
            "loss spike x 1000",
            "micro-batch with nothing scored",
            "NaN in Adam's second moment",
        ),
    ),
    "zero2": (
        3,
        (
            "NaN loss on one rank",
            "NaN in a weight",
            "read-only checkpoint folder on one rank",
        ),
    ),
    "zero3": (
        1,
        (
            "Inf in one gradient element on one rank",
            "NaN in one latent of one sample",
            "NaN in Adam's second moment",
            "wrong values in the newest training state",
            "a rank that sleeps",
            "a rank that exits",
        ),
    ),
}


def records(folder: str, name: str, file: str = "training_log.jsonl") -> list[dict]:
    path = Path(folder) / slug(name) / file
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def events(folder: str, name: str, kind: str) -> list[dict]:
    return [event for event in records(folder, name, "events.jsonl") if event["event"] == kind]


def reference_name(engine: str, accum: int, kind: str) -> str:
    return f"{engine} {accum} ref {REFERENCES[kind][0]}"


def check_survived(
    folder: str, engine: str, accum: int, fault: str, unscored_losses: dict[int, dict[int, float]]
) -> str:
    """ "" when the cell holds, else what is wrong."""
    kind, name = FAULTS[fault][0], f"{engine} {accum} {fault}"
    log = records(folder, name)
    if kind == STOPPED:
        return check_stopped(folder, name, log)
    later = {record["step"]: record["loss"] for record in log if record["step"] > FAULT_STEP}
    if set(later) != set(range(FAULT_STEP + 1, STEPS + 1)) or not all(
        isinstance(x, float) for x in later.values()
    ):
        return f"later losses {later}"
    skipped = [record["step"] for record in log if record["skipped"]]
    if skipped != ([FAULT_STEP] if kind == SKIPPED else []):
        return f"skipped steps {skipped}"
    if kind == SKIPPED:
        skips = events(folder, name, "skip")
        if [event["step"] for event in skips] != [FAULT_STEP]:
            return f"skip events {skips}"
        ranks = [entry["rank"] for entry in skips[0]["bad_micro_batches"]]
        expected = {"NaN loss on one rank": [1], "Inf loss on all ranks": [0, 1]}.get(fault, [])
        if ranks != expected or not (Path(folder) / slug(name) / skips[0]["case"]).is_file():
            return (
                f"the event names ranks {ranks}, not {expected}, and case {skips[0].get('case')}"
            )
    lost = [
        event
        for event in events(folder, name, "save_failed")
        if event["step"] != LOST_STEP or kind != NOT_SAVED
    ]
    if lost or (Path(folder) / slug(name) / "latest").resolve().name != f"step_{STEPS:08d}":
        return f"not saved: {lost}, latest {(Path(folder) / slug(name) / 'latest').resolve().name}"
    if kind == NOT_SAVED:
        reasons = [event["reason"] for event in events(folder, name, "save_failed")]
        if len(reasons) != 1 or "rank 1 on" not in reasons[0]:
            return f"reasons of the lost checkpoint: {reasons}"
    if kind == LEFT_OUT:
        bad = events(folder, name, "bad_sample")
        if len(bad) != 1 or bad[0]["step"] != FAULT_STEP or bad[0]["row"] != bad[0]["id"]:
            return f"bad_sample events {bad}"
        reference = events(folder, reference_name(engine, accum, kind), "bad_sample")
        if [event["id"] for event in reference] != [bad[0]["id"]]:
            return (
                f"named sample {bad[0]['id']}, planted in {[event['id'] for event in reference]}"
            )
    if kind == RESUMED:
        steps = [event["step"] for event in events(folder, name, "resume")]
        if steps != [STEPS - SAVE_EVERY]:
            return f"resumed at {steps}"
    if kind == ROLLED_BACK:
        back = events(folder, name, "rollback")
        named = [tuple(event.get("tensors", {})) for event in back]
        # A NaN second moment reaches its weight in the same step: both are named.
        planted = ".exp_avg_sq" if "moment" in fault else ""
        if (
            len(named) != 1
            or not any(name.endswith(planted) for name in named[0])
            or len(named[0]) > 1 + bool(planted)
        ):
            return f"rollback events {back}"
    bad_state = nonfinite(Path(folder) / slug(name) / "latest")
    if bad_state:
        return f"saved non-finite {bad_state}"
    expected = {
        record["step"]: record["loss"]
        for record in records(folder, reference_name(engine, accum, kind))
        if record["step"] > FAULT_STEP
    }
    if kind == UNSCORED:
        if later == expected:
            return "the losses of the complete batch"
        expected = unscored_losses.setdefault(accum, later)
        far = {
            step: (loss, expected[step])
            for step, loss in later.items()
            if abs(loss / expected[step] - 1) > 1e-4
        }
        return f"losses unlike the first engine's: {far}" if far else ""
    return "" if later == expected else f"later losses {later}, reference {expected}"


def check_stopped(folder: str, name: str, log: list[dict]) -> str:
    """ "" when all ranks of a run in which no step was applied ended with exit code 4."""
    codes = [
        path.read_text() for path in sorted((Path(folder) / slug(name)).glob("exit_code_of_rank*"))
    ]
    ends = [event["exit_code"] for event in events(folder, name, "end")]
    if (
        codes != ["4", "4"]
        or ends != [4]
        or len(log) != STEPS
        or not all(record["skipped"] for record in log)
    ):
        return f"exit codes of ranks {codes}, of the log {ends}, {len(log)} steps"
    return ""


def nonfinite(checkpoint: Path) -> str:
    """The first tensor of a checkpoint with a NaN or Inf in weights or moments, "" without."""
    sys.path.insert(0, str(ROOT))
    import numpy as np

    from mmldlm.checkpoints.resume import open_training_state

    with open_training_state(checkpoint / "engine") as reader:
        for name in reader.names:
            count = int(np.prod(reader.shape(name), dtype=np.int64))
            trained = (
                ("weight", "exp_avg", "exp_avg_sq")
                if reader.kind(name) == "trainable"
                else ("weight",)
            )
            for what in trained:
                if not np.isfinite(reader.read(name, what, 0, count)).all():
                    return f"{name}.{what}"
    return ""


def check_ended(launcher: _runs.RankServer, words: list[str]) -> str:
    """The other rank must have ended by itself and named the failed rank."""
    ranks = launcher.start(2, words, SCRIPT)
    codes = ranks.wait(LIMIT_ENDED, grace=LIMIT_ENDED)
    if codes[0] == -9:
        return f"rank 0 still ran after {LIMIT_ENDED:.0f} s"
    if codes[0] == 0:
        return "rank 0 ended with exit code 0"
    return (
        ""
        if "rank 1 on" in ranks.output(1_000_000)
        else f"rank 1 not named: {ranks.output()[-600:]}"
    )


def cells_of(quick: bool) -> list[tuple[str, int, tuple[str, ...]]]:
    """(engine, accumulation, faults) of each launch, whose faults survive, or end it alone."""
    if quick:
        return [(engine, accum, faults) for engine, (accum, faults) in QUICK.items()]
    return [(engine, accum, tuple(FAULTS)) for engine in ENGINES for accum in ACCUMULATIONS]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", help=_store.HELP)
    parser.add_argument(
        "--quick", action="store_true", help="every engine and every fault, but few of their pairs"
    )
    parser.add_argument("--json", help="write conditions and claims here")
    args = parser.parse_args()
    store = _store.given_or_made(args.data)
    failed, cells, unscored_losses = [], 0, {}
    left_out = [] if _mounts.is_allowed() else list(MOUNTING)
    if left_out:
        print(f"skipped, as only root may mount: {'; '.join(left_out)}")
    with tempfile.TemporaryDirectory() as folder, _runs.RankServer(f"{folder}/output") as launcher:
        for engine, accum, chosen in cells_of(args.quick):
            words = [store, folder, engine, str(accum)]
            chosen = [fault for fault in chosen if fault not in left_out]
            ending = [fault for fault in chosen if FAULTS[fault][0] == ENDED]
            faults = [fault for fault in chosen if fault not in ending]
            ranks = launcher.start(2, [*words, *faults], SCRIPT)
            codes, row = ranks.wait(LIMIT), {}
            for fault in faults:
                row[fault] = check_survived(folder, engine, accum, fault, unscored_losses)
                if row[fault] and codes != [0, 0]:
                    row[fault] += f" (ranks ended with {codes}: {ranks.output()[-600:]})"
            with ThreadPoolExecutor(AT_ONCE) as pool:
                ended = pool.map(lambda fault: check_ended(launcher, [*words, fault]), ending)  # noqa: B023
                row |= dict(zip(ending, ended, strict=True))
            cells += len(row)
            failed += [
                f"{engine}, accumulation {accum}, {fault}: {why}"
                for fault, why in row.items()
                if why
            ]
            marks = "".join("." if not why else "F" for why in row.values())
            held = len(row) - marks.count("F")
            print(
                f"{engine:6s} accumulation {accum}  {marks}  {held} of {len(row)} hold", flush=True
            )
    for line in failed:
        print(f"FAILED {line}")
    claims = [_report.claim("cells_failed", len(failed), "<=", 0)]
    if not args.quick:
        print("faults, in the order of the marks (without the skipped ones): " + "; ".join(FAULTS))
        expected = (len(FAULTS) - len(left_out)) * len(ENGINES) * len(ACCUMULATIONS)
        claims.append(_report.claim("cells", cells, ">=", expected))
    used = {"cells": cells, "steps": STEPS, "fault_step": FAULT_STEP, "left_out": left_out}
    return _report.write(args.json, claims, args.quick, **used)


if __name__ == "__main__":
    assert _injected_faults.FAULT_STEP < STEPS
    sys.exit(main())
