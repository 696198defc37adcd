"""kill -9 of a preparation at random moments: is the store that comes out, byte for byte, that of a quiet one?

    python benchmarks/prepare_kill.py [--corpus FILE] [--kills N] [--quick] [--seed N] [--json FILE]

One preparation of the corpus runs undisturbed in one process. Another is started again and again with one to three
ranks, and killed by SIGKILL after a random time: the whole process group, or one rank of several. Half of the kills
come soon after a start, where ranks read, tokenize and claim; the others fall anywhere between two saved shards. After
the last kill it runs to its end. Every file of both stores, the manifest too, must be the same, and nothing else may
lie beside them. `stores_unequal` counts the files that differ, are missing or are there without a partner.
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
LIFE = 600.0  # seconds until a life that neither ends nor is killed counts as hung
SHARD = 64  # samples of a task: small, so that a small corpus has many


def environment() -> dict[str, str]:
    """One thread a rank; shards small enough for a corpus of minutes."""
    threads = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    paths = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    return {**os.environ, **threads, "PYTHONPATH": paths}


def command(corpus: Path, out: Path, ranks: int, words: list[str]) -> list[str]:
    """The product's own command, with small shards."""
    own = [str(Path(__file__).with_name("_prepare_rank.py")), str(SHARD), "prepare", str(corpus)]
    own += ["--output-dir", str(out), *words]
    launcher = ["-m", "mmldlm.launch.local_launcher", str(ranks)] if ranks > 1 else []
    return [sys.executable, *launcher, *own]


def tree(root: Path) -> dict[str, bytes]:
    """Every file below a folder, by name."""
    return {p.relative_to(root).as_posix(): p.read_bytes() for p in sorted(root.rglob("*")) if p.is_file()}


def shards_done(out: Path) -> int:
    """Tasks whose result is on the disk."""
    work = out.with_name(f"{out.name}.work")
    return sum(1 for path in work.glob("*/*") if not path.name.startswith("."))


def ranks_of(process: subprocess.Popen) -> list[int]:
    """Process ids of the children of a launcher."""
    try:
        return [int(pid) for pid in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()]
    except FileNotFoundError:
        return []


def live_and_die(line: list[str], out: Path, soon: bool, chance: random.Random, log) -> tuple[str, bool]:
    """One life; returns what happened, and whether it was killed (else it had ended by itself)."""
    one_rank = chance.random() < 0.5
    before = shards_done(out)
    process = subprocess.Popen(line, env=environment(), stdout=log, stderr=log, start_new_session=True)
    deadline = time.monotonic() + LIFE
    more = chance.randint(1, 4)
    pause = chance.uniform(0, 8.0 if soon else 0.4)
    if not soon:
        while process.poll() is None and shards_done(out) < before + more and time.monotonic() < deadline:
            time.sleep(0.005)
    try:
        process.wait(pause)
    except subprocess.TimeoutExpired:
        pass
    if process.poll() is not None:
        return f"ended by itself with {process.returncode}", False
    victims = ranks_of(process)
    if one_rank and len(victims) > 1:
        os.kill(chance.choice(victims), signal.SIGKILL)
        what = "one rank"
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            what = "one rank, and the others did not end"
    else:
        what = "all"
    for pid in (process.pid, *victims):
        try:
            os.killpg(process.pid, signal.SIGKILL) if pid == process.pid else os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
    process.wait()
    return f"killed ({what}), {shards_done(out)} tasks done", True


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus", help="a text file (default: docstrings of installed packages)")
    parser.add_argument("--kills", type=int, help="number of kills (20)")
    parser.add_argument("--quick", action="store_true", help="2 kills, of a smaller corpus")
    parser.add_argument("--seed", type=int, help="of the random choices (default: a new one, printed)")
    parser.add_argument("--json", help="write conditions and claims here")
    args = parser.parse_args()
    num_kills = args.kills or (2 if args.quick else 20)
    seed = secrets.randbelow(2**31) if args.seed is None else args.seed
    chance, num_texts = random.Random(seed), 300 if args.quick else 3000
    print(f"{num_kills} kills, seed {seed}")
    with tempfile.TemporaryDirectory() as folder:
        corpus = Path(folder, "corpus.txt")
        lines = list(dict.fromkeys(texts(args.corpus)))[:num_texts]
        corpus.write_text("\n".join([*lines, *lines[:50]]) + "\n", encoding="utf-8")  # some of them twice
        words = ["--overlong", "chunk", "--max-tokens", "24", "--max-samples", str(len(lines) - 20)]
        quiet, killed, log_path = Path(folder, "quiet", "s"), Path(folder, "killed", "s"), Path(folder, "log")
        for out in (quiet, killed):
            out.parent.mkdir()
        with open(log_path, "w") as log:
            started = time.perf_counter()
            subprocess.run(command(corpus, quiet, 1, words), env=environment(), stdout=log, stderr=log, check=True)
            print(f"undisturbed: {time.perf_counter() - started:.0f} s", flush=True)
            num_done, lives = 0, 0
            while num_done < num_kills and lives < 3 * num_kills:
                ranks = chance.randint(1, MAX_RANKS)
                what, was_killed = live_and_die(
                    command(corpus, killed, ranks, words), killed, num_done % 2 == 1, chance, log
                )
                num_done, lives = num_done + was_killed, lives + 1
                print(f"life {lives:2}, {ranks} rank(s): {what}", flush=True)
                if not was_killed and killed.exists():  # done before all kills: it begins anew
                    compare(quiet, killed)
                    subprocess.run(["rm", "-r", str(killed)], check=True)
            last = command(corpus, killed, MAX_RANKS, words)
            code = subprocess.run(last, env=environment(), stdout=log, stderr=log).returncode
        if code:
            print(log_path.read_text()[-3000:])
        num_unequal = len(compare(quiet, killed)) if code == 0 else len(tree(quiet))
        num_files = len(tree(quiet))
    print(f"{num_files} files, {num_unequal} differ")
    claims = [_report.claim("stores_unequal", num_unequal + (num_kills - num_done), "<=", 0)]
    return _report.write(
        args.json, claims, args.quick, kills=num_done, seed=seed, texts=len(lines), max_ranks=MAX_RANKS
    )


def texts(corpus: str | None):
    """The lines of a file, or the sentences of the default corpus."""
    if corpus is not None:
        return Path(corpus).read_text(encoding="utf-8").splitlines()
    sys.path.insert(0, str(ROOT))
    from itertools import islice

    from mmldlm.data.corpora.corpus import open_corpus

    return list(islice(open_corpus("docstrings"), 3000))


def compare(one: Path, other: Path) -> list[str]:
    """Names of files that differ or are in one of the folders only, what lies beside the second included."""
    first, second = tree(one), tree(other)
    found = sorted(name for name in {*first, *second} if first.get(name) != second.get(name))
    found += sorted(path.name for path in other.parent.iterdir() if path != other)
    for name in found:
        print(f"differs: {name}")
    return found


if __name__ == "__main__":
    sys.exit(main())
