"""The same global batches under one process and under ZeRO-0, 1, 2 and 3 on two ranks: do the losses agree?

    python benchmarks/zero_parity.py [--quick] [--json FILE] [--data STORE] [--dtype fp32|bf16]

Two launches of the real training loop: one plain process, and two gloo ranks that run the four stages one after the
other. Losses are read from training_log.jsonl. fp32 sums are added in another order on two ranks and in partitioned
buckets; that rounding (about 1e-7 a sum) is fed back through AdamW, which divides by tiny second moments in its first
steps, so the bound is 1e-3 and not 1e-6.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import _report

ROOT = Path(__file__).resolve().parent.parent
STAGES = (0, 1, 2, 3)
GLOBAL_BATCH = 8


def overrides(args: argparse.Namespace, folder: str, name: str, world_size: int) -> list[str]:
    """Settings of one run; the global batch is the same whatever the world size."""
    return [
        f"data.latent_data_root={args.data}",
        f"logging.save_dir={folder}",
        f"logging.run_name={name}",
        f"training.train_batch_size={GLOBAL_BATCH // world_size // 2}",
        "training.grad_accum_steps=2",
        f"training.num_train_steps={args.steps}",
        f"training.dtype={args.dtype}",
        "optimizer.warmup_steps=5",
        "model.tie_embeddings=true",  # a weight shared by two modules is where partitioning goes wrong first
        "model.token_embedding_init=encoder",
        f"logging.log_freq={args.steps}",
        f"logging.save_freq={args.steps}",
        f"logging.eval_freq={args.steps}",
        "data.max_validation_samples=16",
    ]


def worker(args: argparse.Namespace) -> int:
    """One rank: run every configuration of this world size through the product's own loop."""
    sys.path.insert(0, str(ROOT))
    from mmldlm.config.load import load_config
    from mmldlm.train import check_run, leave_process_group, train

    world_size = int(os.environ["WORLD_SIZE"])
    runs = [("single", ["engine.kind=single"])] if world_size == 1 else []
    if world_size > 1:
        runs = [(f"zero{stage}", [f"engine.zero_stage={stage}"]) for stage in STAGES]
    for name, extra in runs:
        words = overrides(args, args.folder, name, world_size) + extra
        train(check_run(load_config("tiny", None, words), world_size))
    leave_process_group()
    return 0


def launch(args: argparse.Namespace, folder: str, world_size: int) -> None:
    """Start this script's ranks under torchrun and wait."""
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc_per_node={world_size}",
        __file__,
    ]
    command += ["--worker", "--folder", folder, "--data", args.data, "--steps", str(args.steps), "--dtype", args.dtype]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        sys.exit(f"the {world_size}-rank run failed:\n{done.stdout[-4000:]}")


def losses(folder: str, name: str) -> list[float]:
    """Losses of a run, one a step."""
    lines = (Path(folder) / name / "training_log.jsonl").read_text().splitlines()
    return [json.loads(line)["loss"] for line in lines]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="20 steps instead of 200")
    parser.add_argument("--steps", type=int, help="steps of each run")
    parser.add_argument("--data", required=True, help="a store made by `mmldlm prepare`")
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--json", help="write conditions and claims here")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.steps = args.steps or (20 if args.quick else 200)
    args.data = str(Path(args.data).resolve())
    if args.worker:
        return worker(args)
    with tempfile.TemporaryDirectory() as folder:
        launch(args, folder, 1)
        launch(args, folder, 2)
        reference = losses(folder, "single")
        worst = 0.0
        for stage in STAGES:
            found = losses(folder, f"zero{stage}")
            assert len(found) == len(reference) == args.steps
            difference = max(abs(a - b) / abs(b) for a, b in zip(found, reference, strict=True))
            print(f"ZeRO-{stage}, 2 ranks: largest relative loss difference to one process {difference:.2e}")
            worst = max(worst, difference)
    bound = 1e-3 if args.dtype == "fp32" else 2e-2
    claims = [_report.claim("zero_stage_loss_rel_diff", worst, "<=", bound)]
    return _report.write(args.json, claims, steps=args.steps, dtype=args.dtype)


if __name__ == "__main__":
    sys.exit(main())
