"""Kill a preparation at random moments and compare its store, byte for byte, with an undisturbed
one.

    python benchmarks/prepare_kill_resume.py [--corpus FILE] [--kills N] [--quick] [--seed N]
    [--json FILE]

One preparation of the corpus runs undisturbed in one process. Another is started repeatedly with
one to three ranks and killed by SIGKILL after a random time: all of its ranks, or one and then
the others. Half of the kills come soon after a start, where ranks read, tokenize and claim; the
others come anywhere between two saved shards. After the last kill it runs to its end. Every file
of both stores, including the manifest, must be equal, and no other file may be left.
`stores_unequal` counts the files that differ or are in one of the stores only.
"""

from __future__ import annotations

import argparse
import random
import secrets
import shutil
import sys
import tempfile
import time
from pathlib import Path

import _report
from _runs import ROOT, RankServer

WORKER = Path(__file__).with_name("_prepare_worker.py")
MAX_RANKS = 3
HANG_TIMEOUT = 600.0  # seconds until a launch that neither ends nor is killed counts as hung
SHARD = 64  # samples per task: small, so that a small corpus has many tasks


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


def start_and_kill(
    server: RankServer, ranks: int, words: list[str], out: Path, soon: bool, rng: random.Random
) -> tuple[str, bool]:
    """Start a preparation and kill it; return the outcome, and whether it was killed before it
    ended.
    """
    victims = [rng.randrange(ranks)] if rng.random() < 0.5 else list(range(ranks))
    before, num_more, pause = (
        num_results(out),
        rng.randint(1, 4),
        rng.uniform(0, 2 if soon else 0.4),
    )
    job, deadline = server.start(ranks, words, WORKER), time.monotonic() + HANG_TIMEOUT
    while not soon and None in job.codes() and num_results(out) < before + num_more:
        if time.monotonic() > deadline:
            break
        time.sleep(0.005)
    time.sleep(pause)
    if None not in job.codes():
        return f"ended with {job.codes()}", False
    for rank in victims:
        job.kill(rank)
    # As a launcher ends the others.
    job.wait(HANG_TIMEOUT, grace=0)
    killed = "all" if len(victims) == ranks else f"rank {victims[0]}"
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
        quiet, killed = Path(folder, "quiet", "s"), Path(folder, "killed", "s")
        for out in (quiet, killed):
            out.parent.mkdir()
        words = [str(SHARD), "prepare", str(corpus), *options, "--output-dir"]
        with RankServer(f"{folder}/output") as server:
            started = time.perf_counter()
            server.run(1, [*words, str(quiet)], WORKER)
            print(f"undisturbed: {time.perf_counter() - started:.0f} s", flush=True)
            num_done = num_launches = num_unequal = 0
            while num_done < num_kills and num_launches < 3 * num_kills:
                ranks = rng.randint(1, MAX_RANKS)
                outcome, was_killed = start_and_kill(
                    server, ranks, [*words, str(killed)], killed, num_done % 2 == 1, rng
                )
                num_done, num_launches = num_done + was_killed, num_launches + 1
                print(f"launch {num_launches:2}, {ranks} rank(s): {outcome}", flush=True)
                if not was_killed and killed.exists():
                    # Complete before all kills: start from scratch.
                    num_unequal += len(compare(quiet, killed))
                    shutil.rmtree(killed)
                elif not was_killed:
                    num_unequal += 1  # it ended by itself, without a store
            server.run(MAX_RANKS, [*words, str(killed)], WORKER)
            num_unequal, num_files = num_unequal + len(compare(quiet, killed)), len(tree(quiet))
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
