"""Run every benchmark and every study in a process of its own and report which claims hold, fail,
or were not checked.

    python benchmarks/all.py [--quick] [--only NAME ...] [--data STORE] [--json FILE] [--logs DIR]
    [--timeout SECONDS]

The scripts are those of this folder whose names do not begin with an underscore, and the studies
beside it, studies/NAME/NAME.py. They share one store. A script that ends with an error, runs out
of time or makes no claim counts as a failure. Not checked, and not counted as held: a script that
cannot measure here (exit code 3: it needs a package of the extra `bench`, root or network
namespaces), and times and memory under --quick, whose shapes are toys. Exit codes: 0 no failure,
1 some failure, 2 usage, 3 nothing could be judged.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import _report
import _store

HERE = Path(__file__).resolve().parent
SECONDS = {True: 1800.0, False: 12 * 3600.0}  # per script, with and without --quick
GRACE = 60.0  # seconds in which an interrupted script ends what it started
TAIL = 1500  # characters of a failed script's output on the screen


@dataclass
class Outcome:
    """Result of one script.

    Attributes:
        script: its name.
        seconds: its wall time.
        claims: as in its report.
        error: why it failed to run.
        skipped: why it could not be checked.
        conditions: as in its report.
    """

    script: str
    seconds: float = 0.0
    claims: list[dict] = field(default_factory=list)
    error: str | None = None
    skipped: str | None = None
    conditions: dict = field(default_factory=dict)


def discover(folder: Path = HERE) -> dict[str, Path]:
    """Return name -> path of the benchmarks in a folder and of the studies beside it."""
    scripts = [path for path in folder.glob("*.py") if not path.name.startswith("_")]
    scripts += [
        path for path in folder.parent.glob("studies/*/*.py") if path.stem == path.parent.name
    ]
    return {
        path.stem: path for path in sorted(scripts) if path.resolve() != Path(__file__).resolve()
    }


def run_script(path: Path, words: list[str], log: Path, timeout: float) -> Outcome:
    """Run one benchmark and read the claims it wrote."""
    report, started = log.with_suffix(".json"), time.monotonic()
    report.unlink(missing_ok=True)  # left by an earlier run with the same --logs
    command = [sys.executable, str(path), *words, "--json", str(report)]
    with log.open("w", encoding="utf-8") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            code: int | None = process.wait(timeout)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            end(process)
    outcome = judge(path.stem, code, report, log, timeout)
    outcome.seconds = time.monotonic() - started
    return outcome


def end(process: subprocess.Popen) -> None:
    """Interrupt a script that still runs, so that it cleans up; then kill its session."""
    if process.poll() is not None:
        return
    process.send_signal(signal.SIGINT)
    try:
        process.wait(GRACE)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def judge(name: str, code: int | None, report: Path, log: Path, timeout: float) -> Outcome:
    """Derive the outcome from an exit code (None: out of time) and a report."""
    outcome, output = Outcome(name), log.read_text(encoding="utf-8", errors="replace")
    if code is None:
        outcome.error = f"no end after {timeout:g} s:\n{output[-TAIL:]}"
        return outcome
    if code == _report.COULD_NOT_CHECK:
        outcome.skipped = output.strip()[-TAIL:]
        return outcome
    try:
        answer = json.loads(report.read_text(encoding="utf-8"))
        outcome.claims, outcome.conditions = answer["claims"], answer["conditions"]
        quick = outcome.conditions["quick"]
        failed = any(_report.verdict(claim, quick) == "FAILS" for claim in outcome.claims)
    except (OSError, ValueError, KeyError, TypeError) as error:
        outcome.claims = []
        outcome.error = f"exit code {code} and no complete report ({error!r}):\n{output[-TAIL:]}"
        return outcome
    if code != failed:  # it died after its report, so its claims are void
        outcome.claims = []
        outcome.error = f"exit code {code}, but its claims say {int(failed)}:\n{output[-TAIL:]}"
    elif not outcome.claims:
        outcome.error = "it makes no claim"
    return outcome


def show(outcome: Outcome, quick: bool) -> None:
    """Print the result of one script."""
    for claim in outcome.claims:
        print(f"  {_report.line(claim, quick)}")
    if outcome.skipped is not None:
        print("  not checked: " + outcome.skipped.replace("\n", "\n    "))
    if outcome.error is not None:
        print("  FAILED TO RUN: " + outcome.error.replace("\n", "\n    "))
    print(f"  {outcome.seconds:.0f} s", flush=True)


def summary(outcomes: list[Outcome], quick: bool) -> int:
    """Print what held, failed and was not checked; return the exit code."""
    verdicts = {"holds": [], "FAILS": [], "not judged": []}
    for outcome in outcomes:
        for claim in outcome.claims:
            verdicts[_report.verdict(claim, quick)].append(
                f"{outcome.script}: {_report.line(claim, quick)}"
            )
    broken = [outcome.script for outcome in outcomes if outcome.error is not None]
    skipped = [outcome.script for outcome in outcomes if outcome.skipped is not None]
    print(
        f"\n{len(outcomes)} scripts: {len(verdicts['holds'])} claims hold,"
        f" {len(verdicts['FAILS'])} fail"
    )
    for line in verdicts["FAILS"]:
        print(f"  {line}")
    if broken:
        print(f"failed to run: {', '.join(broken)}")
    if skipped:
        print(f"not checked, see the reason above: {', '.join(skipped)}")
    if verdicts["not judged"]:
        print(f"measured and not judged with --quick: {len(verdicts['not judged'])} claims")
    if broken or verdicts["FAILS"]:
        return 1
    return 0 if verdicts["holds"] else _report.COULD_NOT_CHECK


def main(folder: Path = HERE) -> int:
    scripts = discover(folder)
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="run the short form of every script")
    parser.add_argument(
        "--only",
        nargs="+",
        metavar="NAME",
        choices=scripts,
        default=list(scripts),
        help="run only these",
    )
    parser.add_argument("--data", help=_store.HELP)
    parser.add_argument("--json", help="write the claims of all scripts here")
    parser.add_argument(
        "--logs", type=Path, help="keep the output and the report of each script in this folder"
    )
    parser.add_argument(
        "--timeout",
        type=float,
        help="seconds per script (default: 1,800 with --quick, else 43,200)",
    )
    args = parser.parse_args()
    if args.logs is not None:
        args.logs.mkdir(parents=True, exist_ok=True)
    needs_data = {name for name in args.only if '"--data"' in scripts[name].read_text()}
    data = _store.given_or_made(args.data) if needs_data else None
    outcomes = []
    with tempfile.TemporaryDirectory() as temporary:
        for name in dict.fromkeys(args.only):
            words = [
                *(["--quick"] if args.quick else []),
                *(["--data", data] if name in needs_data else []),
            ]
            print(f"{name}.py {' '.join(words)}", flush=True)
            log = (args.logs or Path(temporary)) / f"{name}.txt"
            outcomes.append(
                run_script(scripts[name], words, log, args.timeout or SECONDS[args.quick])
            )
            show(outcomes[-1], args.quick)
    code = summary(outcomes, args.quick)
    if args.json is not None:
        claims = [
            {"script": outcome.script, **claim} for outcome in outcomes for claim in outcome.claims
        ]
        facts = [
            {key: value for key, value in vars(outcome).items() if key != "claims"}
            for outcome in outcomes
        ]
        answer = {
            "conditions": _report.conditions(quick=args.quick, scripts=facts),
            "claims": claims,
        }
        Path(args.json).write_text(json.dumps(answer, indent=2) + "\n", encoding="utf-8")
    return code


if __name__ == "__main__":
    sys.exit(main())
