"""The same training on every engine: how far do the losses and the final weights go apart?

    python benchmarks/parity.py [--optimizer muon] [--data STORE] [--quick] [--json FILE]

200 steps of the real training loop on one process; on DDP, FSDP2, ZeRO-0 to 3 and ZeRO-3 with
offload on two ranks; on FSDP2 with two replicas (hsdp), ZeRO-2 and ZeRO-3 on four. --quick: 6
steps on one process, with offload, and on four ranks (hsdp), each but the first in one
precision. The same global batch everywhere, in two accumulated micro-batches. The number of
samples is not a multiple of the global batch: at the end of each epoch some ranks have empty
micro-batches. In fp32 the engines differ by the order of their sums; in bf16 also by what they
compute in bf16: `single`, `ddp` and `zero0` run under autocast, which keeps norms and losses in
fp32, the others cast the weights of the whole model.

Distance of weights: relative L2 norm of the difference to `single` over all fp32 masters, read
from the checkpoints.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import _report
import _runs
import _store

WORLDS = {
    1: ["single"],
    2: ["ddp", "fsdp", "zero0", "zero1", "zero2", "zero3", "zero3_offload"],
    4: ["hsdp", "zero2", "zero3"],
}
BOUNDS = {"fp32": 1e-4, "bf16": 2e-2}
# Engine -> precisions, by number of ranks. tests/integration/test_engines.py has the other engines
# on two ranks, in both precisions.
QUICK: dict[int, dict[str, tuple[str, ...]]] = {
    1: {"single": ("fp32", "bf16")},
    2: {"zero3_offload": ("bf16",)},
    4: {"hsdp": ("fp32",)},
}
FULL = {world_size: dict.fromkeys(names, tuple(BOUNDS)) for world_size, names in WORLDS.items()}
AT_A_TIME = 3  # trainings: ranks wait for each other most of the time


def weight_distance(run: Path, reference: Path) -> float:
    """||weights - reference|| / ||reference|| over the masters of two runs' last checkpoints,
    summed in float64.
    """
    import numpy as np

    from mmldlm.checkpoints.resume import open_training_state

    difference = norm = 0.0
    with (
        open_training_state(run / "latest/engine") as ours,
        open_training_state(reference / "latest/engine") as theirs,
    ):
        trained = [
            name
            for name in theirs.names
            if theirs.kind(name) == "trainable" and theirs.owner(name) == name
        ]
        for name in trained:
            count = int(np.prod(theirs.shape(name), dtype=int))
            expected = theirs.read(name, "weight", 0, count).astype(np.float64)
            difference += float(((ours.read(name, "weight", 0, count) - expected) ** 2).sum())
            norm += float((expected**2).sum())
    return (difference / norm) ** 0.5


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", help=_store.HELP)
    parser.add_argument("--optimizer", choices=_runs.OPTIMIZERS, default="adamw")
    parser.add_argument(
        "--quick", action="store_true", help="6 steps instead of 200, on fewer engines"
    )
    parser.add_argument("--json", help="write conditions and claims here")
    args = parser.parse_args()
    sys.path.insert(0, str(_runs.ROOT))
    data, steps, samples = (
        _store.given_or_made(args.data),
        6 if args.quick else 200,
        37 if args.quick else 509,
    )
    worst = dict.fromkeys(BOUNDS, 0.0)
    print(f"{'':18} {'largest relative loss difference':>33} {'distance of weights':>23}")
    print(f"{'engine':18} {'fp32':>18} {'bf16':>14} {'fp32':>12} {'bf16':>10}")
    with tempfile.TemporaryDirectory() as folder, _runs.RankServer(f"{folder}/output") as launcher:

        def train(name: str, world_size: int, dtype: str) -> Path:
            run = Path(folder) / f"{name}_{world_size}_{dtype}"
            more = [
                f"data.max_train_samples={samples}",
                f"training.num_train_steps={steps}",
                f"training.dtype={dtype}",
                "optimizer.warmup_steps=5",
                # Every rank makes these from MiniLM's, which takes longer than a few steps.
                *([] if args.quick else ["model.token_embedding_init=encoder"]),
                *_runs.OPTIMIZERS[args.optimizer],
                *_runs.ENGINES[name],
            ]
            launcher.run(
                world_size, _runs.settings(data, folder, run.name, world_size, *more), timeout=7200
            )
            return run

        chosen = QUICK if args.quick else FULL
        places = [(name, world_size) for world_size, names in chosen.items() for name in names]
        with ThreadPoolExecutor(AT_A_TIME) as pool:
            runs = {
                (name, world_size, dtype): pool.submit(train, name, world_size, dtype)
                for name, world_size in places
                for dtype in chosen[world_size][name]
            }
            for name, world_size in places:
                row = {}
                for dtype in BOUNDS:
                    if (name, world_size, dtype) not in runs:
                        continue
                    run, base = (
                        runs[*place, dtype].result() for place in ((name, world_size), places[0])
                    )
                    found = _runs.losses(run)
                    assert sorted(found) == list(range(1, steps + 1)), (
                        f"{run.name} logged other steps"
                    )
                    difference = _runs.loss_difference(found, _runs.losses(base), 1, steps)
                    row[dtype] = [f"{difference:.1e}", f"{weight_distance(run, base):.1e}"]
                    worst[dtype] = max(worst[dtype], difference)
                losses, weights = zip(*(row.get(dtype, ("", "")) for dtype in BOUNDS))
                shown = "{:>18} {:>14} {:>12} {:>10}".format(*losses, *weights)
                print(f"{f'{name} x{world_size}':18} {shown}", flush=True)
    claims = [
        _report.claim(f"loss_rel_diff_{dtype}", worst[dtype], "<=", bound)
        for dtype, bound in BOUNDS.items()
    ]
    used = {
        "steps": steps,
        "samples": samples,
        "global_batch": _runs.GLOBAL_BATCH,
        "optimizer": args.optimizer,
    }
    return _report.write(args.json, claims, args.quick, preset="tiny", **used)


if __name__ == "__main__":
    sys.exit(main())
