"""Which model of text wins? Every baseline and the MMDiT on one corpus, with equal tokens.

    python studies/baselines/baselines.py [--data STORE] [--quick | --full] [--arms NAME ...]
                                          [--workers 2] [--out DIR] [--tables FILE] [--json FILE]

Each arm sees the same batches of the same texts. Its learning rate is the best of three at a tenth
of the length. The first table has equal width and depth, hence about equal FLOPs a text token; the
second (not with --quick) the models that are given a latent, those of one stream twice as deep,
hence with about the parameters of the MMDiT. Likelihoods are exact (AR) or upper bounds with their
weights exact, in nats a token with the length paid for, on texts that training never sees. Models
without a latent also write texts; their judge is an AR model that was trained on a quarter of the
training texts, which no arm sees. Every arm also trains a few steps on two ranks under ZeRO-2,
ZeRO-3 and FSDP2, and is compared with one process.

Arms train in --workers processes of one thread each. --quick shows that it runs: models of 32, a
few steps. --full trains longer, and three seeds.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

# A study runs from a checkout, installed or not, and reports as the benchmarks do.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import _report
import _runs
import _store

from studies.baselines import split_store
from studies.baselines.arms import Arm, Scale, known_arms, length_words, train
from studies.baselines.identities import bound_difference, cache_difference, largest_error
from studies.baselines.measure import markdown, real_texts, run_arm

SCALES = {
    "quick": Scale(32, 1, 2, 4, 16, (1e-3,), (0,), 16),
    "default": Scale(192, 4, 4, 400, 96, (7e-4, 2e-3, 6e-3), (0,), 1000),
    "full": Scale(192, 4, 4, 1300, 96, (7e-4, 2e-3, 6e-3), (0, 1, 2), 1000),
}
PARITY_STEPS, PARITY_BOUND = 4, 1e-4
PARITY_ENGINES = ("zero2", "zero3", "fsdp")


def judge_of(scale: Scale, store: Path, folder: Path) -> Path:
    """Train the judge of written texts; its run."""
    (ar,) = (arm for arm in known_arms() if arm.name == "ar")
    words = [
        *ar.words(scale),
        *length_words(scale.steps, sorted(scale.rates)[len(scale.rates) // 2], 0),
    ]
    train([*words, f"data.latent_data_root={store}"], folder, "judge")
    return folder / "judge"


def compare(
    arms: list[Arm],
    scale: Scale,
    store: str,
    folder: Path,
    double_depth: bool,
    judge: Path,
    workers: int,
) -> dict[str, dict]:
    """Train and measure the arms, some at a time; name -> what `run_arm` gives."""
    # The workers inherit it. Each arm has a process of its own.
    os.environ["OMP_NUM_THREADS"] = "1"
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=spawn, max_tasks_per_child=1) as pool:
        futures = {
            arm.name: pool.submit(run_arm, arm, scale, store, folder, double_depth, judge)
            for arm in arms
        }
        found = {}
        for name, future in futures.items():
            found[name] = future.result()
            print(
                f"{name}: {found[name]['figures']['text_and_length']['value']:.3f} nats/token",
                flush=True,
            )
    return found


def parity_failures(arms: list[Arm], store: str, folder: Path) -> int:
    """How many arms and engines give other losses on two ranks than on one process."""
    scale, failed = SCALES["quick"], 0
    with _runs.RankServer(folder / "ranks") as launcher:
        for arm in arms:
            words = [
                *arm.words(scale),
                *length_words(PARITY_STEPS, 1e-3, 0),
                f"data.latent_data_root={store}",
            ]
            reference = None
            for engine in ("single", *PARITY_ENGINES):
                name, world = f"{arm.name}_{engine}", 1 if engine == "single" else 2
                batch = [f"training.train_batch_size={scale.batch // world}"]
                drop = "engine.kind=single"
                more = [*(word for word in words if word != drop), *batch, *_runs.ENGINES[engine]]
                launcher.run(
                    world, [*more, f"logging.save_dir={folder}", f"logging.run_name={name}"]
                )
                losses = _runs.losses(folder / name)
                reference = reference or losses
                difference = _runs.loss_difference(losses, reference, 1, PARITY_STEPS)
                if not difference <= PARITY_BOUND:
                    print(f"{arm.name} under {engine}: loss differs by {difference:.2e}")
                    failed += 1
    return failed


def claims_of(
    table: dict[str, dict], failed: int, is_whole: bool
) -> tuple[list[dict], dict[str, float]]:
    """The claims, and differences that are reported without a bound; is_whole: all arms were
    wanted.
    """
    claims = [_report.claim("parity_failed", failed, "<=", 0)]
    if is_whole:
        claims.append(_report.claim("arms_trained", len(table), ">=", 8))

    def nats(name: str) -> float:
        return table[name]["figures"]["text_and_length"]["value"]

    if {"mmdit", "latent_dit_adaln"} <= table.keys():
        gain = nats("latent_dit_adaln") - nats("mmdit")
        claims.append(
            _report.claim("mmdit_gain_over_adaln_dit_nats", gain, ">=", 0.0, measured=True)
        )
    reported = {}
    for name in ("mdlm", "mdlm_time", "gidd", "gidd_masks", "hdlm"):
        if {name, "ar"} <= table.keys():
            reported[f"{name}_minus_ar_nats"] = nats(name) - nats("ar")
    if {"mmdit", "ar_prefix"} <= table.keys():
        reported["text_nelbo_vs_ar_nats"] = nats("mmdit") - nats("ar_prefix")
    return claims, reported


def identities(table: dict[str, dict], folder: Path, scale: Scale, store: str) -> list[dict]:
    """Claims that hold whatever was learned."""
    claims = [_report.claim("context_free_error_nats", largest_error(), "<=", 1e-3)]
    for name, identity, difference, bound in (
        ("ar", "ar_cache_nll_diff", cache_difference, 1e-5),
        ("gidd_masks", "gidd_pu0_vs_mdlm_nats", bound_difference, 0.01),
    ):
        if name in table:
            run = folder / f"{name}_seed_{scale.seeds[0]}"
            claims.append(_report.claim(identity, difference(run, store), "<=", bound))
    return claims


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", help=_store.HELP)
    extent = parser.add_mutually_exclusive_group()
    extent.add_argument(
        "--quick", action="store_true", help="toy models, a few steps: shows that it runs"
    )
    extent.add_argument("--full", action="store_true", help="longer, and three seeds")
    parser.add_argument("--arms", nargs="+", metavar="NAME", help="only these")
    parser.add_argument(
        "--workers", type=int, default=2, help="arms trained at a time (default %(default)s)"
    )
    parser.add_argument(
        "--out", type=Path, help="folder of the runs, new or empty (default: a temporary one)"
    )
    parser.add_argument("--tables", type=Path, help="write the tables here, in Markdown")
    parser.add_argument("--json", help="write conditions and claims here")
    args = parser.parse_args()
    arms = known_arms()
    if args.arms:
        unknown = set(args.arms) - {arm.name for arm in arms}
        if unknown:
            parser.error(
                f"--arms {', '.join(sorted(unknown))}: expected of"
                f" {', '.join(arm.name for arm in arms)}"
            )
        arms = [arm for arm in arms if arm.name in args.arms]
    extent_name = "quick" if args.quick else "full" if args.full else "default"
    scale, started = SCALES[extent_name], time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="mmldlm_baselines_") as temporary:
        folder = (args.out or Path(temporary)).resolve()
        store, judges_store = folder / "store", folder / "judges_store"
        split_store.cut(_store.given_or_made(args.data), store, judges_store)
        judge, store = judge_of(scale, judges_store, folder), str(store)
        table = compare(arms, scale, store, folder / "equal_flops", False, judge, args.workers)
        real = {"real texts": {"figures": real_texts(store, scale.samples, judge)}}
        tables = [("Equal width and depth (about equal FLOPs a text token)", {**table, **real})]
        if not args.quick:
            deeper = [arm for arm in arms if arm.conditional and arm.task != "translation"]
            by_parameters = compare(
                deeper, scale, store, folder / "equal_parameters", True, judge, args.workers
            )
            same = {name: table[name] for name in ("mmdit",) if name in table}
            tables.append(
                ("One stream twice as deep (about equal parameters)", {**by_parameters, **same})
            )
        text = "\n\n".join(f"{title}:\n\n{markdown(rows)}" for title, rows in tables)
        print(text)
        if args.tables:
            args.tables.write_text(text + "\n")
        claims, reported = claims_of(
            table, parity_failures(arms, store, folder / "parity"), args.arms is None
        )
        claims += identities(table, folder / "equal_flops", scale, store)
    for name, value in reported.items():
        print(f"{name} = {value:.3f}")
    more = {"extent": extent_name, "seconds": time.perf_counter() - started, "reported": reported}
    return _report.write(args.json, claims, args.quick, tables=dict(tables), **more)


if __name__ == "__main__":
    sys.exit(main())
