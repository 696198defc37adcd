"""How well do models write a text from its embedding at equal compute, and what does the encoder
in the loop give?

    python studies/inversion/inversion.py [--data STORE] [--quick | --full] [--all-arms]
                                          [--runs FOLDER] [--samples N] [--plot FILE.png]
                                          [--tables FILE] [--json FILE]

Three models of equal width and depth (about equal FLOPs a text token) train on the same batches
from the encoder's token embeddings, each with the best of Muon and AdamW at several rates: an
autoregressive one (the latent as a prefix), the MMDiT in mode l2t, and the MMDiT in both modes,
whose own estimate of embeddings guides the local search. Three more go on from the last one, for
as many steps again: one learns to correct the texts that it wrote, one does so without seeing
their embeddings (the ablation), and one trains on as before, which is what correction is compared
with. Then each writes the same unseen sentences in several ways: fewer and more passes, adaptive
samplers, beam, best of 16, local search, rounds of correction. Every way is listed with its passes
one after the other, its FLOPs (those of the encoder included) and its calls of the encoder, beside
floors. No way reads the sentence or its length.

--quick shows that it runs and says nothing of quality. --full has all arms, three seeds and all
sentences. --all-arms adds AR by cross-attention and with as many parameters as the MMDiT, a DiT
that reads the latent by adaLN alone, an MMDiT that learns to write in one pass, and texts of
several lengths. --runs keeps the trainings in a folder, or takes over those that it has. "BLEU,
unknown" leaves out sentences that have a training sentence of a cosine above 0.95.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import yaml

# A study runs from a checkout, installed or not, and reports as the benchmarks do.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import _report
import _store

from studies.baselines.arms import ROOT, Arm, Scale, length_words, train
from studies.inversion.arms import (
    ADAPTIVE,
    BLIND,
    COMPARED,
    CORRECTOR,
    DEEP,
    DEEPER,
    FURTHER,
    FURTHER_MODES,
    GREEDY,
    LOCAL,
    MORE_TRAINED,
    MORE_WRITTEN,
    ONE_BY_ONE,
    OPTIMIZERS,
    SEARCHED,
    START,
    SWEEP_SHARE,
    TRAINED,
    WRITTEN,
    Further,
    Way,
)
from studies.inversion.measure import Reached, measure_ways, plot, table

SCALES = {
    "quick": Scale(32, 1, 2, 4, 16, (), (0,), 8),
    "default": Scale(192, 4, 4, 400, 96, (), (0, 1), 400),
    "full": Scale(192, 4, 4, 1300, 96, (), (0, 1, 2), 1000),
}
# Training sentences that hypotheses are written for.
HYPOTHESES = {"quick": 32, "default": 31_000, "full": 31_000}
# Unseen sentences of the ways without a search.
MANY = {"quick": 8, "default": 1000, "full": 1000}
# A way within so many points of one token a pass counts as equal.
BLEU_WITHIN = 0.5
AR = "AR greedy"


def arm_words(arm: Arm, kind: str, scale: Scale, store: str) -> list[str]:
    """Arguments of an arm's training; Muon orthogonalizes blocks of the width of a head, as in the
    quickstart.
    """
    blocks = [f"optimizer.muon_block_rows={scale.width // scale.heads}"] if kind == "muon" else []
    scale = replace(scale, blocks=int(scale.blocks * DEEPER)) if arm.name == DEEP else scale
    return [
        *arm.words(scale),
        *START,
        f"optimizer.kind={kind}",
        *blocks,
        f"data.latent_data_root={store}",
    ]


def try_optimizer(
    arm: Arm, kind: str, rate: float, scale: Scale, store: str, folder: Path
) -> float:
    """Train an arm for a part of the steps, unless the folder has it; return its validation NELBO
    or NLL.
    """
    name = f"{arm.name}_{kind}_{rate:g}"
    if not (folder / name / "latest").exists():
        lengths = length_words(max(scale.steps // SWEEP_SHARE, 1), rate, 0)
        train([*arm_words(arm, kind, scale, store), *lengths], folder, name)
    record = json.loads((folder / name / "eval_log.jsonl").read_text().splitlines()[-1])
    return next(record[key] for key in ("l2t_nelbo", "l2t_nll") if key in record)


def is_there(run: Path) -> bool:
    """Whether --runs has this training; ends the program where it began otherwise than
    START says.
    """
    if not (run / "latest").exists():
        return False
    trained_with = yaml.safe_load((run / "config.yaml").read_text())["model"]
    for word in START:
        key, value = word.removeprefix("model.").split("=")
        if trained_with[key] != yaml.safe_load(value):
            raise SystemExit(
                f"{run} was trained with another model.{key} ({trained_with[key]}): name another"
                " --runs"
            )
    return True


def train_arm(arm: Arm, seed: int, scale: Scale, store: str, folder: Path) -> None:
    """Train an arm with the best of OPTIMIZERS, unless the folder has it."""
    name = f"{arm.name}_seed_{seed}"
    if is_there(folder / name):
        return
    kind, rate = min(
        OPTIMIZERS, key=lambda one: try_optimizer(arm, one[0], one[1], scale, store, folder)
    )
    train(
        [*arm_words(arm, kind, scale, store), *length_words(scale.steps, rate, seed)], folder, name
    )


def write_hypotheses(seed: int, scale: Scale, store: str, folder: Path, num_samples: int) -> None:
    """Hypotheses of `mmdit_both`, for the correctors of this seed."""
    out = folder / f"hypotheses_seed_{seed}"
    if (out / "manifest.json").exists():
        return
    run = folder / f"mmdit_both_seed_{seed}"
    words = [
        "--checkpoint",
        str(run),
        "--data",
        store,
        "--output-dir",
        str(out),
        "--num-samples",
        str(num_samples),
    ]
    command = [sys.executable, "-m", "mmldlm.cli", "hypotheses", *words, "--seed", str(seed)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(
            f"{' '.join(command)} ended with exit code {done.returncode}:\n{done.stderr[-3000:]}"
        )


def train_further(further: Further, seed: int, scale: Scale, store: str, folder: Path) -> None:
    """Go on from `mmdit_both`, with its config."""
    name, base = f"{further.name}_seed_{seed}", folder / f"mmdit_both_seed_{seed}"
    if (folder / name / "latest").exists():
        return
    config = base / "config.yaml"
    words = ["--config", str(config), f"training.init_from={base}", *further.own, FURTHER_MODES]
    words += length_words(scale.steps, yaml.safe_load(config.read_text())["optimizer"]["lr"], seed)
    if further.corrects:
        # The config of a base that an earlier version trained may hold another share, though it
        # reads none.
        words += [
            f"data.hypotheses={folder / f'hypotheses_seed_{seed}'}",
            "training.hypothesis_share=0.4",
        ]
    train([*words, f"data.latent_data_root={store}"], folder, name)


def train_all(
    arms: Sequence[Arm], scale: Scale, store: str, folder: Path, workers: int, hypotheses: int
) -> None:
    """Train the arms, some at a time, one thread each."""
    os.environ["OMP_NUM_THREADS"] = "1"
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=spawn) as pool:
        rounds = (
            [
                (try_optimizer, arm, *one, scale, store, folder)
                for arm in arms
                for one in OPTIMIZERS
            ],
            [
                (train_arm, arm, seed, scale, store, folder)
                for arm in reversed(arms)
                for seed in scale.seeds
            ],
            [(write_hypotheses, seed, scale, store, folder, hypotheses) for seed in scale.seeds],
            [
                (train_further, further, seed, scale, store, folder)
                for seed in scale.seeds
                for further in FURTHER
            ],
        )
        for calls in rounds:
            for future in [pool.submit(*call) for call in calls]:
                future.result()


class Measured(NamedTuple):
    """What the ways of WRITTEN and of COMPARED reached, each on its own sentences."""

    written: dict[str, Reached]
    compared: dict[str, Reached]


def measure_all(
    arms: Sequence[Arm],
    written: Sequence[Way],
    scale: Scale,
    store: str,
    folder: Path,
    workers: int,
    many: int,
    samples: int,
) -> list[Measured]:
    """What every way reaches, for each seed: `written` on `many` sentences, and those of COMPARED
    on `samples`.
    """
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=spawn) as pool:
        names = [*(arm.name for arm in arms), *(further.name for further in FURTHER)]
        runs = [{name: folder / f"{name}_seed_{seed}" for name in names} for seed in scale.seeds]
        # First those that take longest.
        compared = [pool.submit(measure_ways, COMPARED, models, store, samples) for models in runs]
        others = [pool.submit(measure_ways, written, models, store, many) for models in runs]
        return [Measured(one.result(), other.result()) for one, other in zip(others, compared)]


def claims_of(found: dict[str, Reached]) -> list[dict]:
    """Claims of one seed."""

    def bleu(name: str) -> float:
        return float(found[name].values["sentence_bleu"].mean())

    def passes(name: str) -> float:
        return float(found[name].passes.mean())

    def gain(key: str) -> float:
        return float((found[LOCAL].values[key] - found[GREEDY].values[key]).mean())

    equal = [name for name in ADAPTIVE if bleu(name) >= bleu(ONE_BY_ONE) - BLEU_WITHIN]
    fewest = min((passes(name) for name in equal), default=passes(ONE_BY_ONE))
    return [
        _report.claim(
            "nfe_ratio_at_equal_bleu", fewest / passes(ONE_BY_ONE), "<=", 0.35, measured=True
        ),
        _report.claim("search_cosine_gain", gain("cosine"), ">=", 0.10, measured=True),
        _report.claim("search_f1_gain_points", gain("word_f1"), ">=", 5.0, measured=True),
        _report.claim("corrector_bleu_gain", correction_gain(found)[0], ">", 0.0, measured=True),
    ]


def differences_of(found: dict[str, Reached]) -> dict[str, dict]:
    """Paired differences of one seed, reported without a bound: to AR, and of correction to its
    search and ablation.
    """
    from mmldlm.evaluation.statistics import paired_bootstrap

    shallow = [
        name for name in ADAPTIVE if found[name].passes.mean() <= found[AR].passes.mean() / 3
    ] or [ADAPTIVE[0]]
    best = max(shallow, key=lambda name: found[name].values["sentence_bleu"].mean())
    search = correction_gain(found)[1]
    pairs = {
        f"{name}_against_ar_equal_flops ({way})": (key, way, AR)
        for key, name in (("sentence_bleu", "bleu"), ("exact_match", "em"))
        for way in (best, ONE_BY_ONE)
    } | {
        f"{key}: {CORRECTOR} - {other}": (key, CORRECTOR, other)
        for other in (search, BLIND)
        for key in ("sentence_bleu", "word_f1", "cosine")
    }
    return {
        name: paired_bootstrap(found[one].values[key], found[other].values[key]).as_dict()
        for name, (key, one, other) in pairs.items()
    }


def correction_gain(found: dict[str, Reached]) -> tuple[float, str]:
    """BLEU of the correction minus that of the cheapest local search that costs as much or more.

    Returns:
        The difference in points, and the search's name. Where every search is cheaper, it is the
        dearest.
    """
    cost = found[CORRECTOR].cost["gflops"]
    searches = sorted(
        (f"longer local search {n}" for n in SEARCHED), key=lambda name: found[name].cost["gflops"]
    )
    search = next((name for name in searches if found[name].cost["gflops"] >= cost), searches[-1])
    bleu = [float(found[name].values["sentence_bleu"].mean()) for name in (CORRECTOR, search)]
    return bleu[0] - bleu[1], search


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", help=_store.HELP)
    extent = parser.add_mutually_exclusive_group()
    extent.add_argument(
        "--quick", action="store_true", help="toy models, a few steps: shows that it runs"
    )
    extent.add_argument(
        "--full", action="store_true", help="all arms, longer, three seeds, all sentences"
    )
    parser.add_argument(
        "--all-arms", action="store_true", help="also the arms that the default has no time for"
    )
    parser.add_argument("--runs", type=Path, help="folder of the trainings, kept and used again")
    parser.add_argument(
        "--samples", type=int, help="unseen sentences of searches (default 400; other ways 1,000)"
    )
    parser.add_argument(
        "--workers", type=int, default=2, help="models trained at a time (default %(default)s)"
    )
    parser.add_argument("--plot", type=Path, help="write BLEU against FLOPs a text to this image")
    parser.add_argument("--tables", type=Path, help="write the tables here, in Markdown")
    parser.add_argument("--json", help="write conditions and claims here")
    args = parser.parse_args()
    extent_name = "quick" if args.quick else "full" if args.full else "default"
    scale, store = SCALES[extent_name], _store.given_or_made(args.data)
    all_arms = args.all_arms or args.full
    arms, written = (
        (TRAINED + MORE_TRAINED, WRITTEN + MORE_WRITTEN) if all_arms else (TRAINED, WRITTEN)
    )
    claims, reported, tables, result = [], {}, [], {}
    with tempfile.TemporaryDirectory(prefix="mmldlm_inversion_") as temporary:
        folder = (args.runs or Path(temporary)).resolve()
        train_all(arms, scale, store, folder, args.workers, HYPOTHESES[extent_name])
        samples = args.samples or scale.samples
        many = max(MANY[extent_name], samples)
        measured = measure_all(arms, written, scale, store, folder, args.workers, many, samples)
        for seed, reached in zip(scale.seeds, measured):
            tables.append("\n\n".join(f"Seed {seed}, {table(one)}" for one in reached))
            print(tables[-1])
            found = reached.compared | reached.written
            claims += [{**claim, "seed": seed} for claim in claims_of(found)]
            reported[f"seed {seed}"] = differences_of(found)
            result[seed] = {
                name: (
                    {key: value.as_dict() for key, value in one.estimates().items()}
                    | {"cost": one.cost}
                )
                for name, one in found.items()
            }
            if args.plot and seed == scale.seeds[0]:
                plot(found, args.plot)
    if args.tables:
        args.tables.write_text("\n\n".join(tables) + "\n")
    for seed, differences in reported.items():
        for name, difference in differences.items():
            low, high = difference["ci95"]
            print(
                f"{seed}: {name} = {difference['value']:+.3f}, 95 % interval {low:+.3f} to"
                f" {high:+.3f}"
            )
    more = {"extent": extent_name, "reported": reported}
    return _report.write(args.json, claims, args.quick, tables=result, **more)


if __name__ == "__main__":
    sys.exit(main())
