"""Preflight and the watcher, measured on a virtual cluster of three hosts (network namespaces with
sshd; needs root).

    python benchmarks/preflight.py [--quick] [--part faults|times] [--json FILE] [--data STORE]
    [--names 256]

Injects every fault of tests/support/preflight_faults.py alone; its check must report it on its
node, and no other check may fail. Measures levels 0 to 2 on healthy hosts. Injects every fault of
tests/support/launch_faults.py into a running launch and measures the time until it has ended. Ends
launches next to another one, which must not be affected. --quick injects compatible faults
together, and one fault of a launch. --part runs one half: the faults take 10 minutes on two cores
and do not need a quiet machine. --names N measures the fan-out up to N nodes, with a stub of ssh.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(Path(__file__).resolve().parent)]

from _report import claim, write  # noqa: E402

from tests.support.launch_faults import LAUNCH_FAULTS, NEIGHBORS, play, play_beside  # noqa: E402
from tests.support.preflight_faults import (  # noqa: E402
    FAULTS,
    HARMLESS,
    TOGETHER,
    Scene,
    problem_text,
    problems,
)
from tests.support.virtual_cluster import VirtualCluster, reason_to_skip  # noqa: E402


def make_store(folder: Path) -> Path:
    """Return a small store of real sentences (docstrings of the standard library's argparse, ast
    and logging).
    """
    import argparse as one
    import ast as two
    import logging as three

    texts = {
        line.strip()
        for module in (one, two, three)
        for line in Path(module.__file__).read_text(encoding="utf-8").splitlines()
    }
    sentences = sorted(text for text in texts if 30 < len(text) < 90 and text.isascii())
    (folder / "corpus.txt").write_text("\n".join(sentences[:300]) + "\n")
    command = [sys.executable, "-m", "mmldlm.cli", "prepare", str(folder / "corpus.txt")]
    command += ["--output-dir", str(folder / "store"), "--validation-samples", "40"]
    subprocess.run(command, check=True, cwd=ROOT, stdout=subprocess.DEVNULL)
    return folder / "store"


def save_run(store: Path, folder: Path) -> Path:
    """Return a finished run to resume from: one rank, global batch 12."""
    words = [
        "--config-name",
        "tiny",
        f"data.latent_data_root={store}",
        f"logging.save_dir={folder}",
    ]
    words += [
        "logging.run_name=saved",
        "engine.kind=single",
        "training.train_batch_size=12",
        "training.num_train_steps=2",
    ]
    words += ["data.max_validation_samples=16", "logging.save_freq=2"]
    command = [sys.executable, str(ROOT / "mmldlm" / "train.py"), *words]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return folder / "saved"


def inject(scene: Scene, faults) -> tuple[set[str], set[tuple[str, str]], str]:
    """Inject faults together; return (names found with node and fix, results that no fault
    explains, screen).
    """
    with contextlib.ExitStack() as stack:
        for fault in faults:
            fault.inject(scene, stack)
        try:
            receipt = scene.run()
        except AssertionError as error:  # a timeout, or no receipt: nothing was found
            return set(), set(), str(error)
    seen = problems(receipt)
    found = {
        f.name
        for f in faults
        if f.expected <= seen and all(word in problem_text(receipt, f.id) for word in f.words)
    }
    return found, seen - set().union(*(fault.expected for fault in faults)), receipt["screen"]


def fan_out(names: int, folder: Path) -> float:
    """Return the seconds to start, call and stop agents on N names whose ssh answers after
    0.3 s.
    """
    from mmldlm.cluster.agent import Agent, AgentPool
    from mmldlm.preflight.runner import AGENT

    programs = folder / "bin"
    programs.mkdir(exist_ok=True)
    # Answers every request with the facts of one node; sh, because N Python processes would
    # measure the cores.
    answer = json.dumps(
        {"identity": {"value": {"machine": "m", "hostname": "h"}}, "filler": {"value": "x" * 4000}}
    )
    (programs / "ssh").write_text(
        "#!/bin/sh\nsleep 0.3\necho '@mmldlm {\"hello\": 1}'\nn=0\nwhile read -r line; do"
        f" n=$((n + 1)); sleep 0.3\necho '@mmldlm {{\"id\": '$n', \"value\": {answer}}}'\ndone\n"
    )
    (programs / "ssh").chmod(0o755)
    before = os.environ["PATH"]
    os.environ["PATH"] = f"{programs}:{before}"
    try:
        started = time.perf_counter()
        pool = AgentPool([Agent(f"node{number}", AGENT) for number in range(names)])
        pool.start()
        answers = pool.call("collect_facts", {"probes": []})
        pool.stop()
        assert len(answers) == names, pool.failures
        return time.perf_counter() - started
    finally:
        os.environ["PATH"] = before


def measure_faults(
    cluster: VirtualCluster, store: Path, folder: Path, quick: bool
) -> tuple[int, int, int]:
    """Return (found, missed, false alarms), including those on healthy hosts."""
    saved = save_run(store, folder)
    by_name = {fault.name: fault for fault in FAULTS}
    groups = (
        [[by_name[name] for name in group] for group in TOGETHER]
        if quick
        else [[fault] for fault in FAULTS]
    )
    num_found, num_missed, num_false = 0, 0, 0
    for number, group in enumerate(groups):
        started = time.perf_counter()
        found, unexplained, screen = inject(
            Scene(cluster, store, folder / f"scene{number}", saved), group
        )
        missed = [fault.name for fault in group if fault.name not in found]
        num_found, num_missed = num_found + len(found), num_missed + len(missed)
        num_false += len(unexplained)
        print(
            f"{time.perf_counter() - started:6.1f} s  found {', '.join(sorted(found))}", flush=True
        )
        if missed or unexplained:
            print(
                f"          MISSED {missed}, unexplained {sorted(unexplained)}\n{screen}",
                flush=True,
            )
    for number, harmless in enumerate(HARMLESS):
        ended, alarms, screen = inject(
            Scene(cluster, store, folder / f"harmless{number}", saved), [harmless]
        )
        num_false += len(alarms) + (not ended)
        seen = "no end" if not ended else f"{len(alarms)} alarm(s)"
        print(
            f"          harmless, {harmless.name}: {seen} {screen if alarms or not ended else ''}",
            flush=True,
        )
    for launcher in ("deepspeed",) if quick else ("deepspeed", "torchrun", "mpi"):
        scene = Scene(cluster, store, folder / f"healthy_{launcher}")
        scene.words += ["--launcher", launcher]
        alarms = problems(scene.run())
        num_false += len(alarms)
        print(
            f"          healthy, {launcher}: {len(alarms)} alarm(s) {sorted(alarms) or ''}",
            flush=True,
        )
    return num_found, num_missed, num_false


def measure_levels(
    cluster: VirtualCluster, store: Path, folder: Path, times: int
) -> dict[str, float]:
    """Return the median seconds of `mmldlm preflight` on three healthy hosts, of level 0 and of
    levels 0 to 2.

    Also the CPU seconds of this command and its children, without processes started by ssh:
    independent of other load.
    """
    medians = {}
    for name, level in (("level_0", 0), ("levels_0_to_2", 2)):
        seconds, busy = [], []
        for number in range(times):
            scene = Scene(cluster, store, folder / f"timed{level}_{number}", level=level)
            started, used = time.perf_counter(), os.times()
            scene.run()
            now = os.times()
            seconds.append(time.perf_counter() - started)
            busy.append(
                now.children_user + now.children_system - used.children_user - used.children_system
            )
        medians[name], medians[f"{name}_cpu"] = statistics.median(seconds), statistics.median(busy)
        print(
            f"{name} on 3 hosts: {', '.join(f'{s:.1f}' for s in seconds)} s; CPU"
            f" {medians[f'{name}_cpu']:.1f} s"
        )
    return medians


def measure_watcher(
    cluster: VirtualCluster, store: Path, folder: Path, quick: bool
) -> tuple[float, int]:
    """Return the longest time from a fault to the end of the launch, NaN if a fault was not
    handled, and how many were not.
    """
    stops = []
    for number, fault in enumerate(LAUNCH_FAULTS[1:2] if quick else LAUNCH_FAULTS):
        try:
            seconds, code, output, left = play(
                cluster, store, folder / f"launch_fault{number}", fault
            )
        except (AssertionError, subprocess.TimeoutExpired) as error:
            seconds, code, output, left = float("nan"), 0, str(error), []
        handled = code != 0 and not left and any(words in output for words in fault.words)
        said_instead = "" if handled else f", NOT handled: {output[-800:]}"
        print(f"{seconds:6.1f} s  {fault.name}: exit {code}{said_instead}", flush=True)
        stops.append(seconds if handled else float("nan"))
    return max(stops, key=lambda s: (s != s, s)), sum(s != s for s in stops)


def count_disturbed(cluster: VirtualCluster, store: Path, folder: Path, quick: bool) -> int:
    """Return how many ends of a launch (Ctrl-C, dead rank, dead head) disturbed another launch or
    left processes.
    """
    disturbed = 0
    for ended in play_beside(
        cluster, store, folder / "beside", NEIGHBORS[1:2] if quick else NEIGHBORS
    ):
        undisturbed = (
            ended.kept_trains
            and not ended.pkills
            and not ended.left
            and ended.code in ended.neighbor.codes
        )
        said_instead = "" if undisturbed else f", DISTURBED: {ended.pkills} {ended.output[-800:]}"
        print(
            f"next to another launch, {ended.neighbor.name}: exit {ended.code}{said_instead}",
            flush=True,
        )
        disturbed += not undisturbed
    return disturbed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument(
        "--part", choices=("faults", "times"), help="only the faults, or only what is timed"
    )
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument(
        "--data",
        metavar="STORE",
        help="a prepared store (default: one is made of a few docstrings)",
    )
    parser.add_argument(
        "--names", type=int, default=256, help="largest number of nodes of the fan-out's table"
    )
    args = parser.parse_args()
    reason = reason_to_skip()
    if reason is not None:
        print(f"cannot be measured here: {reason}", file=sys.stderr)
        return 3
    claims, more = [], {}
    temporary = tempfile.TemporaryDirectory(prefix="mmldlm_preflight_")
    with temporary, VirtualCluster(Path(temporary.name) / "cluster") as cluster:
        folder = Path(temporary.name)
        store = Path(args.data).absolute() if args.data else make_store(folder)
        if args.part != "faults":
            medians = measure_levels(cluster, store, folder, 1 if args.quick else 5)
            worst, unhandled = measure_watcher(cluster, store, folder, args.quick)
            disturbed = count_disturbed(cluster, store, folder, args.quick)
            growth = {n: fan_out(n, folder) for n in (4, 16, 64, 256, 1024) if n <= args.names}
            print(
                "fan-out: " + ", ".join(f"{n} nodes {s:.1f} s" for n, s in growth.items()),
                flush=True,
            )
            seconds = medians["levels_0_to_2"]
            claims.append(claim("levels_0_to_2_seconds_3_hosts", seconds, "<=", 30, measured=True))
            claims.append(claim("watcher_seconds_worst", worst, "<=", 15, measured=True))
            claims.append(claim("launch_faults_unhandled", unhandled, "==", 0))
            claims.append(claim("launches_disturbed_by_another", disturbed, "==", 0))
            more = {"seconds": medians, "fan_out_seconds": growth}
        if args.part != "times":
            found, missed, alarms = measure_faults(cluster, store, folder, args.quick)
            claims.append(claim("faults_found", found, ">=", 30))
            claims.append(claim("faults_missed", missed, "==", 0))
            claims.append(claim("false_alarms", alarms, "==", 0))
    return write(args.json, claims, quick=args.quick, hosts=3, load=os.getloadavg()[0], **more)


if __name__ == "__main__":
    sys.exit(main())
