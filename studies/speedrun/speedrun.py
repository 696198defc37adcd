"""FLOPs, steps and CPU seconds to the quality of the quickstart of commit 2b95890: its recipe
against today's.

    python studies/speedrun/speedrun.py [--data STORE] [--corpus FILE] [--out DIR] [--steps N]
                                        [--seeds N ...] [--set KEY=VALUE ...] [--quick]
                                        [--json FILE]

The reference is frozen in recipes.py: AdamW, 1,300 steps of 96 samples. Today's recipe is the
preset `quickstart`. Both train on one process and one thread, with the same order of samples.
Target: at most the reference's l2t NELBO, at least its gain over the null latent and its t2l
cosine, on the complete validation split with the reference's noise. FLOPs are those of the FLOP
model plus the optimizer's.

A schedule ends with its budget, so today's recipe is trained to several lengths, each with its own
schedule. The shortest that holds the target is found by bisection to 4 % of its steps (or --steps
names it), for each seed; the claimed ratio is the mean of the seeds. The reference is trained
once. On the docstrings one more run spends what the reference spends. Finished runs stay in --out
and are read from there, so an interrupted study continues, and seeds may run side by side. --set
changes a key of today's recipe: a candidate (candidates.md is their log).

Default data: the quickstart's docstrings; with --corpus a text file, prepared as the quickstart
does.
"""

from __future__ import annotations

import argparse
import hashlib
import subprocess
import sys
import tempfile
from math import inf
from pathlib import Path
from statistics import fmean, stdev

# A study runs from a checkout, installed or not, and reports as the benchmarks do.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import _report

from studies.speedrun.recipes import ROOT, Recipe, Result, reference_recipe, run, todays_recipe

# Steps of the reference. The quickstart took 3,200 for other corpora: --reference-steps.
STEPS = 1300
# The search begins at this fraction of the reference's steps and finds the length to this fraction
# of itself.
FIRST_GUESS = 0.28
TOLERANCE = 0.04
BOUNDS = {"docstrings": 0.4, "wikipedia": 0.5}


def holds(result: Result, target: tuple[float, float, float]) -> bool:
    """Whether a run is as good as the target in all three figures; the cosine is rounded as the
    target is.
    """
    nelbo, gain, cosine = target
    return (
        result.nelbo <= nelbo
        and result.gain >= gain
        and round(result.cosine, 3) >= round(cosine, 3)
    )


def shortest(
    recipe: Recipe,
    store: str,
    folder: Path,
    target: tuple[float, float, float],
    guess: int,
    longest: int,
) -> tuple[Result, Result | None]:
    """The last run, and the shortest that holds the target, found to TOLERANCE of its steps (None:
    not even `longest` does).

    Walks from the guess to both sides of the target, then bisects.
    """
    fails, best, length = 0, None, min(guess, longest)
    while True:
        result = run(recipe, store, folder, length)
        if holds(result, target):
            best = result
        else:
            fails = length
        if best is None and fails == longest:
            return result, None
        if best is not None and best.steps - fails <= max(TOLERANCE * best.steps, 1):
            return result, best
        if best is None:
            length = min(round(length * 1.25), longest)
        elif fails == 0:
            length = min(length - 1, round(length * 0.8))
        else:
            length = (fails + best.steps) // 2


def prepare(corpus: str, folder: Path) -> str:
    """Prepare a store as the quickstart does; a finished one is used again."""
    store = folder / "store"
    if not (store / "manifest.json").exists():
        print(f"preparing {corpus} in {store}", flush=True)
        words = ["prepare", corpus, "--output-dir", str(store), "--max-samples", "32000"]
        subprocess.run([sys.executable, "-m", "mmldlm.cli", *words], cwd=ROOT, check=True)
    return str(store)


def to_target(
    args: argparse.Namespace,
    store: str,
    folder: Path,
    target: tuple[float, float, float],
    seed: int,
) -> tuple[Result, Result | None]:
    """Today's recipe with one seed: the last run, and the shortest that holds the target."""
    recipe = todays_recipe(tuple(args.set), seed)
    if args.steps is None:
        guess = max(round(FIRST_GUESS * args.reference_steps), 1)
        return shortest(recipe, store, folder, target, guess, args.reference_steps)
    last = run(recipe, store, folder, args.steps)
    return last, last if holds(last, target) else None


def measure(
    args: argparse.Namespace, store: str, folder: Path, suffix: str
) -> tuple[list[dict], dict]:
    """Claims and figures on one store."""
    reference = run(reference_recipe(folder), store, folder, args.reference_steps)
    target = (reference.nelbo, reference.gain, reference.cosine)
    print("target    NELBO {:.3f}  gain {:.3f}  t2l cosine {:.4f}".format(*target))
    runs = {seed: to_target(args, store, folder, target, seed) for seed in args.seeds}
    found = {seed: best for seed, (_, best) in runs.items()}
    ratios = [inf if best is None else best.flops / reference.flops for best in found.values()]
    error = stdev(ratios) / len(ratios) ** 0.5 if len(ratios) > 1 and max(ratios) < inf else None
    print(f"FLOPs to target / reference's: {ratios}, standard error of the mean {error}")
    bound = BOUNDS["wikipedia" if suffix else "docstrings"]
    claims = [
        _report.claim(f"flops_to_target_ratio{suffix}", fmean(ratios), "<=", bound, measured=True)
    ]
    equal = None
    if not suffix:
        # The first seed alone: such a run takes as long as the reference.
        seed = args.seeds[0]
        last = runs[seed][0]
        affordable = max(int(reference.flops / (last.flops / last.steps)), 1)
        equal = run(todays_recipe(tuple(args.set), seed), store, folder, affordable)
        claims += [
            _report.claim("nelbo_at_reference_flops_nats", equal.nelbo, "<=", 3.4, measured=True),
            _report.claim("gain_at_reference_flops_nats", equal.gain, ">=", 1.6, measured=True),
        ]
    named = {
        "reference": reference,
        "today_at_reference_flops": equal,
        **{f"today_at_target_seed_{seed}": best for seed, best in found.items()},
    }
    figures = {name: None if result is None else vars(result) for name, result in named.items()}
    return claims, {"target": target, "ratios": ratios, "ratio_error": error, "runs": figures}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--data", help="store of the quickstart's docstrings (default: prepare them)"
    )
    parser.add_argument("--corpus", help="measure on the sentences of this file instead")
    parser.add_argument(
        "--out", type=Path, help="folder of the runs (default: runs/speedrun in the checkout)"
    )
    parser.add_argument("--steps", type=int, help="length of today's recipe; no search")
    parser.add_argument(
        "--reference-steps",
        type=int,
        default=STEPS,
        help="length of the reference (default 1,300)",
    )
    parser.add_argument(
        "--seeds",
        type=int,
        nargs="+",
        default=[0],
        metavar="N",
        help="seeds of today's recipe (default 0)",
    )
    parser.add_argument(
        "--set", nargs="+", default=[], metavar="KEY=VALUE", help="change today's recipe"
    )
    parser.add_argument(
        "--quick", action="store_true", help="a few steps: shows that it runs, judges nothing"
    )
    parser.add_argument("--json", help="write conditions and claims here")
    args = parser.parse_args()
    if args.quick:
        args.reference_steps, args.steps = 4, 2
    with tempfile.TemporaryDirectory() as temporary:
        folder = (
            Path(temporary)
            if args.quick and args.out is None
            else args.out or ROOT / "runs" / "speedrun"
        )
        corpus = str(Path(args.corpus).resolve()) if args.corpus else "docstrings"
        digest = hashlib.sha256(corpus.encode()).hexdigest()[:8]
        folder = folder.resolve() / f"{Path(corpus).stem}-{digest}"
        if args.corpus:
            store = prepare(corpus, folder)
        else:
            store = str(Path(args.data).resolve()) if args.data else prepare("docstrings", folder)
        claims, figures = measure(args, store, folder, "_wikipedia" if args.corpus else "")
    more = {"changed": args.set, "corpus": args.corpus and Path(args.corpus).name, **figures}
    return _report.write(args.json, claims, args.quick, **more)


if __name__ == "__main__":
    sys.exit(main())
