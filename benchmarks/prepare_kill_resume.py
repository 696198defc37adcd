"""Kill a preparation at random moments and compare its store, byte for byte, with an undisturbed
one.

    python benchmarks/prepare_kill_resume.py [--corpus FILE] [--kills N] [--quick] [--seed N]
    [--json FILE]

One preparation of the corpus runs undisturbed in one process. Another is started repeatedly with
one to three ranks and killed by SIGKILL after a random time: its process group, or one rank of
several. Half of the kills come soon after a start, where ranks read, tokenize and claim; the
others come anywhere between two saved shards. After the last kill it runs to its end. Every file
of both stores, including the manifest, must be equal, and no other file may be left.
`stores_unequal` counts the files that differ or are in one of the stores only.
"""

from __future__ import annotations

import argparse
import os
import random
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import _report

ROOT = Path(__file__).resolve().parents[1]
MAX_RANKS = 3
HANG_TIMEOUT = 600.0  # seconds until a launch that neither ends nor is killed counts as hung
SHARD = 64  # samples per task: small, so that a small corpus has many tasks


def environment() -> dict[str, str]:
    """Return an environment with one thread per rank."""
    threads = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    paths = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    return {**os.environ, **threads, "PYTHONPATH": paths}


def command(corpus: Path, out: Path, ranks: int, options: list[str]) -> list[str]:
    """Return the command of `mmldlm prepare` with small shards."""
    own = [str(Path(__file__).with_name("_prepare_worker.py")), str(SHARD), "prepare", str(corpus)]
    own += ["--output-dir", str(out), *options]
    launcher = ["-m", "mmldlm.launch.local_launcher", str(ranks)] if ranks > 1 else []
    return [sys.executable, *launcher, *own]


def tree(root: Path) -> dict[str, bytes]:
    """Map the name of every file below a folder to its bytes."""
    return {
        p.relative_to(root).as_posix(): p.read_bytes()
        for p in sorted(root.rglob("*"))
        if p.is_file()
    }


def num_results(out: Path) -> int:
    """Return the number of tasks whose result is on the disk."""
    work = out.with_name(f"{out.name}.work")
    return sum(1 for path in work.glob("*/*") if not path.name.startswith("."))


def ranks_of(process: subprocess.Popen) -> list[int]:
    """Return the PIDs of the children of a launcher."""
    try:
        return [
            int(pid)
            for pid in (
                Path(f"/proc/{process.pid}/task/{process.pid}/children")
                .read_text(encoding="utf-8")
                .split()
            )
        ]
    except FileNotFoundError:
        return []


def launch_and_kill(
    args: list[str], out: Path, soon: bool, rng: random.Random, log
) -> tuple[str, bool]:
    """Start a launch and kill it; return the outcome, and whether it was killed before it
    ended.
    """
    one_rank = rng.random() < 0.5
    before = num_results(out)
    process = subprocess.Popen(
        args, env=environment(), stdout=log, stderr=log, start_new_session=True
    )
    deadline = time.monotonic() + HANG_TIMEOUT
    num_more = rng.randint(1, 4)
    pause = rng.uniform(0, 8.0 if soon else 0.4)
    if not soon:
        while (
            process.poll() is None
            and num_results(out) < before + num_more
            and time.monotonic() < deadline
        ):
            time.sleep(0.005)
    try:
        process.wait(pause)
    except subprocess.TimeoutExpired:
        pass
    if process.poll() is not None:
        return f"ended with {process.returncode}", False
    victims = ranks_of(process)
    if one_rank and len(victims) > 1:
        os.kill(rng.choice(victims), signal.SIGKILL)
        killed = "one rank"
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            killed = "one rank, and the others did not end"
    else:
        killed = "all"
    for pid in (process.pid, *victims):
        try:
            (
                os.killpg(process.pid, signal.SIGKILL)
                if pid == process.pid
                else os.kill(pid, signal.SIGKILL)
            )
        except ProcessLookupError:
            pass
    process.wait()
    return f"killed ({killed}), {num_results(out)} tasks done", True


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--corpus", help="a text file (default: docstrings of installed packages)")
    parser.add_argument("--kills", type=int, help="number of kills (20)")
    parser.add_argument("--quick", action="store_true", help="2 kills, of a smaller corpus")
    parser.add_argument(
        "--seed", type=int, help="seed of the random choices (default: random, printed)"
    )
    parser.add_argument("--json", help="write conditions and claims to this file")
    args = parser.parse_args()
    num_kills = args.kills or (2 if args.quick else 20)
    seed = secrets.randbelow(2**31) if args.seed is None else args.seed
    rng, num_texts = random.Random(seed), 300 if args.quick else 3000
    print(f"{num_kills} kills, seed {seed}")
    with tempfile.TemporaryDirectory() as folder:
        corpus = Path(folder, "corpus.txt")
        lines = list(dict.fromkeys(texts(args.corpus)))[:num_texts]
        # Some of them twice.
        corpus.write_text("\n".join([*lines, *lines[:50]]) + "\n", encoding="utf-8")
        options = [
            "--overlong",
            "chunk",
            "--max-tokens",
            "24",
            "--max-samples",
            str(len(lines) - 20),
        ]
        quiet, killed, log_path = (
            Path(folder, "quiet", "s"),
            Path(folder, "killed", "s"),
            Path(folder, "log"),
        )
        for out in (quiet, killed):
            out.parent.mkdir()
        with open(log_path, "w", encoding="utf-8") as log:
            started = time.perf_counter()
            subprocess.run(
                command(corpus, quiet, 1, options),
                env=environment(),
                stdout=log,
                stderr=log,
                check=True,
            )
            print(f"undisturbed: {time.perf_counter() - started:.0f} s", flush=True)
            num_done, num_launches = 0, 0
            while num_done < num_kills and num_launches < 3 * num_kills:
                ranks = rng.randint(1, MAX_RANKS)
                args_of_launch = command(corpus, killed, ranks, options)
                outcome, was_killed = launch_and_kill(
                    args_of_launch, killed, num_done % 2 == 1, rng, log
                )
                num_done, num_launches = num_done + was_killed, num_launches + 1
                print(f"launch {num_launches:2}, {ranks} rank(s): {outcome}", flush=True)
                if not was_killed and killed.exists():
                    # Complete before all kills: start from scratch.
                    compare(quiet, killed)
                    subprocess.run(["rm", "-r", str(killed)], check=True)
            last = command(corpus, killed, MAX_RANKS, options)
            code = subprocess.run(last, env=environment(), stdout=log, stderr=log).returncode
        if code:
            print(log_path.read_text(encoding="utf-8")[-3000:])
        num_unequal = len(compare(quiet, killed)) if code == 0 else len(tree(quiet))
        num_files = len(tree(quiet))
    print(f"{num_files} files, {num_unequal} differ")
    claims = [_report.claim("stores_unequal", num_unequal + (num_kills - num_done), "<=", 0)]
    return _report.write(
        args.json,
        claims,
        args.quick,
        kills=num_done,
        seed=seed,
        texts=len(lines),
        max_ranks=MAX_RANKS,
    )


def texts(corpus: str | None):
    """Return the lines of a file, or sentences of the default corpus."""
    if corpus is not None:
        return Path(corpus).read_text(encoding="utf-8").splitlines()
    sys.path.insert(0, str(ROOT))
    from itertools import islice

    from mmldlm.data.corpora.text_corpus import open_corpus

    return list(islice(open_corpus("docstrings"), 3000))


def compare(one: Path, other: Path) -> list[str]:
    """Return the names of files that differ or are in one folder only, and of files next to the
    second folder.
    """
    first, second = tree(one), tree(other)
    found = sorted(name for name in {*first, *second} if first.get(name) != second.get(name))
    found += sorted(path.name for path in other.parent.iterdir() if path != other)
    for name in found:
        print(f"differs: {name}")
    return found


if __name__ == "__main__":
    sys.exit(main())
