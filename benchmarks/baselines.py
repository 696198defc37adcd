"""Which model of text wins? Every baseline and the MMDiT on one corpus, with equal tokens.

    python benchmarks/baselines.py [--data STORE] [--quick | --full] [--arms NAME ...] [--out DIR] [--json FILE]

Each arm sees the same batches of the same texts. Its learning rate is the best of three at a tenth of the length. The
first table has equal width and depth, hence about equal FLOPs a text token; the second (not with --quick) one-stream
models of twice the depth, hence about the parameters of the MMDiT. Likelihoods are exact (AR) or upper bounds with
their weights exact, in nats a token with the length paid for, on texts that training never sees. Every arm also trains
a few steps on two ranks under ZeRO-2, ZeRO-3 and FSDP2, and is compared with one process.

--quick shows that it runs: models of 32, a few steps. --full trains three seeds.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

import _report
import _runs
import _store
from _ar_cache import cache_difference
from _baselines import Arm, Scale, best_rate, costs, known_arms, length_words, measure, train
from _gidd_masks import bound_difference

SCALES = {
    "quick": Scale(32, 1, 2, 4, 16, (1e-3,), (0,), 16),
    "default": Scale(192, 4, 4, 600, 96, (7e-4, 2e-3, 6e-3), (0,), 1000),
    "full": Scale(192, 4, 4, 1300, 96, (7e-4, 2e-3, 6e-3), (0, 1, 2), 1000),
}
PARITY_STEPS, PARITY_BOUND = 4, 1e-4
PARITY_ENGINES = ("zero2", "zero3", "fsdp")
COLUMNS = (
    ("text_and_length", "nats/token", 3), ("gain_null", "gain of the latent", 3), ("sentence_bleu", "BLEU", 1),
    ("exact_match", "EM", 1), ("word_f1", "word F1", 1),
)  # fmt: skip


def compare(arms: list[Arm], scale: Scale, store: str, folder: Path, double_depth: bool) -> dict[str, dict]:
    """Train and measure the arms; name -> costs, seconds and figures (of the first seed, and the loss of each)."""
    found = {}
    for arm in arms:
        deeper = double_depth and arm.task != "translation"
        rate = best_rate(arm, scale, store, folder, deeper)
        runs, seconds = [], 0.0
        for seed in scale.seeds:
            name = f"{arm.name}_seed_{seed}"
            words = [*arm.words(scale, deeper), *length_words(scale.steps, rate, seed)]
            seconds += train([*words, f"data.latent_data_root={store}"], folder, name)
            runs.append(measure(folder / name, store, scale.samples))
        found[arm.name] = {
            **costs(arm, scale, store, deeper),
            "rate": rate,
            "seconds": seconds / len(runs),
            "text_and_length_of_seeds": [run["text_and_length"]["value"] for run in runs],
            "figures": runs[0],
        }
        print(row(arm.name, found[arm.name]), flush=True)
    return found


def row(name: str, entry: dict) -> str:
    """Format a line of the table."""
    cells = []
    for key, label, digits in COLUMNS:
        estimate = entry["figures"].get(key)
        if estimate is not None:
            cells.append(f"{label} {estimate['value']:.{digits}f} +- {estimate['se']:.{digits}f}")
    size = f"{entry['parameters'] / 1e6:.2f}M ({entry['without_vocabulary'] / 1e6:.2f}M)"
    cost = f"{entry['flops_a_token'] / 1e6:.1f} MFLOP/token  {entry['seconds']:.0f} s"
    return f"{name:27} {'  '.join(cells)}  {size}  {cost}"


def parity_failures(arms: list[Arm], store: str, folder: Path) -> int:
    """How many arms and engines give other losses on two ranks than on one process."""
    scale, failed = SCALES["quick"], 0
    with _runs.RankServer(folder / "ranks") as launcher:
        for arm in arms:
            words = [*arm.words(scale), *length_words(PARITY_STEPS, 1e-3, 0), f"data.latent_data_root={store}"]
            reference = None
            for engine in ("single", *PARITY_ENGINES):
                name, world = f"{arm.name}_{engine}", 1 if engine == "single" else 2
                batch = [f"training.train_batch_size={scale.batch // world}"]
                drop = "engine.kind=single"
                more = [*(word for word in words if word != drop), *batch, *_runs.ENGINES[engine]]
                launcher.run(world, [*more, f"logging.save_dir={folder}", f"logging.run_name={name}"])
                losses = _runs.losses(folder / name)
                reference = reference or losses
                difference = _runs.loss_difference(losses, reference, 1, PARITY_STEPS)
                if not difference <= PARITY_BOUND:
                    print(f"{arm.name} under {engine}: loss differs by {difference:.2e}")
                    failed += 1
    return failed


def claims_of(table: dict[str, dict], failed: int, is_whole: bool) -> tuple[list[dict], dict[str, float]]:
    """The claims, and differences that are reported without a bound; is_whole: all arms were wanted."""
    claims = [_report.claim("parity_failed", failed, "<=", 0)]
    if is_whole:
        claims.append(_report.claim("arms_trained", len(table), ">=", 8))

    def nats(name: str) -> float:
        return table[name]["figures"]["text_and_length"]["value"]

    if {"mmdit", "latent_dit_adaln"} <= table.keys():
        gain = nats("latent_dit_adaln") - nats("mmdit")
        claims.append(_report.claim("mmdit_gain_over_adaln_dit_nats", gain, ">=", 0.0, measured=True))
    reported = {}
    for name in ("mdlm", "gidd", "gidd_masks", "hdlm"):
        if {name, "ar"} <= table.keys():
            reported[f"{name}_minus_ar_nats"] = nats(name) - nats("ar")
    if {"mmdit", "ar_prefix"} <= table.keys():
        reported["text_nelbo_vs_ar_nats"] = nats("mmdit") - nats("ar_prefix")
    return claims, reported


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", help=_store.HELP)
    extent = parser.add_mutually_exclusive_group()
    extent.add_argument("--quick", action="store_true", help="toy models, a few steps: shows that it runs")
    extent.add_argument("--full", action="store_true", help="longer, and three seeds")
    parser.add_argument("--arms", nargs="+", metavar="NAME", help="only these")
    parser.add_argument("--out", type=Path, help="folder of the runs (default: a temporary one)")
    parser.add_argument("--json", help="write conditions and claims here")
    args = parser.parse_args()
    arms = known_arms()
    if args.arms:
        unknown = set(args.arms) - {arm.name for arm in arms}
        if unknown:
            parser.error(f"--arms {', '.join(sorted(unknown))}: expected of {', '.join(arm.name for arm in arms)}")
        arms = [arm for arm in arms if arm.name in args.arms]
    extent_name = "quick" if args.quick else "full" if args.full else "default"
    scale, store, started = SCALES[extent_name], _store.given_or_made(args.data), time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="mmldlm_baselines_") as temporary:
        folder = (args.out or Path(temporary)).resolve()
        print("equal width and depth (about equal FLOPs a text token)")
        table = compare(arms, scale, store, folder / "equal_flops", double_depth=False)
        by_parameters = {}
        if not args.quick:
            print("one-stream models of twice the depth (about the parameters of the MMDiT)")
            by_parameters = compare(arms, scale, store, folder / "equal_parameters", double_depth=True)
        claims, reported = claims_of(table, parity_failures(arms, store, folder / "parity"), args.arms is None)
        for name, identity, difference, bound in (
            ("ar", "ar_cache_nll_diff", cache_difference, 1e-5),
            ("gidd_masks", "gidd_pu0_vs_mdlm_nats", bound_difference, 0.01),
        ):
            if name in table:
                run = folder / "equal_flops" / f"{name}_seed_{scale.seeds[0]}"
                claims.append(_report.claim(identity, difference(run, store), "<=", bound))
    for name, value in reported.items():
        print(f"{name} = {value:.3f}")
    more = {"extent": extent_name, "seconds": time.perf_counter() - started, "reported": reported}
    return _report.write(args.json, claims, args.quick, equal_flops=table, equal_parameters=by_parameters, **more)


if __name__ == "__main__":
    sys.exit(main())
