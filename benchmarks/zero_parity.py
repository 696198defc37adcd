"""The same global batches under one process and under ZeRO-0, 1, 2 and 3 on two ranks: do the
losses agree?

    python benchmarks/zero_parity.py [--data STORE] [--quick] [--json FILE] [--dtype fp32|bf16]
    [key=value ..]

Five runs of the real training loop: one plain process, and two gloo ranks under each stage. Losses
are read from training_log.jsonl. fp32 sums are added in another order on two ranks and in
partitioned buckets; that rounding (about 1e-7 a sum) is fed back through AdamW, which divides by
tiny second moments in its first steps, so the bound is 1e-3 and not 1e-6. parity.py compares all
engines, for longer, with a tighter bound.
"""

from __future__ import annotations

import argparse
import sys
import tempfile

import _report
import _runs
import _store

STAGES = (0, 1, 2, 3)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="20 steps instead of 200")
    parser.add_argument("--steps", type=int, help="steps of each run")
    parser.add_argument("--data", help=_store.HELP)
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument(
        "words",
        nargs="*",
        metavar="key=value",
        help="config, such as task=image_text with its store",
    )
    parser.add_argument("--json", help="write conditions and claims here")
    args = parser.parse_args()
    steps = args.steps or (20 if args.quick else 200)
    data = _store.given_or_made(args.data)
    common = [
        f"training.num_train_steps={steps}",
        f"training.dtype={args.dtype}",
        "optimizer.warmup_steps=5",
        *(args.words or ["model.token_embedding_init=encoder"]),
    ]
    worst = 0.0
    with tempfile.TemporaryDirectory() as folder, _runs.RankServer(f"{folder}/output") as launcher:
        for name, world_size in [("single", 1), *((f"zero{stage}", 2) for stage in STAGES)]:
            launcher.run(
                world_size,
                _runs.settings(data, folder, name, world_size, *common, *_runs.ENGINES[name]),
            )
            found = _runs.losses(f"{folder}/{name}")
            assert sorted(found) == list(range(1, steps + 1)), f"{name} logged other steps"
            if name == "single":
                reference = found
                continue
            difference = _runs.loss_difference(found, reference, 1, steps)
            print(
                f"ZeRO-{name[-1]}, 2 ranks: largest relative loss difference to one process"
                f" {difference:.2e}"
            )
            worst = max(worst, difference)
    bound = 1e-3 if args.dtype == "fp32" else 2e-2
    claims = [_report.claim("zero_stage_loss_rel_diff", worst, "<=", bound)]
    return _report.write(args.json, claims, args.quick, steps=steps, dtype=args.dtype)


if __name__ == "__main__":
    sys.exit(main())
